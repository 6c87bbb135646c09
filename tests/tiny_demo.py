"""Tiny models with random weights, where examples name the embedded ones."""

import functools
import pathlib
import shutil
import tempfile

from flax import nnx
import pytest
import tiny

from specdec.models.checkpoints import expand
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import block_drafters
from specdec.models.lab.training import block_trainer
from specdec.models.nn import block_drafter
from specdec.models.text import generator as generator_lib

_FOLDER = tempfile.TemporaryDirectory()  # Until the process ends.


@functools.cache
def folders() -> dict[str, pathlib.Path]:
  """Folders of the models, by the names of the embedded ones."""
  root = pathlib.Path(_FOLDER.name)
  draft = tiny.module(
    vocab_size=4096, num_positions=1024, width=8, num_layers=1
  )
  draft.wte.embedding[...] *= 3  # Far from flat.
  # The draft is cheaper, and right now and then.
  target = expand.expand(draft, width_factor=4, num_layers=1)
  draft.wpe.embedding[...] *= 1.2
  written = {'demo': root / 'target', 'demo-draft': root / 'draft'}
  for module, name in ((target, 'demo'), (draft, 'demo-draft')):
    hub.save_pretrained(module, written[name])
    for file in hub.locate(name).path.glob('tokenizer*'):
      shutil.copy(file, written[name])
  training = block_trainer.BlockTraining(
    block_size=3, num_layers=1, markov_rank=4, inner_width=8
  )
  config = training.config(target.config)
  block = block_drafter.BlockDrafter(config, rngs=nnx.Rngs(0))
  written['demo-block'] = root / 'block'
  block_drafters.save(block, written['demo-block'], num_target_layers=1)
  return written


def stand_in(monkeypatch) -> None:
  """The names of the embedded models load tiny ones.

  The default method is `chain`, with the smallest program; examples that are
  about another method name it.
  """
  monkeypatch.setattr(hub, '_EMBEDDED', folders())
  arguments = generator_lib.GeneratorChoice.__init__.__kwdefaults__
  monkeypatch.setitem(arguments, 'method', 'chain')


@pytest.fixture(autouse=True, scope='module')
def in_this_file():
  """For all tests of a file that gives it a name."""
  with pytest.MonkeyPatch.context() as patch:
    stand_in(patch)
    yield
