"""A draft with another tokenizer: what it reads and proposes, and exactness."""

import functools

import byte_level
import jax
import numpy as np
import pytest
import tiny
import tiny_drafters
import tokenizers
import transformers

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.nn import other_tokens
from specdec.models.text import vocabulary

# A model that reads every token as one to three of its own, in any order, and
# has a logit of its own for each: what it says shows what it has read.
_PARTS = 3


@functools.cache
def _tables(seed=0):
  rng = np.random.default_rng(seed)
  parts = rng.integers(tiny.VOCAB_SIZE, size=(tiny.VOCAB_SIZE, _PARTS))
  number = rng.integers(1, _PARTS + 1, size=(tiny.VOCAB_SIZE, 1))
  parts[np.arange(_PARTS)[None] < _PARTS - number] = -1
  return rng.permutation(tiny.VOCAB_SIZE).astype('i4'), parts.astype('i4')


def _model():
  draft = tiny.gpt2(num_layers=1)
  return other_tokens.with_other_tokens(draft, *_tables()), draft


_logits = jax.jit(specdec.LanguageModel.logits)


def test_a_token_is_read_as_all_its_parts():
  """The logits are the draft's logits after all parts of all tokens."""
  model, draft = _model()
  same, parts = _tables()
  same = np.where(np.arange(tiny.VOCAB_SIZE) % 5 == 2, -1, same)
  model = model.replace(params=model.params | {'same': same})
  tokens = np.random.default_rng(1).integers(tiny.VOCAB_SIZE, size=(2, 9))
  logits = np.asarray(_logits(model, tokens))
  assert (logits[..., same < 0] == -np.inf).all()
  for row, text in zip(logits, tokens, strict=True):
    read = parts[text]
    flat = np.pad(read[read >= 0], (0, _PARTS * 9))[None, : _PARTS * 9]
    last = np.cumsum((read >= 0).sum(1)) - 1
    assert last[-1] > 12  # several parts
    expected = np.asarray(_logits(draft, flat))[0, last]
    np.testing.assert_allclose(
      row[:, same >= 0], expected[:, same[same >= 0]], rtol=1e-4, atol=1e-4
    )


_PROMPTS = ([3, 9, 4, 1, 20], [7])


def _decode(kind, prompts=_PROMPTS):
  model, _ = _model()
  decoding = specdec.Decoding(
    model,
    tiny.row_keys(2),
    prompts,
    drafter=tiny_drafters.simple(kind, model),
    sampling=tiny.sampling(0.0, 1.0),
    max_new_tokens=12,
    room_for_new_tokens=tiny.MAX_NEW_TOKENS,
  )
  decoding.run()
  return decoding


def test_the_caches_keep_the_parts_of_the_path():
  """Drafting for itself, the model is right as long as its caches are."""
  decoding, plain = _decode('staged'), _decode('plain').result()
  _, parts = _tables()
  assert (parts[np.ravel(plain.tokens), -2] >= 0).any()
  result = decoding.result()
  assert result.tokens == plain.tokens
  assert result.stats.block_efficiency > 2.5
  # The next turn reads what the caches lack.
  pairs = zip(_PROMPTS, result.tokens, strict=True)
  longer = [prompt + new + [8, 2] for prompt, new in pairs]
  decoding.extend(longer, max_new_tokens=12)
  decoding.run()
  assert decoding.result().tokens == _decode('plain', longer).result().tokens


# Two tokenizers whose merges overlap, and which both have bytes of their own.


def _metaspace_tokenizer(tokens, merges):
  vocab = {token: id_ for id_, token in enumerate(tokens)}
  backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, merges))
  backend.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
  backend.decoder = tokenizers.decoders.Sequence(
    [
      tokenizers.decoders.Replace('▁', ' '),
      tokenizers.decoders.ByteFallback(),
      tokenizers.decoders.Fuse(),
    ]
  )
  return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


def test_tokens_are_mapped_by_their_bytes():
  """By bytes, whatever the ids; special tokens by their texts and roles."""
  ours = ['a', 'b', 'ab', 'abab', 'c', 'Ãa', 'Ġa']
  merges = [('a', 'b'), ('ab', 'ab'), ('Ġ', 'a'), ('Ã', 'a')]
  special = ('<x>', '<y>', '<end>')
  target = byte_level.tokenizer([*ours, 'Ġ', 'Ã'], *special, merges=merges)
  size, end = 13, 11  # one is padding
  find = functools.partial(vocabulary.find, target)
  draft = byte_level.tokenizer(
    ['b', 'a', 'ba', 'd'], '<x>', '</s>', merges=[('b', 'a')]
  )
  tables = find(draft, sizes=(size, 6), ends=((end,), (5,)))
  assert tables.same.tolist() == [1, 0, *[-1] * 7, 4, -1, 5, -1]
  # 'abab' is 'a', 'ba', 'b'; two of them are kept. A byte is left out.
  read = [[-1, 1], [-1, 0], [1, 0], [2, 0], [-1, 5], [-1, 1], [-1, 1]]
  assert tables.parts[: len(read)].tolist() == read
  assert tables.parts[len(read) :, 1].tolist() == [5, 5, 4, 5, 5, 5]
  assert tables.share == 0  # of more than a byte
  # This one would put a space before every text, and never says the byte.
  theirs = ['<0x61>', '▁', 'a', 'b', '▁a']
  draft = _metaspace_tokenizer(theirs, [('▁', 'a')])
  tables = find(draft, sizes=(size, 5), ends=((end,), ()))
  assert tables.same.tolist() == [2, 3, *[-1] * 4, 4, 1, *[-1] * 5]
  assert tables.parts[:4].tolist() == [[-1, 2], [-1, 3], [2, 3], [2, 3]]
  assert 0 < tables.share < 0.5


_TEXT = 'def add(first, second):\n  return first + second\n' * 20
_OTHER = 'def sub(first, third):\n  return [first - third]\n' * 20


@pytest.fixture(scope='module')
def folders(tmp_path_factory):
  """A target, and a draft with another tokenizer."""
  folder = tmp_path_factory.mktemp('pair')
  texts = {'target': _TEXT, 'draft': _OTHER}
  for seed, (name, text) in enumerate(texts.items()):
    tokenizer = tokenizer_lib.train_tokenizer(
      [text], vocab_size=280 + seed, context=96
    )
    module = tiny.module(
      vocab_size=280 + seed, num_positions=96, num_layers=1, width=8, seed=seed
    )
    hub.save_pretrained(module, folder / name, tokenizer=tokenizer)
  return folder


def test_tokens_of_the_draft_alone_are_drafted(folders, caplog):
  """A draft with another tokenizer, which computes some of its tokens."""
  paths, size = (folders / 'target', folders / 'draft'), 262
  lm = specdec.load(
    *map(str, paths), dtype='float32', method='chain', draft_vocab=size
  )
  (line,) = [text for text in caplog.messages if 'tokenizers of' in text]
  shared = vocabulary.of_checkpoints(*map(hub.locate, paths))
  assert all(str(path) in line for path in paths)
  assert f'share {(shared.same >= 0).sum()} tokens' in line
  assert f'about {100 * shared.share:.0f} %' in line
  texts = ['def add(first', 'return']
  result = lm.generate(
    texts,
    verify='rejection',
    max_new_tokens=24,
    eos_ids=(),
    seed=5,
    sampling=specdec.Sampling(temperature=0.9, top_p=0.95),
  )
  label = result.labels.index('draft')
  proposed = [
    token
    for row in zip(result.tokens, result.origins, strict=True)
    for token, origin in zip(*row, strict=True)
    if origin == label
  ]
  assert proposed
  # The ids of a draft vocabulary are the draft's; it has all special tokens.
  assert all(0 <= shared.same[token] < size for token in proposed)
  (logits,) = jax.jit(lambda draft: draft.logits(np.arange(8)[None]))(
    lm.pair.draft
  )
  (ranked,) = np.nonzero((logits > -np.inf).all(axis=0))
  np.testing.assert_array_equal(lm.pair.draft.proposed, ranked)
