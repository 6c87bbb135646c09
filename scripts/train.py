"""Trains a small model on a folder of text; run again, it resumes.

python scripts/train.py --workdir=/tmp/target --output=/tmp/target/model
"""

import pathlib

from absl import flags
import command_line

_FLAGS = flags.FLAGS

flags.DEFINE_string(
  'workdir', None, 'folder of checkpoints and loss curve', required=True
)
flags.DEFINE_string(
  'output', None, 'Hugging Face folder to write', required=True
)
flags.DEFINE_string(
  'corpus', '', 'folder of text; default: the standard library'
)
flags.DEFINE_string('pattern', '*.py', 'pattern of file names to read')
flags.DEFINE_string(
  'tokenizer', None, 'folder of a tokenizer to use; default: train one'
)
flags.DEFINE_string(
  'teacher', None, 'model folder to distil from (implies its tokenizer)'
)
flags.DEFINE_integer('vocab_size', 4096, 'vocabulary of a new tokenizer')
flags.DEFINE_enum(
  'family', 'gpt2', ('gpt2', 'llama', 'mixtral'), 'family of the model'
)
flags.DEFINE_integer('width', 320, 'width of the residual stream')
flags.DEFINE_integer('layers', 6, 'number of transformer blocks')
flags.DEFINE_integer('heads', 5, 'number of attention heads')
flags.DEFINE_integer(
  'kv_heads', None, 'number of key and value heads; default: as --heads'
)
flags.DEFINE_integer(
  'inner_width', None, 'width of the feed-forward layer, or of an expert'
)
flags.DEFINE_integer('experts', 8, 'number of experts of --family=mixtral')
flags.DEFINE_integer('experts_per_token', 2, 'number of experts per token')
flags.DEFINE_integer('context', 1024, 'longest context, in tokens')
flags.DEFINE_integer('steps', 2400, 'number of optimizer steps')
flags.DEFINE_integer('batch_tokens', 4096, 'tokens per step')
flags.DEFINE_float('learning_rate', 5e-3, 'peak learning rate; decays to zero')
flags.DEFINE_integer('seed', 0, 'seed of weights and batches')
flags.DEFINE_enum(
  'dtype', 'bfloat16', ['float32', 'bfloat16'], 'dtype of the matrix products'
)
flags.DEFINE_enum(
  'output_dtype',
  'float16',
  ['float32', 'float16', 'bfloat16'],
  'dtype of the stored weights',
)


def main() -> None:
  from models.lab.training import corpus as corpus_lib
  from models.lab.training import pipeline
  from models.lab.training import trainer

  pipeline.run(
    corpus=corpus_lib.Corpus(folder=_FLAGS.corpus, pattern=_FLAGS.pattern),
    config=trainer.TrainConfig(
      num_steps=_FLAGS.steps,
      warmup_steps=min(trainer.TrainConfig.warmup_steps, _FLAGS.steps // 10),
      phases=tuple(
        (part, min(length, _FLAGS.batch_tokens))
        for part, length in trainer.TrainConfig.phases
      ),
      **command_line.given('batch_tokens', 'learning_rate', 'seed', 'dtype'),
    ),
    shape=pipeline.Shape(
      num_layers=_FLAGS.layers,
      num_heads=_FLAGS.heads,
      num_positions=_FLAGS.context,
      num_kv_heads=_FLAGS.kv_heads,
      num_experts=_FLAGS.experts,
      **command_line.given(
        'width', 'family', 'inner_width', 'experts_per_token'
      ),
    ),
    vocab_size=_FLAGS.vocab_size,
    tokenizer_folder=_FLAGS.tokenizer,
    teacher_folder=_FLAGS.teacher,
    workdir=pathlib.Path(_FLAGS.workdir),
    output=pathlib.Path(_FLAGS.output),
    output_dtype=_FLAGS.output_dtype,
  )


if __name__ == '__main__':
  command_line.run(main)
