"""What happened in a block, in words: labels, tables and texts for the ear."""

from collections.abc import Iterator

from specdec.tracing.markup import visible
from specdec.tracing.trace import Block
from specdec.tracing.trace import Trace

_ENDS = {
  'length': 'the length limit is reached',
  'eos': 'an end-of-text token ends the text',
  'stop': 'a stop string is complete',
  'error': 'what the target says next is not finite',
}


def block_of(trace: Trace, number: int) -> Block:
  """A block by its number, from 0; negative ones count from the end.

  Raises:
    ValueError: there is no such block.
  """
  total = len(trace.blocks)
  if not -total <= number < total:
    raise ValueError(
      f'block {number} does not exist; the trace has {total}, from 0'
    )
  return trace.blocks[number]


def quoted(trace: Trace, token: int) -> str:
  """A token as a word of a sentence."""
  return f'“{visible(trace.texts[token])}”'


def plural(number: int, noun: str) -> str:
  """1 token, 2 tokens."""
  return f'{number:,} {noun}' + ('' if number == 1 else 's')


def forwards(block: Block) -> str:
  """Of all stages."""
  return ', '.join(f'{name} {count}' for name, count in block.forwards.items())


def _cut(block: Block) -> str:
  """What is left of a block that the end of the text cuts."""
  number = len(block.emitted)
  if number == len(block.path) - 1:
    return 'the target adds nothing'
  if number == 0:
    return 'none is emitted'
  return 'only the first ' + (
    'is emitted' if number == 1 else f'{number} are emitted'
  )


def sentence(trace: Trace, block: Block) -> str:
  """What was guessed, what stood, what the target said."""
  guesses = len(block.tokens) - 1
  if guesses == 0:
    said = 'Nothing was guessed'
  else:
    levels = plural(max(block.depths), 'level')
    said = f'{plural(guesses, "guess").replace("guesss", "guesses")}, {levels}'
  accepted = [quoted(trace, block.tokens[node]) for node in block.path[1:]]
  said += f'; accepted: {" ".join(accepted) or "none"}'
  if block.bonus is not None:
    said += f'; the target adds {quoted(trace, block.bonus)}'
  else:
    said += f'; {_cut(block)}: {_ENDS.get(trace.finish_reason, "the end")}'
  return f'{said}.'


def tokens(trace: Trace) -> Iterator[tuple[int, int, int, int, float | None]]:
  """Number of the block, id, origin, position, log-probability; in order."""
  index = 0
  for number, block in enumerate(trace.blocks):
    emitted = zip(block.emitted, block.emitted_origins, strict=True)
    for offset, (token, origin) in enumerate(emitted):
      log_prob = None if trace.log_probs is None else trace.log_probs[index]
      yield number, token, origin, block.start + offset, log_prob
      index += 1
