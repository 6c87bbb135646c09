"""Pictures show what is in the trace, and no text can break them."""

import collections
import dataclasses
from html.parser import HTMLParser
import itertools
import xml.etree.ElementTree

import jax
import numpy as np
import pytest

import specdec
from specdec import tracing
from specdec.tracing import svg
from specdec.tree import tree as tree_lib

_NASTY = '</script><!--<script>alert(1)</script>&amp;"\''
_PIECES = ('\n', _NASTY, ' def', '\x00\u202e\ud800', '漢字', '\t', '')


def _block(start, path, emitted, forwards, root, *nodes):
  """Nodes are (token, parent, origin, probability); of the root, the token."""
  nodes = zip((root, -1, 0, 1.0), *nodes, strict=True)
  stages = zip(('target', 'draft', 'lookup+ngram'), forwards, strict=False)
  return tracing.Block(start, *nodes, path, emitted, dict(stages))


_NODES = [(2, 0, 1, 0.75), (3, 0, 2, 0.1), (4, 1, 1, 0.25), (5, 1, 3, 0.5)]
_NODES += [(2, 3, 5, 0.9), (6, 2, 2, 0.2)]
_FEW = [(6, 0, 3, 0.5), (1, 1, 4, 0.5)]
_BLOCKS = (
  _block(2, (0, 1, 3), (2, 4, 5), (1, 2, 5), 1, *_NODES),
  _block(5, (0,), (3,), (1, 0, 0), 5),
  _block(6, (0, 1, 2), (6,), (1, 1, 3), 3, *_FEW),
)
_LABELS = ('target', 'draft', 'lookup', 'ngram', '<i>', 'far')
_TRACE = specdec.Trace(
  prompt='a <b> & "c"\n\tx',
  prompt_tokens=(6, 1),
  labels=_LABELS,
  blocks=_BLOCKS,
  pieces=(_NASTY, '\x00', '漢字', ' def', '\t'),
  texts=dict(enumerate(_PIECES, 1)),
  finish_reason='length',
  log_probs=(-0.5, -1.0, -1.5, -2.0, -2.5),
)


class _Page(HTMLParser):
  """All elements with their attributes and texts; they must be nested."""

  def __init__(self, text):
    super().__init__()
    self.elements = collections.defaultdict(list)
    self._open = []
    self.feed(text)
    self.close()
    assert not self._open

  def handle_starttag(self, tag, attrs):
    element = {'text': '', **dict(attrs)}
    self.elements[tag].append(element)
    if tag != 'meta':
      self._open.append((tag, element))

  def handle_endtag(self, tag):
    assert self._open.pop()[0] == tag

  def handle_data(self, data):
    for _, element in self._open:
      element['text'] += data


def _svg(picture):
  root = xml.etree.ElementTree.fromstring(str(picture))
  name = '{http://www.w3.org/2000/svg}'
  return lambda tag: root.findall(f'.//{name}{tag}')


def _of_kind(elements, kind):
  return [
    element for element in elements if kind in element.get('class', '').split()
  ]


def test_every_node_is_a_box_and_the_accepted_ones_stand_out():
  for number, block in enumerate(_BLOCKS):
    find = _svg(tracing.tree(_TRACE, number))
    boxes = _of_kind(find('rect'), 'box')
    bonus = block.bonus is not None
    assert len(_of_kind(boxes, 'bonus')) == bonus
    assert len(_of_kind(boxes, 'yes')) == len(block.path)
    assert len(boxes) == len(block.tokens) + bonus
    assert len(_of_kind(find('path'), 'edge')) == len(boxes) - 1
    fills = [svg.style_of(origin).fill for origin in block.origins]
    assert [box.get('fill') for box in boxes[: len(fills)]] == fills
  assert len({svg.style_of(origin).line for origin in range(5)}) == 5
  assert tracing.tree(_TRACE, -1) == tracing.tree(_TRACE, 2)
  for draw in (tracing.tree, tracing.mask):
    with pytest.raises(ValueError, match='block 3 does not exist; the trace'):
      draw(_TRACE, 3)


def test_the_parts_of_a_tree():
  """Boxes do not overlap, and what was accepted is one line."""
  find = _svg(tracing.tree(_TRACE, 0))
  boxes = _of_kind(find('rect'), 'box')
  spans = collections.defaultdict(list)
  for box in boxes:
    x, width = float(box.get('x')), float(box.get('width'))
    spans[box.get('y')].append((x, x + width))
  for line in spans.values():
    for (_, end), (start, _) in itertools.pairwise(sorted(line)):
      assert end < start
  assert len({box.get('y') for box in boxes if box.get('class') != 'box '}) == 1
  # Root, two accepted, bonus; below them 2 more lines of the first and root.
  assert len(spans) == 4
  # Labels show sources and probabilities.
  sources, _, *labels = (element.text for element in find('text'))
  assert sources == 'sources: ⁰ target, ¹ draft, ² lookup, ³ ngram, ⁵ far'
  assert labels[2] == '²\u2009␣def 0.10'
  _, accepted, _, _, other, far, *_ = (
    element.text for element in find('title')
  )
  assert '0.900 given its parent, 0.169 with its path' in far
  assert accepted.endswith('; accepted')
  assert not other.endswith('; accepted')


def test_the_mask_is_the_one_of_the_device():
  ancestor_mask = jax.jit(tree_lib.ancestor_mask, static_argnums=3)
  for number, block in enumerate(_BLOCKS):
    parents, nodes = np.array(block.parents), np.arange(len(block.parents))
    expected = np.asarray(
      ancestor_mask(parents, nodes, nodes, max(block.depths))
    )
    for row, above in zip(expected, svg.ancestors(block), strict=True):
      assert np.flatnonzero(row).tolist() == sorted(above)
    find = _svg(tracing.mask(_TRACE, number))
    [seen] = _of_kind(find('path'), 'seen')
    assert seen.get('d').count('z') == expected.sum()
    assert 'black: the nodes it sees; bold' in find('text')[0].text


def test_the_text_is_the_text_with_its_origins():
  page = _Page(tracing.text(_TRACE))
  blocks, spans = (
    [span for span in page.elements['span'] if key in span]
    for key in ('data-block', 'title')
  )
  texts = [(span['data-block'], span['text']) for span in blocks]
  assert texts == [('0', f'{_NASTY}\ufffd漢字'), ('1', ' def'), ('2', '\t')]
  texts = [span['text'] for span in spans]
  assert texts == [_NASTY, '\ufffd', '漢字', ' def', '\t']
  assert 'token 2, position 2, block 1, source: draft' in spans[0]['title']
  assert spans[0]['title'].endswith('log-probability -0.500')
  assert svg.style_of(1).fill in spans[0]['style']
  assert spans[2]['style'] == ''
  assert page.elements['pre'][0]['text'].startswith(_TRACE.prompt)
  [legend] = page.elements['ul']
  assert '¹ draft  40% (solid)' in legend['text']
  assert '<i>' in legend['text']


def test_the_report_is_one_page_that_needs_nothing():
  text = tracing.report(_TRACE, title='A <title>')
  page = _Page(text)
  assert page.elements['title'][0]['text'] == 'A <title>'
  assert not {'link', 'img', 'iframe', 'object'} & page.elements.keys()
  for attributes in itertools.chain(*page.elements.values()):
    assert not {'src', 'href', 'action', 'srcset'} & attributes.keys()
    assert not any(name.startswith('on') for name in attributes)
  [policy] = [
    element for element in page.elements['meta'] if 'http-equiv' in element
  ]
  assert policy['content'].startswith("default-src 'none'")
  # Two scripts, whatever the texts say: the trace and what turns its pages.
  data, _ = page.elements['script']
  assert data['type'] == 'application/json'
  assert specdec.Trace.from_json(data['text']) == _TRACE
  assert data['text'] == _TRACE.to_json().replace('<', '\\u003c')
  blocks = _of_kind(page.elements['section'], 'block')
  assert len(blocks) == 3
  for number, block in enumerate(blocks):
    assert block['data-summary'].startswith(f'Block {number + 1} of 3.')
    assert 'hidden' not in block  # without the script all are there
  assert 'bonus token: “␣def”' in blocks[1]['data-summary']
  assert all(element['aria-label'] for element in page.elements['svg'])
  # Three blocks with 5 tokens; 5 + 0 + 3 forwards of the inner drafter.
  stages = 'target30.600draft30.600lookup+ngram81.600'
  assert any(stages in element['text'] for element in page.elements['table'])


def test_a_block_that_is_cut_says_why():
  for number, reason, end in (
    (4, 'length', '; bonus token: “⏎”.'),
    (2, 'stop', '; only 2 tokens emitted: a stop string is complete.'),
    (0, 'error', '; only 0 tokens emitted: the logits of the target are not'),
  ):
    nodes = [(1, 0, 1, 0.5), (6, 1, 1, 0.5), (5, 2, 1, 0.5)]
    first = _block(1, (0,), (3,), (1, 1), 6, nodes[0])
    emitted = (1, 6, 5, 1)[:number]
    second = _block(2, (0, 1, 2, 3), emitted, (1, 3), 3, *nodes)
    changes = {'prompt_tokens': (6,), 'labels': _LABELS[:2], 'log_probs': None}
    changes |= {'pieces': ('a',) * (1 + number), 'finish_reason': reason}
    trace = dataclasses.replace(_TRACE, blocks=(first, second), **changes)
    assert end in svg.sentence(trace, second)
