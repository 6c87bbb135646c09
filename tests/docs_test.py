"""The examples in the documentation run as they are."""

import pathlib
import re

import pytest

_ROOT = pathlib.Path(__file__).parent.parent


def _examples(path):
  return re.findall(r'```python\n(.*?)```', path.read_text('utf-8'), re.DOTALL)


_WITH_EXAMPLES = [
  str(path.relative_to(_ROOT))
  for path in (_ROOT / 'README.md', *sorted(_ROOT.glob('docs/**/*.md')))
  if _examples(path)
]


def test_pages_with_examples_are_found():
  assert {'README.md', 'docs/api.md', 'docs/tutorial_own_scorer.md'} <= set(
    _WITH_EXAMPLES
  )


@pytest.mark.parametrize('name', _WITH_EXAMPLES)
def test_examples_run(name, monkeypatch, capsys):
  monkeypatch.chdir(_ROOT)
  scope = {'__name__': 'example'}
  for number, example in enumerate(_examples(_ROOT / name)):
    exec(compile(example, f'{name}, example {number}', 'exec'), scope)
  assert capsys.readouterr().out
