"""A tiny pair with random weights, where examples name the embedded pair."""

import pathlib
import shutil

import tiny

from models.checkpoints import expand
from models.checkpoints import hub
from models.text import generator as generator_lib


def stand_in(monkeypatch, folder: pathlib.Path) -> None:
  """Writes the tiny pair to a folder; `demo` and `demo-draft` are then it.

  The default method is `tree`, with half the program of `staged`; examples that
  are about the latter name it.
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
  monkeypatch.setattr(hub, '_EMBEDDED', embedded)
  arguments = generator_lib.GeneratorChoice.__init__.__kwdefaults__
  monkeypatch.setitem(arguments, 'method', 'tree')
