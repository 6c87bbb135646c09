"""Splits block efficiency by whether the text ends in a loop, as JSON.

python scripts/measure_loops.py --prompt_file=prompts.jsonl
"""

import collections
import json

from absl import flags
import command_line
import decoding_flags as options
import jax

from models.text import drafters

flags.adopt_module_key_flags(options)  # Listed by --help.

_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', 20, 'the first so many', lower_bound=1
)
_METHOD = flags.DEFINE_enum(
  'method', 'chain', drafters.METHODS, 'how to decode'
)
_TAIL, _LONGEST_PERIOD = 32, 16


def _ends_in_loop(tokens: list[int]) -> bool:
  tail = tokens[-_TAIL:]
  periods = range(1, _LONGEST_PERIOD + 1)
  return any(tail[period:] == tail[:-period] for period in periods)


def main() -> None:
  from models.text.pair import load_pair
  import specdec

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  pair = load_pair(
    options.TARGET.value, options.draft_name(), dtype=options.DTYPE.value
  )
  drafter = drafters.make_drafter(_METHOD.value, pair, options.draft_settings())
  counts: dict[str, dict[str, float]] = collections.defaultdict(
    lambda: collections.defaultdict(float)
  )
  for prompt in prompts:
    result = specdec.generate(
      pair.target,
      jax.random.key(options.SEED.value),
      [pair.encode(prompt)],
      drafter=drafter,
      max_new_tokens=options.MAX_NEW_TOKENS.value,
      sampling=options.sampling(),
      eos_ids=pair.eos_ids,
    )
    kind = 'loop' if _ends_in_loop(result.tokens[0]) else 'no loop'
    counts[kind]['prompts'] += 1
    for name in ('new_tokens', 'target_forwards'):
      counts[kind][name] += result.stats[name]
  for count in counts.values():
    ratio = count['new_tokens'] / max(count['target_forwards'], 1)
    count['block_efficiency'] = round(ratio, 2)
  print(json.dumps(counts))


if __name__ == '__main__':
  command_line.run(main)
