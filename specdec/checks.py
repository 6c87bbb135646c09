"""Checks the arguments that users pass, and makes of them what `decode` takes.

What cannot be used is a `ValueError` that names the argument and the remedy.
"""

from collections.abc import Callable
from collections.abc import Hashable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import functools
import numbers
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specdec import constraint as constraint_lib
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec import stop_strings
from specdec.draft import drafter as drafter_lib
from specdec.tree import topology as topology_lib
from specdec.verify import accept
from specdec.verify import match
from specdec.verify import rejection
from specdec.verify import traversal


def check_text(name: str, text: str) -> None:
  """Refuses half of a surrogate pair, which no tokenizer can encode."""
  for position, letter in enumerate(text):
    if '\ud800' <= letter <= '\udfff':
      raise ValueError(
        f'{name} has the lone surrogate {letter!r} at position {position} of'
        f' {text[max(position - 8, 0) : position + 8]!r}; give valid Unicode'
      )


def is_integer(value: Any) -> bool:
  """Whether a value is an integer of Python or NumPy, and no bool."""
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_count(
  name: str, value: Any, largest: float = np.inf, least: int = 1
) -> None:
  """Refuses what is no integer from the least to the largest."""
  if not (is_integer(value) and least <= value <= largest):
    bound = '' if largest == np.inf else f' and at most {largest}'
    raise ValueError(
      f'{name} must be an integer of at least {least}{bound}, got {value!r}'
    )


def check_drafter(
  target: model_lib.LanguageModel, drafter: drafter_lib.Drafter
) -> None:
  """Refuses stages that share a name or do not fit the target."""
  ours = target.spec.vocab_size
  labels = ('target', 'plain', *drafter.labels)
  if len(set(labels)) < len(labels):
    raise ValueError(
      'every stage needs a name of its own, neither target nor plain, got'
      f' {drafter.labels}'
    )
  for stage in drafter.stages:
    facts = stage.scorer.facts
    if facts.vocab_size not in (None, ours):
      raise ValueError(
        f'the target has a vocabulary of {ours} tokens, the {stage.name} of'
        f' {facts.vocab_size}; choose one that was made with the tokenizer of'
        ' the target'
      )
    missing = set(facts.hidden) - set(target.spec.hidden)
    if missing:
      raise ValueError(
        f'the {stage.name} reads the hidden states {facts.hidden} of the'
        f' target, whose cache keeps {target.spec.hidden}; load the target with'
        ' the head'
      )


def to_ids(name: str, ids: Any, vocab_size: int) -> list[int]:
  """Token ids as a list."""
  is_list = isinstance(ids, Iterable) and not isinstance(ids, Mapping)
  array = np.asarray(list(ids)) if is_list else np.zeros(())
  if array.ndim != 1 or (array.size and array.dtype.kind not in 'iu'):
    raise ValueError(f'{name} must be a list of token ids, got {ids!r}')
  outside = array[(array < 0) | (array >= vocab_size)]
  if outside.size:
    raise ValueError(
      f'{name} has token {outside[0]}, outside the vocabulary of {vocab_size}'
    )
  return [int(token) for token in array]


def to_prompt(name: str, prompt: Any, vocab_size: int) -> list[int]:
  """The token ids of a prompt as a list."""
  ids = to_ids(name, prompt, vocab_size)
  if not ids:
    raise ValueError(f'{name} is empty; give at least one token, e.g. the EOS')
  return ids


def to_prompts(prompts: Any, vocab_size: int) -> list[list[int]]:
  """The prompts as lists."""
  if not isinstance(prompts, Iterable):
    raise ValueError(f'prompts must be lists of token ids, got {prompts!r}')
  checked = [
    to_prompt(f'prompt {row}', prompt, vocab_size)
    for row, prompt in enumerate(prompts)
  ]
  if not checked:
    raise ValueError('prompts is empty; give at least one')
  return checked


def to_limits(
  prompts: Sequence[Sequence[int]],
  max_new_tokens: Any,
  room: Any,
  context: int,
) -> tuple[np.ndarray, int]:
  """The limits as `[B]` int32, and the room for new tokens."""
  limits = np.asarray(max_new_tokens)
  if limits.shape not in ((), (len(prompts),)) or limits.dtype.kind not in 'iu':
    raise ValueError(
      'max_new_tokens must be an integer, or one per row'
      f' ({len(prompts)}), got {max_new_tokens}'
    )
  limits = np.broadcast_to(limits, len(prompts))
  if limits.min() < 0:
    raise ValueError(f'max_new_tokens must be at least 0, got {max_new_tokens}')
  fits = is_integer(room) and limits.max() <= room <= context
  if room is not None and not fits:
    raise ValueError(
      f'room_for_new_tokens must be an integer from max_new_tokens='
      f'{max_new_tokens} to the context of the target, {context} tokens; got'
      f' {room!r}'
    )
  for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
    if len(prompt) + limit > context:
      raise ValueError(
        f'prompt {row} of {len(prompt)} tokens and max_new_tokens={limit}'
        f' exceed the context of the target, {context} tokens'
      )
  largest = int(limits.max())
  return limits.astype(np.int32), largest if room is None else int(room)


def _dense_bias(bias: Any, batch_size: int, vocab_size: int) -> Any:
  """A mapping, or one per row, or an array, as `[V]` or `[B, V]`."""
  if isinstance(bias, Mapping):
    dense = np.zeros(vocab_size, np.float32)
    tokens = to_ids('logit_bias', list(bias), vocab_size)
    try:
      dense[tokens] = [float(value) for value in bias.values()]
    except (OverflowError, TypeError, ValueError) as error:
      raise ValueError(
        f'logit_bias must map tokens to numbers, got {bias}'
      ) from error
    return dense
  if isinstance(bias, Sequence) and any(
    row is None or isinstance(row, Mapping) for row in bias
  ):
    if len(bias) != batch_size:
      raise ValueError(
        f'logit_bias must be one mapping or one per row ({batch_size}), got'
        f' {len(bias)}'
      )
    return np.stack(
      [_dense_bias(row or {}, batch_size, vocab_size) for row in bias]
    )
  shape = np.shape(bias)
  if shape not in ((vocab_size,), (batch_size, vocab_size)):
    raise ValueError(
      'logit_bias must be a mapping from token to number, or an array of shape'
      f' {(vocab_size,)} or {(batch_size, vocab_size)}, got shape {shape}'
    )
  return bias


def _per_row(name: str, value: Any, batch_size: int, dtype: Any) -> np.ndarray:
  """A number, or one per row, as `[B]` of a dtype."""
  try:
    if value is None:  # NumPy would take it for NaN
      raise TypeError
    array = np.asarray(value, dtype)
  except (OverflowError, TypeError, ValueError) as error:
    raise ValueError(
      f'{name} must be a number or one per row, got {value!r:.60}'
    ) from error
  if array.shape not in ((), (batch_size,)):
    raise ValueError(
      f'{name} must be one number or one per row ({batch_size}), got an array'
      f' of shape {array.shape}'
    )
  return np.broadcast_to(array, batch_size)


_TINY = float(np.finfo(np.float32).tiny)
_RANGES: dict[str, tuple[float, float, str]] = {
  'repetition_penalty': (1e-3, 1e3, 'between 0.001 and 1000'),
  'temperature': (0.0, 1e6, 'between 0 and 1000000'),
  'top_p': (_TINY, 1.0, 'above 0 and at most 1'),
  'min_p': (0.0, 1.0, 'between 0 and 1'),
}


def sampling_value(name: str, value: Any, batch_size: int = 1) -> np.ndarray:
  """A number of `Sampling`, or one per row, as `[B]` float32."""
  low, high, bounds = _RANGES[name]
  array = _per_row(name, value, batch_size, np.float32)
  if not np.all(np.isfinite(array) & (array >= low) & (array <= high)):
    raise ValueError(f'{name} must be {bounds}, got {value}')
  return array


# Stands for all tokens, where other rows have a k.
_ALL = np.iinfo(np.int32).max


def _top_k_params(top_k: Any, batch_size: int) -> dict[str, Any]:
  """As `[B]` int32, and a power of two that is at least as large."""
  if hasattr(top_k, 'dtype'):
    top_k = np.asarray(top_k).tolist()
  single = isinstance(top_k, (numbers.Number, str))
  entries = [top_k] if single else list(top_k)
  for entry in entries:
    if entry is not None and not (is_integer(entry) and entry >= 1):
      raise ValueError(f'top_k must be a positive integer, got {top_k}')
  counts = [_ALL if entry is None else min(entry, _ALL) for entry in entries]
  array = _per_row(
    'top_k', counts[0] if single else counts, batch_size, np.int32
  )
  if min(counts) == _ALL:
    return {}
  largest = max(counts)
  bound = None if largest == _ALL else 1 << (largest - 1).bit_length()
  return {'top_k': jnp.asarray(array), 'max_top_k': bound}


def _checked_bias(bias: Any, batch_size: int, vocab_size: int) -> jax.Array:
  """As `[V]` or `[B, V]` float32."""
  bias = _dense_bias(bias, batch_size, vocab_size)
  try:
    array = np.asarray(bias, np.float32)
  except (TypeError, ValueError) as error:
    raise ValueError('logit_bias must be numbers or -inf') from error
  if np.any(np.isnan(array) | (array == np.inf)):
    raise ValueError('logit_bias must be numbers or -inf')
  if np.any(np.all(array == sampling_lib.EXCLUDED, axis=-1)):
    raise ValueError('logit_bias bans every token; leave one at least')
  return jnp.asarray(array)


def to_params(
  sampling: sampling_lib.Sampling, batch_size: int, vocab_size: int
) -> sampling_lib.SamplingParams:
  """As `decode` takes it: one value per row, biases as arrays.

  Raises:
    ValueError: a value is out of range or of another shape; says which.
  """
  if not isinstance(sampling, sampling_lib.Sampling):
    raise ValueError(f'sampling must be a specdec.Sampling, got {sampling!r}')
  arrays: dict[str, Any] = {}
  for name in _RANGES:
    value = getattr(sampling, name)
    if value is not None or name == 'temperature':
      arrays[name] = jnp.asarray(sampling_value(name, value, batch_size))
  if sampling.logit_bias is not None:
    bias = _checked_bias(sampling.logit_bias, batch_size, vocab_size)
    arrays['logit_bias'] = bias
  if sampling.top_k is not None:
    arrays |= _top_k_params(sampling.top_k, batch_size)
  return sampling_lib.SamplingParams(**arrays)


def to_break_even(break_even: Any) -> np.float32:
  """As a float32; 0, for no fallback, if it is None."""
  if break_even is None:
    return np.float32(0)
  is_number = isinstance(break_even, numbers.Real) and break_even is not True
  if not (is_number and 0 < break_even < np.inf):
    raise ValueError(
      'break_even must be a positive number, the time of a speculative step in'
      f' plain ones, or None; got {break_even!r}'
    )
  return np.float32(break_even)


def check_stop(
  stop: stop_strings.StopTable | None, batch_size: int, vocab_size: int
) -> None:
  """Refuses a table that was built for other shapes."""
  if stop is None:
    return
  rows, tokens = stop.start.shape[0], stop.next_state.shape[1]
  if (rows, tokens) != (batch_size, vocab_size):
    raise ValueError(
      f'stop was built for {rows} rows and {tokens} tokens, but there are'
      f' {batch_size} prompts and a vocabulary of {vocab_size}'
    )


def check_constraint(constraint: Any, batch_size: int, vocab_size: int) -> None:
  """Refuses a constraint whose functions return other shapes than they should.

  Raises:
    ValueError: it does, or it is none.
  """
  if constraint is None:
    return
  if not isinstance(constraint, constraint_lib.Constraint):
    raise ValueError(
      f'constraint must be a specdec.Constraint or None, got {constraint!r}'
    )
  states = jax.ShapeDtypeStruct((batch_size,), jnp.int32)
  nodes = jax.ShapeDtypeStruct((batch_size, 2), jnp.int32)
  for name, function, arguments, shape in (
    ('first_state', lambda: constraint.first_state(batch_size), (), states),
    ('next_state', constraint.next_state, (nodes, nodes), nodes),
    (
      'allowed',
      lambda state: constraint.allowed(state, vocab_size),
      (nodes,),
      jax.ShapeDtypeStruct((batch_size, 2, vocab_size), jnp.bool_),
    ),
  ):
    found = jax.eval_shape(function, *arguments)
    if (found.shape, found.dtype) != (shape.shape, shape.dtype):
      raise ValueError(
        f'constraint.{name} must return an array of {shape.shape} and type'
        f' {shape.dtype} for {batch_size} rows and a vocabulary of'
        f' {vocab_size}, but returns {found.shape}, {found.dtype}'
      )


RULES: dict[str, Callable[[str], accept.Rule]] = {
  'match': lambda children: match.MatchRule(),
  'rejection': rejection.RejectionRule,
  'traversal': traversal.TraversalRule,
  'block': functools.partial(traversal.TraversalRule, needs_chain=True),
}
"""The rules of verification by name, made from how children are chosen."""


def _rule_maker(verify: Any) -> Callable[[str], accept.Rule]:
  """An entry of `RULES`, or a function that returns a given rule."""
  if isinstance(verify, str) and verify in RULES:
    return RULES[verify]
  is_rule = isinstance(verify, accept.Rule) and isinstance(verify, Hashable)
  if not is_rule or isinstance(verify, type):
    raise ValueError(
      f'verify must be one of {tuple(RULES)} or a hashable'
      f' specdec.verify.accept.Rule, got {verify!r}'
    )
  return lambda children: verify


def to_rule(
  verify: str | accept.Rule, children: str | None, drafter: drafter_lib.Drafter
) -> accept.Rule:
  """The rule of verification.

  Args:
    verify: one of `RULES`, or a rule.
    children: one of `sampling.CHILDREN`. None: those of a given rule; else
      drawn without replacement if rule, topology and scorer allow it, or the
      best.
    drafter: the drafter.

  Raises:
    ValueError: the arguments are not known or do not go together.
  """
  make_rule = _rule_maker(verify)
  rule, known = make_rule(sampling_lib.BEST), (None, *sampling_lib.CHILDREN)
  if children not in known:
    raise ValueError(f'children must be one of {known}, got {children!r}')
  if children not in (None, sampling_lib.BEST) and not rule.may_draw:
    raise ValueError(
      f'verify={verify} wants the best children, got children={children};'
      ' choose verify=rejection to draw them'
    )
  shape = drafter.shape
  fixed = isinstance(shape, topology_lib.Topology)
  is_chain = isinstance(shape, topology_lib.Topology) and shape.branching == 1
  if rule.needs_chain and drafter.stages and not is_chain:
    raise ValueError(
      f'verify={verify} is for chains; choose a chain as the topology of the'
      ' drafter, or verify=traversal'
    )
  can_draw = fixed and drafter.stages[0].scorer.facts.can_draw
  in_order = isinstance(shape, topology_lib.Topology) and shape.has_all_siblings
  if children is None and rule is verify:
    children = rule.children
  if children is None:
    draws = can_draw and in_order and rule.may_draw
    children = sampling_lib.WITHOUT_REPLACEMENT if draws else sampling_lib.BEST
  if children != sampling_lib.BEST and not can_draw:
    raise ValueError(
      f'children={children} needs a drafter with a distribution to draw from'
      f' and a fixed topology; choose children={sampling_lib.BEST} or a'
      ' topology'
    )
  ordered = (sampling_lib.WITHOUT_REPLACEMENT, sampling_lib.BEST_AND_DRAWN)
  if children in ordered and not in_order:
    raise ValueError(
      f'children={children} needs a topology in which each node has all'
      ' siblings of lower rank: the draws are tried in their order'
    )
  rule = make_rule(children)
  if rule.children != children:
    raise ValueError(
      f'verify={verify} has children={rule.children}, got children={children};'
      ' leave children out'
    )
  return rule


def row_keys(rng_key: jax.Array, batch_size: int) -> jax.Array:
  """`[B]` keys: as given, or one key folded with the number of the row."""
  dtype = getattr(rng_key, 'dtype', type(rng_key))
  if not jnp.issubdtype(dtype, jax.dtypes.prng_key):
    raise ValueError(
      'rng_key must be made by jax.random.key, whose keys are scalars, got'
      f' {dtype}'
    )
  if 'rbg' in str(jax.random.key_impl(rng_key)):
    raise ValueError(
      f'rng_key is of the kind {jax.random.key_impl(rng_key)}, whose draws'
      ' under vmap depend on the first key alone; make it by'
      " jax.random.key(seed, impl='threefry2x32'), and leave"
      ' jax_default_prng_impl as it is'
    )
  if rng_key.shape == (batch_size,):
    return rng_key
  if rng_key.shape:
    raise ValueError(
      f'rng_key must be one key or one per row ({batch_size}), got'
      f' {rng_key.shape}'
    )
  rows = jnp.arange(batch_size)
  return jax.vmap(jax.random.fold_in, (None, 0))(rng_key, rows)


# Few shapes, so that few programs are compiled.
_SMALLEST_PROMPT_BUCKET = 32
_NEW_TOKENS_BUCKET = 64


def _prompt_bucket(length: int) -> int:
  return max(_SMALLEST_PROMPT_BUCKET, 1 << (length - 1).bit_length())


def padded_room(room: int) -> int:
  """The number of slots for `room` new tokens."""
  return -(-max(room, 1) // _NEW_TOKENS_BUCKET) * _NEW_TOKENS_BUCKET


def padded_shape(
  prompts: Sequence[Sequence[int]], room: int
) -> tuple[int, int]:
  """The slots of the prompts of a batch, P, and those of its new tokens."""
  return _prompt_bucket(max(map(len, prompts))), padded_room(room)


def pad(
  prompts: Sequence[Sequence[int]], num_slots: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
  """`[B, P]` int32, padded with zeros at the end, and the lengths, `[B]`.

  P is `num_slots`; None: as the prompts need, a power of two.
  """
  lengths = np.array([len(prompt) for prompt in prompts], np.int32)
  bucket = num_slots or _prompt_bucket(int(lengths.max()))
  padded = np.zeros((len(prompts), bucket), np.int32)
  for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
  return padded, lengths
