"""The decode loop: one jitted `lax.while_loop`, prompt to last token.

Each step, for every row at once:

    grow     a tree of guesses below the last token (none, for plain decoding)
    verify   its best nodes in one target forward
    accept   as far as the target agrees, plus its own bonus token

Rows advance by their own counts. Plain decoding is this loop with a tree that
is just its root.
"""

import dataclasses
import functools

import flax.struct
import jax
from jax import lax
import jax.numpy as jnp

from specdec.cache import KVCache
from specdec.drafter import Drafter
from specdec.drafter import StageCounters
from specdec.drafter import StageState
from specdec.drafter import Step
from specdec.growth import commit_stages
from specdec.growth import grow
from specdec.growth import init_stages
from specdec.model import Model
from specdec.sampling import position_noise
from specdec.sampling import Sampling
from specdec.scorers.language_model import prefill
from specdec.statistics import count_step
from specdec.statistics import Counters
from specdec.statistics import init_counters
from specdec.tree import init_tree
from specdec.tree import NO_NODE
from specdec.tree import select_best
from specdec.tree import TokenTree
from specdec.verification import commit
from specdec.verification import count_emitted
from specdec.verification import emitted_origins
from specdec.verification import verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """What is static about a decode: changing it recompiles.

  Attributes:
    max_new_tokens: room in the buffers. The limit itself is dynamic and may be
      anything up to this.
    eos_ids: tokens that end a row; the emitted text includes them.
  """

  max_new_tokens: int = 128
  eos_ids: tuple[int, ...] = ()


class DecodeResult(flax.struct.PyTreeNode):
  """What a decode returns.

  Attributes:
    tokens: `[B, T]` int32, prompt and new tokens of each row, then garbage.
    length: `[B]` int32, how many of them are valid.
    origins: `[B, T]` int32, who proposed each new token: 0 nobody, the target
      found it itself; i the i-th of `Drafter.labels`.
    counters: see `specdec.statistics`.
    stage_counters: of each stage, from the outermost in.
  """

  tokens: jax.Array
  length: jax.Array
  origins: jax.Array
  counters: Counters
  stage_counters: tuple[StageCounters, ...]


class _LoopState(flax.struct.PyTreeNode):
  """Carried from step to step.

  Between steps the target cache holds all tokens but the last, the root.
  """

  tokens: jax.Array  # [B, T]
  origins: jax.Array  # [B, T]
  length: jax.Array  # [B]
  done: jax.Array  # [B] bool
  target_cache: KVCache
  stages: StageState | None
  counters: Counters


def _append(tokens, length, new, count):
  """Writes the first `count` of `new` `[B, n]` behind each row's tokens."""
  offsets = jnp.arange(new.shape[1])[None]
  kept = offsets < count[:, None]
  # Out of range, hence dropped.
  index = jnp.where(kept, length[:, None] + offsets, tokens.shape[1])
  rows = jnp.arange(tokens.shape[0])[:, None]
  return tokens.at[rows, index].set(new, mode='drop')


def _select(drafter: Drafter, tree: TokenTree) -> tuple[TokenTree, jax.Array]:
  """The nodes to verify, and where they were."""
  if drafter.config.topology is not None:  # all of them
    return tree, jnp.broadcast_to(jnp.arange(tree.capacity), tree.token.shape)
  return jax.vmap(select_best, (0, None))(tree, drafter.config.num_nodes)


@functools.partial(jax.jit, static_argnames='config')
def decode(
  target: Model,
  drafter: Drafter | None,
  row_keys: jax.Array,
  prompt: jax.Array,
  prompt_length: jax.Array,
  limit: jax.Array,
  sampling: Sampling,
  *,
  config: DecodeConfig,
) -> DecodeResult:
  """Decodes a batch; the pure function under `specdec.generate`.

  Arguments are trusted: `specdec.generate` checks them, and calls this with
  prompts padded to buckets so that few shapes are compiled.

  Args:
    target: the model whose output is kept exactly.
    drafter: guesses ahead; None is plain decoding.
    row_keys: `[B]` keys, one per row; consumed.
    prompt: `[B, P]` int32, padded at the end with any valid token.
    prompt_length: `[B]` int32, at least 1.
    limit: `[B]` int32, new tokens per row, at most `config.max_new_tokens`.
    sampling: validated.
    config: see `DecodeConfig`.

  Returns:
    Tokens, lengths and counters. With equal arguments, every drafter gives
    equal tokens.
  """
  batch_size, prompt_bucket = prompt.shape
  max_depth = 0 if drafter is None else drafter.max_depth
  num_nodes = 1 if drafter is None else drafter.config.num_nodes
  vocab_size = target.definition.vocab_size
  text_slots = prompt_bucket + config.max_new_tokens
  end = prompt_length + limit

  def propose(state: _LoopState, noise) -> tuple[StageState | None, TokenTree]:
    """The tree of guesses, as it is before some are selected."""
    root = jnp.take_along_axis(state.tokens, state.length[:, None] - 1, axis=1)
    capacity = 1 if drafter is None else drafter.config.capacity
    tree = jax.vmap(init_tree, (0, None))(root[:, 0], capacity)
    if drafter is None or state.stages is None or max_depth == 0:
      return state.stages, tree
    step = Step(
      tokens=state.tokens,
      length=state.length,
      active=~state.done,
      noise=noise,
      sampling=sampling,
      target_bytes=target.definition.weight_bytes,
    )
    return grow(
      drafter,
      state.stages,
      tree,
      step,
      closed=jnp.zeros(tree.token.shape, bool),
    )

  def step(state: _LoopState) -> _LoopState:
    length = state.length
    positions = length[:, None] + jnp.arange(max_depth + 1)[None]
    noise = position_noise(row_keys, positions, vocab_size, sampling)
    stages, grown = propose(state, noise)
    tree, nodes = (grown, None) if drafter is None else _select(drafter, grown)
    verdict = verify(target, state.target_cache, tree, noise, sampling)
    room = jnp.where(state.done, 0, end - length)
    emitted, done = count_emitted(
      verdict.accepted, verdict.chosen, room, config.eos_ids
    )
    if drafter is not None and stages is not None and nodes is not None:
      path = jnp.where(
        verdict.path >= 0,
        jnp.take_along_axis(nodes, jnp.maximum(verdict.path, 0), axis=1),
        NO_NODE,
      )
      stages = commit_stages(drafter, stages, path, emitted - 1)
    origins = emitted_origins(tree, verdict)
    return _LoopState(
      tokens=_append(state.tokens, length, verdict.chosen, emitted),
      origins=_append(state.origins, length, origins, emitted),
      length=length + emitted,
      done=state.done | done,
      target_cache=commit(verdict, emitted, num_nodes),
      stages=stages,
      counters=count_step(state.counters, length, tree.size, emitted),
    )

  tokens = jnp.pad(prompt, ((0, 0), (0, config.max_new_tokens)))
  final = lax.while_loop(
    lambda state: ~jnp.all(state.done),
    step,
    _LoopState(
      tokens=tokens,
      origins=jnp.zeros_like(tokens),
      length=prompt_length,
      done=limit <= 0,
      # Rows that are done go on verifying until all are: one tree more.
      target_cache=prefill(
        target, prompt, prompt_length - 1, text_slots + num_nodes
      ),
      stages=None
      if drafter is None
      else init_stages(drafter, prompt, prompt_length, num_slots=text_slots),
      counters=init_counters(batch_size, max_depth),
    ),
  )
  stages = final.stages.stages if final.stages is not None else ()
  return DecodeResult(
    tokens=final.tokens,
    length=final.length,
    origins=final.origins,
    counters=final.counters,
    stage_counters=tuple(stage.counters for stage in stages),
  )
