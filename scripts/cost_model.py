"""Prints what the cost model predicts: when speculative decoding pays, and why.

python scripts/cost_model.py
python scripts/cost_model.py --target=llama-3-8b --draft=none --hardware=v6e \
  --devices=4 --acceptance=0.7 --out=/tmp/cost_model
python scripts/cost_model.py --target=FOLDER --draft=none --hardware=this \
  --devices=1

Nothing is run. The tables are explained in docs/cost_model.md, the pictures are
in colab/05_when_it_pays.ipynb.
"""

import sys

from absl import flags
import command_line

_TARGET = flags.DEFINE_string(
  'target', 'llama-3-70b', 'name of a preset, or a folder with a config.json'
)
_DRAFT = flags.DEFINE_string(
  'draft', 'llama-3-8b', 'as --target; none if drafting costs nothing'
)
_HARDWARE = flags.DEFINE_string(
  'hardware', 'h200', 'name of a preset; this measures the default device'
)
_DEVICES = flags.DEFINE_integer(
  'devices', 8, 'number of devices, which share every layer', lower_bound=1
)
_ACCEPTANCE = flags.DEFINE_float(
  'acceptance',
  0.8,
  'probability that a draft token is accepted',
  lower_bound=0,
  upper_bound=1,
)
_CONTEXT = flags.DEFINE_integer(
  'context', 2048, 'tokens in the cache of each row', lower_bound=0
)
_OVERLAP = flags.DEFINE_bool(
  'overlap', True, 'whether a kernel computes while it reads'
)
_SETTINGS = flags.FLAGS.get_key_flags_for_module(sys.argv[0])  # Those above.
_OUT = flags.DEFINE_string('out', None, 'folder to write cost_model.json to')
_TITLES = (
  '(a) 1 query x 10 tokens (option 1), 10 queries x 1 token (option 2)',
  '(b) Batch size',
  '(c) Context, chain of 4',
  '(d) Mixtures of experts, chain of 4 from a free draft',
  '(e) The paper',
  '(f) Roofline',
  '(g) Several devices, greedy counts of (e)',
)


def _shape(flag):
  import pathlib

  from models.lab import cost_model

  if flag.value in cost_model.MODELS:
    return cost_model.MODELS[flag.value]
  from models.checkpoints import hugging_face
  from models.lab.cost_model import model_shape

  path = pathlib.Path(flag.value) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'--{flag.name}={flag.value} is neither a folder with a config.json nor'
      f' one of {", ".join(cost_model.MODELS)}'
    )
  config = hugging_face.HuggingFaceFolder(path.parent).config
  return model_shape.model_shape(config, name=path.parent.name)


def _hardware():
  from models.lab import cost_model
  from models.lab.bench import machine

  name = _HARDWARE.value
  if name != 'this' and name not in cost_model.HARDWARE:
    raise ValueError(
      f'--hardware={name} must be one of this, {", ".join(cost_model.HARDWARE)}'
    )
  device = (
    machine.this_machine() if name == 'this' else cost_model.HARDWARE[name]
  )
  return device.times(_DEVICES.value)


def _cell(value):
  if isinstance(value, float):
    digits = 0 if abs(value) >= 1000 else 2 if abs(value) >= 1 else 3
    return f'{value:,.{digits}f}'
  return '-' if value is None else f'{value}'


def main() -> None:
  import pathlib

  from models.lab import cost_model
  from models.lab.bench import record
  from models.lab.cost_model import claims

  deployment = cost_model.Deployment(
    target=_shape(_TARGET),
    draft=None if _DRAFT.value == 'none' else _shape(_DRAFT),
    hardware=_hardware(),
    overlap=_OVERLAP.value,
  )
  acceptance, context = _ACCEPTANCE.value, _CONTEXT.value
  root = pathlib.Path(__file__).parents[1]
  counts = claims.read_counts(root / 'results')
  found = {
    'options': claims.options(deployment.target),
    'by_batch_size': claims.by_batch_size(
      deployment, acceptance, context=context
    ),
    'by_context': claims.by_context(deployment, acceptance),
    'by_experts': claims.by_experts(deployment, acceptance, context=context),
    'paper': claims.paper(counts),
    'roofs': claims.roofline(),
    'by_devices': claims.by_devices(
      counts['greedy'], context=context, devices=_DEVICES.value
    ),
  }
  print(f'{deployment.target.name} on {deployment.hardware.name}')
  for title, tables in zip(_TITLES, found.values(), strict=True):
    print(f'\n## {title}')
    for name, rows in tables.items():
      cells = [[_cell(value) for value in row.values()] for row in rows]
      print(
        f'\n{name.replace("_", " ")}\n\n{record.to_table(list(rows[0]), cells)}'
      )
  if _OUT.value is not None:
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {flag.name: flag.value for flag in _SETTINGS}
    record.write_record(str(folder / 'cost_model.json'), settings, found)


if __name__ == '__main__':
  command_line.run(main)
