"""Random tiny GPT-2s with something to say, and drafts for them.

Compiling takes most of the time of these tests, so models of one shape share
their definition, and so their programs: perfect and hopeless drafts differ in
their weights alone.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import tiny_modules

from models.nn.adapter import as_model
from specdec import LanguageModel
from specdec import ModelSpec
from specdec import Sampling
from specdec.checks import check_sampling
from specdec.sampling import SamplingParams

VOCAB_SIZE = 48
# Just the longest prompt of a bucket and the limit of another.
MAX_PROMPT = 32
MAX_NEW_TOKENS = 128
MAX_POSITIONS = MAX_PROMPT + MAX_NEW_TOKENS

# No target ever says it, and the hopeless draft says nothing else.
TABOO = VOCAB_SIZE - 1

DRAFTS = ('perfect', 'similar', 'random', 'hopeless')


def _bias(sign: float) -> jax.Array:
  bias = np.zeros(VOCAB_SIZE, np.float32)
  bias[TABOO] = sign * 1e6
  return jnp.asarray(bias)


@functools.cache
def _base(num_layers, num_heads, width, dtype, seed) -> LanguageModel:
  module = tiny_modules.make(
    dtype=dtype,
    seed=seed,
    vocab_size=VOCAB_SIZE,
    num_positions=MAX_POSITIONS,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
    # A tied head makes a random model repeat itself.
    tie_embeddings=False,
  )
  # Far from flat logits, from tokens and positions rather than from biases.
  module.lm_head[...] *= 2
  module.ln_f.bias[...] *= 0
  for embedding in (module.wte.embedding, module.wpe.embedding):
    embedding[...] *= 4
  return as_model(module)


@functools.cache
def _definition(*shape) -> ModelSpec:
  base = _base(*shape, 0).spec

  def apply(params, tokens, positions, mask, cache):
    logits, cache = base.apply(params['gpt2'], tokens, positions, mask, cache)
    return logits + params['bias'][None, None], cache

  return dataclasses.replace(base, apply=apply)


@functools.cache
def gpt2(
  seed: int = 0,
  *,
  num_layers: int = 2,
  num_heads: int = 2,
  width: int = 16,
  dtype=jnp.float32,
) -> LanguageModel:
  """A random GPT-2 whose greedy text is varied, as `decode_test` makes sure."""
  shape = (num_layers, num_heads, width, dtype)
  return LanguageModel(
    params={'gpt2': _base(*shape, seed).params, 'bias': _bias(-1)},
    spec=_definition(*shape),
  )


def perturbed(model: LanguageModel, amount: float) -> LanguageModel:
  """The model with every weight changed by about this fraction of itself."""
  rng = np.random.default_rng(99)
  params = jax.tree.map(
    lambda leaf: (
      leaf * (1 + amount * rng.normal(size=leaf.shape)).astype(leaf.dtype)
    ),
    model.params['gpt2'],
  )
  return model.replace(params=model.params | {'gpt2': params})


@functools.cache
def draft(kind: str, **shape) -> LanguageModel:
  """A draft for `gpt2(**shape)`, with the same definition.

  Args:
    kind: 'perfect', the target itself; 'similar', right now and then;
      'random', another model; 'hopeless', which is never right.
    **shape: as of `gpt2`.
  """
  target = gpt2(**shape)
  return {
    'perfect': lambda: target,
    'similar': lambda: perturbed(target, 0.05),
    'random': lambda: gpt2(seed=1, **shape),
    'hopeless': lambda: target.replace(
      params=target.params | {'bias': _bias(+1)}
    ),
  }[kind]()


def sampling(*temperatures: float) -> Sampling:
  """One temperature per row, and all filters: one program for most tests."""
  return Sampling(
    temperature=np.array(temperatures, np.float32),
    top_k=20,
    top_p=0.95,
    min_p=0.01,
  )


def sampling_params(*temperatures: float) -> SamplingParams:
  """`sampling`, as `decode` takes it."""
  return check_sampling(sampling(*temperatures), len(temperatures), VOCAB_SIZE)


def prompts(batch_size: int, seed: int = 0) -> list[list[int]]:
  """Ragged random prompts; the second is one token, the third is longest."""
  rng = np.random.default_rng(seed)
  lengths = [5, 1, MAX_PROMPT, 9, 2][:batch_size]
  return [rng.integers(TABOO, size=length).tolist() for length in lengths]


def row_keys(batch_size: int, seed: int = 0) -> jax.Array:
  return jax.random.split(jax.random.key(seed), 5)[:batch_size]


def pad(rows: list[list[int]], fill: int = 0) -> tuple[np.ndarray, np.ndarray]:
  """Prompts as `decode` takes them: one bucket, and the lengths."""
  lengths = np.array([len(row) for row in rows], np.int32)
  padded = np.full((len(rows), MAX_PROMPT), fill, np.int32)
  for index, row in enumerate(rows):
    padded[index, : len(row)] = row
  return padded, lengths


def new_tokens(result, prompt_lengths) -> list[list[int]]:
  """The new tokens of each row of a `DecodeResult`."""
  tokens, ends = jax.device_get((result.tokens, result.length))
  return [
    row[start:end].tolist()
    for row, start, end in zip(tokens, prompt_lengths, ends, strict=True)
  ]
