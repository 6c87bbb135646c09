"""A draft that reads the end of a prompt drafts as if that were all of it."""

import jax
import list_growth as growth
import numpy as np
import pytest
import tiny
import tiny_drafters
import tiny_heads

import models
from models.text import drafters
from models.text import pair as pair_lib
import specdec
from specdec import hidden as hidden_lib
from specdec.draft import stages as stages_lib
from specdec.tree import topology as topology_lib

_C = 3
_SETTINGS = tiny_drafters.Settings(topology=topology_lib.k_ary(2, 2))


def _of_tail(drafter, num_tokens=_C):
  """The drafter, whose outermost model reads the ends of prompts."""
  outer, *others = drafter.stages
  scorer = specdec.PromptTailScorer(outer.scorer, num_tokens)
  return drafter.replace(stages=(outer.replace(scorer=scorer), *others))


def _check_trees(tree, texts, firsts, *rest):
  """The trees are those of a draft that has nothing but the rest of texts."""
  whole = tiny_drafters.model(tiny.draft('similar', num_layers=1), _SETTINGS)
  shorter = [text[at:] for text, at in zip(texts, firsts, strict=True)]
  _, expected = growth.grown(whole, *growth.padded(shorter), *rest)
  growth.assert_equal_trees(*map(growth.lists_of, (tree, expected)))


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
  rows = np.arange(growth.BATCH_SIZE)
  noise = growth.random_step(2, 2, 1.0, tiny.VOCAB_SIZE).noise
  rest = (rows >= 0, noise, tiny.sampling_params(1.0, 0.0, 1.0))
  commit = jax.jit(stages_lib.commit_stages)
  grow_again = jax.jit(growth.grown_from)
  catch_up = jax.jit(stages_lib.catch_up_stages)

  stages, tree = growth.grown(drafter, *growth.padded(texts), *rest)
  firsts = [5, 0, 1]
  _check_trees(tree, texts, firsts, *rest)
  path = np.array([[0, 1, 4]] * len(rows), np.int32)
  stages = commit(drafter, stages, path, 0 * rows.astype(np.int32) + 2)
  for row, text in enumerate(texts):
    text += [*np.asarray(tree.token[row])[[1, 4]].tolist(), row]
  stages, tree = grow_again(drafter, stages, *growth.padded(texts), *rest)
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
    tokens, lengths = growth.padded(texts)
    stages = commit(drafter, stages, 0 * path - 1, 0 * kept - 1)
    stages = catch_up(
      drafter, stages, tokens, length, kept, hidden_lib.HiddenStates()
    )
    stages, tree = grow_again(drafter, stages, tokens, lengths, *rest)
    _check_trees(tree, texts, firsts, *rest)

  # A token more is missing, C + 1 are, and none.
  check((12, 1), (5, 4), (8, 0), firsts=[5, 5, 1], reads=(True, True, False))
  # Other text from within what it has, from before it, and from its start.
  check((8, 2), (3, 4), (0, 9), firsts=[5, 3, 5])
  # Shorter text of which it has all, some and nothing.
  check((9, 0), (6, 0), (3, 0), firsts=[5, 3, 0])


def test_tokens_are_those_of_plain_decoding():
  """In batches, conversations, slots, and where plain steps come between."""
  target, draft = tiny.gpt2(num_layers=1), tiny.draft('similar', num_layers=1)
  tail = lambda kind: _of_tail(tiny_drafters.simple(kind, draft, length=2))
  rng = np.random.default_rng(3)
  prompts = [rng.integers(40, size=length).tolist() for length in (20, 2)]
  keys, sampling = tiny.row_keys(2), specdec.Sampling(temperature=0.7)

  def conversation(drafter, **options):
    decoding = specdec.Decoding(
      *(target, keys, prompts),
      drafter=drafter,
      sampling=sampling,
      max_new_tokens=12,
      room_for_new_tokens=tiny.MAX_NEW_TOKENS,
      **options,
    )
    said = []
    for more in (1, 9, 2):
      decoding.run()
      said.append(decoding.result().tokens)
      texts = map(list.__add__, decoding.prompts, said[-1])
      decoding.extend([text + [7] * more for text in texts], max_new_tokens=6)
    return said

  plain = conversation(specdec.PLAIN)
  assert conversation(tail('staged')) == plain
  assert conversation(tail('staged'), break_even=2.5) == plain
  slots = specdec.Slots(
    target,
    num_slots=2,
    context=tiny.MAX_POSITIONS,
    drafter=tail('chain'),
    sampling=sampling,
    reading=8,
  )
  for prompt, key in zip(prompts, keys, strict=True):
    slots.insert(prompt, key, max_new_tokens=12)
  ended = slots.advance(2)
  assert [ended[row].tokens[0] for row in range(2)] == plain[0]


def test_a_head_and_no_tokens_are_refused():
  pair = pair_lib.Pair(
    *(tiny.gpt2(num_layers=1), None, None, ()), head=tiny_heads.random_head()
  )
  settings = models.DraftSettings(draft_prompt=8, inner='none')
  with pytest.raises(ValueError, match='draft_prompt=8 is for a draft model'):
    drafters.make_drafter('chain', pair, settings)
  for wrong in (0, 2.5):
    with pytest.raises(ValueError, match='num_tokens must be'):
      _of_tail(
        tiny_drafters.model(tiny.draft('similar', num_layers=1), _SETTINGS),
        wrong,
      )
    with pytest.raises(ValueError, match='draft_prompt must be an integer of'):
      models.DraftSettings(draft_prompt=wrong)
