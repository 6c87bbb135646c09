"""What the cost model says: when speculation pays, and why. Nothing is run.

python scripts/cost_model.py
python scripts/cost_model.py --target=llama-3-8b --draft=none --hardware=v6e \
  --devices=4 --acceptance=0.7 --out=/tmp/cost_model
python scripts/cost_model.py --target=FOLDER --hardware=this

Tables, and with --out also cost_model.json and a picture of each; what they
show is in docs/cost_model.md.
"""

from absl import flags
import command_line

_TARGET = flags.DEFINE_string(
  'target', 'llama-3-70b', 'a preset, or a folder with a config.json'
)
_DRAFT = flags.DEFINE_string(
  'draft', 'llama-3-8b', 'likewise; none: drafting costs nothing'
)
_HARDWARE = flags.DEFINE_string(
  'hardware', 'h200', 'a preset; this: the default device, measured now'
)
_DEVICES = flags.DEFINE_integer('devices', 8, 'so many of it', lower_bound=1)
_ACCEPTANCE = flags.DEFINE_float(
  'acceptance', 0.8, 'chance of a drafted token', lower_bound=0, upper_bound=1
)
_CONTEXT = flags.DEFINE_integer(
  'context', 2048, 'tokens in the cache of a row', lower_bound=0
)
_OVERLAP = flags.DEFINE_bool(
  'overlap', True, 'whether a kernel reads while it computes'
)
_OUT = flags.DEFINE_string('out', None, 'folder for JSON and pictures')


def _shape(flag):
  import json
  import pathlib

  from specdec.cost_model import MODELS
  from specdec.cost_model import shape_from_config

  name = flag.value
  if name in MODELS:
    return MODELS[name]
  path = pathlib.Path(name) / 'config.json'
  if not path.is_file():
    raise ValueError(
      f'--{flag.name}={name} is no folder with a config.json and none of'
      f' {", ".join(MODELS)}'
    )
  config = json.loads(path.read_text('utf-8'))
  return shape_from_config(config, name=path.parent.name)


def _hardware():
  from models.bench.machine import this_machine
  from specdec.cost_model import HARDWARE

  name = _HARDWARE.value
  if name != 'this' and name not in HARDWARE:
    raise ValueError(
      f'--hardware={name} is none of this, {", ".join(HARDWARE)}'
    )
  one = this_machine() if name == 'this' else HARDWARE[name]
  return one.times(_DEVICES.value)


def main() -> None:
  import pathlib

  from models.bench import plots
  from models.bench.record import write_record
  from models.cost_report import pictures
  from models.cost_report import report
  from specdec.cost_model import Deployment

  if _OUT.value is not None:
    plots.require_matplotlib(f'--out={_OUT.value}')
  deployment = Deployment(
    target=_shape(_TARGET),
    draft=None if _DRAFT.value == 'none' else _shape(_DRAFT),
    hardware=_hardware(),
    overlap=_OVERLAP.value,
  )
  figures = report.run(
    deployment, acceptance=_ACCEPTANCE.value, context=_CONTEXT.value
  )
  print(report.to_markdown(figures))
  if _OUT.value is not None:
    folder = pathlib.Path(_OUT.value)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
      flag.name: flag.value
      for flag in (_TARGET, _DRAFT, _HARDWARE, _DEVICES, _CONTEXT, _OVERLAP)
    }
    write_record(
      str(folder / 'cost_model.json'),
      settings | {'acceptance': _ACCEPTANCE.value},
      figures,
    )
    for file in pictures.draw(figures, folder):
      print(folder / file)


if __name__ == '__main__':
  command_line.run(main)
