"""Compares ways of decoding, interleaved, on the prompts of a file.

  python scripts/benchmark.py --prompt_file=prompts.jsonl --output=result.json

Settings of an arm that differ from the flags are given in parentheses, and
alternatives are separated by bars:

  python scripts/benchmark.py --prompt_file=prompts.jsonl \
      --arms='plain,chain(num_draft_tokens=2|4),tree(num_nodes=8|16,rounds=2|3)'

  python scripts/benchmark.py --prompt_file=prompts.jsonl --batch_sizes=1,2,4,8

Lines with the keys category and turns are questions, as in Spec-Bench and
SPEED-Bench. The chat template of the target is applied, which it must have, and
every turn is decoded, after the answers that the first arm gives:

  python scripts/benchmark.py --prompt_file=questions.jsonl --num_prompts=10
"""

import pathlib

from absl import flags
import command_line
import options

from specdec.models.text import settings as settings_lib

_ARMS = flags.DEFINE_string(
  'arms',
  'plain,chain,tree,staged',
  'separated by commas, each method, method:dtype or'
  ' method(option=value,...):dtype, the first is the baseline; methods:'
  f' {(*settings_lib.METHODS,)}, those from ngram on without the draft and'
  ' plan as --plan says; options: see the flags of the same names, a|b gives an'
  ' arm each; dtype: see --dtype',
)
_PEER = flags.DEFINE_multi_string(
  'peer',
  [],
  'the address of a server with the interface of OpenAI that has the target,'
  ' such as http://127.0.0.1:8080 of vLLM or llama.cpp; decodes, too; may be'
  ' repeated',
)
options.define_num_prompts(
  'default: all; of questions at most this number of each category'
)
_CATEGORIES = flags.DEFINE_list(
  'categories',
  [],
  'of questions, decode only these categories; default: all',
)
_PROMPT_BUCKET = flags.DEFINE_integer(
  'prompt_bucket',
  None,
  'of those, only prompts of at most this number of tokens and of more than'
  ' half of it: a power of 2 saves compiling for others; default: all',
)
_BATCH_SIZE = options.define_batch_size(1, 'prompts per batch')
_BATCH_SIZES = flags.DEFINE_list(
  'batch_sizes',
  [],
  'several batch sizes, one run each and one table of all; in place of'
  ' --batch_size; the result of size B is written to OUTPUT_bB.json',
)
_MAX_SECONDS = flags.DEFINE_float(
  'max_seconds', None, 'begin no batch after measuring for this long'
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'JSON file to write, next to it tables (.md)'
)
_PLOTS = flags.DEFINE_string(
  'plots', None, 'folder for a picture of the categories'
)


def main() -> None:
  import loading

  from specdec.models.lab.bench import arms as arms_lib
  from specdec.models.lab.bench import benchmark
  from specdec.models.lab.bench import plots
  from specdec.models.lab.bench import record

  output = _OUTPUT.value
  path = pathlib.Path(output or 'benchmark.json')
  paths = {_BATCH_SIZE.value: path}
  questions = options.file_questions(_CATEGORIES.value)
  if _BATCH_SIZES.value:
    sizes = options.batch_sizes(_BATCH_SIZES.value, len(questions))
    paths = {n: path.with_stem(f'{path.stem}_b{n}') for n in sizes}
  for file in paths.values() if output else ():
    record.prepare_output(str(file))
  folder = plots.check_folder(_PLOTS.value)
  if folder is not None and not any(
    question.category for question in questions
  ):
    print('--plots: no picture, as the prompts have no categories')
  specs = arms_lib.parse_arms(_ARMS.value, str(loading.models().dtype))
  specs += [arms_lib.ArmSpec(url) for url in _PEER.value]
  first = [question.first for question in questions]
  reports = {}
  for size, file in paths.items():
    plan = loading.plan(size, lambda: first)
    report = reports[size] = benchmark.run(
      questions,
      arms=specs,
      task=loading.task(size, plan),
      settings=options.as_dict(),
      prompt_bucket=_PROMPT_BUCKET.value,
      max_seconds=_MAX_SECONDS.value,
    )
    print(f'{report}\n' if _BATCH_SIZES.value else report, flush=True)
    if output:
      report.write(str(file))
    if folder is not None and report.categories:
      written = record.record(dict(report.settings), report.figures)
      picture = folder / f'{file.stem}_categories.png'
      plots.draw_categories(written).savefig(picture, dpi=150)
  if _BATCH_SIZES.value:
    print(benchmark.table_by_batch_size(reports))


if __name__ == '__main__':
  command_line.run(main)
