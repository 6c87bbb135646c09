"""What only training needs is imported by training alone."""

import pathlib
import subprocess
import sys

_ROOT = pathlib.Path(__file__).parents[1]
_OF_TRAINING = (
  # flax needs optax itself, so that cannot be taken away.
  'orbax',
  *(
    f'models.training.{name}'
    for name in ('loss', 'optimizer', 'pipeline', 'tokenizer', 'trainer')
  ),
)
_TRAINING = ('train',)

# In a process of its own; scripts may define the same flags.
_IMPORT = """
import importlib
import sys

without, modules = (one.split() for one in sys.argv[1:3])
sys.path[:0] = sys.argv[3:]
sys.modules.update(dict.fromkeys(without))
from absl import flags
for module in modules:
  for flag in list(flags.FLAGS):
    delattr(flags.FLAGS, flag)
  for own in ('options', 'command_line'):
    sys.modules.pop(own, None)  # Defines its flags again.
  importlib.import_module(module)
"""


def _import(*modules):
  return subprocess.run(
    [
      sys.executable,
      '-c',
      _IMPORT,
      ' '.join(_OF_TRAINING),
      ' '.join(modules),
      _ROOT,
      _ROOT / 'scripts',
    ],
    capture_output=True,
    text=True,
    check=False,
  )


def test_all_else_is_imported_without_it():
  models = {
    '.'.join(path.relative_to(_ROOT).with_suffix('').parts)
    for path in (_ROOT / 'models').rglob('[!_]*.py')
  }
  assert models > set(_OF_TRAINING[1:])
  assert 'models.training.build_ngram' in models
  scripts = {path.stem for path in (_ROOT / 'scripts').glob('*.py')}
  result = _import(
    *sorted(models - set(_OF_TRAINING)), *sorted(scripts - set(_TRAINING))
  )
  assert result.returncode == 0, result.stderr


def test_training_is_not():
  result = _import('models.training.pipeline')
  assert result.returncode == 1
  assert 'ModuleNotFoundError' in result.stderr
