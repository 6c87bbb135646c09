"""Cuts prompts in the style of HumanEval out of a corpus' held-out files.

A prompt is a function up to the end of its docstring, to tune settings on.

  python scripts/cut_prompts.py --output=prompts.jsonl
"""

import ast
from collections.abc import Iterator
import random

from absl import flags
import command_line

_OUTPUT = flags.DEFINE_string('output', None, 'file to write', required=True)
_CORPUS = flags.DEFINE_string(
  'corpus', '', 'folder of Python files; default: the standard library'
)
_NUM_PROMPTS = flags.DEFINE_integer('num_prompts', 40, 'at most')
_SEED = flags.DEFINE_integer('seed', 0, 'of the choice')
_LINES_BEFORE = 4
_SHORTEST, _LONGEST = 150, 900  # characters


def _functions(text: str) -> Iterator[str]:
  try:
    tree = ast.parse(text)
  except (SyntaxError, ValueError):
    return  # e.g. test files of the standard library with syntax errors
  lines = text.split('\n')
  for node in ast.walk(tree):
    if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
      start = max(0, node.lineno - 1 - _LINES_BEFORE)
      prompt = '\n'.join(lines[start : node.body[0].end_lineno]) + '\n'
      if len(node.body) > 2 and _SHORTEST < len(prompt) < _LONGEST:
        yield prompt


def main() -> None:
  from models.lab.training import corpus as corpus_lib
  from specdec.text import text_files
  from specdec.text import whole_files

  corpus = corpus_lib.Corpus(folder=_CORPUS.value, pattern='*.py')
  prompts = [
    prompt
    for text in corpus.texts(held_out=True)
    for prompt in _functions(text)
  ]
  random.Random(_SEED.value).shuffle(prompts)
  chosen = prompts[: _NUM_PROMPTS.value]
  if not chosen:
    raise ValueError(
      f'--corpus={_CORPUS.value} has no functions in its held-out files'
    )
  lines = [text_files.to_json({'prompt': prompt}) for prompt in chosen]
  whole_files.write_text(_OUTPUT.value, '\n'.join(lines) + '\n')


if __name__ == '__main__':
  command_line.run(main)
