r"""Compiles decoding for an accelerator that need not be there, and counts.

python scripts/compile_for.py --device=v5e
python scripts/compile_for.py --device=h200 --target=gpt2-large \
  --draft=draft-40m

Kernels, copies and bytes of one round of each loop, against the least that a
forward has to read. TPUs need scripts/install_libtpu.py once; GPUs need
pip install "jax[cuda12]".
"""

import os

from absl import flags
import command_line

# Before JAX starts: it is to run on nothing but the CPU, and quietly.
os.environ['JAX_PLATFORMS'] = 'cpu'

import options

_DEVICE = flags.DEFINE_enum(
  'device',
  'v5e',
  ['h200', 'a100', 'v5e', 'v5p', 'v6e', 'cpu'],
  'to compile for',
)
_METHODS = flags.DEFINE_list(
  'methods', ['plain', 'chain', 'staged'], 'of plain, chain, tree, staged'
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 1, 'rows', lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 256, 'room for the prompt', lower_bound=1
)
_TEXT = flags.DEFINE_string(
  'text', None, 'folder for the compiled programs, to read them'
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def main() -> None:
  import json
  import pathlib

  import jax

  from models.bench.record import prepare_output
  from models.compiled import programs
  from models.compiled import report
  from models.compiled.programs import DEVICES

  if options.draft_name() is None and _METHODS.value != ['plain']:
    raise ValueError('--draft=none: give a draft, or --methods=plain')
  if options.DTYPE.value == 'int8':
    raise ValueError('--dtype=int8: only floats are compiled for accelerators')
  if _OUTPUT.value:
    prepare_output(_OUTPUT.value)
  workload = programs.Workload(
    target=options.TARGET.value,
    draft=options.DRAFT.value,
    # Scripts that decode default to float32, accelerators are used otherwise.
    dtype=options.DTYPE.value if options.DTYPE.present else 'bfloat16',
    batch_size=_BATCH_SIZE.value,
    prompt_tokens=_PROMPT_TOKENS.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    drafting=options.draft_settings(),
  )
  device = DEVICES[_DEVICE.value]
  reports = []
  for method in _METHODS.value:
    compiled = programs.compile_program(method, workload, device)
    if _TEXT.value:
      folder = pathlib.Path(_TEXT.value)
      folder.mkdir(parents=True, exist_ok=True)
      path = folder / f'{_DEVICE.value}-{method}.txt'
      path.write_text(compiled.text, 'utf-8')
    reports.append(report.analyse(method, compiled, device))
  print(report.to_markdown(reports))
  if _OUTPUT.value:
    settings = options.as_dict()
    settings.pop('text')
    settings['dtype'] = workload.dtype
    result = {
      'jax': jax.__version__,
      'settings': settings,
      'programs': [one.as_dict() for one in reports],
    }
    pathlib.Path(_OUTPUT.value).write_text(
      json.dumps(result, indent=1) + '\n', 'utf-8'
    )


if __name__ == '__main__':
  command_line.run(main)
