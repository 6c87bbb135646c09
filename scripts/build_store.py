"""Adds files to a store of texts, which drafts are taken from.

python scripts/build_store.py --target=qwen-1.5b.gguf --store=STORE \
    --files='src/**/*.py' --files=manual.md
python scripts/generate.py --target=qwen-1.5b.gguf --draft=none --store=STORE
"""

import glob
import os

from absl import flags
import command_line

_FLAGS = flags.FLAGS

flags.DEFINE_string(
  'target', 'demo', 'the model that decodes: a folder, a GGUF file or a hub id'
)
flags.DEFINE_string('store', None, 'folder, made if need be', required=True)
flags.DEFINE_multi_string(
  'files', None, 'pattern of the files in UTF-8; may be repeated', required=True
)


def main() -> None:
  from specdec.models.text import choice
  from specdec.models.text import pair
  from specdec.models.text import sources
  from specdec.models.text import text_store
  from specdec.text import text_files

  names = [
    name
    for pattern in _FLAGS.files
    for name in sorted(glob.glob(pattern, recursive=True))
    if os.path.isfile(name)
  ]
  if not names:
    raise ValueError(f'--files={_FLAGS.files}: there is no such file')
  opened = sources.open_sources(choice.ModelChoice(_FLAGS.target, draft=None))
  digest = pair.vocabulary_digest(opened.tokenizer)
  store = text_store.TextStore(
    _FLAGS.store, digest, opened.target.config.vocab_size
  )
  encode = lambda name: opened.tokenizer(
    text_files.read(name), add_special_tokens=False, verbose=False
  )
  store.add([encode(name)['input_ids'] for name in names])
  size = sum(text.size for text in store.newest())
  print(f'{_FLAGS.store} has {size} tokens of at most {text_store.MOST_TOKENS}')


if __name__ == '__main__':
  command_line.run(main)
