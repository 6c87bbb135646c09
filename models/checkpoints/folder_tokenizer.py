"""Tokenizers of Hugging Face folders.

The file `tokenizer.json` is all that decides which ids a text gets. The library
transformers would build another tokenizer from the name of a class, and leave
out what the class does not have, such as a pre-tokenizer.
"""

import codecs
import itertools
import pathlib
from typing import Any

from absl import logging
import tokenizers
import transformers

from specdec.text import text_files

_JSON = 'tokenizer.json'
_CONFIG = 'tokenizer_config.json'
# Files of older models, which only a class of transformers describes.
_OLD = (('tokenizer.model',), ('vocab.json', 'merges.txt'))
# Any of these shows that a folder should have a tokenizer.
_FILES = (
  'tokenizer_config.json',
  'special_tokens_map.json',
  'added_tokens.json',
  *(name for names in _OLD for name in names),
)
_ROLES = (
  'bos_token',
  'eos_token',
  'unk_token',
  'sep_token',
  'pad_token',
  'cls_token',
  'mask_token',
)
# Keys of tokenizer_config.json, and the types of their values.
_KEPT: dict[str, Any] = {
  'clean_up_tokenization_spaces': bool,
  'model_max_length': (int, float),
}
_TEMPLATES = 'additional_chat_templates'


def _read_object(path: pathlib.Path) -> dict[str, Any]:
  return text_files.read_object(path) if path.is_file() else {}


def _chat_template(
  folder: pathlib.Path, config: dict[str, Any]
) -> str | dict[str, str] | None:
  """The template; several by their names. Those in files go first."""
  files = {file.stem: file for file in folder.glob(f'{_TEMPLATES}/*.jinja')}
  if (folder / 'chat_template.jinja').is_file():
    files['default'] = folder / 'chat_template.jinja'
  templates = dict[str, str]()
  for name, file in files.items():
    text_files.refuse_stand_in(file)  # Any text is a template.
    templates[name] = text_files.read(file)
  if templates:
    return (
      templates['default'] if templates.keys() == {'default'} else templates
    )
  stated = config.get('chat_template')
  try:
    if isinstance(stated, list):
      stated = {entry['name']: entry['template'] for entry in stated}
    texts = stated.values() if isinstance(stated, dict) else [stated or '']
    if all(isinstance(text, str) for text in texts):
      return stated
  except (KeyError, TypeError):
    pass
  raise ValueError(
    f'{folder / _CONFIG}: chat_template must be a text or several with names,'
    f' got {stated!r:.40}'
  )


def _special_tokens(
  folder: pathlib.Path, config: dict[str, Any], backend: tokenizers.Tokenizer
) -> dict[str, str]:
  """The tokens of the vocabulary that have a role."""
  stated = _read_object(folder / 'special_tokens_map.json') | config
  model = _read_object(folder / 'config.json')
  tokens = {}
  for role in _ROLES:
    token = stated.get(role)
    if isinstance(token, dict):  # With flags, which tokenizer.json has, too.
      token = token.get('content')
    token_id = model.get(f'{role}_id')
    if token is None and type(token_id) is int and token_id >= 0:
      token = backend.id_to_token(token_id)
    if isinstance(token, str) and backend.token_to_id(token) is not None:
      tokens[role] = token
    elif token is not None:
      logging.warning(
        '%s: the %s %r is left out, because %s does not have it',
        folder,
        role,
        token,
        _JSON,
      )
  return tokens


def _from_json(folder: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
  config = _read_object(folder / _CONFIG)
  kept: dict[str, Any] = {
    key: config[key] for key in _KEPT if isinstance(config.get(key), _KEPT[key])
  }
  kept['chat_template'] = _chat_template(folder, config)
  text_files.refuse_stand_in(folder / _JSON)
  with open(folder / _JSON, 'rb') as file:
    marked = file.read(3) == codecs.BOM_UTF8  # It would not be read as JSON.
  try:
    if marked:
      text = text_files.read(folder / _JSON)
      kept['tokenizer_object'] = tokenizers.Tokenizer.from_str(text)
    else:  # transformers would copy an object.
      kept['tokenizer_file'] = str(folder / _JSON)
    tokenizer = transformers.PreTrainedTokenizerFast(**kept)
  except Exception as error:  # The tokenizers package raises no narrower type.
    raise ValueError(
      f'{folder / _JSON} cannot be read by tokenizers {tokenizers.__version__}:'
      f' {error}; is it complete, or does it need a newer tokenizers?'
    ) from error
  backend = tokenizer.backend_tokenizer
  if not backend.get_vocab_size():
    raise ValueError(f'{folder / _JSON} has no tokens')
  # As arguments they would be added to the vocabulary of the file.
  for role, token in _special_tokens(folder, config, backend).items():
    setattr(tokenizer, role, token)
  added = backend.encode('a').ids
  for role in ('bos_token', 'eos_token'):
    token = getattr(tokenizer, role)
    if (
      config.get(f'add_{role}')
      and backend.token_to_id(token or '') not in added
    ):
      logging.warning(
        '%s says add_%s, but %s adds none to a text, and it decides',
        folder / _CONFIG,
        role,
        _JSON,
      )
  return tokenizer


def _from_class(folder: pathlib.Path) -> transformers.PreTrainedTokenizerBase:
  """A tokenizer of an old folder, which only its class describes."""
  sizes = {file.name: file.stat().st_size for file in folder.iterdir()}
  if not any(all(map(sizes.get, names)) for names in _OLD):
    raise ValueError(
      f'{folder} has no complete tokenizer: no {_JSON}, and neither'
      f' {" nor ".join(" with ".join(names) for names in _OLD)}; copy the'
      f' {_JSON} of the model there'
    )
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    needed = dict(tokenizer.vocab_files_names)
  except Exception as error:  # A package may be missing, or anything be raised.
    for name in filter(sizes.get, itertools.chain(*_OLD)):
      text_files.refuse_stand_in(folder / name)
    raise ValueError(
      f'{folder} has no usable tokenizer: {error}; a {_JSON} would be enough'
    ) from error
  needed.pop('tokenizer_file', None)
  lacking = [name for name in needed.values() if not sizes.get(name)]
  if lacking:  # transformers would go on with an invented vocabulary.
    raise ValueError(
      f'{folder} has no complete tokenizer: {type(tokenizer).__name__} needs'
      f' {" and ".join(lacking)}; copy the {_JSON} of the model there'
    )
  return tokenizer


def load_tokenizer(
  folder: pathlib.Path,
) -> transformers.PreTrainedTokenizerBase | None:
  """The tokenizer of a folder, or None if it has none.

  It is what the tokenizers package makes of `tokenizer.json`; the other files
  state its chat template and which of its tokens have a role. Without this file
  a class of transformers makes it of older files.

  Raises:
    ValueError: a file cannot be read, or the files are not complete.
  """
  if (folder / _JSON).is_file():
    return _from_json(folder)
  if not any((folder / name).is_file() for name in _FILES):
    return None
  return _from_class(folder)
