"""Trains a small model, or a drafting head; run again, it resumes.

python scripts/train.py --workdir=/tmp/target --output=/tmp/target/model
python scripts/train.py --head=eagle3 --target=FOLDER --workdir=/tmp/head \
    --output=/tmp/head/model
python scripts/train.py --head=block --target=FOLDER --workdir=/tmp/block \
    --output=/tmp/block/model
"""

import functools
import pathlib

from absl import flags
import command_line

_FLAGS = flags.FLAGS

_string, _enum = flags.DEFINE_string, flags.DEFINE_enum
_integer = functools.partial(flags.DEFINE_integer, lower_bound=1)
_float = functools.partial(flags.DEFINE_float, lower_bound=0)

_string('workdir', None, 'folder of checkpoints and loss curve', required=True)
_string('output', None, 'Hugging Face folder to write', required=True)
_string('corpus', '', 'folder of text; default: the standard library')
_string('pattern', '*.py', 'pattern of file names to read')
_integer('steps', 2400, 'number of optimizer steps')
_integer('batch_tokens', 4096, 'tokens per step')
_float(
  'learning_rate',
  None,
  'peak learning rate; decays to zero; default: 0.005, of --head 0.002',
)
_enum(
  'optimizer',
  'muon',
  ['muon', 'adamw'],
  'muon: for the matrices of layers, AdamW for the rest; its work does not'
  ' depend on --batch_tokens, so with few of them adamw makes faster steps',
)
flags.DEFINE_integer('seed', 0, 'seed of weights and batches', 0, 2**32 - 1)
_enum('dtype', 'bfloat16', ['float32', 'bfloat16'], 'of the matrix products')
_enum(
  'output_dtype',
  'float16',
  ['float32', 'float16', 'bfloat16'],
  'dtype of the stored weights',
)
_integer('heads', None, 'attention heads; default: 5, of --head as the target')
_integer(
  'kv_heads',
  None,
  'number of key and value heads; default: as --heads, else as the target',
)
_integer(
  'inner_width',
  None,
  'width of the feed-forward layer; default: as the family, of --head as the'
  ' target',
)
_integer(
  'context',
  None,
  'longest context, in tokens; default: 1024; of --head what it learns from at'
  ' once, default: 256',
)
_string('tokenizer', None, 'folder of a tokenizer to use; default: train one')
_string('teacher', None, 'model folder to distil from (implies its tokenizer)')
flags.DEFINE_integer(
  'vocab_size', 4096, 'vocabulary of a new tokenizer', lower_bound=257
)
_enum('family', 'gpt2', ['gpt2', 'llama'], 'family of the model')
_integer('width', 320, 'width of the residual stream')
_integer('layers', None, 'number of layers; default: 6, of --head=block 2')
_enum(
  'head',
  None,
  ['eagle3', 'block'],
  'train a drafting head for --target instead of a model: EAGLE-3, or a block'
  ' drafter (DSpark or DFlash)',
)
_string(
  'target', 'demo', 'of --head: demo, a model folder, a GGUF file or a hub id'
)
_string('target_dtype', 'auto', 'of --head, the dtype of the target')
_integer(
  'head_vocabulary',
  None,
  'of --head, tokens that it may draft, the most frequent ones, with an output'
  ' matrix of its own; default: all, with the matrix of the target',
)
_integer(
  'head_depth',
  4,
  'of --head=eagle3, how many tokens ahead it learns to draft from its own'
  ' states',
)
flags.DEFINE_integer(
  'answer_tokens',
  None,
  'of --head, the last tokens of --context, which the target writes itself;'
  ' default: 192 of --head=block, else 0',
  lower_bound=0,
)
_integer('block_size', 8, 'of --head=block, rows of a block')
flags.DEFINE_integer(
  'markov_rank',
  256,
  'of --head=block, the rank of the term for the token before, which makes it a'
  ' DSpark drafter; 0: none, a DFlash drafter',
  lower_bound=0,
)
_integer('anchors', 64, 'of --head=block, blocks that a window is cut into')
_float(
  'feature_gigabytes',
  10.0,
  'of --head, the most disk space in --workdir for what the target computes',
)

# The flags of settings: for all kinds of training, and for each kind.
_SHARED_FLAGS = (
  'steps',
  'batch_tokens',
  'learning_rate',
  'optimizer',
  'seed',
  'dtype',
  'heads',
  'kv_heads',
  'inner_width',
)
_MODEL_FLAGS = (
  'context',
  'tokenizer',
  'teacher',
  'vocab_size',
  'family',
  'width',
  'layers',
)
_TARGET_FLAGS = (
  'context',
  'answer_tokens',
  'target',
  'target_dtype',
  'head_vocabulary',
  'feature_gigabytes',
)
_HEAD_FLAGS = {
  'eagle3': (*_TARGET_FLAGS, 'head_depth'),
  'block': (*_TARGET_FLAGS, 'block_size', 'layers', 'markov_rank', 'anchors'),
}
# The fields that have other names than their flags.
_FIELDS = {
  'steps': 'num_steps',
  'heads': 'num_heads',
  'kv_heads': 'num_kv_heads',
  'layers': 'num_layers',
  'head_vocabulary': 'vocabulary',
  'head_depth': 'depth',
  'anchors': 'num_anchors',
}


def _without_effect() -> dict[str, str]:
  """The flags that have no effect next to other flags, and why."""
  reasons: dict[str, str] = {}
  ours: tuple[str, ...] = _MODEL_FLAGS
  why = 'without --head'
  if _FLAGS.head is not None:
    ours, why = _HEAD_FLAGS[_FLAGS.head], f'with --head={_FLAGS.head}'
  every = {*_MODEL_FLAGS}.union(*_HEAD_FLAGS.values())
  reasons |= dict.fromkeys(every - {*ours}, why)
  for given, useless in (
    ('tokenizer', ('vocab_size',)),
    ('teacher', ('vocab_size', 'tokenizer')),
  ):
    if _FLAGS[given].value is not None:
      reasons |= dict.fromkeys(useless, f'with --{given}')
  return reasons


@command_line.checked_first
def _check_flags() -> None:
  for name, why in _without_effect().items():
    if _FLAGS[name].present:
      raise ValueError(f'--{name} has no effect {why}; leave it out')


def main() -> None:
  from specdec.models.lab.training import block_trainer
  from specdec.models.lab.training import corpus as corpus_lib
  from specdec.models.lab.training import head_trainer
  from specdec.models.lab.training import model_trainer
  from specdec.models.lab.training import trainer

  trainings: dict[str | None, type[trainer.Training]] = {
    None: model_trainer.ModelTraining,
    'eagle3': head_trainer.HeadTraining,
    'block': block_trainer.BlockTraining,
  }
  names = *_SHARED_FLAGS, *_HEAD_FLAGS.get(_FLAGS.head, _MODEL_FLAGS)
  context = 'num_positions' if _FLAGS.head is None else 'length'
  fields = _FIELDS | {'context': context}
  values = {fields.get(name, name): _FLAGS[name].value for name in names}
  trainer.run(
    trainings[_FLAGS.head](
      corpus=corpus_lib.Corpus(folder=_FLAGS.corpus, pattern=_FLAGS.pattern),
      **{name: value for name, value in values.items() if value is not None},
    ),
    workdir=pathlib.Path(_FLAGS.workdir),
    output=pathlib.Path(_FLAGS.output),
    output_dtype=_FLAGS.output_dtype,
  )


if __name__ == '__main__':
  command_line.run(main)
