"""The distribution of tokens under rejection, summed; and its rules, slowly.

Which children are drawn, which are accepted, and the bonus token are random.
`step` follows every branch of each, with the probability that the functions of
`specdec` give it. That the compiled rules branch in this way is shown decision
by decision: `walk` goes down one tree in plain Python, and its randomness is
data.

A *state* is a context: the tokens since the prompt. The prompt is one token, 0.
A *world* is a target and a draft, both functions of the whole context, with
some sampling. All states of all worlds are in one array, and followed at once.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import reference

import specdec
from specdec import adjusters as adjusters_lib
from specdec import arguments as arguments_lib
from specdec import randomness as randomness_lib
from specdec import sampling as sampling_lib
from specdec.draft import ranking as ranking_lib
from specdec.tree import topology as topology_lib
from specdec.verify import rejection

PROMPT = 0

quick_jit = functools.partial(
  jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)
"""For programs that run for a moment: compiles several times as fast."""

_CHUNK = 4096  # rows at a time, so that few shapes are compiled

# Every field is always set, to what changes nothing: one program for all.
NEUTRAL = {'temperature': 1.0, 'top_k': 1000, 'top_p': 1.0, 'min_p': 0.0}
NEUTRAL |= {'repetition_penalty': 1.0, 'logit_bias': 0.0}
SAMPLINGS = {
  'temperature 1': {},
  'temperature 0.6': {'temperature': 0.6},
  'top-k': {'temperature': 1.3, 'top_k': 2},
  'top-p': {'temperature': 0.9, 'top_p': 0.8},
  'min-p': {'min_p': 0.25},
  'all filters': {'temperature': 1.5, 'top_k': 3, 'top_p': 0.9, 'min_p': 0.1},
  'penalty': {'repetition_penalty': 2.5},
  'penalty, bias, filters': {'temperature': 0.7, 'top_p': 0.9, 'min_p': 0.02}
  | {'repetition_penalty': 1.7, 'logit_bias': 0.8},
  'a banned token': {'logit_bias': -np.inf},
  'greedy': {'temperature': 0.0},
  'greedy with a penalty': {'temperature': 0.0, 'repetition_penalty': 3.0},
}
"""`logit_bias` is the bias of token 1."""

# The adversarial one never proposes the target's most likely token; the peaked
# one has two tokens so likely that float32 has no room for the others.
_DRAFT_LOGITS = {
  'similar': lambda target, noise, order: target + noise,
  'uniform': lambda target, noise, order: np.zeros(target.shape),
  'adversarial': lambda target, noise, order: np.where(
    target == target.max(-1, keepdims=True), -200.0, noise
  ),
  'one-hot': lambda target, noise, order: np.where(order == 0, 0.0, -1e9),
  'peaked': lambda target, noise, order: (
    -np.array([0.0, 30.0, 130.0, 131.0, 131.5])[order]
  ),
  'identical': lambda target, noise, order: target,
}
DRAFTS = tuple(_DRAFT_LOGITS)


def draft_logits(kind: str, target: np.ndarray, rng) -> np.ndarray:
  """The logits of one of `DRAFTS`, for `target [..., V]`."""
  noise = rng.normal(size=target.shape)
  order = np.argsort(rng.random(target.shape), axis=-1)
  return _DRAFT_LOGITS[kind](target, noise, order)


def full_sampling(values: dict, vocab_size: int) -> sampling_lib.SamplingParams:
  """One of `SAMPLINGS` with every parameter set, for one row."""
  values = NEUTRAL | values
  bias = np.zeros((1, vocab_size), np.float32)
  bias[0, 1] = values['logit_bias']
  return params(values | {'logit_bias': bias}, 1, vocab_size)


def params(
  values: dict, batch_size: int, vocab_size: int
) -> sampling_lib.SamplingParams:
  """Checked parameters; their static part does not depend on the values."""
  checked = arguments_lib.to_params(
    specdec.Sampling(**values), batch_size, vocab_size
  )
  return checked.replace(max_top_k=None)


TOPOLOGIES = {
  f'chain of {size}': topology_lib.chain(size) for size in (1, 2, 3)
} | {
  'binary tree': topology_lib.k_ary(2, 2),
  'ternary tree': topology_lib.k_ary(3, 2),
  'ragged tree': topology_lib.Topology(
    [(0,), (1,), (2,), (0, 0), (2, 0), (2, 1), (2, 1, 0)]
  ),
  'more children than tokens': topology_lib.k_ary(5, 1),
}


def request(
  keys, sampling: sampling_lib.SamplingParams, length: int
) -> specdec.Request:
  """A request for `length` tokens of each row; `keys [B]` are of the rows."""
  batch_size = keys.shape[0]
  return specdec.Request(
    prompt=jnp.full((batch_size, 1), PROMPT, jnp.int32),
    prompt_length=jnp.ones(batch_size, jnp.int32),
    limit=jnp.full(batch_size, length, jnp.int32),
    row_keys=keys,
    sampling=sampling,
    adjusters=(adjusters_lib.RepetitionPenalty(sampling.logit_bias.shape[-1]),),
  )


def exact_probs(
  logits: np.ndarray, seen: np.ndarray, values: dict
) -> np.ndarray:
  """The distributions of one token in float64, independent of `specdec`.

  Of `logits [S, V]`, tokens that the context has `[S, V]`, a sampling's values.
  """
  values = NEUTRAL | values
  options = reference.Options(
    top_k=values['top_k'],
    logit_bias={1: values['logit_bias']},
    **{
      name: float(np.float32(values[name]))  # As a device has them.
      for name in ('temperature', 'top_p', 'min_p', 'repetition_penalty')
    },
  )
  rows = zip(logits, map(np.flatnonzero, seen), strict=True)
  return np.array([reference.probs(row, options, text) for row, text in rows])


@dataclasses.dataclass(frozen=True)
class Worlds:
  """See the top of the file."""

  names: list[str]  # `[W]`, draft and sampling
  vocab_size: int  # V
  contexts: list[tuple[int, ...]]  # all of them, the shortest first
  exact: np.ndarray  # `[W * C, V]`, the target's, see `exact_probs`
  target: np.ndarray  # `[W * C, V]`, the same by `specdec`
  draft: np.ndarray  # `[W * C, V]`, what children are drawn from
  ranked: np.ndarray  # `[W * C, V]`, the best, -1 where there are no more
  stochastic: np.ndarray  # `[W * C]` bool, if the temperature is above 0

  @functools.cached_property
  def length(self) -> np.ndarray:
    """`[W * C]`, of the context of each state."""
    lengths = [len(context) for context in self.contexts]
    return np.tile(lengths, len(self.names))

  def following(self, states: np.ndarray) -> np.ndarray:
    """`[n, V]`, the state after each token; arbitrary after the longest."""
    # Shortest first, then by value: a V-ary heap.
    world, context = np.divmod(states, len(self.contexts))
    child = context[:, None] * self.vocab_size + 1 + np.arange(self.vocab_size)
    child = np.minimum(child, len(self.contexts) - 1)
    return world[:, None] * len(self.contexts) + child

  def after(self, states: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """`[n]`, the state after one token of each state."""
    return self.following(states)[range(len(tokens)), tokens]

  def is_drawn(self, states, children) -> np.ndarray:
    """`[n]` bool, whether children of a state are drawn, not the best."""
    return self.stochastic[states] & (children != sampling_lib.BEST)

  def begin(self) -> np.ndarray:
    """The mass of each state at the start: all of it on the prompt."""
    mass = np.zeros(len(self.length))
    mass[:: len(self.contexts)] = 1.0
    return mass

  def exact_law(self, length: int) -> np.ndarray:
    """`[W, V ** length]`, the distribution of whole sequences."""
    mass = self.begin()
    finish(self, mass, length)
    return self.of_length(mass, length)

  def of_length(self, mass: np.ndarray, length: int) -> np.ndarray:
    """`[W, V ** length]`, of contexts of this length and of longer ones."""
    shape = len(self.names), self.vocab_size**length, -1
    return sum(
      mass[self.length == longer].reshape(shape).sum(-1)
      for longer in range(length, self.length.max() + 1)
    )

  def next_draw(self, states, drawn, rank, children) -> np.ndarray:
    """The distribution of the next child, `[n, V]`; zeros if there is none.

    `states [n]` are the parents', `drawn [n, V]` bool the siblings drawn so
    far; greedy states have the best children.
    """
    law = self.draft[states].astype(np.float64)
    if children == sampling_lib.WITHOUT_REPLACEMENT:
      law = np.where(drawn, 0.0, law)
    total = law.sum(1, keepdims=True)
    law = law / np.where(total > 0, total, 1.0)
    best = np.zeros(law.shape, bool)
    if rank < self.vocab_size:
      best = self.ranked[states, rank, None] == np.arange(self.vocab_size)
    is_drawn = self.is_drawn(states, children)[:, None]
    return np.where(is_drawn, law, best)


def spread(mass: np.ndarray, at: np.ndarray, more: np.ndarray) -> None:
  """Adds to the mass at some states; states may be repeated."""
  mass += np.bincount(at.ravel(), more.ravel(), minlength=len(mass))


@quick_jit
def _distributions(target, draft, seen, sampling, keys):
  """Distributions of `[S, V]` logits, and the best tokens by rank."""
  adjust = lambda logits: sampling_lib.penalize(
    sampling_lib.add_bias(logits[:, None], sampling), sampling, seen[:, None]
  )
  target, draft = adjust(target), adjust(draft)
  nodes = jnp.zeros((target.shape[0], 1), jnp.int32)
  _, _, drawn_from = ranking_lib.draw_children(
    draft, nodes, keys, sampling, 1, children=sampling_lib.WITH_REPLACEMENT
  )
  noise = randomness_lib.noise_table(jnp.zeros_like(draft))
  ranking = ranking_lib.rank_logits(
    draft, noise, sampling, 1.0, draft.shape[-1]
  )
  best = jnp.where(
    ranking.best_log_probs > sampling_lib.EXCLUDED, ranking.tokens, -1
  )
  return (
    sampling_lib.token_probs(target, sampling)[:, 0],
    drawn_from[:, 0],
    best[:, 0],
  )


@functools.cache
def make_worlds(
  vocab_size: int, longest: int, *, drafts=DRAFTS, samplings=tuple(SAMPLINGS)
) -> Worlds:
  """Every draft with every sampling, contexts of up to `longest` tokens."""
  contexts: list[tuple[int, ...]] = [()]
  for context in contexts:
    if len(context) < longest:
      contexts += [(*context, token) for token in range(vocab_size)]
  rng = np.random.default_rng(3)
  shape, tokens = (len(contexts), vocab_size), np.arange(vocab_size)
  seen = np.stack([np.isin(tokens, (PROMPT, *context)) for context in contexts])
  names = [f'{kind} draft, {how}' for kind in drafts for how in samplings]
  settings = [NEUTRAL | SAMPLINGS[how] for _ in drafts for how in samplings]
  made = []
  for number, values in enumerate(settings):
    target = (1.3 * rng.normal(size=shape)).astype(np.float32)
    kind = drafts[number // len(samplings)]
    draft = draft_logits(kind, target, rng).astype(np.float32)
    made.append((target, draft, exact_probs(target, seen, values)))
  target, draft, exact = map(np.concatenate, zip(*made, strict=True))
  arrays = {
    name: np.repeat([values[name] for values in settings], len(contexts))
    for name in NEUTRAL
  }
  stochastic = arrays['temperature'] > 0
  bias = arrays['logit_bias'][:, None]
  arrays['logit_bias'] = np.where(tokens == 1, bias, 0.0)
  probs, drawn_from, ranked = _distributions(
    target,
    draft,
    np.tile(seen, (len(names), 1)),
    params(arrays, len(target), vocab_size),
    jax.random.split(jax.random.key(0), len(target)),
  )
  return Worlds(
    names=names,
    vocab_size=vocab_size,
    contexts=contexts,
    exact=exact,
    target=np.asarray(probs),
    draft=np.asarray(drawn_from),
    ranked=np.asarray(ranked),
    stochastic=stochastic,
  )


def _in_chunks(function, *arrays):
  """`function` of arrays with equally many rows, some rows at a time."""
  number = len(arrays[0])
  results = []
  for start in range(0, max(number, 1), _CHUNK):
    some = [array[start : start + _CHUNK] for array in arrays]
    missing = (0, _CHUNK - len(some[0]))
    pad = lambda array, of=missing: np.pad(
      array, (of, *[(0, 0)] * (array.ndim - 1))
    )
    results.append([*map(np.asarray, function(*map(pad, some)))])
  return [
    np.concatenate(parts)[:number] for parts in zip(*results, strict=True)
  ]


@functools.partial(quick_jit, static_argnames='rule')
def try_child(weight, target, draft, token, *, rule):
  """The chance to enter a child, and its weight; if it is left, what remains.

  These are the weight of its parent and both distributions.
  """
  given = weight[:, None] * target, draft, token
  chance = rejection.acceptance_probs(*given)
  _, below = rule.enter(chance, 0 * chance)
  left = rule.weight_left(weight, *given[:2])
  chance = jnp.ones_like(chance) if rule.leaves_nodes else chance
  return chance, below, left, *rejection.after_rejection(*given, rule.children)


def finish(worlds: Worlds, mass: np.ndarray, length: int) -> None:
  """Adds tokens of the target's to states up to some length."""
  for depth in range(length):
    states = np.flatnonzero((worlds.length == depth) & (mass > 0))
    more = mass[states, None] * worlds.exact[states]
    spread(mass, worlds.following(states), more)


def step(worlds: Worlds, states, mass, topology, rule, guesses=None):
  """One step of rows `[n]` in some states; sums the masses of their outcomes.

  Children are the best or drawn, or `guesses`: a token for each path. Returns
  the mass of all states after it, and the expected number of accepted
  tokens of each world, `[W]`. There must be contexts for all that it may emit.
  """
  children = rule.children
  masses = np.zeros(len(worlds.length))
  accepted = np.zeros(len(worlds.names))

  def visit(path, states, mass, weight):
    """The mass with which a node is left, of rows that enter it, all `[n]`."""
    rows, size = np.arange(len(states)), len(states)
    ranks = sorted(other[-1] for other in topology.paths if other[:-1] == path)
    target = worlds.target[states]
    draft = worlds.draft[states]
    drawn = np.zeros(target.shape, bool)
    for rank in ranks:
      law = worlds.next_draw(states, drawn, rank, children)
      if guesses is not None:
        law[:] = np.arange(worlds.vocab_size) == guesses[*path, rank]
      at, tokens = np.nonzero(law)
      here = states[at]
      certain = np.eye(worlds.vocab_size, dtype=np.float32)[tokens]
      is_drawn = worlds.is_drawn(here, children)[:, None]
      chance, below, *left = _in_chunks(
        functools.partial(try_child, rule=rule),
        weight[at],
        target[at],
        np.where(is_drawn, draft[at], certain),
        tokens.astype(np.int32),
      )
      tried = mass[at] * law[at, tokens]
      after = worlds.after(here, tokens)
      failed = tried * (1.0 - chance)
      failed += visit((*path, rank), after, tried * chance, below)
      none = law.sum(1) == 0
      states, mass, rows, drawn, weight, target, draft = (
        np.concatenate([old[none], new[failed > 0]])
        for old, new in (
          (states, here),
          (mass, failed),
          (rows, rows[at]),
          (drawn, drawn[at] | (certain > 0)),
          *zip((weight, target, draft), left, strict=True),
        )
      )
    stays = mass * weight
    spread(masses, worlds.following(states), stays[:, None] * target)
    spread(accepted, states // len(worlds.contexts), len(path) * stays)
    return np.bincount(rows, mass - stays, minlength=size)

  ones = np.ones(len(states), np.float32)
  left = visit((), states, np.float64(mass), ones)
  np.testing.assert_allclose(left, 0, atol=1e-6)
  return masses, accepted


def several_steps(worlds: Worlds, topology, rule, length: int) -> np.ndarray:
  """`[W, V ** length]`, the distribution of sequences of several steps."""
  mass = worlds.begin()
  for depth in range(length):
    states = np.flatnonzero((worlds.length == depth) & (mass > 0))
    mass += step(worlds, states, mass[states], topology, rule)[0]
  return worlds.of_length(mass, length)


# Rules in plain Python, one row at a time. `randomness` and `child_noise` make
# their data from the keys of a step, independently of `specdec.sampling`. Every
# decision has a *margin*. The smallest margin is returned: float32 and float64
# differ in their last digits.

ENOUGH = 1e-5
"""A decision with a smaller margin is not compared."""

# The last three of the numbers that `fold_in` takes as they are.
_DRAFTING, _ACCEPTANCE, _RESIDUAL = 2147483647, 2147483646, 2147483645


def randomness(keys, length, *, num_nodes, vocab_size):
  """The randomness of a step, by row keys `[B]` and lengths of the texts `[B]`.

  Keys for drawing children `[B]`, uniforms `[B, N]`, bonus noise `[B, V]`.
  """
  fold_in = jax.vmap(jax.random.fold_in)
  drafting, acceptance, residual = (
    fold_in(fold_in(keys, np.full(len(length), stream)), length)
    for stream in (_DRAFTING, _ACCEPTANCE, _RESIDUAL)
  )
  return (
    drafting,
    jax.vmap(lambda key: jax.random.uniform(key, (num_nodes,)))(acceptance),
    jax.vmap(lambda key: jax.random.gumbel(key, (vocab_size,)))(residual),
  )


@functools.partial(quick_jit, static_argnames=('num_nodes', 'shape'))
def child_noise(keys, num_nodes, shape):
  """`[B, N, *shape]` of the children of each node, by keys `[B]` for drawing.

  The shape is `(V,)`, or `(K, V)` for K children drawn with replacement.
  """
  of_node = lambda key, node: jax.random.gumbel(
    jax.random.fold_in(key, node), shape
  )
  of_row = jax.vmap(of_node, (None, 0))
  return jax.vmap(of_row, (0, None))(keys, jnp.arange(num_nodes))


def _best(scores, number=1):
  """The largest entries in order, as far as finite, and the margin."""
  order = np.argsort(-scores, kind='stable')
  order = order[: np.sum(scores > -np.inf)]
  gaps = -np.diff(scores[order])[:number]
  # Entries that are equal are so on purpose: the first of them counts.
  return order[:number].tolist(), min(gaps[gaps > 0], default=np.inf)


def _log(probs):
  return np.log(probs, out=np.full(len(probs), -np.inf), where=probs > 0)


def _choose(probs, noise):
  [token], margin = _best(_log(probs / probs.sum()) + noise)
  return token, margin


def pick_children(probs, noise, number, stochastic, children):
  """Tokens of at most `number` children, and the margin.

  `probs [V]` are the draft's; `noise` is the node's noise, see `child_noise`.
  """
  if children == sampling_lib.BEST or not stochastic:
    return _best(_log(probs), number)
  if children == sampling_lib.WITHOUT_REPLACEMENT:
    return _best(_log(probs) + noise, number)
  drawn = [_choose(probs, of_child) for of_child in noise[:number]]
  return [token for token, _ in drawn], min(margin for _, margin in drawn)


def walk(parent, token, target, draft, uniforms, noise, stochastic, rule):
  """Goes down a tree, from sibling to sibling.

  `parent [N]` are places, `target [N, V]` and `draft [N, V]` distributions;
  `uniforms [N]`; `noise [V]` is of the bonus token. A rule that leaves nodes
  enters a child before it is accepted (traversal, arXiv 2505.12398). Returns
  the tokens, the places of the path, and the margin.
  """
  children, margins = rule.children, [np.inf]

  def passes(node, chance):
    if 0 < chance < 1 + ENOUGH:
      margins.append(abs(uniforms[node] - chance))
    return uniforms[node] < chance

  def visit(node, weight):
    """The path from a node on and what is left at its end, or None."""
    wanted, left = target[node], draft[node]
    for child in np.flatnonzero(parent == node):
      proposed = token[child]
      is_drawn = stochastic and children != sampling_lib.BEST
      law = left if is_drawn else np.eye(len(left))[proposed]
      chance = weight * wanted[proposed] / law[proposed]
      below = None
      if rule.leaves_nodes:
        below = visit(child, min(1.0, chance))
      elif passes(child, chance):
        below = visit(child, 1.0)
      if below:
        return [node, *below[0]], below[1]
      rest = np.maximum(weight * wanted - law, 0.0)
      mass = rest.sum()
      if mass < 1e-6 and mass + 1.0 - weight < 1e-3:  # by rounding alone
        margins.append(0.0)
      weight = mass / max(mass + 1.0 - weight, 1e-300)
      wanted = rest / mass if mass > 1e-6 else wanted
      if children == sampling_lib.WITHOUT_REPLACEMENT:
        left = np.where(np.arange(len(left)) == proposed, 0.0, left)
        left /= max(left.sum(), 1e-300)
    accepted = not (node and rule.leaves_nodes) or passes(node, weight)
    return ([node], wanted) if accepted else None

  path, wanted = visit(0, 1.0)
  bonus, gap = _choose(wanted, noise)
  new = [*token[path[1:]].tolist(), bonus]
  return new, [*map(int, path)], min(*margins, gap)
