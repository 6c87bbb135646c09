"""The command lines, end to end, on a tiny pair of their own."""

import json
import os
import pathlib
import subprocess
import sys

from flax import nnx
import numpy as np
import pytest

from models.checkpoints import hub
from models.nn.gpt2 import GPT2
from models.nn.gpt2 import GPT2Config
from models.text.drafters import DraftSettings
from models.text.plan import Plan
from models.training.tokenizer import train_tokenizer
from models.tune.plan_lookup import Setup
from specdec import Sampling
from specdec import Trace

_ROOT = pathlib.Path(__file__).parents[1]
_TEXT = 'def add(first, second):\n  return first + second\n' * 20


def _save(folder, *, seed, vocab_size=280, width=16):
  tokenizer = train_tokenizer([_TEXT], vocab_size=vocab_size, context=128)
  config = GPT2Config(
    vocab_size=len(tokenizer),
    num_positions=128,
    width=width,
    num_layers=1,
    num_heads=2,
  )
  hub.save_pretrained(
    GPT2(config, rngs=nnx.Rngs(seed)), folder, tokenizer=tokenizer
  )
  return folder


@pytest.fixture(scope='module')
def target(tmp_path_factory):
  return _save(tmp_path_factory.mktemp('target'), seed=0)


@pytest.fixture(scope='module')
def draft(tmp_path_factory):
  return _save(tmp_path_factory.mktemp('draft'), seed=1)


@pytest.fixture(scope='module')
def ngram(tmp_path_factory, target):
  folder = tmp_path_factory.mktemp('ngram')
  corpus = folder / 'corpus'
  corpus.mkdir()
  for number in range(60):  # some are held out
    (corpus / f'{number}.py').write_text(_TEXT)
  result = _run(
    'build_ngram.py',
    f'--draft={target}',
    '--num_tokens=0',
    f'--corpus={corpus}',
    '--min_count=1',
    f'--workdir={folder / "work"}',
    f'--output={folder / "table.safetensors"}',
  )
  assert result.returncode == 0, result.stderr
  return folder / 'table.safetensors'


def _run(script, *flags):
  return subprocess.run(
    [sys.executable, _ROOT / 'scripts' / script, *map(str, flags)],
    capture_output=True,
    text=True,
    check=False,
  )


def _generate(target, draft, *flags):
  result = _run(
    'generate.py',
    f'--target={target}',
    f'--draft={draft}',
    '--max_new_tokens=9',
    '--json',
    *flags,
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


def test_json_holds_texts_tokens_and_statistics(target, draft):
  output = _generate(
    target, draft, '--prompt=def add', '--method=chain', '--num_draft_tokens=2'
  )
  stats = output['stats']
  assert len(output['tokens'][0]) == stats['new_tokens'] == 9
  assert output['prompt_tokens'][0]
  assert len(output['text']) == 1
  assert sum(stats['accepted_histogram']) == stats['target_forwards']
  assert stats['stage_forwards'] == {'draft': 2 * stats['target_forwards']}
  assert output['labels'] == ['target', 'draft']
  counts = [output['origins'][0].count(origin) for origin in (0, 1)]
  assert [stats['origins'][label] for label in output['labels']] == counts
  assert ''.join(output['pieces'][0]) == output['text'][0]
  assert len(stats['accepted_histogram']) == 3
  rate = stats['new_tokens'] / stats['seconds']
  assert stats['tokens_per_second'] == pytest.approx(rate)
  assert {'block_efficiency', 'relative_bandwidth'} <= stats.keys()


def test_methods_agree_through_every_sampling_flag(target, draft):
  flags = (
    '--temperature=0.9',
    '--top_k=40',
    '--top_p=0.9',
    '--min_p=0.01',
    '--seed=7',
    '--batch_size=2',
  )
  plain = _generate(target, 'none', '--method=plain', *flags)
  assert plain['tokens'][0] != plain['tokens'][1]  # a row has its own noise
  assert plain['stats']['stage_forwards'] == {}
  assert plain['stats']['block_efficiency'] == 1
  for method in (
    ['--method=chain'],
    ['--method=tree', '--num_nodes=8', '--width=4', '--rounds=2'],
    ['--method=tree', '--topology=k_ary:2x2'],
    ['--method=staged', '--inner=lookup', '--width=4', '--num_nodes=8'],
  ):
    assert (
      _generate(target, draft, *method, *flags)['tokens'] == plain['tokens']
    )


def test_the_text_itself_drafts_without_a_draft_model(target, ngram):
  flags = ('--prompt=def add(first, second):', '--max_new_tokens=24')
  plain = _generate(target, 'none', '--method=plain', *flags)
  for inner, labels in (
    ('lookup', ['target', 'lookup']),
    ('ngram', ['target', 'ngram']),
    ('ngram+lookup', ['target', 'lookup', 'ngram']),
  ):
    output = _generate(
      target, 'none', f'--inner={inner}', f'--ngram={ngram}', *flags
    )
    assert output['tokens'] == plain['tokens']
    assert output['labels'] == labels
  assert output['stats']['block_efficiency'] > 1


def test_origins_are_marked_and_explained(target, draft, monkeypatch):
  flags = (
    'generate.py',
    f'--target={target}',
    f'--draft={draft}',
    '--inner=lookup',
    '--max_new_tokens=9',
    '--show_origin',
  )
  monkeypatch.setenv('NO_COLOR', '1')
  plain = _run(*flags)
  assert plain.returncode == 0, plain.stderr
  assert 'proposed by' in plain.stdout
  assert '¹ draft' in plain.stdout
  assert '⁰' in plain.stdout.partition('proposed by')[0]
  assert '\x1b' not in plain.stdout
  monkeypatch.delenv('NO_COLOR')
  monkeypatch.setenv('FORCE_COLOR', '1')
  assert '\x1b[30;42m draft \x1b[0m' in _run(*flags).stdout


def test_prompts_of_a_file_are_the_rows_of_a_batch(target, draft, tmp_path):
  file = tmp_path / 'prompts.jsonl'
  lines = [
    json.dumps({'prompt': text}) for text in ('def', 'return first', 'x')
  ]
  file.write_text('\n'.join(lines))
  output = _generate(
    target, draft, f'--prompt_file={file}', '--batch_size=2', '--dtype=bfloat16'
  )
  assert output['prompts'] == ['def', 'return first']
  assert len(output['tokens']) == 2


def test_table_follows_the_text(target, draft):
  result = _run(
    'generate.py',
    f'--target={target}',
    f'--draft={draft}',
    '--prompt=def add',
    '--max_new_tokens=3',
  )
  assert result.returncode == 0, result.stderr
  assert result.stdout.startswith('def add')
  assert 'block efficiency' in result.stdout


def test_benchmark_writes_what_it_prints(target, draft, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('def add(\nreturn first\n')
  output = tmp_path / 'results' / 'one.json'
  result = _run(
    'benchmark.py',
    f'--target={target}',
    f'--draft={draft}',
    f'--prompt_file={prompts}',
    '--max_new_tokens=6',
    '--arms=plain:float32,plain:bfloat16,chain(num_draft_tokens=2|3):bfloat16,'
    'lookup:bfloat16',
    f'--output={output}',
  )
  assert result.returncode == 0, result.stderr
  report = json.loads(output.read_text())
  arms = report['arms']
  assert list(arms) == [
    'plain:float32',
    'plain:bfloat16',
    'chain(num_draft_tokens=2):bfloat16',
    'chain(num_draft_tokens=3):bfloat16',
    'lookup:bfloat16',
  ]
  assert output.with_suffix('.md').read_text() == result.stdout
  assert all(arm in result.stdout for arm in arms)
  assert arms['chain(num_draft_tokens=3):bfloat16']['nodes_per_forward'] == 4
  assert len(report['limits']['bytes_per_second_samples']) == 2
  for arm in arms.values():
    assert arm['new_tokens'] == 12
    assert len(arm['speed_per_batch']) == 2
    rate = arms['plain:float32']['tokens_per_second']
    assert arm['speed'] == pytest.approx(arm['tokens_per_second'] / rate)
    ideal = arm['ideal_seconds_per_target_forward']
    share = ideal / arm['seconds_per_target_forward']
    assert arm['of_memory_limit'] == pytest.approx(share)
    assert arm['compile_seconds'] > 0
    low, high = arm['speed_interval']
    assert low <= high
  assert report['settings']['prompts'] == 'prompts.txt'
  assert str(tmp_path) not in json.dumps(report['settings']['prompts'])


# Many runs in one process: importing takes longer than being refused. Flags are
# defined anew by each run.
_RUN_MANY = """
import contextlib
import io
import json
import runpy
import sys

from absl import app, flags

script, known, results = sys.argv[1], set(flags.FLAGS), []
sys.path.insert(0, script.rpartition('/')[0])
for case in json.loads(sys.argv[2]):
  for name in set(flags.FLAGS) - known:
    delattr(flags.FLAGS, name)
  for module in ('command_line', 'options'):
    sys.modules.pop(module, None)
  sys.argv = [script, *case]
  output, errors, code = io.StringIO(), io.StringIO(), 0
  with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
    try:
      runpy.run_path(script, run_name='__main__')
    except SystemExit as end:
      code = end.code or 0
  results.append((code, output.getvalue(), errors.getvalue()))
print(json.dumps(results))
"""


def _run_many(script, cases):
  """Code, output and errors of each run."""
  path = str(_ROOT / 'scripts' / script)
  cases = [[str(flag) for flag in case] for case in cases]
  result = subprocess.run(
    [sys.executable, '-c', _RUN_MANY, path, json.dumps(cases)],
    capture_output=True,
    text=True,
    check=False,
    env=os.environ | {'HF_HUB_OFFLINE': '1', 'PYTHONPATH': str(_ROOT)},
  )
  assert result.returncode == 0, result.stderr
  return json.loads(result.stdout)


def test_what_is_asked_of_the_text(target, draft):
  """A bias for two tokens, a penalty to have both, a stop that ends it."""
  # The bytes of a byte-level vocabulary come in the order of their characters.
  tokenizer = train_tokenizer([_TEXT], vocab_size=280, context=128)
  letter, line_end = tokenizer.convert_tokens_to_ids(['x', 'Ċ'])
  flags = [
    f'--target={target}',
    '--max_new_tokens=9',
    '--prompt=def',
    f'--logit_bias={letter}:100,{line_end}:99',
    '--repetition_penalty=1.5',
    '--stop=nothing',
    r'--stop=\nxx',
  ]
  chain = [f'--draft={draft}', '--method=chain', '--num_draft_tokens=2']
  json_flags = ['--json', '--log_probs']
  rejection = [*chain, *json_flags, '--temperature=1', '--verify=rejection']
  rejection += ['--children=with_replacement']
  runs = _run_many(
    'generate.py',
    [
      [*flags, '--method=plain', *json_flags],
      [*flags, *chain, *json_flags],
      [*flags, *chain, '--log_probs', '--stream'],
      [*flags, *rejection],
    ],
  )
  assert [code for code, _, _ in runs] == [0] * 4, runs
  plain, drafted, rejected = (
    json.loads(runs[number][1]) for number in (0, 1, 3)
  )
  for output in (plain, drafted, rejected):
    # The penalty makes of 100 less than 99, then of both.
    assert output['tokens'] == [[letter, line_end, letter, letter]]
    assert output['text'] == ['x']
    assert output['finish_reasons'] == ['stop']
    assert output['errors'] == [None]
    np.testing.assert_allclose(
      output['log_probs'], plain['log_probs'], atol=1e-4
    )
  # Without the bias it is no more likely than others.
  assert all(-9 < one < -2 for one in plain['log_probs'][0])
  assert plain['stats']['target_forwards'] == 4
  text, _, table = runs[2][1].partition('\n\n')
  assert text == 'defx'
  assert table.startswith('finish reasons')
  assert 'stop' in table.partition('\n')[0]


_BAD_INPUT = [
  (['--target=no/such-model'], "'no/such-model' is neither a folder nor"),
  (['--prompt='], 'prompt 0 is empty'),
  (['--temperature=-1'], 'temperature must be at least 0, got -1'),
  (['--temperature=nan'], 'temperature must be at least 0, got nan'),
  (['--top_k=0'], 'top_k must be a positive integer, got 0'),
  (['--top_p=1.5'], 'top_p must be above 0 and at most 1, got 1.5'),
  (['--min_p=-0.1'], 'min_p must be between 0 and 1, got -0.1'),
  (['--max_new_tokens=4000'], 'exceed the context of the target, 128'),
  (['--max_new_tokens=-1'], 'max_new_tokens must be at least 0, got -1'),
  (['--num_draft_tokens=0'], '--num_draft_tokens must be at least 1, got 0'),
  (['--batch_size=0'], '--batch_size must be at least 1, got 0'),
  (['--prompt_file=/no/such/file'], '--prompt_file=/no/such/file cannot be'),
  (['--method=chain', '--draft=none'], '--method=chain with --inner=lookup'),
  (['--inner=none'], '--method=staged with --inner=none'),
  (['--topology=chain:4'], 'a fixed topology leaves no room'),
  (['--method=tree', '--topology=star:3'], 'topology file star:3 cannot be'),
  (['--method=tree', '--topology=chain:x'], "topology 'chain:x': expected"),
  (['--width=0'], '--width must be an integer of at least 1, got 0'),
  (['--inner_rounds=0'], '--inner_rounds must be an integer of at least 1'),
  (['--num_nodes=600'], '--capacity must be at least num_nodes=600'),
  (['--calibration=0'], '--calibration must be a number above 0, got 0'),
  (['--ngram=/no/table'], 'there is no n-gram table /no/table'),
  (['--inner=ngram', '--ngram=demo'], 'was built with another tokenizer'),
  (['--lookup_confidence=2'], '--lookup_confidence: confidence needs'),
  (['--show_origin'], 'give one of --stream, --show_origin and --json'),
  (['--stream'], 'give one of --stream, --show_origin and --json'),
  (['--nojson', '--stream', '--batch_size=2'], '--stream shows one prompt'),
  (['--stop='], "the stop string ''"),
  (['--logit_bias=5'], '--logit_bias=5: expected token:number'),
  (['--logit_bias=5:1,x:2'], '--logit_bias=5:1,x:2: expected token:number'),
  (['--logit_bias=280:1'], 'logit_bias has token 280, outside'),
  (['--logit_bias=5:nan'], 'logit_bias must be numbers or -inf'),
  (['--repetition_penalty=0'], 'repetition_penalty must be above 0, got 0'),
  (['--verify=block'], 'verify=block is for chains'),
  (['--children=without_replacement'], 'verify=match wants the best children'),
  (
    ['--verify=rejection', '--children=without_replacement'],
    'needs a drafter with a distribution',
  ),
  (
    ['--method=chain', '--children=with_replacement'],
    'verify=match wants the best children, got children=with_replacement',
  ),
]


@pytest.fixture(scope='module')
def refusals(target, draft):
  common = (f'--target={target}', f'--draft={draft}', '--json')
  common += ('--max_new_tokens=9',)
  return _run_many(
    'generate.py', [(*common, *flags) for flags, _ in _BAD_INPUT]
  )


@pytest.mark.parametrize('number', range(len(_BAD_INPUT)))
def test_bad_input_is_one_line(refusals, number):
  code, output, errors = refusals[number]
  assert code == 2, errors
  assert output == ''
  last = errors.strip().splitlines()[-1]
  assert last.startswith('generate.py: ')
  assert _BAD_INPUT[number][1] in last
  assert 'Traceback' not in errors


_BAD_BENCHMARKS = [
  (['--arms=plain,forest'], "arm 'forest' is not known"),
  (['--arms=chain(width=2)'], 'chain has num_draft_tokens'),
  (['--arms=tree(width=0)'], "arm 'tree(width=0):float32': width must be"),
  (['--arms=transformers'], '--arms needs an arm other than transformers'),
  (['--prompt_bucket=64'], 'no prompt has 33 to 64 tokens'),
  (['--batch_size=3'], '--batch_size must be between 1 and'),
  (['--batch_sizes=1,x'], '--batch_sizes=1,x: expected integers'),
  (['--max_new_tokens=0'], '--max_new_tokens must be at least 1'),
]


def test_bad_benchmarks_are_one_line(target, draft, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('def add(\n')
  common = (f'--target={target}', f'--draft={draft}')
  common += (f'--prompt_file={prompts}', '--max_new_tokens=4')
  runs = _run_many(
    'benchmark.py', [(*common, *flags) for flags, _ in _BAD_BENCHMARKS]
  )
  for (_, message), (code, output, errors) in zip(
    _BAD_BENCHMARKS, runs, strict=True
  ):
    assert code == 2, errors
    assert output == ''
    assert message in errors.strip().splitlines()[-1]
    assert 'Traceback' not in errors


@pytest.fixture
def plan(target, draft, tmp_path):
  """A chain of 2, for this pair and this machine."""
  setup = Setup(
    target=str(target),
    draft=str(draft),
    dtype='float32',
    batch_size=1,
    sampling=Sampling(),
  )
  path = tmp_path / 'plan.json'
  Plan(
    method='chain',
    drafting=DraftSettings(num_draft_tokens=2),
    min_block_efficiency=1.5,
    context=setup.context(),
  ).save(path)
  return path


def test_a_plan_says_how_to_decode(target, draft, plan):
  common = [f'--target={target}', f'--draft={draft}', '--json']
  common += ['--max_new_tokens=9']
  planned, same, batch, *refused = _run_many(
    'generate.py',
    [
      [*common, f'--plan={plan}', *more]
      for more in (
        [],
        ['--num_draft_tokens=2', '--method=chain'],
        ['--batch_size=2'],
        ['--num_draft_tokens=3'],
        ['--method=tree'],
        ['--inner_rounds=2'],
        ['--lookup_confidence=0.5'],
        ['--verify=rejection'],
        ['--draft=none'],
        ['--plan=/no/such/plan'],
      )
    ],
  )
  output = json.loads(planned[1])
  expected = _generate(target, draft, '--method=chain', '--num_draft_tokens=2')
  assert output['tokens'] == expected['tokens']
  counts = ('accepted_histogram', 'stage_forwards', 'origins')
  for name in counts:
    assert output['stats'][name] == expected['stats'][name]
  assert 'warning' not in planned[2]
  assert json.loads(same[1])['tokens'] == output['tokens']
  assert 'plan: warning: batch_size is 2, the plan is for 1' in batch[2]
  messages = (
    '--num_draft_tokens=3 contradicts',
    '--method=tree contradicts',
    '--inner_rounds=2 contradicts',
    '--lookup_confidence=(0.5,) contradicts',
    '--plan is for --verify=match, got rejection',
    'the plan was made for another draft',
    'plan /no/such/plan cannot be read',
  )
  for (code, out, errors), message in zip(refused, messages, strict=True):
    assert (code, out) == (2, '')
    assert message in errors.strip().splitlines()[-1]


def test_what_cannot_be_tuned_is_refused(tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('def add(\n')
  with_prompts = [f'--prompt_file={prompts}']
  cases = [
    ([], '--prompt_file is needed'),
    ([*with_prompts, '--plan=auto'], 'leave out --plan'),
    ([*with_prompts, '--verify=rejection'], 'plans are for --verify=match'),
    ([*with_prompts, '--batch_size=0'], '--batch_size must be at least 1'),
    ([*with_prompts, '--max_new_tokens=2'], 'must be at least 16 to plan'),
  ]
  runs = _run_many('tune.py', [flags for flags, _ in cases])
  for (code, out, errors), (_, message) in zip(runs, cases, strict=True):
    assert (code, out) == (2, '')
    assert message in errors.strip().splitlines()[-1]


@pytest.mark.long
def test_a_tuned_plan_is_found_again(target, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('def add(\nreturn first\n')
  common = (f'--target={target}', '--draft=none', '--max_new_tokens=16')
  tuned = _run('tune.py', *common, f'--prompt_file={prompts}')
  assert tuned.returncode == 0, tuned.stderr
  assert '| plain ' in tuned.stdout
  assert '| lookup N=' in tuned.stdout
  planned = _run('generate.py', *common, '--plan=auto', '--json')
  assert planned.returncode == 0, planned.stderr
  assert 'making it' not in planned.stderr
  plain = _run('generate.py', *common, '--method=plain', '--json')
  tokens = [json.loads(one.stdout)['tokens'] for one in (planned, plain)]
  assert tokens[0] == tokens[1]


def test_unknown_choices_are_listed():
  flags = (['--verify=hope'], ['--children=two'])
  for code, output, errors in _run_many('generate.py', flags):
    assert code == 1
    assert output == ''
    assert 'should be one of' in errors
    assert 'Traceback' not in errors


def test_vocabulary_mismatch_names_both_models(target, tmp_path):
  other = _save(tmp_path / 'other', seed=2, vocab_size=270)
  result = _run('generate.py', f'--target={target}', f'--draft={other}')
  assert result.returncode == 2
  last = result.stderr.strip().splitlines()[-1]
  assert str(target) in last
  assert str(other) in last


def test_the_fallback_is_measured_against_plain_decoding(
  target, draft, tmp_path
):
  prompts, output = tmp_path / 'prompts.txt', tmp_path / 'fallback.json'
  prompts.write_text('def add(first, second):\n')
  flags = [f'--target={target}', f'--draft={draft}', '--max_new_tokens=60']
  flags += [f'--prompt_file={prompts}', '--num_prompts=1']
  result = _run('measure.py', 'fallback', *flags)
  assert result.returncode == 2
  assert '--break_even is needed' in result.stderr
  result = _run(
    'measure.py',
    'fallback',
    *flags,
    '--break_even=1000',
    f'--output={output}',
  )
  assert result.returncode == 0, result.stderr
  (row,) = json.loads(output.read_text())['prompts']
  # One step is enough to see that drafting does not pay.
  assert row['speculative_steps'] == 1
  assert row['same_tokens']
  assert row['seconds'] > 0


def test_each_part_is_measured_into_a_table(target, tmp_path):
  corpus = tmp_path / 'corpus'
  corpus.mkdir()
  for number in range(60):  # some are held out
    (corpus / f'{number}.py').write_text(_TEXT)
  common = ['--repeats=1', f'--target={target}']
  for what, flags, head, rows in (
    ('forward', ['--sizes=2', '--context=32'], 'dtype   | N | ms', 2),
    ('memory', [], 'model  ', 1),
    ('loss', ['--sizes=16', f'--corpus={corpus}'], 'window | nats_per', 1),
  ):
    result = _run('measure.py', what, *common, *flags)
    assert result.returncode == 0, result.stderr
    assert head in result.stdout
    assert len(result.stdout.strip().splitlines()) == 2 + rows
  result = _run('measure.py', 'nothing')
  assert result.returncode == 2
  assert "'nothing' is none of matmul, attention" in result.stderr


def test_batch_sizes_give_a_result_each_and_one_table(target, draft, tmp_path):
  prompts = tmp_path / 'prompts.txt'
  prompts.write_text('def add(\nreturn first\n')
  output = tmp_path / 'one.json'
  result = _run(
    'benchmark.py',
    f'--target={target}',
    f'--draft={draft}',
    f'--prompt_file={prompts}',
    '--max_new_tokens=6',
    '--arms=plain,chain(num_draft_tokens=2)',
    '--batch_sizes=1,2',
    f'--output={output}',
  )
  assert result.returncode == 0, result.stderr
  for size in (1, 2):
    report = json.loads((tmp_path / f'one_b{size}.json').read_text())
    assert report['settings']['batch_size'] == size
    assert report['settings']['batches_measured'] == 2 // size
    plain, chain = report['arms'].values()
    assert plain['predicted_speed'] == 1
    assert chain['predicted_speed'] > 0
  assert not output.exists()
  table = result.stdout.strip().rpartition('\n\n')[2].splitlines()
  assert [row.split('|')[1].strip() for row in table[2:]] == [*'1122']


def test_a_decode_is_shown_and_shown_again(target, draft, tmp_path):
  page, again = tmp_path / 'new' / 'one.html', tmp_path / 'two.html'
  data = page.with_suffix('.json')
  other = tmp_path / 'other.json'
  other.write_text('{"format": "else"}')
  runs = _run_many(
    'visualize.py',
    [
      [
        f'--target={target}',
        f'--draft={draft}',
        '--method=chain',
        '--num_draft_tokens=2',
        '--max_new_tokens=9',
        '--prompt=def <b>add',
        f'--output={page}',
      ],
      [f'--trace={data}', f'--output={again}'],
      [f'--trace={other}', f'--output={again}'],
      [f'--trace={tmp_path / "none.json"}', f'--output={again}'],
      [f'--output={tmp_path / "one.txt"}'],
    ],
  )
  codes, outputs, errors = zip(*runs, strict=True)
  assert codes == (0, 0, 2, 2, 2), errors
  assert outputs[0].split() == [str(data), str(page)]
  trace = Trace.from_json(data.read_text())
  assert len(trace.tokens) == 9
  assert trace.prompt == 'def <b>add'
  assert trace.stage_forwards['draft'] == 2 * len(trace.blocks)
  assert trace.log_probs is not None
  assert page.read_text('utf-8') == again.read_text('utf-8')
  assert '<b>add' not in page.read_text('utf-8')
  assert "no JSON object of format 'specdec trace 1'" in errors[2]
  assert f'--trace={tmp_path / "none.json"} cannot be read' in errors[3]
  assert 'one.txt must end in .html' in errors[4]
