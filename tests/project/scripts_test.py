"""The command lines, end to end, on a tiny pair of their own."""

import builtins
import contextlib
import dataclasses
import inspect
import io
import json
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import types

import command_lines
import numpy as np
import plans
import pytest
import refusals
import tiny_demo

import specdec
from specdec.models import extras
from specdec.models import waiting
from specdec.models.checkpoints import hub
from specdec.models.lab import task as task_lib
from specdec.models.lab.bench import times
from specdec.models.lab.bench import timing
from specdec.models.lab.tune import plan_lookup
from specdec.models.nn import sharding as sharding_lib
from specdec.models.serve import app as app_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import generator as generator_lib
from specdec.models.text import settings as settings_lib
from specdec.models.text import text_decoding
from specdec.tree import topology as topology_lib

_SCRIPTS = pathlib.Path(__file__).parents[2] / 'scripts'
_TEXT = 'def add(first, second):\n  return first + second\n' * 20
_CHAIN = ('--method=chain', '--num_draft_tokens=2')
_TEMPLATE = """\
{% for one in messages %}{{ one['role'][0] }}:{{ one['content'] }}
{% endfor %}a:"""


@pytest.fixture(scope='module')
def target():
  return tiny_demo.folders()['demo']


@pytest.fixture(scope='module')
def pair(target):
  """The flags of a target and its draft, and of short texts."""
  draft = tiny_demo.folders()['demo-draft']
  return f'--target={target}', f'--draft={draft}', '--max_new_tokens=9'


@pytest.fixture(scope='module')
def tokenizer(target):
  return hub.locate(target).tokenizer


def _with_template(target, folder, template):
  """The flag of a target that has a chat template."""
  shutil.copytree(target, folder)
  (folder / 'chat_template.jinja').write_text(template)
  return f'--target={folder}'


@pytest.fixture(scope='module')
def instruct(tmp_path_factory, target, pair):
  """The flags of the pair; its target has a chat template."""
  folder = tmp_path_factory.mktemp('instruct') / 'target'
  return _with_template(target, folder, _TEMPLATE), *pair[1:], *_CHAIN


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
  folder = tmp_path_factory.mktemp('corpus')
  for number in range(60):  # some are held out
    (folder / f'{number}.py').write_text(_TEXT)
  return folder


@pytest.fixture
def prompts(tmp_path):
  file = tmp_path / 'prompts.txt'
  file.write_text('def add(\nreturn first\n')
  return file


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
  monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', True)


@pytest.fixture(name='waits')
def _waits(monkeypatch):
  """Lines that tell a user what takes long."""
  waits = []

  @contextlib.contextmanager
  def announced(what):
    waits.append(what)
    yield

  monkeypatch.setattr(waiting, 'announced', announced)
  return waits


def _output(script, *flags):
  ended = command_lines.run(script, *flags)
  assert ended.code == 0, ended.errors
  return ended.output


def _generate(*flags):
  return json.loads(_output('generate.py', '--json', *flags))


def test_json_holds_texts_tokens_and_statistics(pair):
  output = _generate(*pair, *_CHAIN, '--prompt=def add', '--log_probs')
  stats = output['stats']
  assert len(output['tokens'][0]) == stats['new_tokens'] == 9
  assert ''.join(output['pieces'][0]) == output['text'][0]
  assert len(output['log_probs'][0]) == 9
  assert max(output['log_probs'][0]) <= 0
  assert stats['stage_forwards'] == {'draft': 2 * stats['target_forwards']}
  counts = [output['origins'][0].count(origin) for origin in (0, 1)]
  assert stats['origins'] == dict(zip(output['labels'], counts, strict=True))
  rate = stats['new_tokens'] / stats['seconds']
  assert stats['tokens_per_second'] == pytest.approx(rate)


_SAMPLING = {'temperature': 0.9, 'top_k': 40, 'top_p': 0.9, 'min_p': 0.01}
_SAMPLING |= {'repetition_penalty': 1.5}
_OPTIONS = {'seed': 7, 'verify': 'rejection', 'children': 'with_replacement'}
_OPTIONS |= {'break_even': 2.5, 'max_new_tokens': 9}
_BIASED = specdec.Sampling(logit_bias={3: 100.0, 4: -np.inf}, **_SAMPLING)
_as_flags = lambda values: ' '.join(f'--{k}={v}' for k, v in values.items())

# Flags of generate.py, and the arguments of `specdec.load` and `stream`.
_ARGUMENTS = {
  '--target=a --revision=b': {'target': 'a', 'revision': 'b', 'draft': None},
  '--draft=c': {'draft': 'c'},
  '--draft=none': {'draft': None},
  '--head=d': {'head': 'd', 'draft': None},
  '--head=d --draft=none': {'head': 'd', 'draft': None},
  '--head=none': {'head': None, 'draft': 'demo'},
  '--dtype=int4': {'dtype': 'int4', 'draft_dtype': None},
  '--draft_dtype=stored': {'draft_dtype': 'stored'},
  '--draft_vocab=32': {'draft_vocab': 32},
  '--draft_vocab=2:counts.npy': {'draft_vocab': [0, 2]},
  '--cpu_kernels=auto': {'cpu_kernels': True},
  '--cpu_kernels=off': {'cpu_kernels': False},
  '--mesh=data:1': {'mesh': sharding_lib.make_mesh({'model': 1})},
  '--draft_mesh=sharded': {'draft_mesh': 'sharded', 'mesh': None},
  r'--eos=5 --eos=\n': {'eos_ids': [5, '\n']},
  '--eos=none': {'eos_ids': []},
  '--method=tree --topology=k_ary:2x2': {
    'method': 'tree',
    'drafting': settings_lib.with_options(
      settings_lib.DraftSettings(topology=topology_lib.k_ary(2, 2)),
      settings_lib.ON_CPU,
    ),
  },
  f'{_as_flags(_SAMPLING)} --logit_bias=3:100,4:-inf': {'sampling': _BIASED},
  f'{_as_flags(_OPTIONS)} --log_probs': _OPTIONS | {'log_probs': True},
  r'--stop=\nx --stop=no': {'stop': ['\nx', 'no']},
  '--prompt_file=prompts.txt --batch_size=2': {
    'prompts': ['def add(', 'return first']
  },
}


@pytest.mark.usefixtures('prompts')
@pytest.mark.parametrize('flags', _ARGUMENTS)
def test_flags_become_arguments(flags, tmp_path, monkeypatch):
  asked = {}

  def stream(prompts, **options):
    asked.update(options, prompts=prompts)
    raise ValueError('that is all')

  def load(**options):
    asked.update(options)
    pair = types.SimpleNamespace(drafting_model=None)
    return types.SimpleNamespace(stream=stream, pair=pair)

  monkeypatch.setattr(generator_lib, 'load', load)
  monkeypatch.chdir(tmp_path)
  np.save('counts.npy', [5, 0, 9])
  given = ['--dtype=float32', *flags.split()]
  assert command_lines.refusal('generate.py', *given).endswith('that is all')
  expected = _ARGUMENTS[flags]
  assert {name: asked[name] for name in expected} == expected


def test_every_field_of_a_choice_has_a_flag_and_is_an_argument():
  """And a row above; a field of another name would be a second spelling."""
  rows = ' '.join(_ARGUMENTS)
  names = {field.name for field in dataclasses.fields(choice_lib.ModelChoice)}
  assert len(names) == len(choice_lib.OPTIONS)
  for flag, option in choice_lib.OPTIONS.items():
    assert f'--{flag}=' in rows
    assert f'\n  {option.field.name}: ' in inspect.getdoc(specdec.load)
  assert names < inspect.signature(specdec.load).parameters.keys()
  with pytest.raises(TypeError, match="unexpected keyword argument 'dtpye'"):
    specdec.load(dtpye='float32')


def test_the_text_itself_drafts_without_a_draft_model(target, corpus, tmp_path):
  table = tmp_path / 'table.safetensors'
  flags = [f'--draft={target}', '--num_tokens=0', f'--corpus={corpus}']
  flags += ['--min_count=1', f'--workdir={tmp_path / "work"}']
  _output('build_ngram.py', *flags, f'--output={table}')
  flags = [f'--target={target}', '--draft=none', '--max_new_tokens=24']
  flags += ['--prompt=def add(first, second):', f'--ngram={table}']
  plain = _generate(*flags, '--method=plain')
  output = _generate(*flags, '--inner=ngram+lookup')
  assert output['tokens'] == plain['tokens']
  assert output['labels'] == ['target', 'lookup', 'ngram']
  assert output['stats']['block_efficiency'] > 1


def test_a_table_follows_the_text_and_origins_are_marked(pair, monkeypatch):
  flags = ('generate.py', *pair, *_CHAIN, '--prompt=def add')
  text = _output(*flags)
  assert text.startswith('def add')
  assert 'block efficiency' in text
  assert 'plain decoding' not in text
  flags += ('--show_origin',)
  monkeypatch.setenv('NO_COLOR', '1')
  plain = _output(*flags)
  assert 'proposed by' in plain
  assert '¹ draft' in plain
  assert '⁰' in plain.partition('proposed by')[0]
  assert '\x1b' not in plain
  monkeypatch.delenv('NO_COLOR')
  monkeypatch.setenv('FORCE_COLOR', '1')
  assert '\x1b[30;42m draft \x1b[0m' in _output(*flags)


def test_a_comparison_says_what_it_waits_for(pair, waits):
  output = _output(
    'generate.py', *pair, *_CHAIN, '--prompt=def add', '--compare'
  )
  assert output.endswith('times as fast as plain decoding, the same tokens\n')
  both = 'chain', 'plain'
  names = ['chain', *(f'{way}, {n} of 3' for n in (1, 2, 3) for way in both)]
  phases = 'compiling and reading the prompt', 'decoding'
  expected = [f'{name}: {phase}' for name in names for phase in phases]
  assert [wait for wait in waits if ': ' in wait] == expected


def test_a_text_is_shown_while_it_grows(pair, tokenizer, waits):
  """It ends before a stop string; the tokens of the string count."""
  letter, line_end = tokenizer.convert_tokens_to_ids(['x', 'Ċ'])
  flags = [*pair, *_CHAIN, '--prompt=def', '--repetition_penalty=1.5']
  flags += [f'--logit_bias={letter}:1000,{line_end}:990', r'--stop=\nxx']
  text, _, table = _output('generate.py', *flags, '--stream').partition('\n\n')
  assert text == 'defx'
  assert waits[-1] == 'compiling and reading the prompt'
  assert re.match('finish reasons .*stop', table)


def _converse(monkeypatch, lines, *flags):
  """Output of chat.py when a user types these lines, answer by answer."""
  piped = '\n'.join(lines).encode('utf-8', 'surrogateescape')
  # As on a system with another encoding.
  stdin = io.TextIOWrapper(io.BytesIO(piped), 'ascii')
  monkeypatch.setattr('sys.stdin', stdin)
  output = _output('chat.py', '--context=64', *flags)
  first, *answers = output.split('> ')
  assert 'start over' in first
  return answers


def test_a_conversation(instruct, monkeypatch):
  """A message that does not fit is refused in a line, and it goes on."""
  lines = ['/show', 'def', '/show', '/new', 'x ' * 99, 'def', '/quit', 'add']
  help_, first, shown, _, refused, last, _ = _converse(
    monkeypatch, lines, *instruct, '--system=x'
  )
  ask = [*instruct, '--chat', '--prompt=def']
  assert _generate(*ask)['prompts'] == ['u:def\na:']
  asked = _generate(*ask, '--system=x')
  assert asked['prompts'] == ['s:x\nu:def\na:']
  cut = ' [cut by --max_new_tokens or --context]\n'
  assert first == last == asked['text'][0] + cut
  assert help_.startswith('/show: who proposed what')
  assert 'proposed by  ⁰ target ' in shown
  # The system message is known from before anything was typed.
  read, _, length, *_ = shown.split('read ')[1].split()
  assert 0 < int(read) < int(length) == len(asked['prompt_tokens'][0])
  assert 'has room for 64; begin another one' in refused
  assert refused.count('\n') == 1
  assert refused.endswith('your message is left out, /new starts over\n')


def test_an_interrupt_ends_an_answer_and_not_the_conversation(
  instruct, monkeypatch
):
  """Neither does one while nothing is decoded."""
  step_by_step, read = text_decoding.Chat.said, builtins.input
  interrupts = [KeyboardInterrupt]

  def interrupted(chat):
    for number, new in enumerate(step_by_step(chat)):
      if number == 1:
        signal.raise_signal(signal.SIGINT)
      yield new

  def typed(prompt):
    line = read(prompt)
    if interrupts:
      raise interrupts.pop()
    return line

  monkeypatch.setattr(text_decoding.Chat, 'said', interrupted)
  monkeypatch.setattr(builtins, 'input', typed)
  before = signal.getsignal(signal.SIGINT)
  lines = ['lost', 'def', 'add']
  dropped, *answers, end = _converse(monkeypatch, lines, *instruct)
  assert signal.getsignal(signal.SIGINT) is before
  assert '/quit' in dropped
  assert [answer.endswith(' [stopped]\n') for answer in answers] == [True, True]
  assert end == '\n'


def test_reasoning_is_shown_apart(target, instruct, tmp_path, monkeypatch):
  """The template begins the reasoning, as Qwen 3.5's does."""
  template = _TEMPLATE + '{% if add_generation_prompt %}<think>{% endif %}'
  template += '{# </think> #}'
  thinks = _with_template(target, tmp_path / 'thinks', template)
  flags = [thinks, *instruct[1:]]
  said = _generate(*flags, '--chat', '--prompt=def')
  assert said['text'] == ['']
  assert said['reasoning'] != ['']
  shown = '> '.join(_converse(monkeypatch, ['def'], *flags))
  assert shown.startswith('\n[reasoning] ' + said['reasoning'][0])
  flags += ['--chat', '--prompt=def', '--stream']
  assert '\n[reasoning] ' + said['reasoning'][0] in _output(
    'generate.py', *flags
  )


def test_no_message_ends_a_conversation(
  target, instruct, tmp_path, monkeypatch
):
  """Bytes that are not UTF-8, and an answer that the template refuses."""
  template = "{% for one in messages %}{% if not one['content'] %}"
  template += "{{ raise_exception('it is empty') }}{% endif %}"
  template += "{{ one['content'] }}{% endfor %}"
  strict = _with_template(target, tmp_path / 'strict', template)
  flags = [strict, *instruct[1:], '--max_new_tokens=0']
  lines = ['caf\udce9', 'def', 'add', 'caf\udce9', '/new', 'def']
  broken, first, left_out, again, new, last, _ = _converse(
    monkeypatch, lines, *flags
  )
  for text in (broken, again):
    assert 'message 0, content has the lone surrogate' in text
    assert text.endswith('your message is left out, /new starts over\n')
  cut = ' [cut by --max_new_tokens or --context]\n'
  assert (first, new, last) == (cut, '', cut)
  assert left_out.startswith('[your last message, without an answer, is left')
  assert left_out.endswith(f': it is empty]\n{cut}')
  # Nor does an answer that goes wrong.
  result_of, errors = text_decoding.Chat.result, ['the target gave NaN']
  wrong = lambda chat: dataclasses.replace(result_of(chat), errors=errors)
  monkeypatch.setattr(text_decoding.Chat, 'result', wrong)
  *answers, _ = _converse(monkeypatch, ['def', 'add'], *instruct)
  assert ['the target gave NaN]' in text for text in answers] == [True, True]


# The tests of its parts list what the library refuses: here is how
# scripts say it, and what they refuse themselves.
def test_bad_input_is_one_line(pair, prompts):
  assert '--prompt_file is needed' in command_lines.refusal('tune.py')
  for script, flags, message in refusals.of('project', 'script'):
    script, *always = script.split()
    flags = [*always, *pair, f'--prompt_file={prompts}', *flags.split()]
    assert re.search(message, command_lines.refusal(script, *flags))


def test_benchmark_writes_what_it_prints(pair, prompts, tmp_path, monkeypatch):
  """A result per batch size, and one table."""
  # The rates of the machine are not looked at.
  monkeypatch.setattr(times, '_READ_BYTES', {'default': 1 << 20})
  output = tmp_path / 'results' / 'one.json'
  plain, chain = 'plain:bfloat16', 'chain(num_draft_tokens=2):float32'
  flags = [*pair, f'--prompt_file={prompts}', f'--output={output}']
  flags += [f'--arms={plain},{chain}', '--batch_sizes=1,2']
  printed = _output('benchmark.py', *flags)
  assert not output.exists()
  for size in (1, 2):
    path = output.with_stem(f'one_b{size}')
    assert path.with_suffix('.md').read_text() in printed
    report = json.loads(path.read_text())
    arms, settings = report['arms'], report['settings']
    assert list(arms) == [plain, chain]
    assert settings['prompts'] == 'prompts.txt'
    assert settings['batch_size'] * settings['batches_measured'] == 2
    assert len(report['limits']['bytes_per_second_samples']) == 2 // size
    assert arms[chain]['nodes_per_forward'] == 3
    names = {'speed', 'speed_interval', 'of_memory_limit', 'flips'}
    for arm in arms.values():
      assert names <= arm.keys()
      assert arm['new_tokens'] == 18


def test_turns_are_decoded_and_counted_by_category(
  instruct, tokenizer, tmp_path, monkeypatch
):
  """After the answers of plain decoding; `generate.py` gives the same ones."""
  monkeypatch.setattr(times, '_READ_BYTES', {'default': 1 << 20})
  decode, seen = timing.time_arms, []

  def time_arms(arms, batches, **options):
    seen.extend(batches)
    return decode(arms, batches, **options)

  monkeypatch.setattr(timing, 'time_arms', time_arms)
  asked = {'code': [['def', 'x'], ['add', 'y']], 'talk': [['first']]}
  file, output = tmp_path / 'asked.jsonl', tmp_path / 'one.json'
  file.write_text(
    '\n'.join(
      json.dumps({'category': name, 'turns': turns, 'question_id': 1})
      for name, questions in asked.items()
      for turns in questions
    )
  )
  flags = f'--prompt_file={file}', f'--output={output}', '--num_prompts=1'
  flags += (f'--plots={tmp_path}',)
  flags += ('--arms=plain,chain(num_draft_tokens=2)',)
  # The target drafts for itself, so that all that is drafted is accepted.
  flags += (instruct[0].replace('target', 'draft', 1),)
  printed = _output('benchmark.py', *instruct[:3], *flags)
  answer = _generate(*instruct[:3], '--chat', '--prompt=def', '--method=plain')
  texts = 'u:def\na:', 'u:first\na:'
  texts += (f'{texts[0]}{answer["text"][0]}\nu:x\na:',)
  assert seen == [[tokenizer(text)['input_ids']] for text in texts]
  report = json.loads(output.read_text())
  categories = report['categories']
  assert list(categories) == ['code', 'talk']
  for arm, pooled in report['arms'].items():
    by_category = [arms[arm] for arms in categories.values()]
    assert [figures['new_tokens'] for figures in by_category] == [18, 9]
    assert [figures['flips'] for figures in by_category] == [[], []]
    for name in ('new_tokens', 'target_forwards'):
      assert sum(figures[name] for figures in by_category) == pooled[name]
    accepted = [0, 0, 3] if arm.startswith('chain') else [9]
    assert categories['talk'][arm]['accepted_histogram'] == accepted
    mean = np.mean([figures['speed'] for figures in by_category])
    assert report['mean_over_categories'][arm]['speed'] == pytest.approx(mean)
  for table in (printed, output.with_suffix('.md').read_text()):
    for name in (*categories, 'all, pooled', 'mean of categories'):
      assert len(re.findall(rf'^\| {name} ', table, re.M)) == 1 + 2
  assert (tmp_path / 'one_categories.png').stat().st_size > 0


def test_a_plan_says_how_to_decode(pair, tmp_path):
  """A chain of 2, for this pair and this machine."""
  names = dict(flag.lstrip('-').split('=') for flag in pair[:2])
  choice = choice_lib.ModelChoice(**names, dtype='float32')
  context = plan_lookup.context_of(task_lib.Task(models=choice))
  path = tmp_path / 'plan.json'
  plans.plan(context, plans.way('chain', num_draft_tokens=2)).save(path)
  flags = [*pair, '--prompt=def add', '--json', f'--plan={path}']
  planned = command_lines.run('generate.py', *flags)
  assert 'warning' not in planned.errors
  output, expected = json.loads(planned.output), _generate(*flags, *_CHAIN)
  for name in ('accepted_histogram', 'stage_forwards', 'origins'):
    assert output['stats'][name] == expected['stats'][name]
  for flag, message in {
    '--num_draft_tokens=3': '--num_draft_tokens=3 contradicts',
    '--method=tree': '--method=tree contradicts',
    '--lookup_confidence=0.5': '--lookup_confidence=(0.5,) contradicts',
    '--verify=rejection': '--plan is for --verify=match, got rejection',
  }.items():
    assert message in command_lines.refusal('generate.py', *flags, flag)


def test_flags_of_the_endpoint_become_settings(pair, monkeypatch):
  readers = []
  run = lambda server: readers.append(server.reader)
  monkeypatch.setattr(app_lib.Server, 'run', run)
  flags = '--temperature=0.5', '--context=64', '--queue_size=3', '--port=0'
  _output('serve.py', *pair, *_CHAIN, *flags, '--batch_size=2')
  (reader,) = readers
  engine = reader.engine
  assert (engine.method, engine.context, engine.most_choices) == (
    'chain',
    64,
    5,
  )
  assert reader.model == pair[0].rpartition('/')[2]
  assert reader.sampling.temperature == 0.5
  assert (reader.max_new_tokens, reader.seed) == (9, None)
  assert engine._drafters['chain'].max_depth == 2
  _output('serve.py', *pair, '--method=plain', '--seed=5')
  assert (readers[1].seed, readers[1].engine.method) == (5, 'plain')
  hosts = '--coordinator=localhost:1', '--mesh=data:2', '--process_id=0'
  refused = command_lines.refusal('serve.py', *hosts, '--num_processes=2')
  assert 'requests come to one host' in refused
  # Without the extra.
  monkeypatch.delitem(sys.modules, 'specdec.models.serve.app')
  monkeypatch.delattr('specdec.models.serve.app')
  monkeypatch.setitem(sys.modules, 'uvicorn', None)
  refused = command_lines.refusal('serve.py', *pair, '--method=plain')
  assert f'uvicorn is needed: {extras.command("serve")}' in refused


@pytest.mark.long
def test_a_tuned_plan_is_found_again(target, prompts, tmp_path, monkeypatch):
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
  common = (f'--target={target}', '--draft=none', '--max_new_tokens=16')
  samples = f'--prompt_file={prompts}', '--plan_seconds=9'
  assert '| plain ' in _output('tune.py', *common, *samples)
  planned = command_lines.run('generate.py', *common, '--plan=auto', '--json')
  assert planned.code == 0, planned.errors
  assert 'making it' not in planned.errors
  plain = _generate(*common, '--method=plain')
  assert json.loads(planned.output)['tokens'] == plain['tokens']


def test_what_is_measured(pair, corpus, tmp_path):
  output = tmp_path / 'rows.json'
  for flags, head, rows in (
    ('forward --sizes=2 --context=32', 'dtype   | N | ms', 2),
    ('forward --sizes=1 --random_weights --context=32', '| per_rea', 1),
    ('forward --sizes=1 --of_draft --context=32', '| N | ms', 1),
    (f'loss --sizes=16 --corpus={corpus}', 'window | nats_per', 1),
  ):
    flags = [*flags.split(), '--repeats=1', f'--output={output}', *pair[:2]]
    table = _output('measure.py', *flags)
    assert head in table
    assert len(table.strip().splitlines()) == 2 + rows
    assert len(json.loads(output.read_text())['rows']) == rows


def test_a_decode_is_shown_and_shown_again(pair, tmp_path):
  page, again = tmp_path / 'new' / 'one.html', tmp_path / 'two.html'
  data = page.with_suffix('.json')
  show = ('visualize.py', f'--output={again}')
  given = ('--prompt=def <b>add', f'--output={page}')
  printed = _output(*show, *pair, *_CHAIN, *given)
  assert printed.split() == [str(data), str(page)]
  trace = specdec.Trace.from_json(data.read_text())
  assert (len(trace.tokens), trace.prompt) == (9, 'def <b>add')
  _output(*show, f'--trace={data}')
  assert page.read_text('utf-8') == again.read_text('utf-8')
  assert '<b>add' not in page.read_text('utf-8')
  (tmp_path / 'other.json').write_text('{"format": "else"}')
  for flag, message in (
    ('--trace=other.json', "not a JSON object of format 'specdec trace 1'"),
    ('--trace=none.json', 'none.json cannot be read'),
    ('--output=one.txt', 'one.txt must end in .html'),
  ):
    flag = flag.replace('=', f'={tmp_path}/')
    assert message in command_lines.refusal(*show, flag)


def test_messages_are_plain_lines():
  """They say neither when nor where in the code they were written."""
  program = (
    'import command_line\nfrom absl import logging\n'
    "command_line.run(lambda: logging.warning('%d rows are left', 2))\n"
  )
  ended = subprocess.run(
    [sys.executable, '-c', program],
    cwd=_SCRIPTS,
    capture_output=True,
    text=True,
    check=True,
  )
  assert ended.stderr == '2 rows are left\n'
