"""Writes a model in four bits, so that it loads without being rounded again.

python scripts/round_model.py --model=FOLDER --output=FOLDER-int4
python scripts/generate.py --target=FOLDER-int4
"""

from absl import flags
import command_line

_FLAGS = flags.FLAGS

flags.DEFINE_string('model', 'demo', 'folder or hub id to round')
flags.DEFINE_string('output', None, 'folder to write', required=True)


def main() -> None:
  from specdec.models.checkpoints import hub

  hub.save_in_four_bits(_FLAGS.model, _FLAGS.output)
  size = hub.locate(_FLAGS.output).size
  print(f'wrote {_FLAGS.output}: {size / 1e6:.1f} MB of weights')


if __name__ == '__main__':
  command_line.run(main)
