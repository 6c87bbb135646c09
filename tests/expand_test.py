"""Expanded models: another shape, the same function."""

import dataclasses
import functools

import command_lines
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors
import tiny

from models.checkpoints import expand
from models.checkpoints import hub
from models.lab.training import tokenizer as tokenizer_lib

_UNTIED = {'tie_embeddings': False}
# Wider sums are added up in an order of the machine's own; logits are near 1.
_ROUNDING = 1e-4


_logits = functools.partial(tiny.logits, tokens=tiny.tokens())
_assert_close = functools.partial(np.testing.assert_allclose, rtol=0)


@pytest.mark.parametrize(
  ('shape', 'factor', 'num_layers'),
  [
    ({}, 1, 4),
    ({}, 2, 2),
    (_UNTIED, 2, 4),
    ({'inner_width': 24}, 3, 3),
    ({'scale_attention_by_layer': True}, 3, 3),
    (_UNTIED | {'scale_attention': False}, 3, 3),
  ],
)
def test_logits_stay_the_same(shape, factor, num_layers):
  module = tiny.module(**shape)
  expanded = expand.expand(module, width_factor=factor, num_layers=num_layers)
  _assert_close(_logits(expanded), _logits(module), atol=_ROUNDING)
  old, inner, width = module.config, module.config.inner_width, 16 * factor
  assert expanded.config == dataclasses.replace(
    old,
    width=width,
    num_heads=2 * factor,
    num_layers=num_layers,
    inner_width=inner and inner * factor,
  )
  assert expanded.wte.embedding.shape == (40, width)
  last = expanded.h[num_layers - 1]
  assert last.attn.c_attn.weight.shape == (3 * width, width)
  assert last.mlp.c_fc.weight.shape == ((inner or 64) * factor, width)


def test_bfloat16_weights_stay_the_same():
  # Dividing by a power of two is exact, so only the order of sums differs.
  module = tiny.module(dtype=jnp.bfloat16)
  expanded = expand.expand(module, width_factor=4, num_layers=3)
  parameters = tiny.parameters(expanded)
  assert parameters['h.2.attn.c_attn.weight'].dtype == jnp.bfloat16
  assert parameters['h.2.ln_1.scale'].dtype == jnp.float32
  _assert_close(_logits(expanded), _logits(module), atol=0.05)


def test_added_blocks_are_work_and_depend_on_the_seed_alone():
  module = tiny.module()

  def added(seed):
    expanded = expand.expand(module, width_factor=2, num_layers=3, seed=seed)
    return tiny.parameters(expanded)

  first, again, other = added(0), added(0), added(1)
  for name, array in first.items():
    np.testing.assert_array_equal(again[name], array, err_msg=name)
  for name in ('h.2.attn.c_attn.weight', 'h.2.mlp.c_fc.weight'):
    assert np.std(first[name]) > 0.01, name
    assert np.any(first[name] != other[name]), name
  for name in ('h.2.attn.c_proj.weight', 'h.2.mlp.c_proj.bias'):
    assert not np.any(first[name]), name


@pytest.mark.parametrize('shape', [{}, _UNTIED])
def test_added_tokens_have_a_low_logit_after_every_text(shape):
  module = tiny.module(**shape)
  bias = module.ln_f.bias
  bias[...] = jnp.linspace(-0.1, 0.4, bias.size)
  expanded = expand.expand(module, width_factor=2, num_layers=2, vocab_size=50)
  logits = _logits(expanded)
  _assert_close(logits[..., :40], _logits(module), atol=_ROUNDING)
  _assert_close(logits[..., 40:], -30, atol=0.01)


def test_bad_arguments():
  refused = functools.partial(pytest.raises, ValueError)
  expanded = functools.partial(expand.expand, tiny.module())
  with refused(match='width_factor must be at least 1, got'):
    expanded(width_factor=0, num_layers=2)
  with refused(match='at least the 2 of the model, got 1'):
    expanded(width_factor=2, num_layers=1)
  with refused(match='at least the 40 of the model, got 39'):
    expanded(width_factor=2, num_layers=2, vocab_size=39)
  unbiased = tiny.module()
  unbiased.ln_f.bias[...] *= 0
  with refused(match='no token can be added to this model'):
    expand.expand(unbiased, width_factor=1, num_layers=2, vocab_size=41)
  llama = tiny.llama_module('llama')
  with refused(match='only a GPT-2 can be expanded, not a L'):
    expand.expand(llama, width_factor=2, num_layers=2)


def test_the_script_expands_a_folder_with_tokenizer(tmp_path):
  small, large = tmp_path / 'small', tmp_path / 'large'
  module = tiny.module(vocab_size=260)
  tokenizer = tokenizer_lib.train_tokenizer(
    ['a b c d'], vocab_size=260, context=8
  )
  hub.save_pretrained(module, small, tokenizer=tokenizer)
  flags = [f'--model={small}', f'--output={large}', '--dtype=float16']
  flags += ['--width_factor=2', '--layers=3']
  ended = command_lines.run('expand_model.py', *flags)
  assert ended.code == 0, ended.errors
  loaded = hub.load_module(large)
  assert str(loaded.config) in ended.output
  assert (loaded.config.width, loaded.config.num_layers) == (32, 3)
  with safetensors.safe_open(large / 'model.safetensors', 'numpy') as file:
    stored = file.get_slice('transformer.wte.weight').get_dtype()
  assert stored == 'F16'
  copied = hub.locate(large).tokenizer
  assert copied.get_vocab() == tokenizer.get_vocab()
  assert copied.eos_token_id == tokenizer.eos_token_id
  assert copied.model_max_length == 8
  _assert_close(_logits(loaded), _logits(module), atol=0.05)


def test_a_folder_without_tokenizer(tmp_path):
  hub.save_pretrained(tiny.module(num_layers=1), tmp_path / 'a')
  shape = expand.expand_pretrained(
    tmp_path / 'a', tmp_path / 'b', width_factor=2, num_layers=1
  )
  assert hub.locate(tmp_path / 'b').config == shape
  assert hub.locate(tmp_path / 'b').tokenizer is None
