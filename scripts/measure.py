"""Measures one part of decoding, and prints a table.

  python scripts/measure.py WHAT [flags]

WHAT: kernels (at the shapes of GPT-2 Large), forward (V(N) of --target), loss
(of --target on a corpus), draft (the draft side of a step of chain and tree,
beside a target forward), acceptance (by each rule of verification, beside the
most that any lossless rule accepts of such children).
"""

import functools
import sys

from absl import flags
import command_line
import options
import prompt_flags

from specdec.models.text import settings as settings_lib

_SIZES = {
  'kernels': [1, 2, 4, 8, 12, 16, 32, 64, 128, 256],  # rows, queries
  'forward': [1, 2, 5, 8, 12, 16, 24, 32, 64],  # N
  'loss': [256, 512, 1024],  # length of windows
  'draft': [],
  'acceptance': [1, 2, 4],  # children
}
_LIST = flags.DEFINE_list(
  'sizes', None, 'rows, queries, N, window lengths or numbers of children'
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 7, 'interleaved measurements', lower_bound=1
)
_CONTEXT = flags.DEFINE_integer(
  'context', 192, 'forward, draft: tokens in the cache'
)
_RANDOM = flags.DEFINE_bool(
  'random_weights',
  False,
  'forward, draft: of --target and of --head, a block drafter, only config.json'
  ' is read',
)
_OF_DRAFT = flags.DEFINE_bool(
  'of_draft', False, 'forward: of --draft, in its dtype and with its tokens'
)
_PROFILE = flags.DEFINE_bool(
  'profile',
  False,
  'forward: on CPU, where its time goes, by operation of XLA',
)
_ACCEPTED = flags.DEFINE_list(
  'accepted',
  None,
  'draft: how often a chain is known to be accepted up to each position, such'
  ' as 0.8,0.6; speeds are computed from that',
)
_OF_MISSES = flags.DEFINE_list(
  'of_misses',
  [],
  "draft: how often the target's token, where it is not the best one, is the"
  ' second best one, the third best one and so on',
)
options.define_method('chain', settings_lib.METHODS)
prompt_flags.define_num_prompts()
_BATCH_SIZE = options.define_batch_size(4, 'of acceptance')
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


def _acceptance(numbers_of_children: list[int]) -> dict:
  import loading

  from specdec.models.lab.bench import acceptance

  prompts = prompt_flags.file_prompts()
  found = acceptance.measure(
    loading.generator(prompts, 1),
    prompts,
    loading.task(_BATCH_SIZE.value),
    numbers_of_children=numbers_of_children,
  )
  return {'acceptance': found}


def _draft() -> list[dict]:
  import loading

  from specdec.models.lab.bench import draft_times
  from specdec.models.text import pair as pair_lib

  if _RANDOM.value:
    pair = pair_lib.drawn_pair(options.models())
  else:
    pair = pair_lib.load_pair(loading.models())
  rows = draft_times.measure(
    pair,
    options.draft_settings(),
    ('chain', 'tree'),
    context=_CONTEXT.value,
    repeats=_REPEATS.value,
  )
  if _ACCEPTED.value is not None:
    accepted, misses = map(float, _ACCEPTED.value), map(float, _OF_MISSES.value)
    rows = draft_times.with_speeds(rows, [*accepted], [*misses])
  return rows


def _forward(sizes: list[int]) -> list[dict]:
  import loading

  from specdec.models.lab import forward_times
  from specdec.models.text import sources as sources_lib

  models, of_draft = loading.models(), _OF_DRAFT.value
  model = forward_times.network(
    models, random_weights=_RANDOM.value, of_draft=of_draft
  )
  measure = forward_times.profile if _PROFILE.value else forward_times.forward
  rows = measure(model, sizes, _REPEATS.value, context=_CONTEXT.value)
  dtype = models.dtype
  if of_draft:
    dtype = sources_lib.open_sources(models).draft_placement.form.name
  return [{'dtype': dtype} | row for row in rows]


def main(what: str) -> None:
  from specdec.models.lab import kernel_times
  from specdec.models.lab.bench import acceptance
  from specdec.models.lab.bench import record

  if what not in _SIZES:
    raise ValueError(f'{what!r} is none of {", ".join(_SIZES)}; see --help')
  record.prepare_output(_OUTPUT.value)
  sizes = [int(size) for size in _LIST.value or _SIZES[what]]
  if what == 'acceptance':
    figures = _acceptance(sizes)
    rows = acceptance.rows(figures['acceptance'])
  else:
    if what == 'kernels':
      rows = kernel_times.kernels(sizes, _REPEATS.value)
    elif what == 'forward':
      rows = _forward(sizes)
    elif what == 'draft':
      rows = _draft()
    else:
      rows = _loss(sizes)
    figures = {'rows': rows}
  print(record.rows_to_table(rows))
  settings = {'what': what} | options.as_dict()
  record.write_record(_OUTPUT.value, settings, figures)


if __name__ == '__main__':
  # The flags library takes no positional argument here.
  _what = sys.argv.pop(1) if sys.argv[1:] and sys.argv[1][0] != '-' else ''
  command_line.run(functools.partial(main, _what))
