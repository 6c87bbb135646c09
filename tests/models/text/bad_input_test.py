"""Absurd input ends in one clear line, most of it before a model is loaded."""

import io
import itertools
import json
import pathlib
import random
import subprocess
import sys
import time
from unittest import mock

import command_lines
import jax
import numpy as np
import pytest
import tiny_drafters

from models import waiting
from models.checkpoints import families
from models.nn import table_model
import specdec
from specdec import memory

_TESTS = pathlib.Path(__file__).parents[2]
_SCRIPTS = sorted(
  path.name
  for path in (_TESTS.parent / 'scripts').glob('*.py')
  if 'command_line.run' in path.read_text('utf-8')
)

_SURROGATE = 'ab\udcff'

# A flag of generate.py, and what the line says besides the flag.
_FLAGS = [
  ('--width=999999', 'at most 4096, got 999999'),
  ('--width=1e3', 'invalid literal'),
  ('--capacity=1', 'at least num_nodes=64'),
  *(('--cost_ratio=nan', 'got nan'), ('--batch_size=1000000000', '1024')),
  ('--max_new_tokens=99999999999', 'max_new_tokens'),
  ('--temperature=nan', 'between 0 and 1000000, got nan'),
  *(('--top_p=0', 'above 0'), ('--seed=99999999999999999999', 'seed')),
  ('--break_even=-1', 'positive number'),
  ('--compilation_cache=/dev/null', 'is no folder'),
  ('--logit_bias=5', 'expected token:number'),
  ('--lookup_confidence=1', 'below 1'),
  ('--lookup_confidence=' + ','.join(['0.1'] * 99), 'at most 32'),
  ('--topology=k_ary:9x99999', 'more than 4096 nodes'),
  ('--topology=k_ary:2', 'expected chain:4'),
  ('--topology=/no/such/file', 'cannot be read'),
  ('--verify=hope', 'should be one of'),
  ('--json_schema={', 'neither a file nor JSON'),
  ('--json_schema=/no/such/file', 'cannot be read'),
  ('--plan_seconds=0', 'plan_seconds'),
  ('--prompt_file=/no/such/file', 'cannot be read'),
  (f'--prompt={_SURROGATE}', 'lone surrogate'),
  ('--no_such_flag=1', 'Unknown command line flag'),
  *(('--widht=4', 'Did you mean'), ('surplus', 'unexpected argument')),
]


def test_flags():
  for flag, message in _FLAGS:
    line = command_lines.refusal('generate.py', flag)
    assert flag.partition('=')[0].lstrip('-') in line
    assert message in line


def test_nothing_heavy_is_imported_before_flags_are_checked():
  """transformers and torch take seconds, in which a user would wait."""
  program = (
    f'import sys; sys.path.insert(0, {str(_TESTS)!r}); import command_lines\n'
    f'runs = [(one, "--no_such_flag") for one in {_SCRIPTS!r}]\n'
    "for script, flag in [*runs, ('generate.py', '--width=999999')]:\n"
    '  ended = command_lines.run(script, flag)\n'
    '  assert ended.code == 2, (script, ended)\n'
    "  for name in ('transformers', 'torch', 'flax.nnx'):\n"
    '    assert name not in sys.modules, (script, name)\n'
  )
  ended = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=False
  )
  assert ended.returncode == 0, ended.stderr


def _refused_file(path, content, *flags):
  path.write_bytes(content)
  flag = f'--prompt_file={path}'
  line = command_lines.refusal('generate.py', flag, *flags)
  assert flag in line
  return line


def test_files_of_prompts(tmp_path):
  for name, content, message in (
    *(('a.jsonl', b'', 'has 0 prompts'), ('a.jsonl', b'[]\n', 'line 1')),
    ('a.jsonl', b'{"prompt": 5}\n', 'line 1'),
    ('a.jsonl', b'{"prompt": "a"\n', 'line 1'),
    ('a.jsonl', b'\n{"prompt": "ab\\ud800"}\n', 'line 2'),
    ('a.jsonl', b'[' * 100_000, 'line 1'),
    ('a.txt', b'\xff\xfe', 'cannot be read'),
    ('a.txt', b'caf\xc3\xa9\n\r\ncaf\xe9', 'line 3 has the byte 0xe9'),
    ('a.JSONL', b'\xef\xbb\xbf\n5', 'line 2'),
    *((f'a.{suffix}', b'a', 'line 1') for suffix in ('ndjson', 'json', 'Json')),
  ):
    assert message in _refused_file(tmp_path / name, content)
  # More prompts are asked for than there can be, so that all are refused.
  line = json.dumps({'prompt': 'one\u2028two \U0001f600 \\'}).encode()
  for seed in range(40):
    rng = random.Random(seed)
    content = bytearray(b'\n'.join([line] * 3))
    for _ in range(rng.randrange(1, 6)):
      content[rng.randrange(len(content))] = rng.randrange(256)
    _refused_file(tmp_path / 'prompts.jsonl', content, '--batch_size=20')


def test_files_of_questions(tmp_path):
  file, good = tmp_path / 'a.jsonl', '{"category": "b", "turns": ["a"]}'
  for line, message in (
    *(
      ('{"turns": ["a"]}', 'line 2: expected an object with a'),
      ('5', 'line 2'),
    ),
    ('{"category": 5, "turns": ["a"]}', 'line 2: expected an object with a'),
    ('{"prompt": "a", "category": "b"}', 'line 2: expected turns'),
    *(
      (good.replace('["a"]', turns), 'line 2: expected turns, a list')
      for turns in ('[]', '"a"', '["a", ""]', '["a", 5]', '[["a"]]', 'null')
    ),
    (good.replace('"a"', r'"\ud800"'), 'line 2'),
    (good, "--categories=b,c: there is no 'c'; the categories are b"),
  ):
    file.write_text(f'{good}\n{line}\n')
    flags = f'--prompt_file={file}', '--categories=b,c'
    refused = command_lines.refusal('benchmark.py', *flags)
    assert message in refused
    assert str(file) in refused or line == good
  file.write_text('{"prompt": "a"}')
  refused = command_lines.refusal('benchmark.py', *flags)
  assert '--categories=b,c: --prompt_file=' in refused


def _rope(kind, **values):
  return 'rope_parameters', {'rope_theta': 10.0, 'rope_type': kind} | values


_GPT2 = {
  **{'model_type': 'gpt2', 'vocab_size': 64, 'n_positions': 64},
  **{'n_embd': 16, 'n_layer': 2, 'n_head': 4},
}
_LLAMA = {
  **{'model_type': 'llama', 'vocab_size': 64, 'max_position_embeddings': 64},
  **{'hidden_size': 16, 'num_hidden_layers': 2, 'num_attention_heads': 4},
  **{'num_key_value_heads': 2, 'intermediate_size': 32},
}
_MIXTRAL = _LLAMA | {'model_type': 'mixtral', 'num_local_experts': 4}
_QWEN3_MOE = _LLAMA | {
  **{'model_type': 'qwen3_moe', 'moe_intermediate_size': 20},
  **{'num_experts': 4, 'num_experts_per_tok': 2},
}
_GRANITE_4 = _LLAMA | {
  **{'model_type': 'granitemoehybrid', 'layer_types': ['attention'] * 2},
  **{'num_local_experts': 0, 'shared_intermediate_size': 20},
}
_GROWS = {
  **{'rope_type': 'yarn', 'rope_theta': 10.0, 'factor': 2.0},
  **{'original_max_position_embeddings': 32, 'llama_4_scaling_beta': 0.1},
}
_MINISTRAL = _LLAMA | {'model_type': 'ministral3', 'rope_parameters': _GROWS}
_MINISTRAL |= {'head_dim': 4}
_LONG = {'type': 'longrope', 'short_factor': [1.0, 1.5]}
_LONG |= {'long_factor': [2.0, 3.0]}
_PHI_4 = _LLAMA | {'model_type': 'phi3', 'rope_scaling': _LONG}
_PHI_4 |= {'original_max_position_embeddings': 48, 'pad_token_id': 0}
_MINICPM = _LLAMA | {'model_type': 'minicpm', 'scale_emb': 12}
_MINICPM |= {'scale_depth': 1.4, 'dim_model_base': 8}
_GPT_OSS = _LLAMA | {'model_type': 'gpt_oss', 'num_local_experts': 4}
_GPT_OSS |= {'num_experts_per_tok': 2}
_GEMMA_4 = _LLAMA | {'model_type': 'gemma4_text', 'num_hidden_layers': 4}
_GEMMA_4 |= {'layer_types': ['sliding_attention', 'full_attention'] * 2}
_GEMMA_4 |= {'num_kv_shared_layers': 2, 'vocab_size_per_layer_input': 64}
_GEMMA_4 |= {'pad_token_id': 0, 'sliding_window': 8}
_LAYERS = {'1': {'num_key_value_heads': 1, 'head_dim': 8}}
_grows = lambda **changes: ('rope_parameters', _GROWS | changes)
_long = lambda **changes: ('rope_scaling', _LONG | changes)
_DYNAMIC = {'type': 'dynamic', 'factor': 2.0}
_YARN = _rope(
  'yarn', factor=2.0, mscale=1.0, original_max_position_embeddings=32
)
_NO_CONTEXT = _rope('yarn', factor=None, original_max_position_embeddings=None)
_NO_EXPERTS = 'mlp_only_layers=[1] and decoder_sparse_step=1: layers without'
# A good config, then rows of a key, its value, and what the line says.
_CONFIGS = (
  (
    *(_GPT2, ('n_layer', 'two', "n_layer='two'")),
    ('n_layer', 4000, '4000 layers, at most 256'),
    ('n_embd', None, 'n_embd=None'),
    ('n_embd', 18, 'num_heads must divide width 18, got 4'),
    ('n_head', 0, 'num_heads must be positive'),
    ('vocab_size', True, 'vocab_size=True'),
    ('eos_token_id', '</s>', "eos_token_id='</s>'"),
    ('activation_function', [], 'activation_function=[]'),
    ('activation_function', 'prelu', "='prelu' is not known"),
    ('layer_norm_epsilon', 'small', "layer_norm_epsilon='small'"),
    ('tie_word_embeddings', 'yes', "tie_word_embeddings='yes'"),
    ('model_type', ['gpt2'], "model_type ['gpt2'] is not known"),
    ('model_type', 'mamba', "'mamba' is not known; choose from"),
    ('add_cross_attention', True, 'add_cross_attention=True is not supp'),
    ('n_ctx', 32, 'n_ctx=32 and n_positions=64 contradict each other'),
    ('hidden_size', 32, 'hidden_size=32 and n_embd=16 contradict'),
    ('layer_norm_epsilon', float('nan'), 'layer_norm_epsilon=nan must be'),
    ('quantization_config', 3, 'quantization_config=3'),
    ('quantization_config', {'quant_method': 'awq'}, "'awq'} is not supp"),
  ),
  (
    *(_LLAMA, ('hidden_size', 18, 'hidden size (18)')),
    ('hidden_act', 'prelu', "hidden_act='prelu' is not known; choose"),
    ('head_dim', 'x', "head_dim='x'"),
    ('num_key_value_heads', 3, 'num_kv_heads must divide num_heads 4'),
    ('num_attention_heads', 0, 'num_attention_heads'),
    ('rope_parameters', [1], 'rope_parameters=[1] must be an object'),
    ('rope_scaling', [2], 'rope_scaling=[2] must be an object'),
    ('rope_parameters', {'rope_type': ['a']}, "rope_type=['a'] must be"),
    (*_rope('dynamic', factor=2.0), "['default', 'linear'"),
    ('rope_scaling', _DYNAMIC, "rope_type='dynamic' is not supported"),
    (*_YARN, "mscale=1.0 is not supported with rope_type='yarn'"),
    (*_rope('linear'), 'factor'),
    (*_rope('linear', factor=None), "'linear': {'factor'}"),
    (*_NO_CONTEXT, "'yarn': {'factor'}"),
    (*_rope('llama3', factor=8.0, low_freq_factor=None), 'low_freq_factor'),
    (*_rope('linear', factor='a'), "factor='a' must be a finite"),
    (*_rope('yarn', factor=2, beta_fast='3'), "beta_fast='3' must be"),
    (*_rope('linear', factor=-1.0), 'got -1.0'),
    (*_rope('default', rope_theta=0.5), 'got 0.5'),
  ),
  (
    *(
      _GRANITE_4,
      ('layer_types', ['attention', 'mamba'], "['linear_attention']"),
    ),
    ('layers_block_type', ['mamba', 'mamba'], 'contradict'),
    ('num_local_experts', 1, 'num_experts=1, got 2'),
    ('shared_intermediate_size', 0, 'inner_width must be positive'),
    ('position_embedding_type', 5, 'position_embedding_type=5 must be'),
    ('mlp_bias', True, 'mlp_bias=True is not supported'),
  ),
  (
    *(_MINISTRAL, (*_grows(max_position_embeddings=32), 'contradict')),
    (*_grows(mscale_all_dim=1.0), 'mscale_all_dim=1.0 is not supported'),
    (*_grows(rope_type='default'), 'factor=2.0 is not supported with'),
    (*_grows(llama_4_scaling_beta=None), 'must have llama_4_scaling_beta'),
    (*_grows(llama_4_scaling_beta='a'), "llama_4_scaling_beta='a' must be"),
    ('layer_types', ['full_attention'] * 3, 'layer_types'),
  ),
  (
    *(_PHI_4, (*_long(short_factor=[1.0] * 3), 'short_factor')),
    (*_long(short_factor=[1.0, 0.0]), 'short_factor must have positive'),
    (*_long(long_factor=None), 'long_factor'),
    (*_long(long_factor=[1.0, 'a']), 'must be a list of numbers'),
    (*_long(mscale=1.0), 'mscale=1.0 is not supported'),
  ),
  (
    *(_MINICPM, ('scale_depth', 'a', "scale_depth='a' must be a finite")),
    ('dim_model_base', 0, 'dim_model_base=0: a MiniCPM needs one above 0'),
    ('scale_emb', -1.0, 'scale_emb=-1.0: a MiniCPM needs'),
    ('sparse_config', {'topk': 8}, "sparse_config={'topk': 8} is not"),
    ('model_type', 'minicpm3', "model_type 'minicpm3' is not known"),
  ),
  (
    *(_GPT_OSS, ('num_experts_per_tok', 9, 'num_experts=4, got 9')),
    ('swiglu_limit', 5.0, 'swiglu_limit=5.0 is not supported, only 7.0'),
    ('layer_types', ['chunked_attention'] * 2, 'chunked_attention'),
    ('experts_per_token', 3, 'experts_per_token=3 and num_experts_per_tok'),
    ('quantization_config', {'quant_method': 'awq'}, "'awq'} is not supp"),
    ('num_experts', 5, 'contradict'),
  ),
  (
    *(
      _GEMMA_4,
      ('num_kv_shared_layers', 3, '=3: none of the others is of ful'),
    ),
    ('num_kv_shared_layers', 4, 'num_kv_shared_layers=4 must lie between 0 an'),
    ('num_kv_shared_layers', -1, 'num_kv_shared_layers=-1 must lie between'),
    ('vocab_size_per_layer_input', 63, 'vocab_size_per_layer_input=63 is not'),
    ('layer_types', ['full_attention'] * 3, 'number of `layer_types` (3)'),
    ('global_head_dim', 9, 'head_width must be even, got 9'),
    ('per_layer_config', _LAYERS, "per_layer_config has ['num_key_value_he"),
    ('enable_moe_block', True, 'enable_moe_block=True is not supported'),
    ('attention_k_eq_v', True, 'attention_k_eq_v=True is not supported'),
    ('num_experts', 8, 'num_experts=8 is not supported'),
    ('num_global_key_value_heads', 1, 'num_global_key_value_heads=1 is not'),
    ('use_bidirectional_attention', 'all', "use_bidirectional_attention='all'"),
    ('hidden_size_per_layer_input', -4, 'layer_width must not be below 0: -4'),
    ('model_type', 'gemma4_assistant', "Google's drafters of Gemma 4 read"),
  ),
  (_MIXTRAL, ('num_experts_per_tok', 9, 'num_experts=4, got 9')),
  (_QWEN3_MOE, ('mlp_only_layers', [1], _NO_EXPERTS)),
)


def test_configs(tmp_path):
  path = tmp_path / 'config.json'
  for config, *rows in _CONFIGS:
    families.config_from_keys(config, path)
    for key, value, message in rows:
      with pytest.raises(ValueError, match=r'config\.json: ') as caught:
        families.config_from_keys(config | {key: value}, path)
      assert message in str(caught.value)
  path.write_text('[' * 99_999)
  flags = [f'--target={tmp_path}', '--draft=none']
  assert str(path) in command_lines.refusal('generate.py', *flags)


def _value(rng):
  """Something that a user may type."""
  return rng.choice(
    [
      str(rng.choice((-1, 1)) * 10 ** rng.randrange(30)),
      rng.choice(('nan', 'inf', '-inf', '1e999', '0x10', '1_000', '\u0663')),
      *(''.join(chr(rng.randrange(1, 0x3000)) for _ in range(5)), _SURROGATE),
      '',
    ]
  )


_NAMES = (
  *('width', 'branching', 'rounds', 'num_nodes', 'max_depth', 'capacity'),
  *('num_draft_tokens', 'batch_size', 'temperature', 'top_p', 'top_k', 'min_p'),
  *('seed', 'repetition_penalty', 'break_even', 'calibration', 'cost_ratio'),
  *('topology', 'logit_bias', 'lookup_confidence', 'verify', 'max_new_tokens'),
)


def test_any_value_of_a_flag_is_taken_or_refused_in_a_line(tmp_path):
  """The file of prompts is missing, so that good flags end there."""
  missing = f'--prompt_file={tmp_path / "missing"}'
  for seed in range(60):
    rng = random.Random(seed)
    names = rng.sample(_NAMES, 2)
    given = [f'--{name}={_value(rng)}' for name in names]
    line = command_lines.refusal('generate.py', *given, missing)
    assert any(name in line for name in (*names, 'prompt_file')), given


def test_a_call_that_does_not_fit_is_refused_before_it_is_traced(monkeypatch):
  model = table_model.table_model(
    np.zeros((8, 8), np.float32), max_positions=64
  )
  tree = tiny_drafters.Settings(num_nodes=8, width=3, rounds=2, capacity=24)
  drafter = tiny_drafters.model(model, tree)
  # A table of 8 x 8 numbers, which both have; 3 rows, 8 nodes, 8 tokens; all of
  # 4 bytes.
  needed = 8 * 8 * 4 + 3 * 8 * 8 * 4
  start = mock.Mock(side_effect=RuntimeError('traced'))
  monkeypatch.setattr(specdec.loop, 'start', start)
  refused = r'has 0\.0 GB.*the logits.*num_nodes'
  for available, error in (
    (needed - 1, pytest.raises(ValueError, match=refused)),
    (needed, pytest.raises(RuntimeError, match='traced')),
  ):
    monkeypatch.setattr(memory, 'device_bytes', lambda size=available: size)
    key, prompts = jax.random.key(0), [[1, 2]] * 3
    with error:
      specdec.Decoding(model, key, prompts, drafter=drafter, max_new_tokens=8)


def test_waiting_is_announced_once_it_takes_long(capsys, monkeypatch):
  """Large checkpoints have a bar on a terminal."""
  for patience, seconds, said in ((10.0, 0.0, ''), (0.01, 0.2, 'a ...\n')):
    with waiting.announced('a', patience=patience):
      time.sleep(seconds)
    assert capsys.readouterr().err == said
  for is_terminal, size in itertools.product((False, True), (10**8, 10**10)):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda is_=is_terminal: is_)
    assert [*waiting.progress(iter('abc'), 'reading', 3, size)] == [*'abc']
    has_bar = is_terminal and size == 10**10
    assert ('reading' in capsys.readouterr().err) == has_bar


def test_a_terminal_without_a_character_shows_a_question_mark(
  tmp_path, monkeypatch
):
  stream = io.TextIOWrapper(io.BytesIO(), encoding='ascii')
  redirect = lambda _: mock.patch.object(sys, 'stdout', stream)
  monkeypatch.setattr(command_lines.contextlib, 'redirect_stdout', redirect)
  command_lines.run('generate.py', f'--prompt_file={tmp_path / "missing"}')
  stream.write('\U0001f600')
  stream.flush()
  assert stream.buffer.getvalue() == b'?'
