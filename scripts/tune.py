"""Finds the fastest way to decode on this machine and writes it to a plan.

python scripts/tune.py --prompt_file=prompts.jsonl
python scripts/generate.py --plan=auto

Ctrl-C ends the search; the plan is then made from what is known so far, if any
drafter was tried.
"""

import pathlib
import sys

from absl import flags
import command_line
import options

flags.adopt_module_key_flags(options)  # Listed by --help.

_NUM_PROMPTS = flags.DEFINE_integer(
  'num_prompts', None, 'prompts to use; default: all', lower_bound=1
)
_BATCH_SIZE = flags.DEFINE_integer(
  'batch_size',
  1,
  'rows decoded together',
  lower_bound=1,
  upper_bound=options.LARGEST_BATCH,
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'file of the plan; default: where --plan=auto looks for it'
)


def main() -> None:
  from models.lab.bench.record import prepare_output
  from models.lab.tune.plan_lookup import table
  from models.lab.tune.planner import make_plan
  from models.text.plan import cache_path

  if options.PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  if options.PLAN.value is not None:
    raise ValueError('tune.py makes a plan; leave out --plan')
  if not options.keeps_tokens():
    raise ValueError(
      f'plans are for --verify=match, got {options.VERIFY.value}'
    )
  if options.COORDINATOR.value is not None:
    raise ValueError(
      f'--coordinator={options.COORDINATOR.value}: hosts would decide by their'
      ' own clocks; make the plan on one host'
    )
  if _OUTPUT.value:
    prepare_output(_OUTPUT.value)
  prompts = options.read_prompts(options.PROMPT_FILE.value, _NUM_PROMPTS.value)
  setup = options.plan_setup(_BATCH_SIZE.value)
  context = setup.context()
  plan = make_plan(
    setup.load(),
    prompts,
    context=context,
    sampling=setup.sampling,
    drafting=options.draft_settings(),
    seed=options.SEED.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    plan_seconds=options.PLAN_SECONDS.value,
    report=lambda line: print(line, file=sys.stderr),
  )
  path = cache_path(context, options.draft_settings())
  if _OUTPUT.value:
    path = pathlib.Path(_OUTPUT.value)
  print(f'{table(plan)}\n\n{plan.method}')
  plan.save(path)
  print(f'written to {path}')


if __name__ == '__main__':
  command_line.run(main)
