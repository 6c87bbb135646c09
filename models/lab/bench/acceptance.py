"""Measures how often rules of verification accept, beside theory."""

from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from models.lab import task as task_lib
from models.lab.bench import ceilings
from models.lab.bench import exactness
from models.lab.bench import optimal
from models.text import generator as generator_lib
from models.text import result as result_lib
import specdec
from specdec import arguments as arguments_lib
from specdec import mappings
from specdec import model as model_lib
from specdec import sampling as sampling_lib
from specdec.tree import topology as topology_lib
from specdec.verify import rules as rules_lib


@dataclasses.dataclass(frozen=True)
class Verification:
  """The arguments `verify` and `children` of `specdec.generate`."""

  verify: str
  children: str | None = None

  def __str__(self):
    return self.verify + (f', {self.children}' if self.children else '')

  @property
  def theory(self) -> str:
    """Acceptance probability of a single child, an entry of `theory`."""
    rule = rules_lib.RULES[self.verify](self.children or sampling_lib.BEST)
    if rule.keeps_tokens:
      return 'coupled'
    return 'p(best)' if rule.children == sampling_lib.BEST else '1 - TV'


_OF_CHILDREN = (
  Verification('match'),
  Verification('rejection', sampling_lib.WITHOUT_REPLACEMENT),
  Verification('rejection', sampling_lib.WITH_REPLACEMENT),
  Verification('rejection', sampling_lib.BEST_AND_DRAWN),
  Verification('rejection', sampling_lib.BEST),
)
# With children alone traversal is rejection, and with the best ones always.
_OF_TREES = (
  *_OF_CHILDREN,
  Verification('traversal', sampling_lib.WITHOUT_REPLACEMENT),
  Verification('traversal', sampling_lib.WITH_REPLACEMENT),
  Verification('traversal', sampling_lib.BEST_AND_DRAWN),
)


@mappings.jit()
def theory(target: jax.Array, draft: jax.Array) -> dict[str, jax.Array]:
  """Acceptance probabilities of a single draft token, at each of n positions.

  Args:
    target: `[n, V]`, distributions.
    draft: `[n, V]`, distributions.

  Returns:
    `[n]` each: `1 - TV`, rejection sampling; `coupled`, match, where draft and
    target choose with the same Gumbel noise (arXiv 2408.07978), and its lower
    bound `(1 - TV)/(1 + TV)`; `sum p q`, independent noise; `p(best)`, the
    draft's most likely token instead of a draw.
  """
  common = jnp.sum(jnp.minimum(target, draft), axis=1)
  best = jnp.argmax(draft, axis=1)
  # sum_j 1 / sum_i max(p_i / p_j, q_i / q_j): the maximum is the first term if
  # p_i / q_i >= p_j / q_j, so that sorting by that ratio gives all sums.
  ratio = jnp.where(draft > 0, target / jnp.maximum(draft, 1e-37), jnp.inf)
  order = jnp.argsort(ratio, axis=1)
  p, q = (jnp.take_along_axis(x, order, axis=1) for x in (target, draft))
  p_from = jnp.flip(jnp.cumsum(jnp.flip(p, 1), axis=1), 1)
  q_before = jnp.cumsum(q, axis=1) - q
  both = (p > 0) & (q > 0)
  share = lambda mass, prob: mass / jnp.where(both, prob, 1.0)
  coupled = jnp.where(both, 1 / (share(p_from, p) + share(q_before, q)), 0.0)
  return {
    '1 - TV': common,
    'coupled': jnp.sum(coupled, axis=1),
    '(1 - TV)/(1 + TV)': common / (2 - common),
    'sum p q': jnp.sum(target * draft, axis=1),
    'p(best)': jnp.take_along_axis(target, best[:, None], axis=1)[:, 0],
  }


def _efficiency(
  results: Iterable[result_lib.TextGeneration],
) -> dict[str, float]:
  """Tokens per target forward, and the standard error of that ratio by rows."""
  rows = [row for result in results for row in result.origins if row]
  tokens = np.array([len(row) for row in rows])
  # Origin 0 is the target, whose token is the last of its forward.
  forwards = np.array([row.count(0) + (row[-1] != 0) for row in rows])
  rate = tokens.sum() / forwards.sum()
  spread = np.square(tokens - rate * forwards).sum() / max(len(rows) - 1, 1)
  return {
    'measured': float(rate),
    'standard_error': float(np.sqrt(spread / len(rows)) / forwards.mean()),
    'forwards': int(forwards.sum()),
  }


def _acceptance(
  results: Iterable[result_lib.TextGeneration],
  probs_of: Any,
  number: int,
  rule: Verification,
) -> dict[str, Any]:
  """Acceptance of one of the first draft tokens of each target forward."""
  accepted: list[np.ndarray] = []
  expected: list[dict[str, np.ndarray]] = []
  for result in results:
    rows = zip(result.prompt_tokens, result.tokens, result.origins, strict=True)
    for prompt, tokens, origins in rows:
      # Origin 0 is the target, whose token is the last of its forward.
      first = np.concatenate([[0], origins[:-1]]) == 0
      accepted.append(np.asarray(origins)[first] > 0)
      positions = len(prompt) - 1 + np.flatnonzero(first)
      found: dict[str, np.ndarray] = {}
      target, draft = map(np.asarray, probs_of([*prompt, *tokens]))
      if number == 1:
        # Padded to a power of two, so that few shapes are compiled.
        padded = np.resize(positions, 1 << (positions.size - 1).bit_length())
        rates = jax.device_get(theory(target[padded], draft[padded]))
        found = {name: rate[: positions.size] for name, rate in rates.items()}
      if rule.children is not None:
        found['most'] = ceilings.one_step(
          target[positions], draft[positions], number, rule.children
        )
      expected.append(found)
  pooled = np.concatenate(accepted)
  figures: dict[str, Any] = {
    'measured': float(pooled.mean()),
    'standard_error': float(pooled.std() / np.sqrt(pooled.size)),
    'forwards': pooled.size,
  }
  means = jax.tree.map(lambda *rows: np.concatenate(rows).mean(), *expected)
  figures['theory'] = {name: float(mean) for name, mean in means.items()}
  return figures


def _decode_batches(
  generator: generator_lib.Generator,
  draft: model_lib.LanguageModel,
  prompts: Sequence[str],
  topology: topology_lib.Topology,
  rule: Verification,
  *,
  task: task_lib.Task,
) -> Iterable[result_lib.TextGeneration]:
  """Decodes with a fixed topology; the last batch only if it is full."""
  scorer = specdec.LanguageModelScorer(draft)
  drafter = specdec.fixed_drafter(scorer, topology)
  drafted = dataclasses.replace(generator, drafter=drafter)
  starts = range(0, len(prompts) - task.batch_size + 1, task.batch_size)
  title = f'{topology.branching} x {topology.max_depth}, {rule}'
  for start in tqdm.tqdm(starts, desc=title, unit='batch', file=sys.stderr):
    yield drafted.generate(
      prompts[start : start + task.batch_size],
      seed=task.seed + start,
      verify=rule.verify,
      children=rule.children,
      eos_ids=(),
      sampling=task.sampling,
      max_new_tokens=task.max_new_tokens,
    )


def _trees(
  acceptance: Mapping[str, Any], chain_length: int, sizes: Sequence[int]
) -> dict[str, topology_lib.Topology]:
  """A chain, and the trees of some sizes that are best for drawn children.

  `acceptance` is that of `measure`.
  """
  by_rank: list[float] = []
  drawn = str(Verification('rejection', sampling_lib.WITHOUT_REPLACEMENT))
  for number in sorted(map(int, acceptance)):
    more = acceptance[str(number)][drawn]['measured'] - sum(by_rank)
    ranks = number - len(by_rank)
    by_rank += [max(more, 0.0) / ranks] * ranks
  trees = {f'chain of {chain_length}': topology_lib.chain(chain_length)}
  for size in sizes:
    table = optimal.best_trees(by_rank, num_nodes=size, max_depth=size - 1)
    paths = table.paths(size, size - 1)
    trees[f'tree of {size}'] = topology_lib.from_paths(paths)
  return trees


def _checked_draft(
  draft: model_lib.LanguageModel | None,
  task: task_lib.Task,
  num_prompts: int,
) -> model_lib.LanguageModel:
  """The draft; ValueError if there is no acceptance of sampling to measure."""
  if not np.all(np.asarray(task.sampling.temperature) > 0):
    raise ValueError('acceptance of sampling needs --temperature above 0')
  if draft is None:
    raise ValueError('acceptance needs a draft; give --draft')
  if num_prompts < task.batch_size:
    raise ValueError(
      f'--batch_size={task.batch_size} needs as many prompts, got {num_prompts}'
    )
  return draft


def measure(
  generator: generator_lib.Generator,
  prompts: Sequence[str],
  task: task_lib.Task,
  *,
  numbers_of_children: Sequence[int],
  tree_sizes: Sequence[int] = (),
) -> dict[str, Any]:
  """Measures how often each rule of verification accepts.

  The drafter of the generator is not used: trees of depth 1 have the numbers of
  children; a chain of `num_draft_tokens` and trees of some sizes, the root
  included, measure block efficiency. A last batch that is not full is left out.
  The seed of the batch from prompt i on is seed + i.

  Returns:
    `acceptance` by number of children and rule: `measured`, the share of target
    forwards that accepted a draft token, `standard_error`, `forwards` and
    `theory`, means over the same positions: `most`, see `ceilings.one_step`,
    and for one child those of `theory`. And `block_efficiency` by shape and
    rule: `measured`, `standard_error` between rows, `forwards`; `paths` by
    shape.

  Raises:
    ValueError: there is no draft, or decoding is greedy.
  """
  pair = generator.pair
  draft = _checked_draft(pair.draft, task, len(prompts))
  decode = functools.partial(
    _decode_batches,
    *(generator, draft, prompts),
    task=task,
  )
  size = pair.target.spec.vocab_size
  sampling = arguments_lib.to_params(task.sampling, 1, size)
  probs_of = lambda ids: [
    exactness.distributions(model, exactness.padded(ids), sampling)
    for model in (pair.target, draft)
  ]
  accepted = lambda n, rule: _acceptance(
    decode(topology_lib.k_ary(n, 1), rule), probs_of, n, rule
  )
  acceptance = {
    str(n): {str(rule): accepted(n, rule) for rule in _OF_CHILDREN}
    for n in numbers_of_children
  }
  trees = _trees(acceptance, task.drafting.num_draft_tokens, tree_sizes)
  return {
    'acceptance': acceptance,
    'block_efficiency': {
      name: {str(rule): _efficiency(decode(tree, rule)) for rule in _OF_TREES}
      for name, tree in trees.items()
    },
    'paths': {name: tree.paths for name, tree in trees.items()},
  }


def rows(figures: dict[str, Any]) -> list[dict[str, str]]:
  """The rows of a table of the figures of `measure`."""
  table = []
  for rule in _OF_TREES:
    row = {'rule': str(rule), 'theory, 1 child': ''}
    for number, by_rule in figures['acceptance'].items():
      found = by_rule.get(str(rule))
      measured, most = f'measured, {number} children', f'most, {number}'
      row |= {measured: '', most: ''}
      if found:
        error = f'{found["standard_error"]:.3f}'
        row[measured] = f'{found["measured"]:.3f} ± {error}'
        if np.isfinite(found['theory'].get('most', np.nan)):
          row[most] = f'{found["theory"]["most"]:.3f}'
        if rule.theory in found['theory']:
          value = found['theory'][rule.theory]
          row['theory, 1 child'] = f'{rule.theory} = {value:.3f}'
    for shape, by_rule in figures['block_efficiency'].items():
      found = by_rule[str(rule)]
      error = f'{found["standard_error"]:.3f}'
      row[f'{shape}: tokens per forward'] = f'{found["measured"]:.3f} ± {error}'
    table.append(row)
  return table
