"""Tiny models with random weights, and prompts for them.

Compiling takes most of the time of these tests, so models of one shape share
their definition, and so their programs: perfect and hopeless drafts differ in
their weights alone.
"""

import dataclasses
import functools
import pathlib

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

import specdec
from specdec import arguments as arguments_lib
from specdec import sampling as sampling_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints import hub
from specdec.models.checkpoints.keys import tensor_parts
from specdec.models.nn import adapter
from specdec.models.nn import delta as delta_lib
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import lfm2 as lfm2_lib
from specdec.models.nn import llama as nn_llama
from specdec.models.nn import mixtral as mixtral_lib
from specdec.models.nn import rope as rope_lib

VOCAB_SIZE = 48
MAX_PROMPT = 32  # The longest of its bucket.
MAX_NEW_TOKENS = 48
MAX_POSITIONS = MAX_PROMPT + MAX_NEW_TOKENS

# No target ever says it, and the hopeless draft says nothing else.
TABOO = VOCAB_SIZE - 1

# The target itself, one that is right now and then, another model, never right.
DRAFTS = ('perfect', 'similar', 'random', 'hopeless')

MODULE_SHAPE = {'vocab_size': 40, 'num_positions': 8, 'width': 16}
MODULE_SHAPE |= {'num_layers': 2, 'num_heads': 2}


def module(*, dtype=jnp.float32, seed: int = 0, **config) -> nn_gpt2.GPT2:
  """A GPT-2 of `MODULE_SHAPE | config`; no bias is zero, no scale one."""
  rng = np.random.default_rng(seed)
  shape = nn_gpt2.GPT2Config(**(MODULE_SHAPE | config))
  # Its weights are replaced, so do not spend time on drawing them.
  shapes = nnx.eval_shape(
    lambda: nn_gpt2.GPT2(shape, dtype=dtype, rngs=nnx.Rngs(0))
  )
  graph, variables = nnx.split(shapes)

  def draw(path, leaf):
    noise = 0.3 * rng.standard_normal(leaf.shape)
    is_scale = path[-1].key == 'scale'
    return jnp.asarray(noise + is_scale, leaf.dtype)

  params = jax.tree_util.tree_map_with_path(draw, nnx.to_pure_dict(variables))
  return nnx.merge(graph, params)


def parameters(module: nn_gpt2.GPT2) -> dict[str, np.ndarray]:
  """Every parameter by its path."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(
    nnx.to_pure_dict(nnx.split(module)[1])
  )
  return {
    jax.tree_util.keystr(path, simple=True, separator='.'): np.asarray(leaf)
    for path, leaf in leaves
  }


def tokens(batch_size: int = 2, length: int = 8, seed: int = 0) -> np.ndarray:
  rng = np.random.default_rng(seed)
  return rng.integers(MODULE_SHAPE['vocab_size'], size=(batch_size, length))


def logits(module: nn_gpt2.GPT2, tokens: np.ndarray) -> np.ndarray:
  """Logits of the plain causal forward."""
  batch_size, length = tokens.shape
  positions = jnp.broadcast_to(jnp.arange(length)[None], tokens.shape)
  causal = jnp.tril(jnp.ones((length, length), bool))
  mask = jnp.broadcast_to(causal[None], (batch_size, length, length))
  forward = jax.jit(lambda tokens: module(tokens, positions, mask)[0])
  return np.asarray(forward(tokens))


def _bias(sign: float) -> jax.Array:
  bias = np.zeros(VOCAB_SIZE, np.float32)
  bias[TABOO] = sign * 1e6
  return jnp.asarray(bias)


@functools.cache
def _base(seed: int = 0, hidden=(), **shape) -> specdec.LanguageModel:
  made = module(
    seed=seed,
    vocab_size=VOCAB_SIZE,
    num_positions=MAX_POSITIONS,
    # A tied head makes a random model repeat itself.
    tie_embeddings=False,
    **shape,
  )
  # Far from flat logits, from tokens and positions rather than from biases.
  made.lm_head[...] *= 2
  made.ln_f.bias[...] *= 0
  for embedding in (made.wte.embedding, made.wpe.embedding):
    embedding[...] *= 4
  return adapter.as_model(made, hidden=hidden)


@functools.cache
def _spec(**shape) -> specdec.ModelSpec:
  base = _base(**shape).spec

  def apply(params, tokens, positions, mask, cache):
    logits, cache = base.apply(params['gpt2'], tokens, positions, mask, cache)
    return logits + params['bias'][None, None], cache

  return dataclasses.replace(base, apply=apply)


@functools.cache
def gpt2(seed: int = 0, **shape) -> specdec.LanguageModel:
  """A random GPT-2 whose greedy text is varied.

  `shape` may have a `dtype`, and `hidden`, see `adapter.as_model`.
  """
  params = {'gpt2': _base(seed, **shape).params, 'bias': _bias(-1)}
  return specdec.LanguageModel(params=params, spec=_spec(**shape))


def _similar(model: specdec.LanguageModel) -> specdec.LanguageModel:
  """The model with every weight changed by about 5 percent of itself."""
  rng = np.random.default_rng(99)
  factor = lambda leaf: 1 + 0.05 * rng.normal(size=leaf.shape)
  change = lambda leaf: leaf * factor(leaf).astype(leaf.dtype)
  params = jax.tree.map(change, model.params['gpt2'])
  return model.replace(params=model.params | {'gpt2': params})


@functools.cache
def draft(kind: str, **shape) -> specdec.LanguageModel:
  """A draft of one of `DRAFTS` for `gpt2(**shape)`, with its definition."""
  target = gpt2(**shape)
  return {
    'perfect': lambda: target,
    'similar': lambda: _similar(target),
    'random': lambda: gpt2(seed=1, **shape),
    'hopeless': lambda: target.replace(
      params=target.params | {'bias': _bias(+1)}
    ),
  }[kind]()


def sampling(*temperatures: float) -> specdec.Sampling:
  """One temperature per row, and all filters: one program for most tests."""
  temperature = np.array(temperatures, np.float32)
  return specdec.Sampling(
    temperature=temperature, top_k=20, top_p=0.95, min_p=0.01
  )


def sampling_params(*temperatures: float) -> sampling_lib.SamplingParams:
  """`sampling`, as `decode` takes it."""
  return arguments_lib.to_params(
    sampling(*temperatures), len(temperatures), VOCAB_SIZE
  )


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


def in_slots(slots, jobs, num_ended: int = 1) -> tuple[list, list[int]]:
  """The generations of jobs, and the order in which they ended.

  Jobs are arguments of `insert`; each is inserted as soon as a slot is free.
  """
  waiting, indices, results = list(range(len(jobs))), {}, {}
  while waiting or indices:
    while waiting and slots.free:
      slot = slots.insert(**jobs[waiting[0]])
      indices[slot] = waiting.pop(0)
    for slot, generation in slots.advance(num_ended).items():
      results[indices.pop(slot)] = generation
  return [results[index] for index in range(len(jobs))], list(results)


def table(vocab_size: int, seed: int = 0) -> np.ndarray:
  """Random logits of a table model, `[V, V]` float32."""
  rng = np.random.default_rng(seed)
  return 2 * rng.normal(size=(vocab_size, vocab_size)).astype(np.float32)


_LLAMA_SHAPE = {'vocab_size': VOCAB_SIZE, 'num_positions': MAX_POSITIONS}
_LLAMA_SHAPE |= {'width': 16, 'num_layers': 2, 'inner_width': 24}
_LLAMA_SHAPE |= {'num_heads': 4, 'num_kv_heads': 2, 'head_width': 8}
_SCALING = rope_lib.Llama3Scaling(
  factor=4.0,
  low_freq_factor=1.0,
  high_freq_factor=4.0,
  original_max_position_embeddings=64,
)
_ROPE = rope_lib.Rope(theta=1000.0, scaling=_SCALING)
LLAMA_CONFIGS = {
  'llama': nn_llama.LlamaConfig(**_LLAMA_SHAPE, qk_norm=True, rope=_ROPE),
  # One layer: every expert has a loop of its own to compile.
  'mixtral': mixtral_lib.MixtralConfig(
    **(_LLAMA_SHAPE | {'num_layers': 1}), num_experts=4, experts_per_token=2
  ),
}


_LFM2 = _LLAMA_SHAPE | {'num_layers': 3, 'qk_norm': True}
LLAMA_CONFIGS['lfm2'] = lfm2_lib.Lfm2Config(
  **_LFM2, mixers=('conv', 'self_attn', 'conv')
)
LLAMA_CONFIGS['delta'] = delta_lib.DeltaConfig(
  **_LFM2 | {'num_layers': 2},
  key_heads=2,
  value_heads=4,
  key_width=16,
  value_width=8,
  conv_size=4,
  mixers=('linear_attn', 'self_attn'),
)


class Stored:
  """The weights of a module, as a stored network for `hub.read_module`."""

  path, size = pathlib.Path('module'), 0

  def __init__(self, module: adapter.Module):
    self.module = module
    self.config = module.config
    self.family = families.family_of(module.config)

  def tensors(self):
    for path, leaf in hub.flat_params(self.module)[1].items():
      name = families.parameter_name(path)
      yield name, tensor_parts.HostTensor(name, np.asarray(leaf))


_LLAMA_SEED = 9000  # These models do not repeat themselves.


@functools.cache
def llama_module(
  name: str, dtype: str = 'float32', **changes
) -> adapter.Module:
  """A random model of `LLAMA_CONFIGS` whose greedy text is varied."""
  config = dataclasses.replace(LLAMA_CONFIGS[name], **changes)
  make = families.family_of(config).module
  graph, variables = nnx.split(
    nnx.eval_shape(lambda: make(config, dtype=dtype, rngs=nnx.Rngs(0)))
  )
  pure = nnx.to_pure_dict(variables)
  leaves, structure = jax.tree_util.tree_flatten_with_path(pure)
  drawn = []
  for index, (path, leaf) in enumerate(leaves):
    rng = np.random.default_rng(_LLAMA_SEED + index)
    values = 0.5 * rng.standard_normal(leaf.shape) + (leaf.ndim == 1)
    if path[-1].key == 'rate':  # States decay.
      values = -np.abs(values)
    drawn.append(jnp.asarray(values, leaf.dtype))
  return nnx.merge(graph, jax.tree.unflatten(structure, drawn))
