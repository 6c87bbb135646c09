"""The examples in the documentation run as they are.

The embedded pair is a tiny one here; `--long` takes the embedded pair itself.
"""

import pathlib
import re

import pytest
import tiny_demo

_ROOT = pathlib.Path(__file__).parents[2]


def _examples(path):
  return re.findall(r'```python\n(.*?)```', path.read_text('utf-8'), re.DOTALL)


_PAGES = (_ROOT / 'README.md', *sorted(_ROOT.glob('docs/**/*.md')))
_WITH_EXAMPLES = [
  str(path.relative_to(_ROOT)) for path in _PAGES if _examples(path)
]
assert len(_WITH_EXAMPLES) > 2


def test_no_example_is_left_out():
  """A block in another language, or indented, would not be run."""
  for path in _PAGES:
    fences = re.findall(
      r'^ *(?:```+|~~~+) *(\S*)', path.read_text('utf-8'), re.M
    )
    assert {*fences} <= {'', 'python', 'bibtex', '{eval-rst}', '{toctree}'}
    assert fences.count('python') == len(_examples(path)), path


@pytest.mark.parametrize('name', _WITH_EXAMPLES)
def test_examples_run(name, monkeypatch, capsys, request, tmp_path):
  if not request.config.getoption('--long'):
    tiny_demo.stand_in(monkeypatch, tmp_path)
  monkeypatch.chdir(_ROOT)
  scope = {'__name__': 'example'}
  for number, example in enumerate(_examples(_ROOT / name)):
    exec(compile(example, f'{name}, example {number}', 'exec'), scope)
  assert capsys.readouterr().out
