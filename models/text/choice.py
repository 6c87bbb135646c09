"""The choice of models: which are loaded, and how.

`ModelChoice` is the only list of it: `specdec.load` takes its fields, scripts
have a flag for each, and benchmarks and plans carry it. This module imports
neither transformers nor Flax's modules, so that scripts can refuse a flag
before they wait for them.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
from typing import Self

import jax
from jax.sharding import Mesh
import numpy as np

from specdec.models.nn import dtypes
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.models.text import fields
from specdec.text import text_files
from specdec.text import whole_files

_DEMO = 'demo'  # The embedded target, and its draft.
OWN = 'own'  # The head in the folder or file of a target.
SELF = 'self'
"""The draft that is the target, with weights of fewer bits."""


def _name_of_text(text: str) -> str | None:
  return None if text == 'none' else text


def most_frequent(path: str, num_tokens: int) -> list[int]:
  """The tokens of the largest counts; of equal counts the lower ids.

  Args:
    path: of a `.npy` file with an array of counts, `[V]`.
    num_tokens: N, at most V.

  Raises:
    ValueError: the file cannot be read or has another shape.
  """
  with whole_files.reading(path, 'give a .npy file of counts'):
    text_files.refuse_stand_in(path)
    counts = np.load(path, allow_pickle=False)
  if counts.ndim != 1 or counts.dtype.kind not in 'iuf':
    raise ValueError(f'{path} has no array [V] of counts, but {counts.shape}')
  return sorted(np.argsort(-counts, kind='stable')[:num_tokens].tolist())


def _draft_vocab_of_text(text: str) -> int | list[int]:
  count, _, path = text.partition(':')
  if not count.isdecimal() or int(count) < 1:
    raise ValueError(
      f'draft_vocab={text} is neither N nor N:FILE, such as 32768'
    )
  if not path:
    return int(count)
  try:
    return most_frequent(path, int(count))
  except ValueError as error:
    raise ValueError(f'draft_vocab={text}: {error}') from error


def _eos_ids_of_texts(texts: list[str]) -> list[int | str]:
  if 'none' in texts and len(texts) > 1:
    raise ValueError(
      f'eos=none ends no text, but there are other values: {texts}'
    )
  if texts == ['none']:
    return []
  return [
    int(text) if text.isdecimal() else text for text in fields.unescaped(texts)
  ]


@fields.documented
@dataclasses.dataclass(frozen=True)
class ModelChoice:
  """The models of a decode, and how they are loaded.

  In float32 drafted and plain tokens are equal, and with the kernels for CPU in
  every dtype except float16; otherwise they may differ in 16 bits where two
  logits are as close as rounding (docs/cpu.md).
  """

  target: str = fields.described(
    _DEMO,
    'demo (embedded), a folder, a GGUF file or the id of a model on the Hugging'
    ' Face hub',
  )
  draft: str | None = fields.described(
    dtypes.AUTO,
    'the draft model: a folder, a GGUF file, a hub id, demo (embedded), none or'
    ' self: the target with weights of four bits, or in the blocks of its file;'
    ' auto: demo for the embedded target, and none for others or with a head',
    in_python='None',
    parse=_name_of_text,
  )
  _: dataclasses.KW_ONLY
  revision: str | None = fields.described(
    None, 'branch, tag or commit of the target on the hub'
  )
  dtype: jax.typing.DTypeLike = fields.described(
    dtypes.AUTO,
    'the format of the target; auto: stored for files in blocks of few bits,'
    ' such as GGUF, where the kernels for CPU are used, otherwise the 16-bit'
    ' type of the checkpoint where this platform computes in it natively, else'
    ' float32; int8, int4: weights of eight or four bits, the rest computed in'
    ' bfloat16; stored: weights as the file has them',
    choices=(dtypes.AUTO, *matrices_lib.DTYPES),
  )
  draft_dtype: jax.typing.DTypeLike | None = fields.described(
    None,
    'the format of the draft, or of the matrices of the head; default: the'
    ' format of the target, but where the kernels for CPU are used four bits'
    ' for a target of bfloat16 or fewer bits (eight if the files of the draft'
    ' have less than 64 MiB); what is decoded does not depend on it',
    choices=matrices_lib.DTYPES,
  )
  draft_vocab: int | Sequence[int] | None = fields.described(
    None,
    'how many tokens the draft or head computes and proposes: N takes those'
    ' that the tokenizer learned first, N:FILE those with the largest counts in'
    ' an array [V] of a .npy file; what is decoded does not depend on it;'
    ' default: all',
    in_python='N or the ids of the tokens',
    parse=_draft_vocab_of_text,
  )
  cpu_kernels: bool = fields.described(
    True,
    'on CPU and one device, whether products and attention use kernels that are'
    ' compiled once with the C++ compiler of the system; auto: where there is'
    ' one',
    in_python='True or False',
    choices={'auto': True, 'off': False},
  )
  mesh: Mesh | Mapping[str, int] | None = fields.described(
    None,
    'several devices, as sizes of the axes data (rows) and model (weights),'
    ' whose product is the number of devices: data:2,model:4 for eight;'
    ' default: one device',
    in_python='a mapping of the sizes or a jax.sharding.Mesh with these axes',
    parse=sharding_lib.parse_mesh,
  )
  draft_mesh: str = fields.described(
    'auto',
    'on several devices, whether each of them has the whole draft (replicated)'
    ' or the draft is divided as the target is (sharded); auto: what should be'
    ' faster by its size',
    choices=sharding_lib.DRAFT_MESHES,
  )
  eos_ids: str | Sequence[int | str] | None = fields.described(
    None,
    'a token that ends a text, as its id or as its text; none: only the limit'
    " and stop strings end a text; default: as the target's files say",
    in_python='several of them, or () for none; a call may have others',
    parse=_eos_ids_of_texts,
    flag='eos',
    repeats=True,
  )
  head: str | None = fields.described(
    dtypes.AUTO,
    'a drafting head of the target in place of a draft: own (the MTP layer that'
    " the target's folder or file has), demo (of the embedded target), a"
    ' folder, a GGUF file, a hub id or none; auto: own if there is one and no'
    ' draft; every device has all of it',
    in_python='None',
    parse=_name_of_text,
  )

  def __post_init__(self) -> None:
    if self.draft == dtypes.AUTO:
      embedded = self.target == _DEMO and self.head in (None, dtypes.AUTO)
      object.__setattr__(self, 'draft', _DEMO if embedded else None)
    if self.draft is not None and self.head == dtypes.AUTO:
      object.__setattr__(self, 'head', None)

  @property
  def of_target(self) -> Self:
    """The choice without what drafts."""
    return dataclasses.replace(self, draft=None, head=None)

  @property
  def draft_vocab_size(self) -> int | None:
    """The number of tokens in `draft_vocab`; None if it is all of them."""
    stated = self.draft_vocab
    if stated is None or isinstance(stated, int):
      return stated
    return len({*stated})


OPTIONS: Mapping[str, fields.Option] = fields.options_of(ModelChoice)
"""The fields of a `ModelChoice`, by the names of their flags."""
