"""The distribution of the tokens of models, by samples.

`law_test` samples tables. Here drafts are loaded as users load them: a model
with another tokenizer, a head and a block drafter. All have few outputs, and
two are for recurrent targets. Each sequence is counted among 20,000 rows.
Plain forwards of the target say how probable it is.

Target and draft are random and differ much. A bias leaves four tokens, and
every draft lacks one of them.
"""

import dataclasses
import functools
import itertools

import block_folders
import enumeration
import jax
import law_test
import numpy as np
import pytest
import quick
import tiny
import tiny_drafters
import tiny_heads

import specdec
from specdec import arguments as arguments_lib
from specdec import sampling as sampling_lib
from specdec.draft import block as block_lib
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.heads import heads
from specdec.models.nn import adapter
from specdec.models.nn import other_tokens
from specdec.tree import topology as topology_lib
from specdec.verify import rules as rules_lib

_TOKENS = np.array([1, 2, 3, 4])  # All that a text may have.
_LACKS = 3  # The head lacks this one, the block drafter token 2.
_NUM_ROWS, _BATCH_SIZE = 20_000, 100
_TEMPERATURE = 2.5
_TREE = tiny_drafters.Settings(topology=topology_lib.k_ary(2, 2))


def _few_outputs_of_other_tokens(folder):
  """For delta nets, a draft that reads a token as one to three of its own.

  It computes most of its outputs, and has no token that is the one it lacks.
  """
  size = tiny.VOCAB_SIZE
  module = tiny.module(
    vocab_size=size,
    num_positions=3 * tiny.MAX_POSITIONS,
    tie_embeddings=False,
    num_layers=1,
  )
  hub.save_pretrained(module, folder)
  rng = np.random.default_rng(0)
  same = rng.permutation(size).astype(np.int32)
  outputs = np.setdiff1d(np.arange(size), same[[_LACKS, 7, 30]])
  same[9] = -1
  parts = rng.integers(size, size=(size, 3), dtype=np.int32)
  number = rng.integers(1, 4, size=(size, 1))
  parts[np.arange(3)[None] < 3 - number] = -1
  draft = other_tokens.with_other_tokens(
    adapter.as_model(hub.load_module(folder, outputs=outputs)), same, parts
  )
  proposed = np.flatnonzero(np.isin(same, outputs)).astype(np.int32)
  draft = draft.replace(proposed=proposed)
  target = adapter.as_model(tiny.llama_module('delta'))
  return target, specdec.LanguageModelScorer(draft)


def _few_outputs_of_a_head(folder):
  """A head with `d2t`."""
  values = tiny_heads.tensors('eagle3', reduced=True)
  tiny_heads.write(folder, 'sglang', values, reduced=True)
  assert _LACKS not in tiny_heads.IDS
  return tiny_heads.target(), specdec.HeadScorer(tiny_heads.load(folder))


def _few_outputs_of_a_block(folder):
  """A block drafter with `d2t`, for a target of convolutions."""
  module = tiny.llama_module(
    'lfm2',
    vocab_size=block_folders.VOCAB,
    width=block_folders.WIDTH,
    num_layers=block_folders.LAYERS,
    mixers=('conv', 'self_attn', 'conv', 'conv'),
  )
  block_folders.write(folder, 'speculators gated')
  found = heads.locate(folder, module.config)
  target = adapter.as_model(module, hidden=found.config.reads)
  return target, block_lib.BlockScorer(heads.load(found, target))


_PAIRS = (
  _few_outputs_of_other_tokens,
  _few_outputs_of_a_head,
  _few_outputs_of_a_block,
)
_RULES = ('match', 'rejection', 'traversal')
# For one test, so that all hold with a probability of 99.9% at least.
_SIGNIFICANCE = 1e-3 / len(_PAIRS) / len(_RULES)


_logits = jax.jit(specdec.LanguageModel.logits)


def _law(target):
  """The distribution of whole sequences, `[V ** L]`, in float64."""
  length, size = law_test.LENGTH, law_test.VOCAB_SIZE
  texts = np.array([*itertools.product(range(size), repeat=length - 1)])
  prompt = np.full((len(texts), 1), enumeration.PROMPT)
  read = np.concatenate([prompt, _TOKENS[texts]], axis=1)
  logits = np.float64(_logits(target, read))[:, :, _TOKENS] / _TEMPERATURE
  probs = np.exp(logits - logits.max(-1, keepdims=True))
  probs /= probs.sum(-1, keepdims=True)
  of_texts = np.take_along_axis(probs[:, :-1], texts[:, :, None], axis=2)[
    :, :, 0
  ]
  return (of_texts.prod(1)[:, None] * probs[:, -1]).ravel()


# Compiling takes most of the time.
@functools.partial(
  jax.jit,
  static_argnames='config',
  compiler_options={'xla_backend_optimization_level': 1} | quick.PLAIN_FUSIONS,
)
def _run(target, drafter, sampling, keys, *, config):
  """The new tokens of many batches, and the forwards of each row."""

  def decode_batch(keys):
    request = enumeration.request(keys, sampling, law_test.LENGTH)
    request = dataclasses.replace(request, adjusters=())
    result = specdec.decode(target, drafter, request, config=config)
    return result.tokens[:, 1:], result.counters.target_forwards

  return jax.lax.map(decode_batch, keys)


def _decode(target, scorer, rule):
  """New tokens `[n, L]` and forwards `[n]` of each row."""
  drawn = rule != 'match'
  children = sampling_lib.WITHOUT_REPLACEMENT if drawn else sampling_lib.BEST
  size = target.spec.vocab_size
  bias = np.full((_BATCH_SIZE, size), -np.inf, np.float32)
  bias[:, _TOKENS] = 0.0
  sampling = specdec.Sampling(temperature=_TEMPERATURE, logit_bias=bias)
  keys = jax.random.split(jax.random.key(0), _NUM_ROWS)
  found = _run(
    target,
    _TREE.drafter(scorer),
    arguments_lib.to_params(sampling, _BATCH_SIZE, size),
    keys.reshape(-1, _BATCH_SIZE),
    config=specdec.DecodeConfig(
      max_new_tokens=law_test.LENGTH, rule=rules_lib.RULES[rule](children)
    ),
  )
  return [np.concatenate(np.asarray(array)) for array in found]


@pytest.fixture(scope='module', params=_PAIRS)
def pair(request, tmp_path_factory):
  return request.param(tmp_path_factory.mktemp('draft'))


@pytest.mark.long
@pytest.mark.parametrize('rule', _RULES)
def test_sequences_have_the_targets_law(pair, rule):
  target, scorer = pair
  tokens, steps = _decode(target, scorer, rule)
  assert np.isin(tokens, _TOKENS).all()
  counts = law_test.counts_of(np.searchsorted(_TOKENS, tokens))
  law = _law(target)
  assert law_test.p_value(counts, law) > _SIGNIFICANCE
  # And the test would notice a total variation of 0.05, whatever its form.
  moved = law_test.moved_law(law, 0.05)
  assert law_test.p_value(counts, moved) < _SIGNIFICANCE
  # Drafted tokens are accepted and rejected, in several steps.
  assert 1.5 < steps.mean() < law_test.LENGTH - 0.3
