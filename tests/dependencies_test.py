"""What a plain install lacks, only training imports."""

import pathlib
import subprocess
import sys

import pytest

_ROOT = pathlib.Path(__file__).parents[1]
_ONLY_FOR_TRAINING = (
  'optax',
  'orbax',
  # transformers brings tokenizers along, but to train one is of the extra.
  'models.training.tokenizer',
)
_SCRIPTS = sorted(path.stem for path in (_ROOT / 'scripts').glob('*.py'))
_MODELS = sorted(path.stem for path in (_ROOT / 'models').glob('[!_]*.py'))


def _import(*modules):
  """In a process of its own, where the extra is not installed."""
  lines = [
    'import importlib',
    'import sys',
    f'sys.path[:0] = [{str(_ROOT)!r}, {str(_ROOT / "scripts")!r}]',
    f'sys.modules.update(dict.fromkeys({_ONLY_FOR_TRAINING}))',
    *(f'importlib.import_module({module!r})' for module in modules),
  ]
  return subprocess.run(
    [sys.executable, '-c', '\n'.join(lines)],
    capture_output=True,
    text=True,
    check=False,
  )


def test_all_but_training_works_without_its_extra():
  models = [f'models.{name}' for name in _MODELS]
  assert 'models.ngram_building' in models
  result = _import(*models, *(name for name in _SCRIPTS if name != 'train'))
  assert result.returncode == 0, result.stderr
