"""The time of the draft side of a step, beside that of a target forward.

It does not depend on weights, so models of a published shape may have random
ones. With them go published figures of acceptance, from which the speed can be
computed, but not measured.
"""

from collections.abc import Iterator
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import heapq
import pathlib
from typing import Any
import zlib

from flax import nnx
from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import families
from models.checkpoints import hub
from models.checkpoints.heads import heads
from models.lab import machine
from models.lab.bench import replay
from models.lab.bench import timing
from models.nn import adapter
from models.nn import block_drafter
from models.nn import llama_config
from models.nn import matrices as matrices_lib
from models.nn import rope as rope_lib
from models.nn import sharding as sharding_lib
from models.nn.cpu import build
from models.text import choice as choice_lib
from models.text import draft_vocabulary
from models.text import drafters
from models.text import pair as pair_lib
from models.text import settings as settings_lib
import specdec
from specdec import cache as cache_lib

_NEW_TOKENS = 24  # Steps of a decode, as nothing is accepted.
_NUMBERS = 1 << 22  # Random numbers that are drawn at once.

# config.json of Qwen/Qwen3-1.7B, except for the length of the context, which
# costs nothing, and the card of rasyosef/Qwen3-1.7B-DSpark.
_QWEN3: dict[str, Any] = {
  **{'vocab_size': 151936, 'num_positions': 4096, 'width': 2048},
  **{'num_heads': 16, 'num_kv_heads': 8, 'head_width': 128},
  **{'inner_width': 6144, 'rope': rope_lib.Rope(theta=1e6), 'qk_norm': True},
}
_DSPARK: dict[str, Any] = {
  **{'num_layers': 4, 'target_width': 2048, 'block_size': 8},
  **{'reads': (3, 11, 19, 27), 'window': (2048, 2048, 2048, None)},
  **{'samples_root': True, 'markov': block_drafter.VANILLA},
  **{'markov_rank': 256, 'confidence': True, 'confidence_with_markov': True},
}
SHAPES: Mapping[
  str, tuple[llama_config.LlamaConfig, block_drafter.BlockDrafterConfig]
] = {
  'qwen3-1.7b-dspark': (
    llama_config.LlamaConfig(num_layers=28, tie_embeddings=True, **_QWEN3),
    block_drafter.BlockDrafterConfig(**_QWEN3 | _DSPARK),
  )
}
"""Targets and their published block drafters, by name."""


@dataclasses.dataclass(frozen=True)
class _DrawnTensor:
  """A random tensor, a `models.checkpoints.checkpoint.StoredTensor`."""

  name: str
  shape: tuple[int, ...]

  def check(self, expected: tuple[int, ...]) -> None:
    """It has the expected shape."""
    assert expected == self.shape

  def blocks(self) -> Iterator[tuple[slice, np.ndarray]]:
    """Yields random rows."""
    rng = np.random.default_rng(zlib.crc32(self.name.encode()))
    size = max(1, _NUMBERS // (self.shape[-1] if len(self.shape) > 1 else 1))
    for first in range(0, self.shape[0], size):
      rows = slice(first, min(first + size, self.shape[0]))
      shape = (rows.stop - first, *self.shape[1:])
      yield rows, 0.02 * rng.standard_normal(shape, np.float32)

  def in_blocks(self) -> None:
    """It is not in blocks of few bits."""


@dataclasses.dataclass(frozen=True)
class _Drawn:
  """Random tensors, a `models.checkpoints.checkpoint.StoredTensors`."""

  shapes: Mapping[hub.Path, Any]
  path = pathlib.Path('random')
  files, stored_dtypes, size = (), (), 0

  def tensors(self) -> Iterator[tuple[str, _DrawnTensor]]:
    """Yields tensors by their canonical names."""
    for path, leaf in self.shapes.items():
      name = families.parameter_name(path)
      yield name, _DrawnTensor(name, leaf.shape)


def _drawn(module: nnx.Module, config: Any, dtype: Any) -> Any:
  """A module with random weights in place of shapes."""
  graph, expected = hub.flat_params(module)
  loaded = hub.read_parameters(
    *(_Drawn(expected), families.LLAMA, expected),
    *(matrices_lib.format_of(dtype), config),
    packed=build.is_available(),
    layout=sharding_lib.Layout(),
  )
  return nnx.merge(graph, traverse_util.unflatten_dict(loaded))


def drawn_pair(shape: str, models: choice_lib.ModelChoice) -> pair_lib.Pair:
  """A target and a block drafter with random weights, without a tokenizer.

  Args:
    shape: a key of `SHAPES`.
    models: has the formats.
  """
  of_target, of_drafter = SHAPES[shape]
  floats = jnp.dtype(matrices_lib.format_of(models.dtype).float_dtype)
  module = _drawn(hub.shape_module(of_target, floats), of_target, models.dtype)
  kept = (*of_drafter.reads, cache_lib.AFTER_NORM)
  target = adapter.as_model(module, sharding_lib.Layout(), kept)
  make = functools.partial(block_drafter.BlockDrafter, of_drafter)
  drafter = _drawn(
    nnx.eval_shape(lambda: make(dtype=floats, rngs=nnx.Rngs(0))),
    of_drafter,
    models.draft_dtype or models.dtype,
  )
  matrix = target.params[of_target.embedding]['embedding']
  lm_head = matrix
  if models.draft_vocab is not None:
    lm_head = heads.few_outputs(
      matrix,
      np.arange(draft_vocabulary.size_of(models.draft_vocab) or 0),
      models.draft_dtype or models.dtype,
      packed=build.is_available(),
    )
  head = block_drafter.as_drafter(drafter, embedding=matrix, lm_head=lm_head)
  tokenizer: Any = None
  return pair_lib.Pair(target, None, tokenizer, (), head=head)


def tree_tokens(
  accepted: Sequence[float],
  of_misses: Sequence[float],
  num_nodes: int,
  *,
  siblings_go_on: bool,
) -> float:
  """Expected tokens per step of a tree that grows best first, computed.

  Args:
    accepted: how often a chain is accepted up to each position; beyond these it
      goes on with the last ratio.
    of_misses: how often the token of the target, where it is not the best one
      of the drafter, is the second best one, the third best one and so on.
    num_nodes: N, the root included.
    siblings_go_on: whether what follows a token that is not the best one is as
      good as what follows the best one; otherwise nothing follows it.
  """
  ratios = np.divide(accepted, (1.0, *accepted[:-1]))
  found, heap = 0.0, [(-1.0, 0)]
  for _ in range(num_nodes):
    if not heap:
      break
    minus, depth = heapq.heappop(heap)
    found -= minus
    if depth < 0:  # A token that nothing follows.
      continue
    best = float(ratios[min(depth, len(ratios) - 1)])
    heapq.heappush(heap, (minus * best, depth + 1))
    for share in of_misses:
      below = depth + 1 if siblings_go_on else -1
      heapq.heappush(heap, (minus * (1 - best) * share, below))
  return found


def measure(
  pair: pair_lib.Pair,
  drafting: settings_lib.DraftSettings,
  methods: Sequence[str],
  *,
  context: int,
  repeats: int,
) -> list[dict[str, Any]]:
  """Milliseconds of the draft side of a step, and of target forwards.

  The draft side is a step with a target that costs nothing (`replay`), so that
  it includes what a step does beside the models.

  Args:
    pair: a target and a drafter.
    drafting: settings of the methods.
    methods: names of methods with a drafter.
    context: tokens in the cache.
    repeats: interleaved measurements.

  Returns:
    A row for each method: N nodes, `draft_ms`, V(1) and V(N) in `plain_ms` and
    `verify_ms`, and `draft_per_plain`, the first of these over the second.
  """
  spec = pair.target.spec
  rng = np.random.default_rng(0)
  text = rng.integers(spec.vocab_size, size=context + _NEW_TOKENS).tolist()
  oracle = replay.oracle_target(pair.target, [text])
  drafting = dataclasses.replace(drafting, inner='none')

  def arm(drafter: specdec.Drafter) -> timing.Arm:
    return lambda prompts, limit: specdec.generate(
      *(oracle, jax.random.key(0), prompts),
      drafter=drafter,
      max_new_tokens=limit,
    )

  chosen = {
    name: drafters.make_drafter(name, pair, drafting) for name in methods
  }
  arms = {name: arm(drafter) for name, drafter in chosen.items()}
  batches = [[text[:context]]] * repeats
  timing.warm_up(arms, batches, max_new_tokens=_NEW_TOKENS)
  found = timing.time_arms(arms, batches, max_new_tokens=_NEW_TOKENS)
  sizes = {name: one.shape.num_nodes for name, one in chosen.items()}
  verification = machine.measure_step_costs(
    *(pair.target, [text]),
    prompt_slots=context,
    max_new_tokens=64,
    context=context,
    node_counts=[*sizes.values()],
    effort=machine.Effort(num_steps=4, repeats=repeats),
  ).verification
  return [
    _row(name, sizes[name], measured, verification)
    for name, measured in found.items()
  ]


def _row(
  name: str,
  num_nodes: int,
  measured: Sequence[timing.Measurement],
  verification: Mapping[int, float],
) -> dict[str, Any]:
  """A row of `measure`."""
  steps = [one.generation.stats.reads['target']['forwards'] for one in measured]
  seconds = [one.seconds - one.prefill_seconds for one in measured]
  draft = float(np.median(np.divide(seconds, steps)))
  plain, verify = verification[1], verification[num_nodes]
  return {
    **{'method': name, 'N': num_nodes, 'draft_ms': 1e3 * draft},
    **{'plain_ms': 1e3 * plain, 'verify_ms': 1e3 * verify},
    'draft_per_plain': draft / plain,
  }


def with_speeds(
  rows: Sequence[Mapping[str, Any]],
  accepted: Sequence[float],
  of_misses: Sequence[float],
) -> list[dict[str, Any]]:
  """Rows of `measure` with tokens per step and speed, which are computed.

  The arguments are those of `tree_tokens`; a tree has two values, without and
  with what follows tokens that are not the best ones.
  """
  found = []
  for row in rows:
    chain = row['method'] == 'chain'
    step = row['draft_ms'] + row['verify_ms']
    few, many = (
      tree_tokens(
        *(accepted, () if chain else of_misses, row['N']), siblings_go_on=go_on
      )
      for go_on in (False, True)
    )
    tokens = {'computed_tokens': few, 'computed_tokens_most': many}
    gain = row['plain_ms'] / step
    speeds = {'computed_speed': few * gain, 'computed_speed_most': many * gain}
    found.append({**row, **tokens, **speeds})
  return found
