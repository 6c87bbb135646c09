"""The script of the cost model, its tables and its pictures."""

import json
import pathlib
import subprocess
import sys

import pytest

from models.bench import machine as machine_limits
from models.cost_report import pictures
from models.cost_report import report
from specdec.cost_model import Deployment
from specdec.cost_model import HARDWARE
from specdec.cost_model import MODELS

_ROOT = pathlib.Path(__file__).parents[1]


def _run(*flags):
  return subprocess.run(
    [sys.executable, _ROOT / 'scripts' / 'cost_model.py', *flags],
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.fixture(scope='module')
def figures():
  deployment = Deployment(
    target=MODELS['llama-3-70b'],
    draft=MODELS['llama-3-8b'],
    hardware=HARDWARE['h200'].times(8),
  )
  return report.run(deployment, acceptance=0.8, context=2048)


def test_the_script_prints_and_draws(tmp_path):
  pytest.importorskip('matplotlib')
  result = _run(
    f'--target={_ROOT / "models" / "demo" / "target"}',
    '--draft=none',
    '--hardware=rtx-4090',
    '--devices=2',
    f'--out={tmp_path / "new"}',
  )
  assert result.returncode == 0, result.stderr
  record = json.loads((tmp_path / 'new' / 'cost_model.json').read_text())
  assert record['setting'] == {
    'target': 'target',
    'draft': None,
    'hardware': '2 x rtx-4090',
    'acceptance': 0.8,
  }
  assert record['settings']['context'] == 2048
  files = sorted(tmp_path.glob('new/*.png'))
  assert len(files) == 7
  for file in files:
    assert file.read_bytes().startswith(b'\x89PNG')
    assert str(file) in result.stdout
  for part in 'abcdef':
    assert f'## ({part}) ' in result.stdout


def test_unknown_names_are_refused():
  result = _run('--target=llama-9')
  assert result.returncode == 2
  assert '--target=llama-9 is no folder with a config.json' in result.stderr
  assert 'Traceback' not in result.stderr


def test_the_table_of_options(figures):
  text = report.to_markdown(figures)
  rows = [
    [cell.strip() for cell in line.split('|')[1:-1]]
    for line in text.splitlines()
    if line.startswith('|')
  ]
  assert ['2K', 'KV cache read', '0.671', '6.71', '10.00'] in rows
  assert ['128K', 'KV cache read', '42.95', '429.50', '10.00'] in rows
  assert ['2K', 'all', '139.94', '145.98', '1.04'] in rows
  assert ['128K', 'all', '182.22', '568.77', '3.12'] in rows
  assert 'Option 2 moves 1.5 times the bytes at 25,001 tokens.' in text
  assert 'Option 2 moves 2 times the bytes at 53,127 tokens.' in text


def test_figures_survive_json(figures):
  # Keys that are numbers become text, which pictures do not look at.
  assert json.loads(json.dumps(figures))['roofs'] == figures['roofs']


def test_lines_are_those_of_the_figures(figures):
  pytest.importorskip('matplotlib')
  study = figures['by_batch_size']
  axes = pictures._by_batch_size(figures).axes[0]
  by_label = {line.get_label(): line for line in axes.lines}
  for label, values in study['lines'].items():
    assert list(by_label[label].get_xdata()) == study['x']
    assert list(by_label[label].get_ydata()) == values
  # Told apart without colour.
  looks = {
    (line.get_linestyle(), line.get_marker())
    for label, line in by_label.items()
    if label in study['lines']
  }
  assert len(looks) == len(study['lines'])


def test_mixtures_are_left_out_where_their_dtype_is_unknown():
  deployment = Deployment(
    target=MODELS['gpt2'], draft=None, hardware=HARDWARE['a100']
  )
  figures = report.run(deployment, acceptance=0.5, context=0)
  names = [row['model'] for row in figures['by_experts']['rows']]
  assert names == ['mixtral-8x7b', 'qwen3-30b-a3b']


def test_this_machine_is_measured(monkeypatch):
  class Limits:
    samples = 0

    def __init__(self, dtypes):
      self.dtypes = dtypes

    def sample(self):
      Limits.samples += 1

    def summary(self):
      rates = dict.fromkeys(self.dtypes, 7.0)
      return {'bytes_per_second': 3.0, 'flops_per_second': rates}

  monkeypatch.setattr(machine_limits, 'MachineLimits', Limits)
  found = machine_limits.this_machine(['float32'], samples=4)
  assert Limits.samples == 4
  assert found.bytes_per_second == 3
  assert found.flops_per_second == {'float32': 7}
