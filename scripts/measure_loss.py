"""Measures the loss of a model on the held-out files of a corpus, as JSON.

python scripts/measure_loss.py --model=demo
"""

import json

from absl import flags
import command_line
import transformers

from models.checkpoints import hub
from models.training.corpus import Corpus
from models.training.loss import held_out_loss

_MODEL = flags.DEFINE_string('model', 'demo', 'demo, demo-draft or a folder')
_CORPUS = flags.DEFINE_string(
  'corpus', '', 'folder of text; default: the standard library'
)
_PATTERN = flags.DEFINE_string('pattern', '*.py', 'file names to read')
_DTYPE = flags.DEFINE_enum('dtype', 'float32', hub.DTYPES, 'of the weights')
_WINDOWS = flags.DEFINE_list('windows', ['256', '512', '1024'], 'in tokens')


def main() -> None:
  folder = hub.locate(_MODEL.value)
  tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
  corpus = Corpus(folder=_CORPUS.value, pattern=_PATTERN.value)
  tokens = corpus.tokens(tokenizer, held_out=True)
  module = hub.load_module(folder, dtype=_DTYPE.value)
  losses = {
    length: round(held_out_loss(module, tokens, length=int(length)), 3)
    for length in _WINDOWS.value
  }
  result = {'model': _MODEL.value, 'dtype': _DTYPE.value, 'tokens': len(tokens)}
  print(json.dumps(result | {'nats_per_token': losses}))


if __name__ == '__main__':
  command_line.run(main)
