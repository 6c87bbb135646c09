"""Builds an n-gram table from samples of a draft; run again, it resumes.

python scripts/build_ngram.py --workdir=/tmp/ngram --output=/tmp/ngram/table
"""

import pathlib

from absl import flags
import command_line

_DRAFT = flags.DEFINE_string(
  'draft', 'demo', 'to imitate: demo (embedded), a model folder or a hub id'
)
_WORKDIR = flags.DEFINE_string(
  'workdir', None, 'keeps the tokens that are counted', required=True
)
_OUTPUT = flags.DEFINE_string('output', None, 'file to write', required=True)
_NUM_TOKENS = flags.DEFINE_integer(
  'num_tokens', 1_000_000, 'tokens to sample from the draft; 0: corpus only'
)
_SAMPLE_LENGTH = flags.DEFINE_integer('sample_length', 256, 'tokens per text')
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 16, 'texts sampled at once')
_TEMPERATURE = flags.DEFINE_float('temperature', 1.5, 'of the sampling')
_TOP_K = flags.DEFINE_integer('top_k', None, 'sample from the k likeliest')
_SEED = flags.DEFINE_integer('seed', 0, 'of the sampling')
_CORPUS = flags.DEFINE_string(
  'corpus',
  None,
  'folder of text to count too, without its held-out files; stdlib: the'
  ' standard library',
)
_PATTERN = flags.DEFINE_string('pattern', '*.py', 'file names to read')
_ORDER = flags.DEFINE_integer('order', 3, 'n, from 1 to 5')
_CONTINUATIONS = flags.DEFINE_integer(
  'continuations', 8, 'next tokens to keep of every context'
)
_MIN_COUNT = flags.DEFINE_integer(
  'min_count', 2, 'leave out contexts seen less often'
)


def _corpus():
  from models.training.corpus import Corpus

  if _CORPUS.value is None:
    return None
  folder = '' if _CORPUS.value == 'stdlib' else _CORPUS.value
  return Corpus(folder=folder, pattern=_PATTERN.value)


def main() -> None:
  from models.training import build_ngram as ngram_building

  ngram_building.build(
    draft=_DRAFT.value,
    corpus=_corpus(),
    samples=ngram_building.Samples(
      num_tokens=_NUM_TOKENS.value,
      length=_SAMPLE_LENGTH.value,
      batch_size=_BATCH_SIZE.value,
      temperature=_TEMPERATURE.value,
      top_k=_TOP_K.value,
      seed=_SEED.value,
    ),
    table=ngram_building.TableConfig(
      order=_ORDER.value,
      num_continuations=_CONTINUATIONS.value,
      min_count=_MIN_COUNT.value,
    ),
    workdir=pathlib.Path(_WORKDIR.value),
    output=pathlib.Path(_OUTPUT.value),
  )


if __name__ == '__main__':
  command_line.run(main)
