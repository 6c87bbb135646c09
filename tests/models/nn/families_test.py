"""Families that people run: random shapes of each, compared with transformers.

Also that drafted text equals plain text, and that chat templates render.
"""

import functools
import json
import pathlib
import re
import tempfile

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
import tiny_drafters
import tokenizers
import transformers
import variants

from models.checkpoints import hub
from models.nn import adapter
from models.nn import blocks as blocks_lib
from models.nn import mixtral as mixtral_lib
from models.nn.cpu import build
from models.text import chat_template
import specdec

_LENGTH = len(variants.LONG)
# Two shapes of each family; the others take minutes.
_NAMES = [
  pytest.param(
    name, marks=[] if name.endswith(('_0', '_3')) else [pytest.mark.long]
  )
  for name in variants.FAMILIES
]
_FIRST = [name for name in variants.FAMILIES if name.endswith('_0')]
_DRAFTED = ('gpt_oss_0', 'ministral3_1', 'gemma4_3')


_CAUSAL = np.tri(_LENGTH, dtype=bool)


@jax.jit
def _forward(model, tokens, positions, mask):
  """Logits of a prefill into a cache that is longer than the text."""
  cache = model.spec.init_cache(1, _LENGTH + 3)
  mask = jnp.pad(mask[None], ((0, 0), (0, 0), (0, 3)))
  return model.apply(tokens[None], positions[None], mask, cache)[0][0]


def _logits(module, tokens=variants.LONG, positions=None, mask=_CAUSAL):
  if positions is None:
    positions = np.arange(_LENGTH)
  return _forward(adapter.as_model(module), tokens, positions, mask)


def _error(module, name):
  """The errors of some logits at all positions."""
  with np.load(variants.FAMILY_RESULTS) as results:
    return np.abs(_logits(module)[:, variants.SOME_WORDS] - results[name])


def check_logits(name):
  with tempfile.TemporaryDirectory() as folder:
    variant = variants.FAMILIES[name]
    made = variants.write(variant, pathlib.Path(folder) / name)
    assert np.max(_error(hub.load_module(made), name)) < 2e-4


@pytest.mark.parametrize('name', _NAMES)
def test_logits_are_those_of_transformers_and_shapes_are_saved(name, tmp_path):
  module = hub.load_module(
    variants.write(variants.FAMILIES[name], tmp_path / name)
  )
  assert np.max(_error(module, name)) < 2e-4
  hub.save_pretrained(module, tmp_path)
  saved = hub.load_module(tmp_path)
  assert saved.config == module.config
  both = map(tiny.parameters, (module, saved))
  jax.tree.map(np.testing.assert_array_equal, *both)
  # A tree whose branches go on after the same beginning: nodes see windows,
  # sinks and factors by their own positions.
  start, size = 16, 12
  one, branch = np.arange(start, start + size), np.arange(start + size, _LENGTH)
  positions, mask = np.arange(_LENGTH), _CAUSAL.copy()
  positions[branch], mask[np.ix_(branch, one)] = one, False
  found = _logits(module, variants.LONG, positions, mask)
  text = np.roll(variants.LONG, -size)
  text[:start] = variants.LONG[:start]
  expected = _logits(module, text)
  np.testing.assert_allclose(found[branch], expected[one], rtol=0, atol=2e-4)


def test_layers_that_share_do_so_in_training_and_in_the_form_for_a_gpu(
  tmp_path,
):
  name = 'gemma4_6'
  module = hub.load_module(
    variants.write(variants.FAMILIES[name], tmp_path / name)
  )
  tokens, positions = variants.LONG[None], np.arange(_LENGTH)[None]
  free, cache = nnx.jit(
    lambda module: module(tokens, positions, _CAUSAL[None])
  )(module)
  assert cache is None  # Nor was there one.
  gpu = adapter.as_model(module, on_gpu=True)
  found = _forward(gpu, variants.LONG, positions[0], _CAUSAL)
  with np.load(variants.FAMILY_RESULTS) as results:
    for logits in (free[0], found):
      error = np.abs(logits[:, variants.SOME_WORDS] - results[name])
      assert np.max(error) < 2e-4


def test_longrope_has_the_context_of_the_training(tmp_path, caplog):
  variant = variants.FAMILIES['phi4_mini_0']
  known = variant['config']['original_max_position_embeddings']
  target = adapter.as_model(
    hub.load_module(variants.write(variant, tmp_path / 'a'))
  )
  assert f'context is {known} tokens, so --context may' in caplog.text
  with pytest.raises(
    ValueError, match=f'context of the target, {known} tokens'
  ):
    specdec.generate(target, jax.random.key(0), [[1] * 9], max_new_tokens=known)


@pytest.mark.parametrize('name', _FIRST)
def test_kernels_and_few_bits(name, tmp_path):
  folder = variants.write(variants.FAMILIES[name], tmp_path / name)
  load = functools.partial(hub.load_module, folder)
  if build.is_available():
    assert np.max(_error(load(packed=True), name)) < 2e-4
  if name.startswith(('gpt_oss', 'gemma4')):  # They are computed otherwise.
    # Routing may differ for a few tokens.
    assert 0 < np.median(_error(load(dtype='int8'), name)) < 0.2
    for packed in {False, build.is_available()}:
      found = _error(load(dtype='int4', packed=packed), name)
      assert np.isfinite(found).all()


@pytest.mark.long
@pytest.mark.parametrize('name', _DRAFTED)
def test_greedy_trees_equal_plain_text(name, tmp_path):
  folder = variants.write(variants.FAMILIES[name], tmp_path / name)
  target = adapter.as_model(hub.load_module(folder))
  rng = np.random.default_rng(0)
  noise = lambda leaf: leaf * (1 + 0.1 * rng.standard_normal(leaf.shape))
  draft = target.replace(params=jax.tree.map(noise, target.params))
  prompts = [variants.LONG[:9].tolist(), variants.LONG[9:12].tolist()]
  generate = functools.partial(
    *(specdec.generate, target, jax.random.key(0), prompts), max_new_tokens=40
  )
  plain = generate()
  drafted = generate(drafter=tiny_drafters.simple('tree', draft))
  assert drafted.tokens == plain.tokens
  assert drafted.stats.block_efficiency > 1.2


def test_folders_in_mxfp4_are_read_as_they_are_stored(tmp_path):
  """Neighbours are the halves of a byte, the first one the lower half."""
  shape = {'vocab_size': 40, 'num_positions': 64, 'width': 32, 'num_layers': 1}
  shape |= {'num_heads': 2, 'num_kv_heads': 1, 'head_width': 8}
  config = mixtral_lib.GptOssConfig(
    **shape | {'inner_width': 64, 'num_experts': 3, 'experts_per_token': 2},
    **dict.fromkeys(('mlp_bias', 'sinks', 'clamped', 'tie_embeddings'), True),
  )
  made = mixtral_lib.Mixtral(config, rngs=nnx.Rngs(0))
  hub.save_pretrained(made, tmp_path)
  rng, floats, blocks = np.random.default_rng(0), {}, {}
  halves = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
  for part, size in (('gate_up_proj', (3, 128, 1)), ('down_proj', (3, 32, 2))):
    name = f'model.layers.0.mlp.experts.{part}'
    codes = rng.integers(0, 16, (*size, 32), dtype=np.uint8)
    exponents = rng.integers(120, 128, size, dtype=np.uint8)
    values = halves[codes & 7] * np.where(codes & 8, -1, 1)
    values = values * np.float32(2) ** (np.float32(exponents) - 127)[..., None]
    floats[name] = values.reshape(*size[:2], -1).swapaxes(1, 2)
    blocks |= {
      **{name: None, f'{name}_scales': exponents},
      f'{name}_blocks': codes[..., ::2] | codes[..., 1::2] << 4,
    }
  edit = lambda edits: variants.edit_tensors(
    tmp_path,
    {k: v if v is None else lambda _, v=v: v for k, v in edits.items()},
  )
  edit({k: np.ascontiguousarray(v, np.float32) for k, v in floats.items()})
  expected = hub.flat_params(hub.load_module(tmp_path))[1]
  edit(blocks)
  path = tmp_path / 'config.json'
  keys = json.loads(path.read_text())
  path.write_text(
    json.dumps(keys | {'quantization_config': {'quant_method': 'mxfp4'}})
  )
  assert hub.locate(tmp_path).stored_dtypes == ['float32', 'stored']
  for dtype, count in (('float32', 0), ('stored', 9)):
    found = hub.flat_params(hub.load_module(tmp_path, dtype=dtype))[1]
    grouped = lambda leaf: isinstance(leaf, blocks_lib.GroupedMatrix)
    assert sum(map(grouped, found.values())) == count
    for key, leaf in found.items():
      if grouped(leaf):
        leaf = leaf.take(np.arange(len(expected[key])))
      elif dtype == 'stored':
        continue  # In bfloat16.
      np.testing.assert_array_equal(leaf, expected[key], err_msg=key)
  edit({'model.layers.0.mlp.experts.down_proj_scales': np.uint8([[[0]]] * 3)})
  with pytest.raises(ValueError, match=r'down_proj_scales has shape'):
    hub.load_module(tmp_path)


# The features of published templates, in few lines: tools that are not there,
# system messages, dates, thinking that is off, and what the text is by them.
_TEMPLATES = {
  'granite4': (
    """{%- set all = namespace(text='') %}{%- if tools %}TOOLS{% endif %}
{%- if messages[0].role == 'system' %}
{%- set all.text = messages[0].content %}{%- endif %}
{{- '<|role|>system<|end|>' + (all.text or 'Hi') }}
{%- for message in messages if message.role != 'system' %}
{{- '<|role|>' + message.role + '<|end|>' + message.content }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|role|>assistant<|end|>' }}{%- endif %}""",
    '<|role|>system<|end|>S<|role|>user<|end|>U<|role|>assistant<|end|>',
  ),
  'ministral3': (
    """{%- set year = strftime_now('%Y') %}{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{{- '[SYSTEM]' + messages[0]['content'] }}{%- set rest = messages[1:] %}
{%- else %}{{- year }}{%- set rest = messages %}{%- endif %}
{%- if tools is defined and tools is not none %}[TOOLS]{%- endif %}
{%- for message in rest %}{%- if message['role'] != 'user' %}
{{- raise_exception('Only users') }}{%- elif message['content'] is string %}
{{- '[INST]' + message['content'] + '[/INST]' }}{%- endif %}{%- endfor %}""",
    '<s>[SYSTEM]S[INST]U[/INST]',
  ),
  'minicpm, phi4_mini': (
    """{%- for message in messages %}
{%- if 'tools' in message and message['tools'] is not none %}[TOOLS]{% endif %}
{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking %}OFF{%- endif %}
{%- else %}{{- eos_token }}{%- endif %}""",
    '<|system|>S<|end|><|user|>U<|end|><|assistant|>',
  ),
  'gpt_oss': (
    """{%- macro channels() -%}{{- '# Channels' }}{%- endmacro -%}
{%- if reasoning_effort is not defined %}{%- set reasoning_effort = 'low' %}
{%- endif %}{{- '<|start|>' + reasoning_effort + channels() + '<|end|>' }}
{%- for message in messages -%}
{{- '<|start|>' + message.role + '<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- endfor -%}{%- if add_generation_prompt %}<|start|>assistant{%- endif -%}""",
    '<|start|>low# Channels<|end|><|start|>system<|message|>S<|end|>'
    '<|start|>user<|message|>U<|end|><|start|>assistant',
  ),
}
_SPECIAL = re.compile(r'<\|\w+\|>|<s>|\[/?[A-Z]+\]')


@pytest.mark.parametrize('family', _TEMPLATES)
def test_chat_templates_render_without_tools_and_thoughts(family):
  template, expected = _TEMPLATES[family]
  letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
  words = {letter: index for index, letter in enumerate(letters)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(words, []))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
    add_prefix_space=False, use_regex=False
  )
  special = [*dict.fromkeys(_SPECIAL.findall(expected))]
  backend.add_special_tokens(special)
  tokenizer = transformers.PreTrainedTokenizerFast(
    tokenizer_object=backend, bos_token='<s>', chat_template=template
  )
  messages = chat_template.first_messages('U', 'S')
  ids = chat_template.conversation_ids(tokenizer, messages)
  assert ids == tokenizer(expected)['input_ids']
  assert {*special} <= {*tokenizer.convert_ids_to_tokens(ids)}
  assert chat_template.conversation_ids(tokenizer, messages[1:])
