"""Writes an HTML page that shows a decode step by step.

python scripts/visualize.py --output=report.html
python scripts/visualize.py --trace=report.json --output=again.html

The page needs no network and no server. The trace is written next to it as
JSON. The second command makes the page again from this file.
"""

import pathlib

from absl import flags
import command_line
import options

import specdec
from specdec.models.text import settings as settings_lib
from specdec.text import text_files
from specdec.text import whole_files

_PROMPT = flags.DEFINE_string('prompt', options.DEFAULT_PROMPT, 'to continue')
options.define_method(methods=[*settings_lib.METHODS][:-1])
_OUTPUT = flags.DEFINE_string(
  'output', None, 'HTML file to write, with the trace next to it', required=True
)
_TRACE = flags.DEFINE_string(
  'trace', None, 'JSON file of an earlier run, instead of decoding'
)


def _read(name: str) -> specdec.Trace:
  try:
    return specdec.Trace.from_json(text_files.read(name))
  except ValueError as error:
    raise ValueError(f'--trace={name} cannot be read: {error}') from error


def main() -> None:
  from specdec import tracing
  from specdec.models import waiting

  page = pathlib.Path(_OUTPUT.value)
  if page.suffix not in ('.html', '.htm'):
    raise ValueError(f'--output={page} must end in .html')
  page.parent.mkdir(parents=True, exist_ok=True)
  if _TRACE.value is None:
    import loading

    prompts = options.given_prompts(_PROMPT, 1)
    generator = loading.generator(prompts, 1)
    arguments = options.decoding() | {'log_probs': True}
    with waiting.announced('compiling and decoding'):
      (trace,) = generator.stream(prompts, **arguments).trace()
    data = page.with_suffix('.json')
    whole_files.write_text(data, trace.to_json() + '\n')
    print(data)
  else:
    trace = _read(_TRACE.value)
  whole_files.write_text(page, tracing.report(trace))
  print(page)


if __name__ == '__main__':
  command_line.run(main)
