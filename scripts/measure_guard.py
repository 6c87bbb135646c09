"""What the guard costs against plain decoding, as JSON.

python scripts/measure_guard.py --draft=FOLDER --break_even=1.2

Both decode the same prompts, in turns of a few steps each, so that a machine
that is busy with other things slows down both. The figure to look at is
`seconds`: of the guarded decode over those of the plain one.
"""

import json
import time

from absl import flags
import command_line
import decoding_flags as options
import jax

from models.text import drafters

flags.adopt_module_key_flags(options)  # Listed by --help.

_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', 4, 'the first so many', lower_bound=1
)
_METHOD = flags.DEFINE_enum(
  'method', 'chain', drafters.METHODS, 'what is guarded'
)
_TURN = flags.DEFINE_integer('turn', 8, 'steps in a row', lower_bound=1)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def _decode_in_turns(arms, prompt, **settings):
  """Seconds by arm, first new token to last, and what was generated."""
  import specdec

  decodings = {
    name: specdec.Decoding(
      target, key, [prompt], drafter=drafter, break_even=even, **settings
    )
    for name, (target, key, drafter, even) in arms.items()
  }
  seconds = dict.fromkeys(decodings, 0.0)
  while not all(one.done for one in decodings.values()):
    for name, decoding in decodings.items():
      if not decoding.done:
        start = time.perf_counter()
        decoding.step(_TURN.value)
        seconds[name] += time.perf_counter() - start
  return seconds, {name: one.result() for name, one in decodings.items()}


def main() -> None:
  from models.bench import record as results
  from models.text.pair import load_pair

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  if options.BREAK_EVEN.value is None:
    raise ValueError('--break_even is needed, or nothing is guarded')
  if _OUTPUT.value:
    results.prepare_output(_OUTPUT.value)
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  pair = load_pair(
    options.TARGET.value, options.draft_name(), dtype=options.DTYPE.value
  )
  drafter = drafters.make_drafter(_METHOD.value, pair, options.draft_settings())
  key = jax.random.key(options.SEED.value)
  arms = {
    'plain': (pair.target, key, None, None),
    'guarded': (pair.target, key, drafter, options.BREAK_EVEN.value),
  }
  settings = {
    'sampling': options.sampling(),
    'eos_ids': pair.eos_ids,
    'room_for_new_tokens': options.MAX_NEW_TOKENS.value,
  }
  rows = []
  for prompt in map(pair.encode, prompts):
    _decode_in_turns(arms, prompt, max_new_tokens=24, **settings)  # Compiles.
    seconds, ends = _decode_in_turns(
      arms, prompt, max_new_tokens=options.MAX_NEW_TOKENS.value, **settings
    )
    stats = ends['guarded'].stats
    rows.append(
      {
        'seconds': seconds['guarded'] / seconds['plain'],
        'plain_ms_per_token': 1e3
        * seconds['plain']
        / ends['plain'].stats['new_tokens'],
        'new_tokens': stats['new_tokens'],
        'speculative_steps': stats['target_forwards'] - stats['plain_steps'],
        'same_tokens': ends['guarded'].tokens == ends['plain'].tokens,
      }
    )
    print(json.dumps(rows[-1]), flush=True)
  if _OUTPUT.value:
    results.write_record(_OUTPUT.value, options.as_dict(), {'prompts': rows})


if __name__ == '__main__':
  command_line.run(main)
