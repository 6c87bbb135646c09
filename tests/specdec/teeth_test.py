"""Plants known bugs in a copy of the source; the suite must detect each.

Most of them were seen in other systems. Each is listed with a test that must
fail with it, which runs on a fresh import of all modules, one place of the
source replaced.
"""

import ast
import contextlib
import importlib
import importlib.machinery
import importlib.util
import pathlib
import re
import sys

import pytest

_ROOTS = ('specdec', 'models')
# Nothing imported under one source may be used under another.
_FILES = {
  path.stem: path
  for path in pathlib.Path(__file__).parents[1].rglob('*.py')
  if path.stem != 'conftest'
}

# Tests that detect several bugs.
_TESTS = {
  'AUTOMATA': 'constraint.check_tables([0, 1, 2, 3, 4, 5, 297])',
  'BANNED': (
    'sampling.test_no_temperature_and_no_penalty_brings_a_banned_token_back()'
  ),
  'BLOCK_DRAWS': "block_law.check_draws('without_replacement')",
  'BOTH_WAYS': "block_drafter.check_forward('z-lab both ways')",
  'COMMIT': 'cache.test_keeping_nodes_by_hand()',
  'CONSTRAINED': "constraint.check_tokens('chain', 'match')",
  'DRAWS': (
    'enumeration.test_children_are_drawn_from_what_is_said('
    "'without_replacement')"
  ),
  'FROM_ROOT': "block_drafter.check_forward('speculators both ways')",
  'GATED': "block_drafter.check_forward('speculators gated')",
  'HEAD': "heads.test_logits_are_those_of_the_formulas('sglang')",
  'IN_A_FILE': "block_drafter.check_layout('gguf', 'z-lab 2')",
  'LARGE_TOP_P': (
    'large_vocabulary.test_top_p_keeps_what_the_definition_says(50257, 400)'
  ),
  'LENGTHS': "heads.check_steps('fixed')",
  'MANY_KEPT': (
    'large_vocabulary.test_where_filters_keep_many_tokens_all_noise_is_drawn()'
  ),
  'NEIGHBOURS': ("block_drafter.check_layout('liquid', 'speculators dspark')"),
  'NEXT_STEP': 'growth.test_growth_after_a_step_is_growth_after_a_prefill()',
  'RANDOMNESS': 'enumeration.test_the_randomness_of_a_step_is_of_these_keys()',
  'SHARING': "families.check_logits('gemma4_6')",
  'STATES': 'recurrent.test_lengthening_and_going_back_by_hand()',
  'STEP': 'step.test_a_decode_of_all_that_a_step_does()',
  'TAIL': (
    'prompt_tail.test_it_drafts_as_if_the_end_of_the_text_were_all_of_it()'
  ),
  'TRAVERSALS': "enumeration.check_few('traversal', 'without_replacement')",
  'TRAVERSED': "enumeration.check_walks('without_replacement', 'traversal')",
  'TREES': "enumeration.check_few('rejection', 'without_replacement')",
  'WINDOWS': 'attention.test_a_window_is_counted_along_the_path_of_a_query()',
  'WALKS': "enumeration.check_walks('without_replacement')",
}

# A module, of specdec or with its whole name, and a test; the name of a bug,
# code, what replaces it, in which @ stands for the code.
_TABLE = r"""
# The rule by which tokens are accepted and emitted.
[tree.tree: tree.test_the_accepted_path()]
accepts tokens behind a rejected one
  jnp.all(agrees[None] | ~is_above, axis=1) => agrees
[verify.match: STEP]
bonus token from the wrong node
  .along_path(choices) => .replace(index=jax.numpy.roll(index, 1, 1))@
[verify.accept: verification.test_the_stop_rule_against_a_loop(2, 0.1)]
continues past an EOS accepted within a path
  jnp.minimum(until_end, room) => room
overshoots the limit
  jnp.minimum(until_end, room) => until_end
[step: STEP]
goes on with a row that is done
  jnp.where(ctx.active, room, 0) => room
[verify.accept: verification.test_origins_by_hand()]
the origin of a token is that of the token before
  - verdict.path(nodes)[:, 1:],
  -     ((0, 0), (0, 1)),
  + verdict.path(nodes),
  +     ((0, 0), (0, 0)),
# A draft whose text begins later.
[draft.prompt_tail: TAIL]
counts a shorter text as the whole one
  length=ctx.length - state.skipped => length=ctx.length
uses entries of text that has changed
  - jnp.minimum(state.cache.length + state.skipped, texts.kept)
  + state.cache.length + state.skipped
# The noise.
[step: STEP]
noise keyed by step, not by position
  - request.row_keys,
  -       state.length,
  + request.row_keys,
  +       state.counters.steps.wrapped + 0 * state.length,
[randomness: RANDOMNESS]
noise used again in every step
  (row_keys, positions, => (row_keys, positions - length[:, None],
[verify.match: STEP]
target chooses with the noise of the depth above
  (tree.depth, nodes) => (tree.depth, nodes) - 1
[draft.language_model: growth.check('model')]
draft ranks with the noise of the depth above
  (tree.depth, nodes) => (tree.depth, nodes) - 1
# Large vocabularies, and trees larger than most.
[sampling: LARGE_TOP_P]
top-p adds up in 16 bits
  - _in_units(weights, weights.shape[-1])
  + _in_units(
  +     jnp.sum(weights.astype(jnp.bfloat16), -1, keepdims=True).astype('f4'),
  +     weights.shape[-1],
  +   )
[sampling: large_vocabulary.test_a_row_has_the_same_bits_in_every_shape(1000)]
probabilities are added in the order of the shape
  - .astype(weights.dtype) / one
  + * 0 + jnp.sum(weights, axis=-1, keepdims=True)
[best: large_vocabulary.test_of_equal_scores_the_lowest_token_wins(50257)]
the highest token wins a tie
  - jnp.min(jnp.where(scores == largest, tokens, last), axis=-1)
  + jnp.max(jnp.where(scores == largest, tokens, 0), axis=-1)
[best: large_vocabulary.test_the_best_are_found_in_blocks_as_by_a_sort()]
blocks in the order of their maxima
  jnp.sort(chosen, axis=-1) => chosen
[sampling: MANY_KEPT]
tokens that tie with the last one looked at are forgotten
  ranked[..., -1:] < self.threshold => ranked[..., -1:] <= self.threshold
[randomness: large_vocabulary.test_noise_of_few_tokens_has_the_bits_of_jax()]
noise of few tokens from half of the bits
  words[0] ^ words[1] => words[0]
[sampling: large_vocabulary.test_a_value_that_is_not_finite_is_seen(50257)]
a maximum is trusted to keep NaN
  jnp.max(nan_as_inf, axis=-1) => jnp.max(logits, axis=-1)
[arguments: BANNED]
a banned token is very unlikely instead
  return jnp.asarray(array) => return jnp.maximum(array, -1e30)
[draft.ranking: enumeration.test_every_node_draws_children_of_its_own()]
draws repeat from the sixteenth node on
  fold_in(key, node) => fold_in(key, node % 16)
[randomness: RANDOMNESS]
uniform numbers repeat from the sixteenth node on
  - jax.random.uniform(key, (num_nodes,))
  + jnp.resize(jax.random.uniform(key, (16,)), num_nodes)
[verify.match: verification.test_greedy_paths('match', 'best')]
bonus token after four accepted ones from the depth above
  - .along_path(choices)
  + .replace(index=index - (index > 3)).along_path(choices)
[verify.rejection: verification.test_greedy_paths('rejection', 'best')]
bonus token after four accepted ones is always the same
  bonus[:, None], following => (bonus * (walk.depth < 4))[:, None], following
# Masks and positions of nodes.
[tree.tree: tree.test_walks_and_masks()]
mask forgets the farthest ancestor
  for _ in range(num_steps): => for _ in range(num_steps - 1):
[model: STEP]
nodes see all that is in front of them, as in a chain
  cache.ops.mask(length, sees, => cache.ops.mask(length, jnp.tril(sees | True),
positions by index instead of depth
  + at(tree.depth, nodes) => + nodes
[cache: cache.test_window_mask_by_hand('_written')]
nodes do not see the last token of the text
  before = jnp.arange(num_slots)[None] < start[:, None] => @ - 1
[model: NEXT_STEP]
draft forgets the text that it could not read in time
  sees |= slot < text.num_seen[:, :, None] => pass
# The caches.
[step: STEP]
target keeps the first nodes, not those of the path
  - model_lib.keep(target_state, added)
  + model_lib.keep(
  +   target_state,
  +   added.replace(path=jnp.where(path >= 0, nodes[:, : path.shape[1]], path)),
  + )
[model: COMMIT]
target cache keeps one too many
  jnp.minimum(num_scored, added.count) => @ + 1
target cache keeps rejected nodes
  jnp.minimum(num_scored, added.count) => 0 * added.count + path.shape[1]
draft cache keeps one too many after full acceptance
  jnp.minimum(num_scored, added.count) => added.count
draft cache forgets the root
  jnp.minimum(num_scored, added.count) => jnp.minimum(@, added.count - 1)
draft cache keeps nodes in the order of the tree
  jnp.argmax(in_slot, axis=2), => state.num_text[:, None] + path,
[cache: cache.test_keep_by_hand()]
only keys are moved
  values=tuple(map(move, cache.values)) => values=cache.values
# Trees.
[tree.tree: tree.test_adding_children()]
duplicates are not merged
  wanted & ~_has_child(tree, children.parents, children.tokens) => wanted
[tree.tree: tree.test_the_best_nodes_are_a_connected_subtree(6, 'different')]
the best nodes are not connected
  best_by(tree.log_prob, num_nodes) => best_by(tree.cond_log_prob, num_nodes)
[tree.tree: tree.test_accumulating_new_edges('tiny')]
log-probabilities are summed from the node up
  -     log_prob = jnp.where(is_child, summed, log_prob)
  +   walk = walk_up(tree.parent, jnp.arange(tree.capacity), max_depth)
  +   summed = jnp.zeros(tree.capacity)
  +   for above in walk.T:
  +     summed += jnp.where(above >= 0, tree.cond_log_prob[above], 0.0)
  +   log_prob = jnp.where(is_child, summed, log_prob)
[tree.tree: scorers.test_lookup_against_a_loop()]
a context of the text instead of the path
  behind_root > 0, => behind_root > -1 - tree.capacity,
# Growth.
[draft.growth: growth.check('model, table')]
an inner stage drafts below what has been scored
  expanded | states[0].scored => expanded
children keep the numbers of the inner stage
  jnp.where(known, log_probs, tree.cond_log_prob) => tree.cond_log_prob
[draft.growth: growth_stop.test_rows_that_are_done_have_no_say()]
rows that are done have a say
  jnp.where(ctx.active, values, 0.0) => values
[draft.lookup: scorers.test_lookup_against_a_loop()]
lookup reads what is behind the text
  (position < length - 1) => (position < num_tokens - 1)
[draft.candidates: scorers.test_merging_proposers(2)]
proposers share all of the probability, not what is left
  log_prob + left, => log_prob,
# Branches for GPUs.
[cache: cache.test_window_mask_by_hand('_looked_up')]
slots before the window are looked up in it
  seen, offset[:, None] < 0 => seen, offset[:, None] < -1
# Rejection verification: what the children were drawn from.
[draft.ranking: DRAWS]
distributions without the filters that were drawn with
  drawn_from = jnp.exp(log_probs) => drawn_from = jax.nn.softmax(logits)
the best children count as drawn
  jnp.where(sampling_lib.per_row(stochastic, noise), noise, 0.0) => 0.0 * noise
[verify.rejection: enumeration.check_walks('best')]
children that are not drawn count as drawn evenly
  jax.nn.one_hot(token, target.shape[1]) => 0.0 * @ + 1.0 / target.shape[1]
[draft.ranking: enumeration.test_children_that_float32_gives_no_probability()]
drawn where float32 has no probability
  _LEAST_LOG_PROB = -69.0 => _LEAST_LOG_PROB = -1e29
[sampling: WALKS]
greedy rows judged as at temperature 1
  per_row(sampling.is_stochastic, => per_row(sampling.is_stochastic | True,
[sampling: sampling.test_temperature_0_is_argmax_whatever_the_filters()]
greedy rows divided by a temperature of -1
  temperature > 0, temperature, 1.0 => temperature > 0, temperature, -1.0
[sampling: sampling.test_filters_against_numpy(None, 0.6, None)]
top-p before temperature
  - (candidates, likeliest, top_p)
  + (lambda: temperature * candidates(), temperature * likeliest, top_p)
# Its randomness.
[randomness: RANDOMNESS]
drafting noise used again in every step
  (row_keys, DRAFTING, length) => (row_keys, DRAFTING, 0 * length)
uniforms and bonus noise used again in every step
  (of_stream, length) => (of_stream, 0 * length)
children and uniforms from one stream
  2**31 - 1 - stream => 2**31 - 1 - max(stream, 1)
uniforms and bonus token from one stream
  2**31 - 1 - stream => 2**31 - 1 - min(stream, 1)
[verify.rejection: WALKS]
one uniform for all siblings
  _at(nodes.uniform, child) => nodes.uniform[:, 0]
[draft.ranking: DRAWS]
one drafting noise for all nodes
  jax.random.fold_in(key, node) => jax.random.fold_in(key, 0 * node)
# Residuals after a rejection.
[verify.rejection: WALKS]
the draft of the node above
  _at(self.node, place)), draft) => _at(self.parent, place)), draft)
the bonus token from the distribution of the root
  logits = _at(self.logits, place)[:, None] => logits = self.logits[:, :1]
the bonus token where the last draft token was
  == walk.depth[:, None] => == walk.depth[:, None] - 1
tokens of the first nodes, not of the verified ones
  token=_at(tree.token, nodes), => token=tree.token[:, : nodes.shape[1]],
[verify.rejection: TREES]
residual not normalised for the next sibling
  - left = normalized(jnp.maximum(target - draft, 0.0), target)
  + left = jnp.maximum(target - draft, 0.0)
residual of the target alone
  jnp.maximum(target - draft, 0.0), target) => target, target)
residual subtracts the probability of another token
  (target - draft, 0.0), t => (target - jnp.roll(draft, 1, axis=1), 0.0), t
drawn without replacement, judged as with
  if children == sampling_lib.WITHOUT_REPLACEMENT: => if False:
[verify.rejection: enumeration.check_few('rejection', 'with_replacement')]
drawn with replacement, judged as without
  if children == sampling_lib.WITHOUT_REPLACEMENT: => if True:
[draft.ranking: DRAWS]
siblings in another order than they were drawn
  - best_lib.top_k(log_probs + noise, number)
  + [
  +   jnp.flip(one, axis=-1)
  +   for one in best_lib.top_k(log_probs + noise, number)
  + ]
# Traversal verification.
[verify.rejection: TRAVERSED]
proposals of the first nodes, not of the verified ones
  _at(self.proposals, _at(self.node, place)) => _at(self.proposals, place)
the residual of the root behind any prefix
  left = _at(walk.target, walk.depth) => left = walk.target[:, 0]
residual where all was accepted
  _where(walk.turn == 0, known => _where(walk.depth > 99, known
weights above 1
  draft), 1e-37), 1.0) => draft), 1e-37), 1e9)
children forget the weight of their parent
  given = weight[:, None] * target, => given = target,
residual not weighted
  *after_rejection(*given, => *after_rejection(target, *given[1:],
one uniform for all nodes
  _at(nodes.uniform, walk.place) => nodes.uniform[:, 0]
[verify.rejection: TRAVERSALS]
weights without the mass of the residual
  whole = mass + (1.0 - weight) => whole = 1.0 + 0.0 * mass
a node is accepted by its weight before its children
  jnp.where(whole > 0, mass / => jnp.where(whole < 0, mass /
[verify.rejection: enumeration.test_a_weight_of_which_nothing_is_left()]
nothing left and nothing missing is a weight of 0
  whole, 1.0), weight) => whole, 1.0), 0.0)
# Results other than tokens.
[watchers: step.test_stop_strings_go_on_where_the_emitted_tokens_led()]
stop strings are forgotten between blocks
  (state, added.count[:, None], => (state, 0 * added.count[:, None],
[adjusters: STEP]
a token is not seen before the next block
  - sampling_lib.seen_by_nodes(
  -       nodes.tree, nodes.index, state, nodes.max_depth
  -     )
  + jnp.broadcast_to(state[:, None], logits.shape)
[step: STEP]
log-probabilities after bias and penalty
  logits=scores.logits) => logits=logits)
[fallback: guard.test_the_worst_of_drafts_costs_under_five_percent(2.0)]
the fallback tries a hopeless draft too often
  _PREMIUM = 0.02 => _PREMIUM = 0.2
[fallback: guard.test_rows_that_are_done_have_no_say()]
the fallback counts rows that are done
  jnp.maximum(jnp.sum(active), 1) => active.shape[0]
# Constraints.
[context: CONSTRAINED]
a child has the state of its parent
  adjuster.after(before, tree.token), => before,
[draft.language_model: CONSTRAINED]
a draft does not know the constraint
  logits = ctx.adjusted(found.logits, tree, nodes) => logits = found.logits
[text.constraint: CONSTRAINED]
the constraint goes on from the root, not from the last token
  - jnp.concatenate([state[:, None], after], axis=1)
  + jnp.repeat(state[:, None], 1 + after.shape[1], axis=1)
[draft.candidates: constraint.check_tokens('guesses', 'match')]
forbidden candidates take the places of others
  ctx.adjusted_few(log_probs, tree, nodes, tokens) => log_probs
[text.automaton: AUTOMATA]
a text may end anywhere
  np.where(accepting[kept], 0, constraint_lib.FORBIDDEN) => 0
a token leads to where no text ends
  leads[ends] = True => leads[:] = True
tokens of several bytes are told apart by the first
  above[:, alive] = after => break
a token that ends a text spells its bytes, too
  [b''] if token < len(pieces) else [] => pieces[token : token + 1]
[text.automaton: constraint.check_kinds()]
kinds of tokens are told apart by 12 bits
  sums[node], return_index => sums[node] % 4096, return_index
[text.automaton: constraint.test_rows_that_come_and_go_keep_their_automata()]
where tables grow, all rows follow the automaton that is new
  jnp.pad(tables.masks, ((0, 0), more, (0, 0))) => 0 * @
[models.text.byte_automaton: expression.check_texts()]
a match hides longer ones
  return frozenset(ways), => return frozenset(() if 0 in known else ways),
bytes are told apart by the first characters of which they are parts
  alike[tuple(rest)] => alike[tuple(rest[:1])]
[models.text.expression: expression.check_texts()]
a flag of one group holds for what follows
  (flags | added) & ~removed => flags | added
[models.text.json_texts: json_schema.check_values('strings')]
quotes are not escaped
  (0x20, 0x21), (0x23, 0x5B), => (0x20, 0x5B),
[models.text.json_texts: json_schema.check_values('arrays')]
a limit of elements is one too large
  index >= most => index > most
[text.constraint: AUTOMATA]
the bits of a mask are of other tokens
  jnp.right_shift(jnp.broadcast_to(words, shape), bit) => @ >> 1
all rows follow the first automaton
  return jax.lax.broadcasted_iota(jnp.int32, state.shape, 0) => return 0 * state
# Drafting heads, which change no output.
[draft.head: LENGTHS]
accepted tokens are not read anew by a head
  (path.shape[1])[None] == 0, => (path.shape[1])[None] >= 0,
positions of drafted tokens are shifted in a head
  planned.positions, planned => planned.positions + (planned.nodes > 0), planned
a head does not read the prompt
  - head, texts, window_size
  + head, texts.replace(length=0 * texts.length + 1), window_size
drafted tokens are read with the state of the target
  None], of_parent, fused => None], fused, fused
[carried: LENGTHS]
a token is read with its own state, not with that before it
  self.at(positions - 1, layers) => self.at(positions, layers)
[models.nn.llama: heads.test_what_a_state_is('llama')]
a hidden state counts as that of the next layer
  (cache, layer, x) => (cache, layer + 1, x)
[models.nn.eagle: HEAD]
a head takes embedding and state for each other
  [embedded, normalized] => [normalized, embedded]
a head feeds its state back after the norm
  config.kind == MTP or config.norm_output => config.kind != EAGLE
[models.nn.layers: HEAD]
weights of a norm are one less
  jnp.expand_dims(self.scale[...], => jnp.expand_dims(self.scale[...] - 1,
[models.nn.matrices: heads.test_logits_are_those_of_the_formulas('sglang norm')]
rows of a reduced vocabulary are taken for ids
  index[ids] = => index[: len(ids)] =
# Block drafters.
[draft.block: BLOCK_DRAWS]
all nodes have the children of the first depth
  - pick(state.tokens, depth), pick(state.scores, depth)
  + pick(state.tokens, 0 * depth), pick(state.scores, 0 * depth)
children do not know their parent
  (state.states, depth), parents, => (state.states, depth), 0 * parents,
the bias of a candidate is that of its place
  scores + pick(bias, tokens) => scores + bias[:, None, : tokens.shape[2]]
[draft.block: block.test_tokens_are_those_of_plain_decoding('chain', True)]
the text of a step is not read
  (read, missing) => (cache, missing)
a block begins behind the root
  positions = (ctx.length - 1)[:, None] => positions = ctx.length[:, None]
all rows of a block are masks
  jnp.where(is_root, root, spec.mask_token) => @ * 0 + spec.mask_token
[draft.block: block.test_with_the_targets_noise_all_that_is_known_is_right()]
candidates are ranked with the noise of the next depth
  noise.at(depth).of => noise.at(depth + 1).of
[models.lab.training.block_trainer: block_training.check_loss()]
a row sees the text up to the root
  (length)[None, None] < roots => (length)[None, None] <= roots
blocks of a window see each other
  block[:, None] == block[None] => block[:, None] >= block[None]
the term of a block is that of the root
  at(tokens, before)), => at(tokens, anchors)),
the target's distribution is that of a token later
  *(at(batch['normed'], before) => *(at(batch['normed'], before + 1)
# Block drafters, which change no output either.
[models.nn.block_drafter: block_drafter.check_forward('z-lab windows')]
rows of a block see later ones in layers with a window
  keys <= rows => keys <= keys
fused states of the target are not normalised
  - self.hidden_norm,
  + None,
[models.nn.convolution: block_drafter.check_forward('z-lab 2')]
a convolution reaches to later rows
  (tap, 0), (0, 0), (0, 0)) => (0, tap), (0, 0), (0, 0))
the last row of a block comes before its first
  shifted[:, :, : self.block_size] => jnp.roll(blocks, tap, 2)
both convolutions are the first
  self._apply(1, rows => self._apply(0, rows
[models.nn.block_drafter: block_drafter.check_forward('speculators dflash2')]
the edge score does not know the row
  found *= self.hidden_projection(states) => pass
[models.nn.block_drafter: GATED]
the gate of a term is no probability
  found *= jax.nn.sigmoid(gate) => found *= gate
rows of a reduced term are taken for ids
  jnp.maximum(rows[tokens], 0) => jnp.minimum(tokens, 9)
the first row drafts
  config.block_size - config.depth : => : config.depth
[models.checkpoints.heads.head_tensors: GATED]
ids of a reduced vocabulary are those behind
  ids + np.arange(len(ids)) => ids + np.arange(1, len(ids) + 1)
[models.checkpoints.keys.block_keys: block_drafter.check_forward('z-lab')]
layers that write a state count as those that read it
  layer + (name == _WRITTEN) => layer + (name != _WRITTEN)
[models.checkpoints.keys.block_keys: FROM_ROOT]
windows of speculators count from the row
  'window_from_root': of_speculators => 'window_from_root': not of_speculators
[models.checkpoints.keys.block_keys: GATED]
the first row of any drafter with a term drafts
  from_root = not of_speculators and bool( => from_root = bool(
[models.nn.rope: NEIGHBOURS]
halves of a head are rotated where neighbours are
  order.reshape(num_heads, 2, -1).swapaxes(1, 2) => order
[models.checkpoints.heads.head_tensors: IN_A_FILE]
layers of a file of llama.cpp count two more
  layer - 1 for layer in layers => layer - 2 for layer in layers
[models.checkpoints.heads.block_drafters: BOTH_WAYS]
layers with a window are causal whatever the key says
  shape | block_keys.fields(keys, slides) => @ | {'causal': slides}
# Broken models and short contexts.
[cache: STEP]
a node that is NaN spoils the tree
  jnp.where(jnp.isfinite(new), new, 0) => new
[verify.accept: verification.test_the_stop_rule_against_a_loop(2, 0.1)]
a row goes on with choices from NaN
  emitted = jnp.minimum(wanted, valid) => emitted = wanted
[draft.growth: growth_stop.test_no_node_is_scored_beyond_the_context()]
a draft goes on beyond its context
  jnp.maximum(longest - ctx.length, -1) => @ + 1
# Layers that differ, and models that store something else.
[models.nn.attention: WINDOWS]
a window is one position too short
  counted <= window => counted < window
a window counts slots
  mask.astype(jnp.int32), axis=2 => jnp.ones(mask.shape, jnp.int32), axis=2
[models.nn.llama: hub.check_logits('gemma3')]
layers with a window rotate as those without
  [found[kind] for kind in kinds] => [found[kinds[-1]] for _ in kinds]
[models.checkpoints.tensor_names: hub.check_logits('gemma3')]
scales of norms are taken as they are stored
  np.float32(sign) if is_norm => np.float32(0) if is_norm
[models.nn.layers: hub.check_logits('gemma2')]
scores and logits are not capped
  cap * jnp.tanh(x / cap) => x
[models.nn.grouped_query: SHARING]
values are not normalised
  (value, 'v_norm') => (value, 'no_norm')
[models.nn.gemma: SHARING]
every layer reads the embedding of the last one
  embedded[:, :, layer] => embedded[:, :, -1]
[models.nn.rope: SHARING]
all pairs are rotated
  int(self.partial_rotary_factor * pairs) => pairs
[models.checkpoints.keys.gemma_keys: SHARING]
layers read the keys of the first of their kind
  max(at for at => min(at for at
# Layers with a state.
[recurrent: recurrent.test_parents_and_ancestors_by_hand()]
a grandparent is counted by slots, not along the path
  - jnp.max(jnp.where(sees & (rank == number + 1), slots, -1), axis=2)
  + jnp.max(jnp.where(sees, slots, -1), axis=2) - number
[recurrent: STATES]
a rejected node is folded into the state
  index < count, => index <= count,
a state takes in what another row added
  (array[:, 0], slot) => (array[::-1, 0], slot)
rows that go back keep their state
  _chosen(stays, self.state, before) => self.state
[cache: STATES]
the mark is not moved
  one.replace(mark=one.state) => one
[cache: STATES]
a mark is used although the text before it changed
  (cache.marked <= known, cache.marked, => (cache.marked >= 0, cache.marked,
accepted nodes are folded in the order of their slots
  (moved, slots, in_place => (moved, jnp.sort(slots, axis=1), in_place
[recurrent: recurrent.test_any_wrong_state_would_show('tree')]
a node has the state of the slot before it
  parent[slot] + 1 => slot
# A draft with another tokenizer.
[models.nn.matrices: other_tokens.check_what_is_read('gpt2')]
logits of other ids than the target's
  jnp.maximum(index, 0), axis => jnp.arange(index.size), axis
[models.nn.other_tokens: other_tokens.check_what_is_read('gpt2')]
ids are read as they are
  params['parts'][tokens] => 0 * @ + tokens[..., None]
parts are read in the wrong order
  jnp.maximum(parts, 0).reshape => jnp.maximum(parts, 0)[..., ::-1].reshape
positions are those of the target's tokens
  (before[:, :, None] + own) => (before[:, :, None] * 0 + slot[..., None] + own)
slots without a part are seen
  & is_used[:, None, None] => & (is_used[:, None, None] | True)
[models.text.shared_tokens: other_tokens.check_what_is_shared()]
the first parts are kept, not the last
  tokens[-_MOST_PARTS:] => tokens[:_MOST_PARTS]
# Blocks of few bits.
[models.nn.blocks: blocks.test_xla_expands_what_gguf_does('Q5_K')]
the scale of a neighbouring group
  scale[..., None] => jnp.roll(scale, 1, -1)[..., None]
minima are forgotten
  values - minimum[..., None] => values - 0 * minimum[..., None]
halves of bytes are swapped
  - (_shifted(low, (0, 4), -2) & nibbles).reshape(*lead, 8, 8)
  + (_shifted(low, (4, 0), -2) & nibbles).reshape(*lead, 8, 8)
"""


def _parse(table):
  """The bugs: module, code, what replaces it, test."""
  lines = lambda text: '\n'.join(line[4:] for line in text.splitlines())
  return [
    pytest.param(
      *(module, old or lines(olds), new.replace('@', old) or lines(news)),
      _TESTS.get(test, test),
      id=name,
    )
    for module, test, bugs in re.findall(
      r'^\[(.*): (.*)\]\n((?:[^\[].*\n)+)', table, re.MULTILINE
    )
    for name, old, new, olds, news in re.findall(
      *(r'^(\w.*)\n(?:  (\S.*) => (.*)|((?:  -.*\n)+)((?:  \+.*\n)+))', bugs),
      re.MULTILINE,
    )
  ]


_BUGS = _parse(_TABLE)


class _Planter(importlib.machinery.SourceFileLoader):
  """Loads a module with one place of it replaced."""

  def __init__(self, name, path, old, new):
    super().__init__(name, path)
    self._old, self._new = old, new

  def get_code(self, fullname):
    source = self.get_source(fullname)
    if source.count(self._old) != 1:
      raise RuntimeError(f'{fullname} has changed: plant this bug anew')
    source = source.replace(self._old, self._new)
    return compile(source, f'<{fullname}, planted>', 'exec')


def _is_ours(module):
  return module.split('.')[0] in _ROOTS or module in _FILES


def _whole(name):
  return name if name.startswith('models.') else f'specdec.{name}'


class _Finder:
  """Finds the modules of this project, one of them with a bug.

  It precedes pytest's own finder, whose rewritten assertions compare long lists
  for hours where the variable `CI` is set.
  """

  def __init__(self, name, old, new):
    self._name, self._bug = _whole(name), (old, new)

  def find_spec(self, fullname, path, target=None):
    if not _is_ours(fullname):
      return None
    if fullname in _FILES:
      return importlib.util.spec_from_file_location(fullname, _FILES[fullname])
    spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
    if fullname == self._name:
      spec.loader = _Planter(fullname, spec.origin, *self._bug)
    return spec


@contextlib.contextmanager
def _planted(name, old, new):
  """All modules are imported anew, one of them with a bug."""
  pop = lambda: {
    module: sys.modules.pop(module)
    for module in list(sys.modules)
    if _is_ours(module)
  }
  saved = pop()
  finder = _Finder(name, old, new)
  sys.meta_path.insert(0, finder)
  try:
    yield
    assert _whole(name) in sys.modules
  finally:
    sys.meta_path.remove(finder)
    pop()
    sys.modules.update(saved)


def _run(test):
  """A test by its file, its name and its arguments."""
  file, name, arguments = re.fullmatch(r'(\w+)\.(\w+)\((.*)\)', test).groups()
  arguments = ast.literal_eval(f'[{arguments}]')
  getattr(importlib.import_module(f'{file}_test'), name)(*arguments)


def test_every_bug_is_read():
  names = [line for line in _TABLE.splitlines() if re.match(r'[^\s#[]', line)]
  assert names == [bug.id for bug in _BUGS]
  assert len(names) == len(set(names)) == 167


@pytest.mark.parametrize(('module', 'old', 'new', 'test'), _BUGS)
def test_a_bug_is_noticed(module, old, new, test):
  with _planted(module, old, new), pytest.raises(AssertionError):
    _run(test)


@pytest.mark.parametrize(
  'test', [_TESTS['COMMIT'], _TESTS['TREES'], 'tree.test_walks_and_masks()']
)
def test_without_a_bug_nothing_fails(test):
  """Nor does the way in which they are planted break anything."""
  harmless = 'for _ in range(num_steps):'
  with _planted('tree.tree', harmless, harmless):
    _run(test)
  with (
    pytest.raises(RuntimeError, match='plant this bug anew'),
    _planted('tree.tree', 'not there', ''),
  ):
    _run(test)
