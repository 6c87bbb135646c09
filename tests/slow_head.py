"""Drafting heads in NumPy, token by token, written from their formulas.

Tensors have the names of SafeAILab's EAGLE-3, its layers as `layers.0`.
Positions are counted from 0. Positions of the project are one more; rotations
are relative, so the results are the same.
"""

import numpy as np


def _silu(x):
  return x / (1 + np.exp(-x))


class SlowHead:
  """A head, and keys and values of what it has read."""

  def __init__(self, tensors, *, heads, head_width, **flags):
    self.tensors, self.flags = tensors, flags
    self.heads, self.head_width = heads, head_width
    self.theta = flags.get('rope_theta', 10000.0)
    self.epsilon = flags.get('rms_norm_eps', 1e-6)
    # How many keys are seen, the token's own the last.
    self.window = flags.get('sliding_window', 10**6)
    self.num_layers = 1 + max(
      int(name.split('.')[1]) for name in tensors if name.startswith('layers')
    )
    self._forget()

  def _forget(self):
    self.keys = [[] for _ in range(self.num_layers)]
    self.values = [[] for _ in range(self.num_layers)]

  def _norm(self, x, weight):
    return x / np.sqrt(np.mean(x * x) + self.epsilon) * weight

  def _rotated(self, vector):
    x = vector.reshape(-1, self.head_width)
    half = self.head_width // 2
    speed = self.theta ** (-np.arange(half) / half)
    angle = (len(self.keys[-1])) * speed
    a, b = x[:, :half], x[:, half:]
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=1)

  def _attend(self, layer, x):
    at = lambda name: self.tensors[f'layers.{layer}.self_attn.{name}.weight']
    query = self._rotated(at('q_proj') @ x)
    key = self._rotated(at('k_proj') @ x)
    self.keys[layer].append(key)
    value = (at('v_proj') @ x).reshape(-1, self.head_width)
    self.values[layer].append(value)
    group, out = self.heads // len(key), []
    for head, row in enumerate(query):
      seen = slice(-self.window, None)
      keys = np.array([rows[head // group] for rows in self.keys[layer][seen]])
      values = np.array(
        [rows[head // group] for rows in self.values[layer][seen]]
      )
      scores = keys @ row / np.sqrt(self.head_width)
      weights = np.exp(scores - scores.max())
      out.append(weights @ values / weights.sum())
    return at('o_proj') @ np.concatenate(out)

  def _mlp(self, layer, x):
    x = self._norm(
      x, self.tensors[f'layers.{layer}.post_attention_layernorm.weight']
    )
    at = lambda name: self.tensors[f'layers.{layer}.mlp.{name}.weight']
    return at('down_proj') @ (_silu(at('gate_proj') @ x) * (at('up_proj') @ x))

  def fuse(self, states):
    """The state before a token from the target's states, one per layer."""
    tensors = self.tensors
    if 'layers.0.hidden_norm.weight' not in tensors:
      return states[0]
    if 'fc_norm.0.weight' in tensors:
      states = [
        self._norm(state, tensors[f'fc_norm.{number}.weight'])
        for number, state in enumerate(states)
      ]
    fused = np.concatenate(states)
    if 'input_norm.weight' in tensors:
      fused = self._norm(fused, tensors['input_norm.weight'])
    return tensors['fc.weight'] @ fused

  def read(self, token, state):
    """The next token and the state before it; its logits and its own state."""
    tensors, flags = self.tensors, self.flags
    embedded = tensors['embed_tokens.weight'][token]
    if 'layers.0.hidden_norm.weight' in tensors:
      normed = self._norm(state, tensors['layers.0.hidden_norm.weight'])
      first = self._norm(embedded, tensors['layers.0.input_layernorm.weight'])
      x = normed if flags.get('norm_before_residual') else state
      x = x + self._attend(0, np.concatenate([first, normed]))
    else:
      x = tensors['fc.weight'] @ np.concatenate([embedded, state])
      x = x + tensors.get('fc.bias', 0.0)
      first = tensors.get('layers.0.input_layernorm.weight')
      x = x + self._attend(0, x if first is None else self._norm(x, first))
    x = x + self._mlp(0, x)
    for layer in range(1, self.num_layers):
      weight = tensors[f'layers.{layer}.input_layernorm.weight']
      x = x + self._attend(layer, self._norm(x, weight))
      x = x + self._mlp(layer, x)
    normed = x
    if 'norm.weight' in tensors:
      normed = self._norm(x, tensors['norm.weight'])
    logits = tensors['lm_head.weight'] @ normed
    return logits, normed if flags.get('norm_output') else x

  def _read_text(self, tokens, states):
    """The logits and the head's own state after a text.

    `states[t]` are the target's after token t.
    """
    self._forget()
    if len(tokens) == 1:  # There is nothing to see, nor is it seen.
      result = self.read(tokens[0], self.fuse(np.zeros_like(states[0])))
      self._forget()
      return result
    for token, before in zip(tokens[1:], states, strict=False):
      result = self.read(token, self.fuse(before))
    return result

  def draft(self, tokens, states, number, ids=None):
    """The most likely tokens after a text, each read with the head's own state.

    `ids`: of a reduced vocabulary. Also returns the logits, `[number, D]`.
    """
    logits, state = self._read_text(tokens, states)
    drafted, seen = [], []
    for _ in range(number):
      seen.append(logits)
      best = int(np.argmax(logits))
      drafted.append(best if ids is None else int(ids[best]))
      logits, state = self.read(drafted[-1], state)
    return drafted, np.array(seen)

  def after(self, tokens, states, path):
    """The logits after a text and some drafted tokens."""
    logits, state = self._read_text(tokens, states)
    for token in path:
      logits, state = self.read(token, state)
    return logits
