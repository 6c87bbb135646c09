"""Builds an n-gram table from samples of a draft; run again, it resumes.

python scripts/build_ngram.py --workdir=/tmp/ngram --output=/tmp/ngram/table
"""

import functools
import pathlib

from absl import flags
import command_line

_FLAGS = flags.FLAGS

_string = flags.DEFINE_string
_integer = functools.partial(flags.DEFINE_integer, lower_bound=1)

_string('draft', 'demo', 'demo, a model folder, a GGUF file or a hub id')
_string('workdir', None, 'folder that keeps the counted tokens', required=True)
_string('output', None, 'file to write', required=True)
flags.DEFINE_integer(
  'num_tokens', 1_000_000, 'to sample from the draft; 0: corpus only', 0
)
_integer('sample_length', 256, 'tokens per text')
_integer('batch_size', 16, 'number of texts sampled at once')
flags.DEFINE_float(
  'temperature', 1.5, 'of the sampling; greedy texts would all be equal', 0.01
)
_integer('top_k', None, 'sample from the k most probable tokens')
flags.DEFINE_integer('seed', 0, 'seed of the sampling')
_string(
  'corpus',
  None,
  'folder of text to count too, without its held-out files;'
  ' stdlib: the standard library',
)
_string('pattern', '*.py', 'pattern of file names to read')
_integer('order', 3, 'n, from 1 to 5', upper_bound=5)
_integer('continuations', 8, 'next tokens to keep per context')
_integer('min_count', 2, 'drop contexts with fewer occurrences than this')


def main() -> None:
  from specdec.models.lab.training import build_ngram
  from specdec.models.lab.training import corpus as corpus_lib

  corpus = None
  if _FLAGS.corpus is not None:
    folder = '' if _FLAGS.corpus == 'stdlib' else _FLAGS.corpus
    corpus = corpus_lib.Corpus(folder=folder, pattern=_FLAGS.pattern)
  build_ngram.build(
    draft=_FLAGS.draft,
    corpus=corpus,
    samples=build_ngram.Samples(
      length=_FLAGS.sample_length,
      **command_line.given(
        'num_tokens', 'batch_size', 'temperature', 'top_k', 'seed'
      ),
    ),
    table=build_ngram.TableConfig(
      num_continuations=_FLAGS.continuations,
      **command_line.given('order', 'min_count'),
    ),
    workdir=pathlib.Path(_FLAGS.workdir),
    output=pathlib.Path(_FLAGS.output),
  )


if __name__ == '__main__':
  command_line.run(main)
