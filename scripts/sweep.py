"""Plain, chain and staged decoding over one axis at a time, beside predictions.

python scripts/sweep.py --output=/tmp/sweep
python scripts/sweep.py --target=FOLDER --studies=batch --batch_sizes=1,4,16 \
  --output=/tmp/sweep

By batch size, context and number of verified tokens; by longer contexts, on a
random Llama; a random mixture of experts beside that Llama; and how many
experts the tokens of a trained one share. What is measured and what the cost
model says of it go to sweep_*.json and sweep_*.png; docs/cost_model.md explains
them.
"""

from absl import flags
import command_line
import decoding_flags as options

flags.adopt_module_key_flags(options)  # Listed by --help.

_OUTPUT = flags.DEFINE_string('output', None, 'folder for JSON and pictures')
_STUDIES = flags.DEFINE_list(
  'studies', 'batch,context,nodes,long,experts,routing', 'which of them'
)
_CORPUS = flags.DEFINE_string(
  'corpus',
  '',
  'folder of *.py, whose held-out files prompts are cut from; default: the'
  ' standard library',
)
_AXES = {
  'batch_sizes': '1,2,4,8,16,32',
  'contexts': '64,448,960',
  'long_contexts': '512,2048,4096',
  'chain_nodes': '2,3,5,9,17',
  'tree_nodes': '8,16,32',
  'expert_batch_sizes': '1,2,4,8',
  'routed_nodes': '1,2,5,9,17,33',
  'routed_batch_sizes': '1,4',
}
_HELP = {
  'batch_sizes': 'rows, of the study batch',
  'contexts': 'tokens of prompts, of the study context; the others have the'
  ' first',
  'long_contexts': 'likewise, of the study long, with a random Llama',
  'chain_nodes': 'tokens that a chain verifies, of the study nodes',
  'tree_nodes': 'that a staged tree verifies, likewise',
  'expert_batch_sizes': 'rows, of the study experts',
  'routed_nodes': 'neighbouring tokens of a forward, of the study routing',
  'routed_batch_sizes': 'rows, likewise',
}
for _NAME, _VALUE in _AXES.items():
  flags.DEFINE_list(_NAME, _VALUE, _HELP[_NAME])
_CONTEXT_BATCH_SIZE = flags.DEFINE_integer(
  'context_batch_size', 8, 'rows, of the study context'
)
_NODES_BATCH_SIZE = flags.DEFINE_integer(
  'nodes_batch_size', 1, 'rows, of the study nodes'
)
_MIXTURE = flags.DEFINE_list(
  'mixture',
  '768,4,8,2,2048',
  'width, layers, experts, experts per token and width of an expert, of the'
  ' study experts',
)
_ROUTED = flags.DEFINE_string(
  'routed', 'demo-moe', 'mixture of experts of the study routing'
)
_REPEATS = flags.DEFINE_integer(
  'repeats', 3, 'decodes of each point, of different prompts', lower_bound=1
)

# Other defaults than elsewhere, so that it takes minutes.
_DEFAULTS = (
  (options.MAX_NEW_TOKENS, 48),
  (options.DTYPE, 'bfloat16'),
  (options.NUM_NODES, 16),
  (options.WIDTH, 8),
  (options.BRANCHING, 4),
  (options.ROUNDS, 3),
)


def _integers(name: str) -> tuple[int, ...]:
  values = flags.FLAGS[name].value or []
  try:
    return tuple(int(value) for value in values)
  except ValueError as error:
    raise ValueError(
      f'--{name}={",".join(values)}: expected integers, separated by commas'
    ) from error


def main() -> None:
  import pathlib
  import sys
  import time

  from models import machine_limits
  from models import plots
  from models.results import write_record
  from models.sweep import pictures
  from models.sweep import run
  from models.sweep import tables
  from models.sweep.measuring import Effort
  from models.sweep.mixture import mixture_of
  from models.training.corpus import Corpus

  if _OUTPUT.value is None:
    raise ValueError('--output is needed: a folder')
  plots.require_matplotlib(f'--output={_OUTPUT.value}')
  draft = options.draft_name()
  if draft is None or options.DTYPE.value not in run.DTYPES:
    raise ValueError(
      f'--draft={options.DRAFT.value} --dtype={options.DTYPE.value}: a sweep'
      f' needs a draft, and one of the dtypes {", ".join(run.DTYPES)}'
    )
  start = time.monotonic()
  folder = pathlib.Path(_OUTPUT.value)
  folder.mkdir(parents=True, exist_ok=True)

  def save(name, study):
    path = folder / f'sweep_{name}.json'
    write_record(str(path), options.as_dict(), study)
    for file in (path.name, *pictures.draw(name, study, folder)):
      print(folder / file)

  plan = run.Plan(
    target=options.TARGET.value,
    draft=draft,
    dtype=options.DTYPE.value,
    corpus=Corpus(folder=_CORPUS.value),
    drafting=options.draft_settings(),
    axes=run.Axes(
      **{name: _integers(name) for name in _AXES},
      context_batch_size=_CONTEXT_BATCH_SIZE.value,
      nodes_batch_size=_NODES_BATCH_SIZE.value,
    ),
    routed=_ROUTED.value,
    mixture=mixture_of(_integers('mixture'), options.DTYPE.value),
    effort=Effort(
      max_new_tokens=options.MAX_NEW_TOKENS.value,
      repeats=_REPEATS.value,
      report=lambda text: print(
        f'{time.monotonic() - start:6.0f} s  {text}', file=sys.stderr
      ),
    ),
    studies=tuple(_STUDIES.value),
    save=save,
  )
  figures = run.run(plan, machine_limits.this_machine((plan.dtype,)))
  print(tables.to_markdown(figures))


if __name__ == '__main__':
  for holder, default in _DEFAULTS:
    flags.set_default(holder, default)
  command_line.run(main)
