"""Checks greedy tokens against transformers' own generate, on real prompts.

Needs torch, which nothing else here does.

  python scripts/compare_with_transformers.py --prompt_file=prompts.jsonl
"""

import json
from typing import Any

from absl import flags
import command_line
import decoding_flags as options

_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', 20, 'the first so many', lower_bound=1
)
_METHODS = flags.DEFINE_list(
  'methods', ['plain', 'chain', 'tree', 'staged'], 'to compare'
)


def main() -> None:
  import jax
  import torch
  import transformers

  from models import drafters
  from models import hub
  from models.pair import load_pair
  import specdec

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  if (
    options.sampling() != specdec.Sampling() or options.DTYPE.value != 'float32'
  ):
    raise ValueError('the comparison is greedy and in float32')
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  name = options.TARGET.value
  pair = load_pair(name, options.draft_name(), revision=options.REVISION.value)
  peer: Any = transformers.AutoModelForCausalLM.from_pretrained(
    hub.locate(name, revision=options.REVISION.value), dtype=torch.float32
  )
  limit = options.MAX_NEW_TOKENS.value
  methods = {
    name: drafters.make_drafter(name, pair, options.draft_settings())
    for name in _METHODS.value
  }
  equal = dict.fromkeys(methods, 0)
  for prompt in prompts:
    ids = pair.encode(prompt)
    output = peer.generate(
      torch.tensor([ids]), max_new_tokens=limit, do_sample=False
    )
    expected = output[0, len(ids) :].tolist()
    for method, drafter in methods.items():
      result = specdec.generate(
        pair.target,
        jax.random.key(options.SEED.value),
        [ids],
        drafter=drafter,
        max_new_tokens=limit,
        eos_ids=pair.eos_ids,
      )
      equal[method] += result.tokens[0] == expected
  print(json.dumps({'prompts': len(prompts), 'equal': equal}))
  if any(count < len(prompts) for count in equal.values()):
    raise ValueError('some prompts differ')


if __name__ == '__main__':
  command_line.run(main)
