"""Trains a small model on a folder of text; run again, it resumes.

python scripts/train.py --workdir=/tmp/target --output=/tmp/target/model
"""

import pathlib

from absl import flags
import command_line

from models.training import trainer as run
from models.training.corpus import Corpus
from models.training.trainer import TrainConfig

_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'checkpoints and loss curve', required=True
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'Hugging Face folder to write', required=True
)
_CORPUS = flags.DEFINE_string(
  'corpus', '', 'folder of text; default: the standard library'
)
_PATTERN = flags.DEFINE_string('pattern', '*.py', 'file names to read')
_TOKENIZER = flags.DEFINE_string(
  'tokenizer', None, 'folder of a tokenizer to use; default: train one'
)
_TEACHER = flags.DEFINE_string(
  'teacher', None, 'model folder to distil from (implies its tokenizer)'
)
_VOCAB_SIZE = flags.DEFINE_integer('vocab_size', 4096, 'of a new tokenizer')
_FAMILY = flags.DEFINE_enum('family', 'gpt2', run.FAMILIES, 'kind of model')
_WIDTH = flags.DEFINE_integer('width', 320, 'of the residual stream')
_LAYERS = flags.DEFINE_integer('layers', 6, 'transformer blocks')
_HEADS = flags.DEFINE_integer('heads', 5, 'attention heads')
_KV_HEADS = flags.DEFINE_integer(
  'kv_heads', None, 'key and value heads; default: as --heads'
)
_INNER_WIDTH = flags.DEFINE_integer(
  'inner_width', None, 'of the feed-forward layer, or of an expert'
)
_EXPERTS = flags.DEFINE_integer('experts', 8, 'of --family=mixtral')
_EXPERTS_PER_TOKEN = flags.DEFINE_integer('experts_per_token', 2, 'likewise')
_CONTEXT = flags.DEFINE_integer('context', 1024, 'positions')
_STEPS = flags.DEFINE_integer('steps', 2400, 'optimizer steps')
_BATCH_TOKENS = flags.DEFINE_integer('batch_tokens', 4096, 'tokens per step')
_RATE = flags.DEFINE_float('learning_rate', 5e-3, 'peak; decays to zero')
_SEED = flags.DEFINE_integer('seed', 0, 'of weights and batches')
_DTYPE = flags.DEFINE_enum(
  'dtype', 'bfloat16', ['float32', 'bfloat16'], 'of the matrix products'
)
_OUTPUT_DTYPE = flags.DEFINE_enum(
  'output_dtype',
  'float16',
  ['float32', 'float16', 'bfloat16'],
  'of the stored weights',
)


def main() -> None:
  run.run(
    corpus=Corpus(folder=_CORPUS.value, pattern=_PATTERN.value),
    config=TrainConfig(
      num_steps=_STEPS.value,
      warmup_steps=min(TrainConfig.warmup_steps, _STEPS.value // 10),
      phases=tuple(
        (part, min(length, _BATCH_TOKENS.value))
        for part, length in TrainConfig.phases
      ),
      batch_tokens=_BATCH_TOKENS.value,
      learning_rate=_RATE.value,
      seed=_SEED.value,
      dtype=_DTYPE.value,
    ),
    shape=run.Shape(
      width=_WIDTH.value,
      num_layers=_LAYERS.value,
      num_heads=_HEADS.value,
      num_positions=_CONTEXT.value,
      family=_FAMILY.value,
      num_kv_heads=_KV_HEADS.value,
      inner_width=_INNER_WIDTH.value,
      num_experts=_EXPERTS.value,
      experts_per_token=_EXPERTS_PER_TOKEN.value,
    ),
    vocab_size=_VOCAB_SIZE.value,
    tokenizer_folder=_TOKENIZER.value,
    teacher_folder=_TEACHER.value,
    workdir=pathlib.Path(_WORKDIR.value),
    output=pathlib.Path(_OUTPUT.value),
    output_dtype=_OUTPUT_DTYPE.value,
  )


if __name__ == '__main__':
  command_line.run(main)
