"""Trains a small model, or a drafting head; run again, it resumes.

python scripts/train.py --workdir=/tmp/target --output=/tmp/target/model
python scripts/train.py --head=eagle3 --target=FOLDER --workdir=/tmp/head \
    --output=/tmp/head/model
python scripts/train.py --head=block --target=FOLDER --workdir=/tmp/block \
    --output=/tmp/block/model
"""

import pathlib
import sys
from typing import Any

from absl import flags
import command_line

from specdec.models import extras
from specdec.models.text import fields

try:
  from specdec.models.lab.training import block_trainer
  from specdec.models.lab.training import corpus as corpus_lib
  from specdec.models.lab.training import head_trainer
  from specdec.models.lab.training import model_trainer
  from specdec.models.lab.training import trainer
except ImportError as error:
  sys.exit(
    f'train.py: the package {error.name} is needed: {extras.command("train")}'
  )

_FLAGS = flags.FLAGS

flags.DEFINE_string(
  'workdir', None, 'folder of checkpoints and loss curve', required=True
)
flags.DEFINE_string(
  'output', None, 'Hugging Face folder to write', required=True
)
flags.DEFINE_enum(
  'output_dtype',
  'float16',
  ['float32', 'float16', 'bfloat16'],
  'dtype of the stored weights',
)
flags.DEFINE_enum(
  'head',
  None,
  ['eagle3', 'block'],
  'train a drafting head for --target instead of a model: EAGLE-3, or a block'
  ' drafter (DSpark or DFlash)',
)

# By --head.
_TRAININGS: dict[str | None, type[trainer.Training]] = {
  None: model_trainer.ModelTraining,
  'eagle3': head_trainer.HeadTraining,
  'block': block_trainer.BlockTraining,
}
_OPTIONS = {
  head: fields.options_of(training) for head, training in _TRAININGS.items()
}
_MAY_BE_ZERO = ('seed', 'answer_tokens', 'markov_rank')


def _define(name: str) -> None:
  """The flag of an option, which may differ by `--head`."""
  heads_by_text = dict[str, list[str]]()
  for head, options in _OPTIONS.items():
    if name in options:
      field = options[name].field
      text = field.metadata['help']
      if field.default not in (None, ''):
        text += f'; default: {field.default}'
      heads = heads_by_text.setdefault(text, [])
      heads.append('without --head' if head is None else f'--head={head}')
  texts = [
    text if len(heads) == len(_OPTIONS) else f'{", ".join(heads)}: {text}'
    for text, heads in heads_by_text.items()
  ]
  option = next(
    options[name] for options in _OPTIONS.values() if name in options
  )
  is_whole = option.parser is int and name not in _MAY_BE_ZERO
  command_line.define_option(
    name, option, None, '; '.join(texts), int(is_whole)
  )


for _name in dict.fromkeys(
  name for options in _OPTIONS.values() for name in options
):
  _define(_name)
flags.adopt_module_key_flags(command_line)  # So that --help lists them.


def _given(record: str = '') -> dict[str, Any]:
  """The fields of a record of the chosen training that flags set."""
  return {
    option.field.name: _FLAGS[name].value
    for name, option in _OPTIONS[_FLAGS.head].items()
    if option.record == record and _FLAGS[name].present
  }


@command_line.checked_first
def _check_flags() -> None:
  """Refuses flags that have no effect next to other flags."""
  chosen = _OPTIONS[_FLAGS.head]
  why = f'with --head={_FLAGS.head}' if _FLAGS.head else 'without --head'
  reasons = {
    name: why
    for options in _OPTIONS.values()
    for name in options
    if name not in chosen
  }
  for given, useless in (
    ('tokenizer', ('vocab_size',)),
    ('teacher', ('vocab_size', 'tokenizer')),
  ):
    if _FLAGS[given].value is not None:
      reasons |= dict.fromkeys(useless, f'with --{given}')
  for name, why in reasons.items():
    if _FLAGS[name].present:
      raise ValueError(f'--{name} has no effect {why}; leave it out')


def main() -> None:
  corpus = corpus_lib.Corpus(**_given('corpus'))
  trainer.run(
    _TRAININGS[_FLAGS.head](corpus=corpus, **_given()),
    workdir=pathlib.Path(_FLAGS.workdir),
    output=pathlib.Path(_FLAGS.output),
    output_dtype=_FLAGS.output_dtype,
  )


if __name__ == '__main__':
  command_line.run(main)
