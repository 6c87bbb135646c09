r"""Compiles decoding for an accelerator that need not be present, and counts.

python scripts/compile_for.py --device=v5e
python scripts/compile_for.py --device=v5e:2x4 --mesh=model:8 \
  --target=FOLDER --draft=FOLDER

Of --target and --draft, only config.json is read. TPUs need
scripts/install_libtpu.py once, GPUs need pip install "jax[cuda12]".
"""

import os

from absl import flags
import command_line

# Set before JAX starts, so that JAX looks for no accelerator.
os.environ['JAX_PLATFORMS'] = 'cpu'

import options

_DEVICE = flags.DEFINE_enum(
  'device', 'v5e', ['h100', 'v5e', 'v5e:2x4', 'cpu'], 'device to compile for'
)
_METHODS = flags.DEFINE_multi_enum(
  'methods',
  ['plain', 'chain', 'staged'],
  options.METHODS,
  'loops to compile; may be repeated',
)
_BATCH_SIZE = flags.DEFINE_integer('batch_size', 1, 'rows', lower_bound=1)
_PROMPT_TOKENS = flags.DEFINE_integer(
  'prompt_tokens', 256, 'slots for the prompt', lower_bound=1
)
_OUTPUT = flags.DEFINE_string('output', None, 'JSON file to write')


def main() -> None:
  from specdec.models.checkpoints import hub
  from specdec.models.lab.bench import record
  from specdec.models.lab.compiled import programs

  models = options.models()
  if models.draft is None and _METHODS.value != ['plain']:
    raise ValueError('--draft=none: name a draft, or pass --methods=plain')
  record.prepare_output(_OUTPUT.value)
  draft = None
  if models.draft is not None:
    draft = hub.locate(hub.draft_name(models.draft)).config
  task = programs.CompiledTask(
    target=hub.locate(models.target).config,
    draft=draft,
    # Accelerators are used with bfloat16, whatever this machine computes in.
    dtype='float32' if models.dtype == 'float32' else 'bfloat16',
    drafting=options.draft_settings(),
    sampling=options.sampling(),
    verify=options.VERIFY.value,
    batch_size=_BATCH_SIZE.value,
    prompt_tokens=_PROMPT_TOKENS.value,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
  )
  memory, loops = [], []
  for method in _METHODS.value:
    with options.named_as_flag():
      compiled = programs.compile_program(
        method,
        task,
        _DEVICE.value,
        models.mesh,  # type: ignore[arg-type]  # Flags give sizes.
      )
    memory.append({'method': method} | compiled.memory)
    loops += [{'method': method} | loop for loop in compiled.loops()]
  print(f'{record.rows_to_table(memory)}\n\n{record.rows_to_table(loops)}')
  settings = options.as_dict() | {'dtype': task.dtype}
  record.write_record(
    _OUTPUT.value, settings, {'memory': memory, 'loops': loops}
  )


if __name__ == '__main__':
  command_line.run(main)
