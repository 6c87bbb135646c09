"""Texts of the tiny target, and drafters that learn them by heart."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny
import tiny_heads

import specdec
from specdec import cache as cache_lib

NUM_TEXTS, PROMPT, NEW = 4, 8, 40
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


def in_slots(drafter, prompts, target):
  """The generations of prompts that come and go in two slots, as they end."""
  slots = specdec.Slots(
    target, num_slots=2, context=PROMPT + NEW, drafter=drafter
  )
  ended = []
  for prompt in prompts:
    if not slots.free:
      ended += slots.advance().values()
    slots.insert(prompt, jax.random.key(1), max_new_tokens=NEW)
  while len(ended) < len(prompts):
    ended += slots.advance().values()
  return ended
