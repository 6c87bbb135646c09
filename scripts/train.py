"""Trains a small model, or a drafting head; run again, it resumes.

python scripts/train.py --workdir=/tmp/target --output=/tmp/target/model
python scripts/train.py --head=eagle3 --target=FOLDER --workdir=/tmp/head \
    --output=/tmp/head/model
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
flags.DEFINE_enum(
  'head',
  None,
  ['eagle3'],
  'train a drafting head for --target instead of a model; --heads, --kv_heads'
  ' and --inner_width are those of the target unless they are given',
)
flags.DEFINE_string(
  'target', 'demo', 'of --head: demo, a model folder, a GGUF file or a hub id'
)
flags.DEFINE_string(
  'target_dtype', 'auto', 'of --head, that the target computes in'
)
flags.DEFINE_integer(
  'head_vocabulary',
  None,
  'of --head, tokens that it may draft, the most frequent ones, with an output'
  ' matrix of its own; default: all, with the matrix of the target',
  lower_bound=1,
)
flags.DEFINE_integer(
  'head_depth',
  4,
  'of --head, how many tokens ahead it learns to draft from its own states',
)
flags.DEFINE_float(
  'feature_gigabytes',
  10.0,
  'of --head, the most disk space in --workdir for what the target computes',
)


def _given(*names):
  return {name: _FLAGS[name].value for name in names}


def _train_head() -> None:
  from models.lab.training import corpus as corpus_lib
  from models.lab.training import head_trainer

  stated = lambda name: _FLAGS[name].value if _FLAGS[name].present else None
  defaults = head_trainer.HeadTraining
  head_trainer.train(
    head_trainer.HeadTraining(
      dtype=_FLAGS.target_dtype,
      vocabulary=_FLAGS.head_vocabulary,
      num_heads=stated('heads'),
      num_kv_heads=stated('kv_heads'),
      inner_width=stated('inner_width'),
      depth=_FLAGS.head_depth,
      length=stated('context') or defaults.length,
      feature_bytes=int(_FLAGS.feature_gigabytes * 1e9),
      num_steps=_FLAGS.steps,
      learning_rate=stated('learning_rate') or defaults.learning_rate,
      warmup_steps=min(defaults.warmup_steps, _FLAGS.steps // 10),
      train_dtype=_FLAGS.dtype,
      **_given('target', 'batch_tokens', 'seed'),
    ),
    corpus_lib.Corpus(folder=_FLAGS.corpus, pattern=_FLAGS.pattern),
    workdir=pathlib.Path(_FLAGS.workdir),
    output=pathlib.Path(_FLAGS.output),
    output_dtype=_FLAGS.output_dtype,
  )


def main() -> None:
  if _FLAGS.head is not None:
    _train_head()
    return
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
