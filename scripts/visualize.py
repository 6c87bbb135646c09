"""Writes a page of HTML that shows a decode, to be stepped through.

python scripts/visualize.py --output=report.html
python scripts/visualize.py --trace=report.json --output=again.html

The page needs no network and no server. Beside it goes the trace, as JSON, from
which the second command makes the page anew.
"""

import pathlib

from absl import flags
import command_line
import decoding_flags as options
import planned

from models.text.drafters import METHODS
import specdec

flags.adopt_module_key_flags(options)  # Listed by --help.

_PROMPT = flags.DEFINE_string('prompt', options.DEFAULT_PROMPT, 'to continue')
_METHOD = flags.DEFINE_enum(
  'method', 'staged', METHODS[:-1], 'how to decode; --plan chooses'
)
_OUTPUT = flags.DEFINE_string(
  'output', None, 'HTML file to write; the trace goes beside it', required=True
)
_TRACE = flags.DEFINE_string(
  'trace', None, 'JSON file of an earlier run, instead of decoding'
)


def _decoded() -> specdec.Trace:
  """What the flags say."""
  if options.PROMPT_FILE.value is None:
    prompts = [_PROMPT.value]
  elif _PROMPT.present:
    raise ValueError('give --prompt or --prompt_file, not both')
  else:
    prompts = options.read_prompts(options.PROMPT_FILE.value, 1)
  generator = planned.generator(_METHOD, prompts, 1)
  chosen = {}
  if options.BREAK_EVEN.value is not None:
    chosen['break_even'] = options.BREAK_EVEN.value
  (trace,) = generator.trace(
    prompts,
    max_new_tokens=options.MAX_NEW_TOKENS.value,
    sampling=options.sampling(),
    seed=options.SEED.value,
    verify=options.VERIFY.value,
    children=options.CHILDREN.value,
    log_probs=True,
    **chosen,
  )
  return trace


def _read(name: str) -> specdec.Trace:
  try:
    return specdec.Trace.from_json(pathlib.Path(name).read_text('utf-8'))
  except (OSError, ValueError) as error:
    raise ValueError(f'--trace={name} cannot be read: {error}') from error


def main() -> None:
  from specdec import tracing as viz

  page = pathlib.Path(_OUTPUT.value)
  if page.suffix not in ('.html', '.htm'):
    raise ValueError(f'--output={page} must end in .html')
  page.parent.mkdir(parents=True, exist_ok=True)
  if _TRACE.value is None:
    trace = _decoded()
    data = page.with_suffix('.json')
    data.write_text(trace.to_json() + '\n', 'utf-8')
    print(data)
  else:
    trace = _read(_TRACE.value)
  page.write_text(viz.report(trace), 'utf-8')
  print(page)


if __name__ == '__main__':
  command_line.run(main)
