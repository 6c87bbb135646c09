"""What is compiled, how often, and for which machines."""

import collections
import dataclasses
import re

import jax
from jax import export
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from models.table import table_model
from specdec import decode
from specdec import DecodeConfig
from specdec import generate
from specdec import Sampling


def _table(seed):
  logits = np.random.default_rng(seed).normal(size=(10, 10))
  return table_model(logits, max_positions=500)


def _counting(model, counts, name):
  """The model, counting how often it is traced."""

  def apply(*args):
    counts[name] += 1
    return model.definition.apply(*args)

  definition = dataclasses.replace(model.definition, apply=apply)
  return model.replace(definition=definition)


def test_one_program_for_all_prompts_limits_seeds_and_temperatures():
  counts = collections.Counter()
  target = _counting(_table(0), counts, 'target')
  draft = _counting(_table(1), counts, 'draft')

  def run(prompts, limit, seed, temperature, top_p):
    generate(
      target,
      jax.random.key(seed),
      prompts,
      max_new_tokens=limit,
      draft=draft,
      num_draft_tokens=3,
      sampling=Sampling(temperature=temperature, top_p=top_p),
    )

  size = decode._cache_size()
  run([[1], [2]], 10, 0, 1.0, 0.9)
  assert decode._cache_size() == size + 1
  # The prefill, and the body of the loop.
  assert counts['target'] == 2
  # The prefill, the first forward of a step, and the scan over the others.
  assert counts['draft'] == 3

  run([[3, 1, 4], [1] * 32], 10, 0, 1.0, 0.9)
  run([[1], [2]], 0, 0, 1.0, 0.9)
  run([[1], [2]], 64, 0, 1.0, 0.9)
  run([[1], [2]], 10, 1, 1.0, 0.9)
  run([[1], [2]], 10, 0, 0, 0.5)
  run([[1], [2]], 10, 0, np.float64(0.3), 1)
  target = target.replace(params=_table(7).params)
  run([[1], [2]], 10, 0, 1.0, 0.9)
  assert decode._cache_size() == size + 1
  assert sum(counts.values()) == 5

  # Other buckets do compile, so compiling would have been noticed.
  run([[1], [2]], 65, 0, 1.0, 0.9)
  run([[1] * 33, [2]], 10, 0, 1.0, 0.9)
  assert decode._cache_size() == size + 3


def _arguments(model, batch_size, g):
  prompt, lengths = tiny_models.pad(tiny_models.prompts(batch_size))
  return (
    model,
    model if g else None,
    tiny_models.row_keys(batch_size),
    jnp.asarray(prompt),
    jnp.asarray(lengths),
    jnp.full(batch_size, 20, jnp.int32),
    tiny_models.sampling(*[1.0] * batch_size).validated(),
  )


def test_no_transfer_between_host_and_device_in_a_decode():
  arguments = _arguments(_table(0), 2, 3)
  # Tokens of the tiny models do not fit the table.
  arguments = (*arguments[:3], arguments[3] % 10, *arguments[4:])
  config = DecodeConfig(num_draft_tokens=3, max_new_tokens=32, eos_ids=(1,))
  with jax.transfer_guard('disallow'):
    result = decode(*arguments, config=config)
    jax.block_until_ready(result)
    # The guard is on: this would have to fetch an array.
    with pytest.raises(Exception, match=r'[Dd]isallow'):
      jnp.zeros(3) + np.ones(3, np.float32)
  assert np.all(result.length > arguments[4])


_PLATFORMS = ('cpu', 'cuda', 'tpu')


def _export(dtype, g, platforms):
  """The lowered decode loop of a tiny GPT-2, for machines that are not here."""
  model = tiny_models.gpt2(dtype=jnp.dtype(dtype))
  config = DecodeConfig(num_draft_tokens=g, max_new_tokens=32, eos_ids=(1,))
  return export.export(decode, platforms=platforms)(
    *_arguments(model, 1, g), config=config
  )


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize(
  'platforms', [_PLATFORMS, *((platform,) for platform in _PLATFORMS)]
)
def test_the_decode_loop_lowers_for_every_platform(dtype, platforms):
  exported = _export(dtype, 3, platforms)
  assert exported.platforms == platforms
  text = exported.mlir_module()
  # The steps, and within a step the draft's scan.
  assert text.count('stablehlo.while') >= 2
  assert ('_platform_index' in text) == (len(platforms) > 1)
  assert not exported.ordered_effects
  assert not exported.unordered_effects
  assert 'callback' not in text


def _rows_of_products(platform, dtype):
  """The row counts of the two-dimensional matrix products of plain decoding."""
  element = {'float32': 'f32', 'bfloat16': 'bf16'}[dtype]
  shape = rf'tensor<(\d+)x\d+x{element}>'
  text = _export(dtype, 0, (platform,)).mlir_module()
  products = re.findall(rf'dot_general.*: \({shape}, {shape}\)', text)
  return {int(rows) for rows, _ in products}


def test_a_single_bfloat16_row_is_made_two_on_cpu_alone():
  assert {1, 2} & _rows_of_products('cpu', 'bfloat16') == {2}
  assert {1, 2} & _rows_of_products('cuda', 'bfloat16') == {1}
  assert {1, 2} & _rows_of_products('tpu', 'bfloat16') == {1}
  assert 1 in _rows_of_products('cpu', 'float32')
