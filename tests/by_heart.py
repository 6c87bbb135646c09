"""Texts of the tiny target, and drafters that learn them by heart."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
import tiny_heads

import specdec
from specdec import cache as cache_lib
from specdec.models.lab.training import head_trainer
from specdec.models.nn import eagle

NUM_TEXTS, PROMPT, NEW = 4, 8, 40
DEPTHS = 3  # The tokens that heads learn to draft.
# The target is unsure of some of its tokens. What a drafter learns is the text,
# not how unsure the target is, so that no rounding makes it draft another one.
_SHARPER = 10.0


def generate(drafter, prompts, target=None):
  """The new tokens of the target, by default of the tiny one."""
  return specdec.generate(
    target or tiny_heads.target(),
    jax.random.key(0),
    prompts,
    drafter=drafter,
    max_new_tokens=NEW,
  )


@functools.cache
def texts() -> np.ndarray:
  """Texts that the tiny target wrote, `[texts, tokens]`."""
  return written(tiny_heads.target(), tiny.TABOO)


def written(target, vocab_size) -> np.ndarray:
  """Texts that a target wrote, `[texts, tokens]`."""
  rng = np.random.default_rng(3)
  prompts = rng.integers(vocab_size, size=(NUM_TEXTS, PROMPT)).tolist()
  plain = generate(specdec.PLAIN, prompts, target)
  return np.array(
    [prompt + new for prompt, new in zip(prompts, plain.tokens, strict=True)]
  )


@jax.jit
def hidden(tokens, target=None):
  """The target's logits and hidden states of whole texts."""
  target = target or tiny_heads.target()
  cache = target.spec.init_cache(*tokens.shape)
  logits, cache = target.causal(tokens, cache)
  return logits, cache.hidden


def fitted(function, params, reads, *, steps, target=None):
  """Parameters after training on the texts, by a loss function of the trainers.

  `reads` are the states that the drafter reads; `target` has a target other
  than the tiny one, its texts, its embedding and its output matrix.
  """
  if target is None:
    base = tiny_heads.target().params['gpt2']
    matrices = base['wte']['embedding'], base['lm_head']
    target = tiny_heads.target(), texts(), *matrices
  model, tokens, *matrices = target
  logits, of_layers = hidden(tokens, model)
  states = [of_layers[layer][:, 0] for layer in reads]
  batch = {
    'tokens': tokens,
    'states': np.concatenate(states, -1),
    'normed': _SHARPER * of_layers[cache_lib.AFTER_NORM][:, 0],
    'choice': np.argmax(logits, -1),
  }
  frozen = *matrices, None
  loss = jax.tree_util.Partial(function, frozen)
  optimizer = optax.adam(optax.linear_schedule(5e-3, 0.0, steps))

  @jax.jit
  def fit(params):
    def step(number, carry):
      params, state = carry
      drawn = batch | {'draw': number.astype(jnp.uint32)}
      grads = jax.grad(lambda params: loss(params, drawn)[0])(params)
      updates, state = optimizer.update(grads, state)
      return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, optimizer.init(params)))

  return fit(params)[0]


def by_position(histogram):
  """The fraction accepted at each position, of what was reached."""
  reached = np.cumsum(np.array(histogram)[::-1])[::-1]
  return reached[1:] / reached[:-1]


def fitted_head(config, *, norm=None, target=None) -> eagle.Head:
  """A head that learned the texts; `norm` is the scale of its norm before."""
  make = lambda: eagle.Head(config, rngs=nnx.Rngs(0))
  graph, _ = nnx.split(nnx.eval_shape(make))
  params = jax.jit(lambda: nnx.to_pure_dict(nnx.split(make())[1]))()
  if norm is not None:
    params['norm']['scale'] = jnp.asarray(norm)
  loss = head_trainer.loss_function(graph, config, DEPTHS, 'float32')
  params = fitted(loss, params, config.reads, steps=300, target=target)
  return nnx.merge(graph, params)


@jax.jit
def right(head, tokens, of_layers) -> jax.Array:
  """How much a head drafts rightly at each depth, `[DEPTHS]` fractions.

  It begins at every place of the texts `[B, T]`, and goes on where all before
  is right. `of_layers` are the target's states, see `hidden`. A depth has a row
  for every place. The row sees the text up to there, and the rows of the same
  place at the depths above.
  """
  rows, size = tokens.shape
  cache = head.spec.init_cache(rows, DEPTHS * size)
  states = tiny_heads.before(head, of_layers)
  places = jnp.broadcast_to(jnp.arange(size)[None], tokens.shape)
  text, same = jnp.tri(size, dtype=bool), jnp.eye(size, dtype=bool)
  reached, fractions = places >= PROMPT - 1, []
  for depth in range(DEPTHS):
    blocks = [text, *[same] * depth, *[~text & text] * (DEPTHS - 1 - depth)]
    mask = jnp.tile(jnp.concatenate(blocks, axis=1)[None], (rows, 1, 1))
    read, wanted = (jnp.roll(tokens, -k, axis=1) for k in (depth, depth + 1))
    states, cache = head.forward(read, places + depth, mask, cache, states)
    cache = cache.replace(length=cache.length + size)
    drafted = jnp.argmax(head.spec.logits(head.params, states), axis=-1)
    reached &= places + depth + 1 < size
    accepted = reached & (drafted == wanted)
    fractions.append(jnp.sum(accepted) / jnp.sum(reached))
    reached = accepted
  return jnp.stack(fractions)
