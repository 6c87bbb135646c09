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
import several_hosts

options.define_num_prompts()
_BATCH_SIZE = options.define_batch_size(1, 'rows decoded together')
_OUTPUT = flags.DEFINE_string(
  'output', None, 'file of the plan; default: where --plan=auto looks for it'
)
several_hosts.refuse(
  'hosts would decide by their own clocks; make the plan on one host'
)


def main() -> None:
  import loading

  from specdec.models.lab.bench import record
  from specdec.models.lab.tune import plan_lookup
  from specdec.models.lab.tune import planner
  from specdec.models.text import pair as pair_lib
  from specdec.models.text import plan as plan_lib

  if options.PLAN.value is not None:
    raise ValueError('tune.py makes a plan; leave out --plan')
  if not options.keeps_tokens():
    raise ValueError(
      f'plans are for --verify=match, got {options.VERIFY.value}'
    )
  prompts = options.file_prompts()
  record.prepare_output(_OUTPUT.value)
  task = loading.task(_BATCH_SIZE.value)
  context = plan_lookup.context_of(task)
  plan = planner.make_plan(
    pair_lib.load_pair(task.models),
    prompts,
    task,
    context=context,
    plan_seconds=options.PLAN_SECONDS.value,
    report=lambda line: print(line, file=sys.stderr),
  )
  path = pathlib.Path(
    _OUTPUT.value or plan_lib.cache_path(context, task.drafting)
  )
  print(f'{plan_lookup.table(plan)}\n')
  plan.save(path)
  print(f'written to {path}')


if __name__ == '__main__':
  command_line.run(main)
