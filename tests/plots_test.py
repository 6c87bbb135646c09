"""Pictures of a record: that they are there, and show what it says."""

import importlib.util
import json

import pytest

from models.bench import plots

_PEER = 'transformers:float32'


def _arm(rate, speed, *, interval=True):
  return {
    'tokens_per_second': rate,
    'tokens_per_second_interval': [0.9 * rate, 1.2 * rate]
    if interval
    else None,
    'speed': speed,
    'speed_interval': [0.9 * speed, 1.2 * speed] if interval else None,
    'speed_per_batch': [0.5 * speed, speed, 2 * speed],
    'arithmetic_intensity': 0.5 * speed,
    'flops_per_second': 1e9 * speed,
  }


def _record(arms):
  return {
    'machine': {
      'platform': 'cpu',
      'device': 'cpu',
      'processor': 'A processor',
      'cores': 2,
    },
    'settings': {
      'target': 'demo',
      'temperature': 1.0,
      'top_k': 50,
      'batch_size': 1,
      'batches_measured': 3,
      'max_new_tokens': 64,
    },
    'limits': {
      'bytes_per_second': 2e10,
      'flops_per_second': {'float32': 1e11, 'bfloat16': 3e11},
    },
    'arms': arms,
  }


_ARMS = {
  'plain:float32': _arm(10.0, 1.0),
  'tree(num_nodes=8,rounds=2):bfloat16': _arm(31.5, 3.15),
  _PEER: _arm(8.0, 0.8, interval=False),
}


@pytest.fixture
def _needs_matplotlib():
  pytest.importorskip('matplotlib')


def _texts(figure):
  from matplotlib.text import Text

  return [one.get_text() for one in figure.findobj(Text) if one.get_text()]


@pytest.mark.usefixtures('_needs_matplotlib')
def test_three_files_are_drawn(tmp_path):
  record = json.loads(json.dumps(_record(_ARMS)))
  files = plots.draw(record, tmp_path, 'folder/result.json')
  assert [file.name for file in files] == [
    'result_tokens_per_second.png',
    'result_speeds.png',
    'result_roofline.png',
  ]
  for file in files:
    assert file.read_bytes().startswith(b'\x89PNG')


@pytest.mark.usefixtures('_needs_matplotlib')
def test_lines_go_through_the_records_of_all_batch_sizes(monkeypatch, tmp_path):
  from matplotlib.figure import Figure

  drawn = []
  monkeypatch.setattr(
    Figure, 'savefig', lambda self, file, **_: drawn.append((self, file))
  )
  records = {
    size: _record(
      {
        'plain:float32': _arm(10.0 * size, 1.0) | {'predicted_speed': 1.0},
        'tree:float32': _arm(30.0, 3.0 / size)
        | {'predicted_speed': 2.0 / size},
      }
    )
    for size in (1, 4)
  }
  file = plots.draw_batch_sizes(records, tmp_path, 'folder/result.json')
  assert file.name == 'result_batch_sizes.png'
  ((figure, saved),) = drawn
  assert saved == file
  rates, speeds = figure.axes
  lines = lambda axes: [list(line.get_ydata()) for line in axes.lines]
  assert lines(rates) == [[10, 40], [30, 30]]
  assert lines(speeds) == [[1, 1], [1, 1], [3, 0.75], [2, 0.5]]
  assert 'batch' not in figure.get_suptitle()


@pytest.mark.usefixtures('_needs_matplotlib')
def test_bars_are_as_long_as_the_rates():
  figure = plots._draw_rates(_record(_ARMS))
  bars = figure.axes[0].patches
  assert [bar.get_width() for bar in bars] == [10, 31.5, 8]
  texts = _texts(figure)
  assert '31.5  (3.15x)' in texts
  assert 'tree(num_nodes=8,rounds=2), bfloat16' in texts
  title = texts[-1]
  assert 'A processor, 2 cores; target demo, bfloat16 and float32' in title
  assert 'T = 1, top-k 50, batch 1, 3 prompts' in title


@pytest.mark.usefixtures('_needs_matplotlib')
def test_every_prompt_is_in_a_histogram():
  figure = plots._draw_speeds(_record(_ARMS))
  assert len(figure.axes) == 2  # the baseline has none
  for axes in figure.axes:
    heights = [bar.get_height() for bar in axes.containers[0]]
    assert sum(heights) == 3
  many = {
    f'chain(num_draft_tokens={n}):float32': _arm(n, n) for n in range(1, 9)
  }
  figure = plots._draw_speeds(_record(many))
  assert sum(axes.get_visible() for axes in figure.axes) == 7


@pytest.mark.usefixtures('_needs_matplotlib')
def test_arms_lie_under_their_roofs():
  axes = plots._draw_roofline(_record(_ARMS)).axes[0]
  by_label = {line.get_label(): line for line in axes.lines}
  point = by_label['tree(num_nodes=8,rounds=2), bfloat16: 1.6']
  assert (*point.get_xdata(), *point.get_ydata()) == (1.575, 3.15)
  roof = axes.lines[0]
  for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True):
    assert y == pytest.approx(min(20 * x, 300))


@pytest.mark.usefixtures('_needs_matplotlib')
def test_one_dtype_is_named_once():
  arms = {'plain:float32': _arm(1, 1), 'chain:float32': _arm(2, 2)}
  texts = _texts(plots._draw_rates(_record(arms)))
  assert 'chain' in texts


def test_without_matplotlib_the_remedy_is_named(monkeypatch, tmp_path, capsys):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match='pip install matplotlib'):
    plots.choose_folder(str(tmp_path), None)
  assert plots.choose_folder(None, str(tmp_path / 'one.json')) is None
  assert 'pip install matplotlib' in capsys.readouterr().err
  assert plots.choose_folder(None, None) is None


def test_pictures_go_where_they_are_asked_for(monkeypatch, tmp_path):
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  new = tmp_path / 'new'
  assert plots.choose_folder(str(new), 'elsewhere/one.json') == new
  assert new.is_dir()
  output = str(tmp_path / 'one.json')
  assert plots.choose_folder(None, output) == tmp_path
