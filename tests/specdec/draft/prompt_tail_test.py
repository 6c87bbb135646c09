"""A draft that reads the end of a prompt drafts as if that were all of it."""

import jax
import list_trees
import numpy as np
import pytest
import tiny
import tiny_drafters
import tiny_heads

import specdec
from specdec import carried as carried_lib
from specdec.draft import drafter as drafter_lib
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.tree import topology as topology_lib

_C = 3
_SETTINGS = tiny_drafters.Settings(topology=topology_lib.k_ary(2, 2))


def _of_tail(drafter, num_tokens=_C):
  """The drafter, but its outermost model reads only the ends of prompts."""
  outer, *others = drafter.stages
  scorer = outer.scorer.replace(most_tokens=num_tokens)
  return drafter.replace(stages=(outer.replace(scorer=scorer), *others))


def _check_trees(tree, texts, firsts, *rest):
  """A draft that has nothing but the rest of the texts grows the same trees."""
  whole = tiny_drafters.model(tiny.draft('similar', num_layers=1), _SETTINGS)
  shorter = [text[at:] for text, at in zip(texts, firsts, strict=True)]
  _, expected = list_trees.grown(whole, *list_trees.padded(shorter), *rest)
  list_trees.assert_equal_trees(*map(list_trees.lists_of, (tree, expected)))


def test_it_drafts_as_if_the_end_of_the_text_were_all_of_it():
  """After a prefill, a step, and text that is longer, other or shorter."""
  drafter = _of_tail(
    tiny_drafters.model(tiny.draft('similar', num_layers=1), _SETTINGS)
  )
  rng = np.random.default_rng(1)
  draw = lambda *lengths: [
    rng.integers(9, size=length).tolist() for length in lengths
  ]
  texts = draw(9, 2, 5)
  rows = np.arange(list_trees.BATCH_SIZE)
  noise = list_trees.random_step(2, 2, 1.0, tiny.VOCAB_SIZE).noise
  rest = (rows >= 0, noise, tiny.sampling_params(1.0, 0.0, 1.0))
  grow_again = jax.jit(list_trees.grown_from)
  restart = jax.jit(drafter_lib.restart)

  stages, tree = list_trees.grown(drafter, *list_trees.padded(texts), *rest)
  firsts = [5, 0, 1]
  _check_trees(tree, texts, firsts, *rest)
  path = np.array([[0, 1, 4]] * len(rows), np.int32)
  stages = list_trees.kept(drafter, stages, path, 0 * rows.astype(np.int32) + 3)
  for row, text in enumerate(texts):
    text += [*np.asarray(tree.token[row])[[1, 4]].tolist(), row]
  stages, tree = grow_again(drafter, stages, *list_trees.padded(texts), *rest)
  _check_trees(tree, texts, firsts, *rest)

  def check(*changes, firsts, reads=(True,) * 3):
    """Changes: the tokens of a text that are kept, and how many follow."""
    nonlocal stages
    length = np.zeros(len(rows), np.int32)
    kept = np.zeros(len(rows), np.int32)
    for row, (keep, more) in enumerate(changes):
      texts[row] = texts[row][:keep] + draw(more)[0]
      length[row] = len(texts[row]) * reads[row]
      kept[row] = min(keep, len(texts[row]) - 1)
    tokens, lengths = list_trees.padded(texts)
    stages = list_trees.kept(drafter, stages, 0 * path - 1, 0 * kept)
    new = carried_lib.Texts(tokens, length, list_trees.TEXT_SLOTS, kept)
    stages = restart(drafter, stages, new)
    stages, tree = grow_again(drafter, stages, tokens, lengths, *rest)
    _check_trees(tree, texts, firsts, *rest)

  # A token more is missing, C + 1 are, and none.
  check((12, 1), (5, 4), (8, 0), firsts=[5, 5, 1], reads=(True, True, False))
  # Other text from within what it has, from before it, and from its start.
  check((8, 2), (3, 4), (0, 9), firsts=[5, 3, 5])
  # Shorter texts: it has all of one, some of the next, nothing of the last.
  check((9, 0), (6, 0), (3, 0), firsts=[5, 2, 0])


def test_a_head_and_no_tokens_are_refused():
  pair = pair_lib.Pair(
    tiny.gpt2(num_layers=1), None, None, (), head=tiny_heads.random_head()
  )
  settings = specdec.DraftSettings(draft_prompt=8, inner='none')
  with pytest.raises(ValueError, match='draft_prompt=8 is for a draft model'):
    drafters.make_drafter('chain', pair, settings)
  for wrong in (0, 2.5):
    with pytest.raises(ValueError, match='most_tokens must be'):
      _of_tail(
        tiny_drafters.model(tiny.draft('similar', num_layers=1), _SETTINGS),
        wrong,
      )
    with pytest.raises(ValueError, match='draft_prompt must be an integer of'):
      specdec.DraftSettings(draft_prompt=wrong)
