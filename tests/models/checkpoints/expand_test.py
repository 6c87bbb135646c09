"""Expanded models: another shape, the same function."""

import dataclasses
import functools

import command_lines
import numpy as np
import pytest
import safetensors
import tiny

from specdec.models.checkpoints import expand
from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib

_UNTIED = {'tie_embeddings': False}
# Wider sums are added up in an order of the machine's own; logits are near 1.
_ROUNDING = 1e-4


_logits = functools.partial(tiny.logits, tokens=tiny.tokens())
_assert_close = functools.partial(np.testing.assert_allclose, rtol=0)


def test_logits_stay_the_same():
  for shape, factor, num_layers in (
    (_UNTIED, 2, 4),
    ({'inner_width': 24}, 3, 3),
    ({'scale_attention_by_layer': True}, 1, 3),
  ):
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


def test_bad_arguments():
  usual, unbiased = {'width_factor': 2, 'num_layers': 2}, tiny.module()
  unbiased.ln_f.bias[...] *= 0
  for message, module, changes in (
    ('width_factor must be at least 1', tiny.module(), {'width_factor': 0}),
    ('at least the 2 of the model, got 1', tiny.module(), {'num_layers': 1}),
    ('at least the 40 of the model', tiny.module(), {'vocab_size': 39}),
    ('no token can be added to this model', unbiased, {'vocab_size': 41}),
    ('only a GPT-2 can be expanded', tiny.llama_module('llama'), {}),
  ):
    with pytest.raises(ValueError, match=message):
      expand.expand(module, **usual | changes)


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
