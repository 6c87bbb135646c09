r"""Compiles decoding for an accelerator that need not be present, and counts.

python scripts/compile_for.py --device=v5e
python scripts/compile_for.py --device=h200 --target=gpt2-large \
  --draft=draft-40m
python scripts/compile_for.py --device=v5e:2x4 --mesh=model:8 \
  --target=llama-2-70b --num_layers=4 --draft=tinyllama-1.1b

TPUs need scripts/install_libtpu.py once, GPUs need pip install "jax[cuda12]".
"""

import os

from absl import flags
import command_line

# Set before JAX starts, so that JAX looks for no accelerator.
os.environ['JAX_PLATFORMS'] = 'cpu'

import options

_DEVICE = flags.DEFINE_string(
  'device',
  'v5e',
  'device to compile for: h200, h100, a100, v5e, v5p, v6e or cpu; also several'
  ' with --mesh, such as v5e:2x4, v5p:2x2x2 or h100:8',
)
_NUM_LAYERS = flags.DEFINE_integer(
  'num_layers',
  None,
  'of the target, at most: what is counted per layer is found in less time',
  lower_bound=1,
)
_METHODS = flags.DEFINE_list(
  'methods', ['plain', 'chain', 'staged'], 'any of plain, chain, tree, staged'
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 1, 'rows', lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 256, 'slots for the prompt', lower_bound=1
)
_EXECUTED = flags.DEFINE_bool(
  'executed',
  False,
  'also count a whole step, with the rounds of a decode of the embedded pair on'
  ' this machine',
)
_TEXT = flags.DEFINE_string(
  'text', None, 'folder to write the text of the compiled programs to'
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')

_BYTES = {
  'temporary_bytes': 'beside arguments',
  'accessed_bytes': 'read and written',
  'held_bytes': 'of weights and caches',
  'ideal_held_bytes': 'if they were divided evenly',
}


def _checked():
  """The device and the mesh; ValueError if flags do not go together."""
  from specdec.models.lab.compiled import programs
  from specdec.models.nn import matrices as matrices_lib

  models = options.models()
  if models.draft is None and _METHODS.value != ['plain']:
    raise ValueError('--draft=none: name a draft, or pass --methods=plain')
  form = matrices_lib.FORMATS.get(str(models.dtype))
  if form is not None and not form.is_float:
    raise ValueError(f'--dtype={form.name}: compile for float32 or bfloat16')
  with options.named_as_flag():
    device = programs.device(_DEVICE.value)
  mesh = models.mesh
  if ':' in _DEVICE.value and mesh is None:
    raise ValueError(
      f'--device={_DEVICE.value} is several devices; say how to use them, such'
      ' as --mesh=model:8'
    )
  if unknown := [one for one in _METHODS.value if one not in programs.METHODS]:
    raise ValueError(
      f'--methods={unknown[0]}: choose from {", ".join(programs.METHODS)}'
    )
  return device, mesh


def main() -> None:
  import dataclasses
  import pathlib

  from specdec.models.lab.bench import record
  from specdec.models.lab.compiled import programs
  from specdec.models.lab.compiled import report as report_lib
  from specdec.models.nn import dtypes

  device, mesh = _checked()
  record.prepare_output(_OUTPUT.value)
  # Accelerators are used with bfloat16, whatever this machine computes in.
  models = options.models()
  dtype = 'bfloat16' if models.dtype == dtypes.AUTO else models.dtype
  task = programs.CompiledTask(
    models=dataclasses.replace(models, dtype=dtype),
    num_layers=_NUM_LAYERS.value,
    batch_size=_BATCH_SIZE.value,
    prompt_tokens=_PROMPT_TOKENS.value,
    drafting=options.draft_settings(),
    **options.decoding(),
  )
  memory, loops, steps = {}, [], []
  for method in _METHODS.value:
    compiled = programs.compile_program(method, task, device, mesh)
    if _TEXT.value:
      folder = pathlib.Path(_TEXT.value)
      folder.mkdir(parents=True, exist_ok=True)
      name = f'{_DEVICE.value.replace(":", "-")}-{method}.txt'
      (folder / name).write_text(compiled.text, 'utf-8')
    memory[method] = sizes = report_lib.memory_figures(compiled)
    words = (f'{one / 1e6:.1f} MB {_BYTES[key]}' for key, one in sizes.items())
    print(f'{method}: {"; ".join(words)}')
    counted = report_lib.analyse(compiled)
    loops += [{'method': method} | loop for loop in counted]
    if _EXECUTED.value:
      rounds = report_lib.rounds_per_step(method, task, compiled.cost_ratio)
      steps.append({'method': method} | report_lib.per_step(counted, rounds))
  print(record.rows_to_table(loops))
  figures = {'memory': memory, 'loops': loops}
  if steps:
    print(f'\n{record.rows_to_table(steps)}')
    figures['executed'] = steps
  settings = options.as_dict() | {'dtype': dtype}
  del settings['text']
  record.write_record(_OUTPUT.value, settings, figures)


if __name__ == '__main__':
  command_line.run(main)
