"""Examples of pages run as they are, and words are plain.

The embedded pair is a tiny one here; `--long` takes the embedded pair itself.
"""

import pathlib
import re
import subprocess

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
def test_examples_run(name, monkeypatch, capsys, request):
  if not request.config.getoption('--long'):
    tiny_demo.stand_in(monkeypatch)
  monkeypatch.chdir(_ROOT)
  scope = {'__name__': 'example'}
  for number, example in enumerate(_examples(_ROOT / name)):
    exec(compile(example, f'{name}, example {number}', 'exec'), scope)
  assert capsys.readouterr().out


# A match begins at the first line of a comment.
_START = re.compile(
  r'(?:^(?!\s*(?:#|//)).*\n\s*(?:#|//):? ?|\S.*  (?:#|//):? ?|"""|\'\'\')'
  r'(?:Of|Those of|That of|As of|What|But for|So many)\b.*',
  re.MULTILINE,
)
_MOST_WORDS = 1_200


def _headless(text):
  """Fragments such as `Of each row.`, with their lines."""
  return [
    f'{text.count(chr(10), 0, match.end()) + 1}: {match[0].splitlines()[-1]}'
    for match in _START.finditer(text)
  ]


def test_comments_begin_with_a_subject():
  listed = subprocess.run(
    ['git', 'ls-files', '*.py', '*.cc', '*.h'],
    cwd=_ROOT,
    capture_output=True,
    text=True,
    check=True,
  )
  fragments = [
    f'{name}:{fragment}'
    for name in listed.stdout.split()
    if name != 'tests/project/docs_test.py'
    for fragment in _headless((_ROOT / name).read_text('utf-8'))
  ]
  assert not fragments, '\n'.join(['give these a subject:', *fragments])


def test_pages_are_short_and_begin_with_what_they_say():
  """A reader has time for `_MOST_WORDS` words; numbers do not count.

  A paragraph follows the title: no heading, table, picture or example.
  """
  for page in _PAGES:
    text = page.read_text('utf-8')
    is_readme = page.name == 'README.md'
    words = sum(bool(re.match(r'\W*[^\W\d]', word)) for word in text.split())
    assert words <= (700 if is_readme else _MOST_WORDS), (page, words)
    assert not is_readme or text.count('\n') <= 90
    assert re.match(r'# .*\n\n[\w`*]', text), page
