"""Operands that do not fit a CPU kernel, and what both languages know."""

import functools

import jax
import numpy as np
import pytest

from models.nn import blocks as blocks_lib
from models.nn.cpu import build
from models.nn.cpu import ops
from models.nn.cpu import state_ops

_kernels = pytest.mark.skipif(
  not build.is_available(), reason='the CPU kernels need a C++ compiler'
)
_floats = functools.partial(np.zeros, dtype=np.float32)
_ints = functools.partial(np.zeros, dtype=np.int32)


def _multiply(x, scale, bias, norm_scale, norm_bias, residual, **options):
  words = options.pop('words', np.zeros((2, 16, 2, 16), np.uint32))
  matrices = [ops.Matrix(words, scale, 40, bias)] * 2
  norm = ops.Norm(norm_scale, norm_bias, 0.1, False)
  options = {'dtype': 'int8', 'norm': norm, 'residual': residual} | options
  return ops.multiply(x, matrices, **options)


def _attend(query_norm, key_norm, value_norm, cos, sin, **arrays):
  norm = ops.Norm(query_norm, None, 0.1, False)
  changes = {key: arrays.pop(key) for key in {*arrays} & {*norm._fields}}
  norms = norm, norm._replace(scale=key_norm, **changes)
  norms = *norms, norm._replace(scale=value_norm)
  return ops.attend(norms=norms, rotation=(cos, sin), scale=1.0, **arrays)


def _normalize(x, scale, bias):
  return ops.normalize(x, ops.Norm(scale, bias, 0.1, False))


_route = functools.partial(ops.route, count=3, renormalize=True)
_CACHE = 2, 3, 9, 8
# Functions, and operands that fit.
_CALLS = {
  _multiply: {
    'x': _floats((2, 3, 20)),
    **{'scale': _floats(40), 'bias': _floats(40)},
    **{'norm_scale': _floats(20), 'norm_bias': _floats(20)},
    'residual': _floats((2, 3, 80)),
  },
  _attend: {
    **{'keys': _floats(_CACHE), 'values': _floats(_CACHE)},
    'projections': _floats((2, 4, 12 * 8)),
    **{'mask': np.zeros((2, 4, 9), bool), 'start': _ints(2)},
    **{'query_norm': _floats(8), 'key_norm': _floats(8)},
    'value_norm': _floats(8),
    **{'cos': _floats((2, 1, 4, 4)), 'sin': _floats((2, 1, 4, 4))},
  },
  ops.write_slots: {
    **{'slots': _floats(_CACHE), 'new': _floats((2, 3, 4, 8))},
    'start': _ints(2),
  },
  _normalize: {'x': _floats((2, 5)), 'scale': _floats(5), 'bias': _floats(5)},
  _route: {'logits': _floats((2, 3))},
  ops.sum_rows: {
    **{'rows': _floats((5, 7)), 'index': _ints((2, 3))},
    'weights': _floats((2, 3)),
  },
}


def _fold_delta(key, delta, decay, **arrays):
  inputs = {'key': key, 'delta': delta, 'decay': decay}
  return state_ops.fold_delta(inputs=inputs, tiled=False, **arrays)


def _mix_delta(
  conv_state, state, parents, first, rate_0, rate_1, norm_scale, **arrays
):
  names = 'conv', 'key', 'delta', 'decay'
  return state_ops.mix_delta(
    state={'conv': conv_state, 'matrix': state},
    inputs={name: arrays.pop(name) for name in names},
    tree=(parents, first),
    rates=(rate_0, rate_1),
    norm=ops.Norm(norm_scale, None, 1e-6, center=False),
    tiled=False,
    **arrays,
  )


def _convolve(parents, first, **arrays):
  return state_ops.mix_convolution(tree=(parents, first), **arrays)


_gate = state_ops.gate
_MIXED = 2 * 3 * 5 + 6 * 7
_WINDOW = {
  **{'state': _floats((2, 6, 5, 7)), 'key': _floats((2, 1, 9, 3 * 5))},
  **{'delta': _floats((2, 1, 9, 6 * 7)), 'decay': _floats((2, 1, 9, 6))},
}
_CALLS |= {
  _convolve: {
    **{'projected': _floats((2, 4, 60)), 'state': _floats((2, 3, 20))},
    **{'window': _floats((2, 1, 9, 20)), 'parents': _ints((2, 9))},
    **{'first': _ints(2), 'weight': _floats((4, 20)), 'bias': _floats(20)},
  },
  _gate: {'x': _floats((2, 5)), 'gates': _floats((2, 5))},
  _fold_delta: _WINDOW | {'slots': _ints((2, 8)), 'count': _ints(2)},
  _mix_delta: {
    **{'projected': _floats((2, 4, _MIXED + 6 * 9)), **_WINDOW},
    'conv': _floats((2, 1, 9, _MIXED)),
    **{'conv_state': _floats((2, 3, _MIXED)), 'weight': _floats((4, _MIXED))},
    **{'parents': _ints((2, 9)), 'first': _ints(2), 'norm_scale': _floats(7)},
    **{f'rate_{i}': _floats(6) for i in range(2)},
  },
}
# Axes that no other operand has, or that may be longer; and rows of any axes.
_FREE = {(ops.write_slots, 'slots', 2), (ops.write_slots, 'new', 2)}
_FREE |= {(ops.sum_rows, 'rows', 0), (ops.sum_rows, 'rows', 1)}
_FREE |= {(_convolve, 'projected', 1), (_mix_delta, 'projected', 1)}
_FREE |= {(_fold_delta, 'slots', 1)}
_ROWS = {(_normalize, 'x'), (_route, 'logits')}


def _trace(function, operands):
  return jax.eval_shape(lambda: function(**operands))


@pytest.mark.parametrize('function', _CALLS)
def test_an_operand_that_does_not_fit_is_named_with_both_shapes(function):
  """Longer along each axis, with an axis less, of another dtype."""
  operands = _CALLS[function]
  _trace(function, operands)
  names = '|'.join(operands)
  for name, array in operands.items():
    wrong = [array.astype(np.float16)]
    if (function, name) not in _ROWS:
      wrong.append(array[0])
      wrong += [
        np.repeat(array, [1] * (size - 1) + [2], axis)
        for axis, size in enumerate(array.shape)
        if (function, name, axis) not in _FREE
      ]
    for misfit in wrong:
      with pytest.raises(ValueError, match=rf'^({names})\w* .*\(.*\).*\(.*\)'):
        _trace(function, operands | {name: misfit})


_MORE = {
  'projections': _floats((2, 10, 96)),
  'mask': np.zeros((2, 10, 9), bool),
  **{'cos': _floats((2, 1, 10, 4)), 'sin': _floats((2, 1, 10, 4))},
}
_PAIRS = {'cos': _floats((2, 1, 4, 5)), 'sin': _floats((2, 1, 4, 5))}
_MISFITS = [
  (_multiply, {'scale': None}, r'scale_0 must be float32 of shape \(40,\)'),
  (_multiply, {'residual': _floats((3, 2, 80))}, 'residual must be'),
  (_multiply, {'activation': 'tanh'}, 'activation=tanh is none of'),
  # More entries than slots, no queries, more pairs than a head has.
  (_attend, _MORE, 'projections .* does not fit a cache'),
  (_attend, {'projections': _floats((2, 4, 48))}, 'projections .* not fit'),
  (_attend, _PAIRS, 'cos .* does not fit a cache'),
  (_attend, {'epsilon': 0.2}, 'norms of heads have no bias'),
  (_attend, {'bias': _floats(8)}, 'norms of heads have no bias'),
  (_attend, {'center': True}, 'norms of heads have no bias'),
  (ops.write_slots, {'new': _floats((2, 3, 10, 8))}, 'new .* does not fit'),
  (_route, {'logits': _floats((2, 2))}, '3 experts of logits'),
  (_fold_delta, {'key': _floats((2, 1, 9, 20))}, 'key .* does not fit a state'),
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
    (known.number, known.blocks(width) * known.words)
    for known in blocks_lib.KINDS.values()
  ]
  assert not multiply(kinds).any()
  for wrong in (kinds, 1), (kinds, -1), ([(0, 0)], 0):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r'matrix 0 must have'):
      multiply(*wrong)


_HALVES = {'keys': np.zeros(_CACHE, 'float16')}
_HALVES['values'] = _HALVES['keys']


@_kernels
@pytest.mark.parametrize(
  ('function', 'changes', 'message'),
  [
    (_attend, _HALVES, 'keys must be float32 or bfloat16'),
    (_multiply, {'bias': np.zeros(40, 'float16')}, 'a bias must be float32 or'),
    (_multiply, {'words': _ints((2, 16, 2, 16))}, 'words must be uint32'),
  ],
)
def test_kernels_refuse_types_that_they_do_not_know(
  function, changes, message, monkeypatch
):
  """Also if Python lets them pass."""
  monkeypatch.setattr(ops, '_FLOATS', ('float32', 'float16'))
  with pytest.raises(jax.errors.JaxRuntimeError, match=message):
    jax.block_until_ready(function(**_CALLS[function] | changes))
