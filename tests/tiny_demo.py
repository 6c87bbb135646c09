"""Tiny models with random weights, where examples name the embedded ones."""

import pathlib
import shutil

from flax import nnx
import tiny

from specdec.models.checkpoints import expand
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import block_drafters
from specdec.models.lab.training import block_trainer
from specdec.models.nn import block_drafter
from specdec.models.text import generator as generator_lib


def stand_in(monkeypatch, folder: pathlib.Path) -> None:
  """Writes tiny models to a folder; the names of the embedded models load them.

  The default method is `tree`, with half the program of `staged`; examples that
  are about `staged` name it.
  """
  draft = tiny.module(
    vocab_size=4096, num_positions=1024, width=8, num_layers=1
  )
  draft.wte.embedding[...] *= 3  # Far from flat.
  # The draft is cheaper, and right now and then.
  target = expand.expand(draft, width_factor=4, num_layers=1)
  draft.wpe.embedding[...] *= 1.2
  embedded = {'demo': folder / 'target', 'demo-draft': folder / 'draft'}
  for module, name in ((target, 'demo'), (draft, 'demo-draft')):
    hub.save_pretrained(module, embedded[name])
    for file in hub.locate(name).path.glob('tokenizer*'):
      shutil.copy(file, embedded[name])
  config = block_trainer.BlockTraining(
    **{'block_size': 3, 'num_layers': 1, 'markov_rank': 4, 'inner_width': 8}
  ).config(target.config)
  block = block_drafter.BlockDrafter(config, rngs=nnx.Rngs(0))
  embedded['demo-block'] = folder / 'block'
  block_drafters.save(block, embedded['demo-block'], num_target_layers=1)
  monkeypatch.setattr(hub, '_EMBEDDED', embedded)
  arguments = generator_lib.GeneratorChoice.__init__.__kwdefaults__
  monkeypatch.setitem(arguments, 'method', 'tree')
