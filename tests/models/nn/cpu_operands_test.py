"""Operands that do not fit a CPU kernel, and what both languages know."""

import functools

import jax
import numpy as np
import pytest

from specdec.models.nn import blocks as blocks_lib
from specdec.models.nn.cpu import build
from specdec.models.nn.cpu import ops

_kernels = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)
_floats = functools.partial(np.zeros, dtype=np.float32)
_ints = functools.partial(np.zeros, dtype=np.int32)


def _norm(width, bias=None):
  return ops.Norm(_floats(width), bias, 0.1, False)


_WORDS = np.zeros((2, 16, 2, 16), np.uint32)
_MATRIX = ops.Matrix(_WORDS, _floats(40), 40, _floats(40))
_CACHE = 2, 3, 9, 8
_STATE = _floats((2, 6, 5, 7))
_INPUTS = {
  'key': _floats((2, 1, 9, 3 * 5)),
  'delta': _floats((2, 1, 9, 6 * 7)),
  'decay': _floats((2, 1, 9, 6)),
}
_MIXED = 2 * 3 * 5 + 6 * 7
_TREE = _ints((2, 9)), _ints(2)
# Functions, and operands that fit.
_CALLS = {
  functools.partial(ops.multiply, dtype='int8'): {
    'x': _floats((2, 3, 20)),
    'matrices': [_MATRIX] * 2,
    'norm': _norm(20, _floats(20)),
    'residual': _floats((2, 3, 80)),
  },
  functools.partial(ops.attend, scale=1.0): {
    'keys': _floats(_CACHE),
    'values': _floats(_CACHE),
    'projections': _floats((2, 4, 12 * 8)),
    'mask': np.zeros((2, 4, 9), bool),
    'start': _ints(2),
    'norms': [_norm(8)] * 3,
    'rotation': [_floats((2, 1, 4, 4))] * 2,
  },
  ops.write_slots: {
    'slots': _floats(_CACHE),
    'new': _floats((2, 3, 4, 8)),
    'start': _ints(2),
  },
  ops.normalize: {'x': _floats((2, 5)), 'norm': _norm(5, _floats(5))},
  functools.partial(ops.route, count=3, renormalize=True): {
    'logits': _floats((2, 3))
  },
  ops.sum_rows: {
    'rows': _floats((5, 7)),
    'index': _ints((2, 3)),
    'weights': _floats((2, 3)),
  },
  ops.mix_convolution: {
    'projected': _floats((2, 4, 60)),
    'state': _floats((2, 3, 20)),
    'window': _floats((2, 1, 9, 20)),
    'tree': _TREE,
    'weight': _floats((4, 20)),
    'bias': _floats(20),
  },
  ops.gate: {'x': _floats((2, 5)), 'gates': _floats((2, 5))},
  functools.partial(ops.fold_delta, tiled=False): {
    'state': _STATE,
    'inputs': _INPUTS,
    'slots': _ints((2, 8)),
    'count': _ints(2),
  },
  functools.partial(ops.mix_delta, tiled=False): {
    'projected': _floats((2, 4, _MIXED + 6 * 9)),
    'state': {'conv': _floats((2, 3, _MIXED)), 'matrix': _STATE},
    'inputs': _INPUTS | {'conv': _floats((2, 1, 9, _MIXED))},
    'tree': _TREE,
    'weight': _floats((4, _MIXED)),
    'rates': [_floats(6)] * 2,
    'norm': _norm(7),
  },
}
_multiply, _attend, _, _, _route, *_, _fold_delta, _mix_delta = _CALLS
# Axes that no other operand has, or that may be longer; and rows of any axes.
_FREE = {(ops.write_slots, 'slots', 2), (ops.write_slots, 'new', 2)}
_FREE |= {(ops.sum_rows, 'rows', 0), (ops.sum_rows, 'rows', 1)}
_FREE |= {(ops.mix_convolution, 'projected', 1)}
_FREE |= {(_mix_delta, 'projected', 1), (_fold_delta, 'slots', 1)}
_ROWS = {(ops.normalize, 'x'), (_route, 'logits')}


def _trace(function, operands):
  return jax.eval_shape(lambda: function(**operands))


@pytest.mark.parametrize('function', _CALLS)
def test_an_operand_that_does_not_fit_is_named_with_both_shapes(function):
  """Longer along each axis, with an axis less, of another dtype."""
  _trace(function, _CALLS[function])
  leaves, tree = jax.tree_util.tree_flatten_with_path(_CALLS[function])
  operands = [leaf for _, leaf in leaves]
  for place, (path, array) in enumerate(leaves):
    if not isinstance(array, np.ndarray) or array is _WORDS:
      continue
    name, wrong = path[0].key, [array.astype(np.float16)]
    if (function, name) not in _ROWS:
      wrong.append(array[0])
      wrong += [
        np.repeat(array, [1] * (size - 1) + [2], axis)
        for axis, size in enumerate(array.shape)
        if (function, name, axis) not in _FREE
      ]
    for misfit in wrong:
      some = [*operands[:place], misfit, *operands[place + 1 :]]
      with pytest.raises(ValueError, match=r'^\w+ .*\(.*\).*\(.*\)'):
        _trace(function, jax.tree.unflatten(tree, some))


_MORE = {
  'projections': _floats((2, 10, 96)),
  'mask': np.zeros((2, 10, 9), bool),
  'rotation': [_floats((2, 1, 10, 4))] * 2,
}
_with = lambda **changed: {'matrices': [_MATRIX._replace(**changed)] * 2}
_norms = lambda **changed: {'norms': [_norm(8), _norm(8)._replace(**changed)]}
_MISFITS = [
  (_multiply, _with(scale=None), r'scale_0 must be float32 of shape \(40,\)'),
  (_multiply, {'residual': _floats((3, 2, 80))}, 'residual must be'),
  (_multiply, {'activation': 'tanh'}, 'activation=tanh is not one of'),
  # More entries than slots, no queries, more pairs than a head has.
  (_attend, _MORE, 'projections .* does not fit a cache'),
  (_attend, {'projections': _floats((2, 4, 48))}, 'projections .* not fit'),
  (_attend, {'rotation': [_floats((2, 1, 4, 5))] * 2}, 'cos .* does not fit a'),
  (_attend, _norms(epsilon=0.2), 'norms of heads have no bias'),
  (_attend, _norms(bias=_floats(8)), 'norms of heads have no bias'),
  (_attend, _norms(center=True), 'norms of heads have no bias'),
  (ops.write_slots, {'new': _floats((2, 3, 10, 8))}, 'new .* does not fit'),
  (_route, {'logits': _floats((2, 2))}, '3 experts of logits'),
  (
    _fold_delta,
    {'inputs': _INPUTS | {'key': _floats((2, 1, 9, 20))}},
    'key .* does not fit a state',
  ),
  (
    _mix_delta,
    {'projected': _floats((2, 10, _MIXED + 6 * 9))},
    '10 nodes in 9 slots',
  ),
]


@pytest.mark.parametrize(('function', 'changes', 'message'), _MISFITS)
def test_operands_that_do_not_fit_one_another(function, changes, message):
  with pytest.raises(ValueError, match=message):
    _trace(function, _CALLS[function] | changes)


@pytest.mark.parametrize('outputs', [[40], [40, 39], [40, 40, 40]])
def test_a_gate_has_two_matrices_alike(outputs):
  words = np.zeros((2, 32, 2, 16), np.uint32)
  matrices = [ops.Matrix(words, None, each) for each in outputs]
  with pytest.raises(ValueError, match='a gate needs two equal matrices'):
    ops.multiply(_floats((1, 20)), matrices, dtype='float32', gated=True)


@_kernels
@pytest.mark.parametrize('width', [129, 257])
def test_blocks_have_as_many_words_in_both_languages(width):
  """All kinds at once; one word more or less, or of no kind, is an error."""

  def multiply(kinds, more=0):
    matrices = [
      ops.Matrix(np.zeros(32 * words + more, np.uint32), None, 32, None, number)
      for number, words in kinds
    ]
    out = ops.multiply(_floats((1, width)), matrices, dtype='blocks')
    return np.asarray(out)

  kinds = [
    (layout.number, layout.blocks(width) * layout.words)
    for layout in blocks_lib.KINDS.values()
  ]
  assert not multiply(kinds).any()
  for wrong in (kinds, 1), (kinds, -1), ([(0, 0)], 0):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r'matrix 0 must have'):
      multiply(*wrong)


_HALVES = dict.fromkeys(('keys', 'values'), np.zeros(_CACHE, 'float16'))


@_kernels
@pytest.mark.parametrize(
  ('function', 'changes', 'message'),
  [
    (_attend, _HALVES, 'keys must be float32 or bfloat16'),
    (_multiply, _with(bias=np.zeros(40, 'float16')), 'a bias must be float32 '),
    (_multiply, _with(words=_ints(_WORDS.shape)), 'words must be uint32'),
  ],
)
def test_kernels_refuse_types_that_they_do_not_know(
  function, changes, message, monkeypatch
):
  """Also if Python lets them pass."""
  monkeypatch.setattr(ops, '_FLOATS', ('float32', 'float16'))
  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    jax.block_until_ready(function(**_CALLS[function] | changes))
