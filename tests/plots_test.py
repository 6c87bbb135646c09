"""Pictures of a record: that they are there, and show what it says."""

import importlib.util
import json

import pytest

from models.lab.bench import plots


def _arm(rate, speed, *, interval=True):
  around = lambda value: [0.9 * value, 1.2 * value] if interval else None
  return {
    'tokens_per_second': rate,
    'tokens_per_second_interval': around(rate),
    'speed': speed,
    'speed_interval': around(speed),
    'decoding_tokens_per_second': 1.5 * rate,
    'decoding_tokens_per_second_interval': around(1.5 * rate),
    'decoding_speed': 1.2 * speed,
    'speed_per_batch': [0.5 * speed, speed, 2 * speed],
    'arithmetic_intensity': 0.5 * speed,
    'flops_per_second': 1e9 * speed,
  }


def _record(arms):
  peaks = {'float32': 1e11, 'bfloat16': 3e11}
  settings = {'target': 'demo', 'temperature': 1.0, 'top_k': 50}
  settings |= {'batch_size': 1, 'batches_measured': 3, 'max_new_tokens': 64}
  machine = {'platform': 'cpu', 'device': 'cpu', 'cores': 2}
  return {
    'machine': machine | {'processor': 'A processor'},
    'settings': settings,
    'limits': {'bytes_per_second': 2e10, 'flops_per_second': peaks},
    'arms': arms,
  }


_ARMS = {
  'plain:float32': _arm(10.0, 1.0),
  'tree(num_nodes=8,rounds=2):bfloat16': _arm(31.5, 3.15),
  'transformers:float32': _arm(8.0, 0.8, interval=False),
}


@pytest.fixture
def _needs_matplotlib():
  pytest.importorskip('matplotlib')


@pytest.mark.usefixtures('_needs_matplotlib')
def test_lines_go_through_the_records_of_all_batch_sizes(monkeypatch, tmp_path):
  from matplotlib.figure import Figure

  drawn = []
  save = lambda self, file, **_: drawn.append((self, file))
  monkeypatch.setattr(Figure, 'savefig', save)
  predicted = lambda rate, speed, ratio: (
    _arm(rate, speed) | {'predicted_speed': ratio}
  )
  records = {
    size: _record(
      {
        'plain:float32': predicted(10.0 * size, 1.0, 1.0),
        'tree:float32': predicted(30.0, 3.0 / size, 2.0 / size),
      }
    )
    for size in (1, 4)
  }
  records[1]['arms']['peer:float32'] = _arm(5.0, 0.5)  # One row at a time.
  file = plots.draw_batch_sizes(records, tmp_path, 'folder/result.json')
  assert file.name == 'result_batch_sizes.png'
  [(figure, saved)] = drawn
  assert saved == file
  rates, speeds = (
    [list(line.get_ydata()) for line in axes.lines] for axes in figure.axes
  )
  assert rates == [[10, 40], [30, 30], [5]]
  assert speeds == [[1, 1], [1, 1], [3, 0.75], [2, 0.5], [0.5]]
  assert 'batch' not in figure.get_suptitle()


@pytest.mark.usefixtures('_needs_matplotlib')
def test_pictures_show_what_the_record_says(tmp_path):
  from matplotlib.text import Text

  record = json.loads(json.dumps(_record(_ARMS)))
  files = plots.draw(record, tmp_path, 'folder/result.json')
  kinds = ('tokens_per_second', 'speeds', 'roofline')
  assert [file.name for file in files] == [f'result_{k}.png' for k in kinds]
  assert all(file.read_bytes().startswith(b'\x89PNG') for file in files)

  figure = plots._draw_rates(_record(_ARMS))
  widths = [bar.get_width() for bar in figure.axes[0].patches]
  assert widths == [15, 10, 47.25, 31.5, 12, 8]  # with the prompt: the smaller
  texts = [one.get_text() for one in figure.findobj(Text) if one.get_text()]
  assert '47.2  (3.78x)' in texts
  assert 'tree(num_nodes=8,rounds=2), bfloat16' in texts
  assert 'A processor, 2 cores; target demo, bfloat16 and float32' in texts[-1]
  assert 'T = 1, top-k 50, batch 1, 3 prompts' in texts[-1]

  # The prompts of each arm in a histogram; the baseline has none.
  figure = plots._draw_speeds(_record(_ARMS))
  bars = [axes.containers[0] for axes in figure.axes]
  assert [sum(bar.get_height() for bar in one) for one in bars] == [3, 3]
  many = {
    f'chain(num_draft_tokens={n}):float32': _arm(n, n) for n in range(1, 9)
  }
  figure = plots._draw_speeds(_record(many))
  assert sum(axes.get_visible() for axes in figure.axes) == 7

  roof, *arms = plots._draw_roofline(_record(_ARMS)).axes[0].lines
  by_label = {line.get_label(): line for line in arms}
  point = by_label['tree(num_nodes=8,rounds=2), bfloat16: 1.6']
  assert (*point.get_xdata(), *point.get_ydata()) == (1.575, 3.15)
  for x, y in zip(roof.get_xdata(), roof.get_ydata(), strict=True):
    assert y == pytest.approx(min(20 * x, 300))


def test_where_pictures_go(monkeypatch, tmp_path, capsys):
  output, new = str(tmp_path / 'one.json'), tmp_path / 'new'
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: name)
  assert plots.choose_folder(str(new), 'elsewhere/one.json') == new
  assert new.is_dir()
  assert plots.choose_folder(None, output) == tmp_path
  monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
  with pytest.raises(ValueError, match='pip install matplotlib'):
    plots.choose_folder(str(tmp_path), None)
  assert plots.choose_folder(None, output) is None
  assert 'pip install matplotlib' in capsys.readouterr().err
  assert plots.choose_folder(None, None) is None
