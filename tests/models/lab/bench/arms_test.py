"""Names of arms, to and fro."""

import re

import pytest

from models.lab.bench import arms as arms_lib
from models.lab.bench import peer as peer_lib
from models.text import settings as settings_lib
from specdec.tree import topology as topology_lib


def test_methods_dtypes_and_options_are_told_apart():
  text = (
    'plain,chain:bfloat16,tree(num_nodes=16,rounds=2),'
    'staged(inner=lookup):bfloat16,transformers-lookup'
  )
  arms = arms_lib.parse_arms(text, 'float32')
  assert arms == [
    peer_lib.ArmSpec('plain', 'float32'),
    peer_lib.ArmSpec('chain', 'bfloat16'),
    peer_lib.ArmSpec('tree', 'float32', (('num_nodes', '16'), ('rounds', '2'))),
    peer_lib.ArmSpec('staged', 'bfloat16', (('inner', 'lookup'),)),
    peer_lib.ArmSpec('transformers-lookup', 'float32'),
  ]
  assert [arm.peer for arm in arms] == [None] * 4 + ['transformers']
  (arm,) = arms_lib.parse_arms('llama.cpp-draft(spec_draft_n_max=8)', 'float32')
  assert (arm.peer, arm.dtype) == ('llama.cpp', 'gguf')
  assert arms_lib.parse_arms(','.join(map(str, arms)), 'bfloat16') == arms
  assert len(arms_lib.parse_arms('chain(draft_prompt=4)', 'float32')) == 1
  # Alternatives give all combinations.
  arms = arms_lib.parse_arms(
    'tree(num_nodes=8|16,rounds=2|4|6):bfloat16', 'float32'
  )
  assert [str(arm) for arm in arms] == [
    f'tree(num_nodes={nodes},rounds={rounds}):bfloat16'
    for nodes in (8, 16)
    for rounds in (2, 4, 6)
  ]


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('forest', "'forest' is not known; it is"),
    ('plain:float64', "'plain:float64' is not known"),
    ('tree(num_nodes=4', 'is not known; it is'),
    ('chain(num_nodes=4)', "'num_nodes=4' is not known; chain has"),
    ('plain(width=4)', 'plain has none'),
    ('lookup(draft_prompt=4)', "'draft_prompt=4' is not known; lookup has"),
    ('tree(width)', "'width' is not known"),
    ('tree(width=4,width=5)', 'has an option twice'),
    ('tree,tree', 'arms are repeated'),
    *(('tree(width=4|4)', 'arms are repeated'), ('', 'no arm is given')),
    ('rounds=two', 'rounds=two: '),
    ('inner=ngrams', 'inner=ngrams: expected one of none, ngram, lookup'),
  ],
)
def test_what_is_not_known_is_refused(text, message):
  name, _, value = text.partition('=')
  call = lambda: arms_lib.parse_arms(text, 'float32')
  if name in settings_lib.OPTIONS:
    call = lambda: settings_lib.with_options(
      settings_lib.DraftSettings(), {name: value}
    )
  with pytest.raises(ValueError, match=re.escape(message)):
    call()


def test_options_change_what_they_name_and_nothing_else():
  settings = settings_lib.DraftSettings()
  options = {'num_nodes': '8', 'inner_rounds': '2', 'num_draft_tokens': '3'}
  changed = settings_lib.with_options(settings, options)
  assert (changed.tree.num_nodes, changed.stage.rounds) == (8, 4)
  assert changed.inner_stage.rounds == 2
  assert changed.inner_stage.width == settings.inner_stage.width
  assert changed.num_draft_tokens == 3
  assert settings_lib.with_options(settings, {}) == settings
  fixed = settings_lib.with_options(settings, {'topology': 'chain:3'})
  assert fixed.topology == topology_lib.chain(3)
  assert settings_lib.with_options(fixed, {'topology': None}) == settings
  values = {'inner': 'lookup', 'topology': 'k_ary:2x2', 'capacity': '99'}
  for name in settings_lib.OPTIONS:
    changed = settings_lib.with_options(settings, {name: values.get(name, '7')})
    assert changed != settings, name
