"""Measures one part of decoding, and prints a table.

  python scripts/measure.py WHAT [flags]

WHAT: kernels (at the shapes of GPT-2 Large), forward (V(N) of --target, or of
--draft with --of_draft), loss (of --target on a corpus), draft (what a step of
chain and tree takes besides the target).
"""

import functools
import sys

from absl import flags
import command_line
import options

_SIZES = {
  'kernels': [1, 2, 4, 8, 12, 16, 32, 64, 128, 256],  # rows, queries
  'forward': [1, 2, 5, 8, 12, 16, 24, 32, 64],  # N
  'loss': [256, 512, 1024],  # length of windows
  'draft': [],
}
_LIST = flags.DEFINE_list('sizes', None, 'rows, queries, N or window lengths')
_REPEATS = flags.DEFINE_integer(
  'repeats', 7, 'interleaved measurements', lower_bound=1
)
_CONTEXT = flags.DEFINE_integer(
  'context', 192, 'forward, draft: tokens in the cache'
)
_RANDOM = flags.DEFINE_bool(
  'random_weights',
  False,
  'forward, draft: of --target and of --head, a block drafter or own, only'
  ' config.json is read',
)
_OF_DRAFT = flags.DEFINE_bool(
  'of_draft', False, 'forward: of --draft, in its dtype and with its tokens'
)
_CORPUS = flags.DEFINE_string('corpus', '', 'default: the standard library')
_PATTERN = flags.DEFINE_string('pattern', '*.py', 'file names of the corpus')
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def _loss(lengths: list[int]) -> list[dict]:
  import loading

  from specdec.models.lab.training import corpus as corpus_lib
  from specdec.models.lab.training import loss as loss_lib
  from specdec.models.text import pair as pair_lib

  corpus = corpus_lib.Corpus(folder=_CORPUS.value, pattern=_PATTERN.value)
  pair = pair_lib.load_pair(loading.models().of_target)
  tokens = corpus.tokens(pair.tokenizer, held_out=True)
  loss = functools.partial(loss_lib.held_out_loss, pair.target, tokens)
  return [{'window': n, 'nats_per_token': loss(length=n)} for n in lengths]


def _forward(sizes: list[int]) -> list[dict]:
  import loading

  from specdec.models.lab.bench import times
  from specdec.models.text import pair as pair_lib
  from specdec.models.text import sources as sources_lib

  models = loading.models()
  dtype = models.dtype
  if _OF_DRAFT.value:
    model = pair_lib.load_pair(models).draft
    if model is None:
      raise ValueError('--of_draft measures a draft model; give --draft')
    dtype = sources_lib.open_sources(models).draft_placement.form.name
  else:
    load = pair_lib.drawn_pair if _RANDOM.value else pair_lib.load_pair
    model = load(models.of_target).target
  rows = times.forward(model, sizes, _REPEATS.value, context=_CONTEXT.value)
  return [{'dtype': dtype} | row for row in rows]


def _draft() -> list[dict]:
  import loading

  from specdec.models.lab.bench import times
  from specdec.models.text import pair as pair_lib

  if _RANDOM.value:
    pair = pair_lib.drawn_pair(options.models())
  else:
    pair = pair_lib.load_pair(loading.models())
  return times.draft(
    pair,
    loading.drafting(),
    context=_CONTEXT.value,
    repeats=_REPEATS.value,
  )


def main(what: str) -> None:
  from specdec.models.lab.bench import record
  from specdec.models.lab.bench import times

  if what not in _SIZES:
    raise ValueError(f'{what!r} is none of {", ".join(_SIZES)}; see --help')
  record.prepare_output(_OUTPUT.value)
  sizes = [int(size) for size in _LIST.value or _SIZES[what]]
  if what == 'kernels':
    rows = times.kernels(sizes, _REPEATS.value)
  elif what == 'forward':
    rows = _forward(sizes)
  elif what == 'loss':
    rows = _loss(sizes)
  else:
    rows = _draft()
  print(record.rows_to_table(rows))
  settings = {'what': what} | options.as_dict()
  record.write_record(_OUTPUT.value, settings, {'rows': rows})


if __name__ == '__main__':
  # The flags library takes no positional argument here.
  _what = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1][0] != '-' else ''
  command_line.run(functools.partial(main, _what))
