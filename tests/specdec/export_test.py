"""One exported artifact runs on CPU, GPU and TPU, and without the host.

GPU and TPU are lowered for, but only the CPU runs.
"""

import functools
import re

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters

import specdec
from specdec import watchers as watchers_lib

_PLATFORMS = ('cpu', 'cuda', 'tpu')
_CONFIG = specdec.DecodeConfig(max_new_tokens=32)


def _arguments(method, dtype, temperatures=(0.0, 1.0)):
  """Target, drafter and request of one row for each temperature.

  The drafter `staged` has a model, a table and lookup.
  """
  rows, size = len(temperatures), tiny.VOCAB_SIZE
  model = tiny.gpt2(num_layers=1, dtype=jnp.dtype(dtype))
  text = np.random.default_rng(0).integers(size, size=50).tolist()
  table = tiny_drafters.ngram_table([text], size, order=3, num_continuations=2)
  proposers = specdec.NGram(table), specdec.PromptLookup()
  draft = tiny.draft('similar', num_layers=1, dtype=jnp.dtype(dtype))
  drafter = tiny_drafters.simple(method, draft, *proposers)
  prompt, lengths = tiny.pad(tiny.prompts(rows))
  request = specdec.Request(
    prompt=jnp.asarray(prompt),
    prompt_length=jnp.asarray(lengths),
    limit=jnp.full(rows, 20, jnp.int32),
    row_keys=tiny.row_keys(rows),
    sampling=tiny.sampling_params(*temperatures),
    watchers=(watchers_lib.EndOfText(jnp.ones((1, 1), jnp.int32)),),
  )
  return model, drafter, request


@functools.cache
def _export():
  """The decode loop for all platforms, on the leaves of its arguments.

  An artifact can be stored if its arguments and results are plain arrays.
  """
  leaves, tree = jax.tree.flatten(_arguments('staged', 'bfloat16'))

  def run(*leaves):
    result = specdec.decode(*jax.tree.unflatten(tree, leaves), config=_CONFIG)
    return result.tokens, result.length

  return export.export(jax.jit(run), platforms=_PLATFORMS)(*leaves)


def test_one_artifact_has_the_loop_for_every_platform():
  """In bfloat16, whose products differ by platform."""
  exported = _export()
  assert exported.platforms == _PLATFORMS
  text = exported.mlir_module()
  # The steps, and within a step the growth rounds of each stage.
  assert text.count('stablehlo.while') >= 3
  assert not exported.ordered_effects
  assert not exported.unordered_effects
  assert 'callback' not in text


def test_a_stored_artifact_decodes_the_same_tokens():
  stored = export.deserialize(_export().serialize())
  arguments = _arguments('staged', 'bfloat16')
  tokens, length = stored.call(*jax.tree.leaves(arguments))
  expected = specdec.decode(*arguments, config=_CONFIG)
  np.testing.assert_array_equal(length, expected.length)
  assert np.all(length > arguments[2].prompt_length)
  for row, end in enumerate(expected.length):
    np.testing.assert_array_equal(tokens[row, :end], expected.tokens[row, :end])


def test_no_transfer_between_host_and_device_in_a_decode():
  arguments = _arguments('staged', 'bfloat16')
  with jax.transfer_guard('disallow'):
    jax.block_until_ready(specdec.decode(*arguments, config=_CONFIG))
    # The guard is on: this would have to fetch an array.
    with pytest.raises(Exception, match=r'[Dd]isallow'):
      jnp.zeros(3) + np.ones(3, np.float32)


def _rows_of_products(platform, dtype):
  """Row counts of the two-dimensional matrix products of plain decoding."""
  element = {'float32': 'f32', 'bfloat16': 'bf16'}[dtype]
  shape = rf'tensor<(\d+)x\d+x{element}>'
  arguments = _arguments('plain', dtype, [1.0])
  exported = export.export(specdec.decode, platforms=(platform,))
  text = exported(*arguments, config=_CONFIG).mlir_module()
  products = re.findall(rf'dot_general.*: \({shape}, {shape}\)', text)
  return {int(rows) for rows, _ in products}


def test_a_single_bfloat16_row_is_padded_as_the_machine_likes():
  few = {1, 2, 8}
  assert few & _rows_of_products('cpu', 'bfloat16') == {2}
  assert few & _rows_of_products('cuda', 'bfloat16') == {1}
  assert few & _rows_of_products('tpu', 'bfloat16') == {8}
  assert 1 in _rows_of_products('cpu', 'float32')
