"""Llamas and mixtures of experts, written down slowly in numpy.

Reads a Hugging Face folder by the names that are in it, in float64, one token
and one head at a time, and shares no code with `models`.
"""

import json
import math
import pathlib

import ml_dtypes
import numpy as np
from safetensors import numpy as safetensors_numpy


def _tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
  assert ml_dtypes  # registers bfloat16
  tensors = {}
  for file in sorted(folder.glob('*.safetensors')):
    tensors |= safetensors_numpy.load_file(file)
  return {
    name.removeprefix('model.'): array.astype(np.float64)
    for name, array in tensors.items()
  }


def _frequencies(config, width):
  """And what queries and keys are multiplied with."""
  rope = config.get('rope_parameters') or config.get('rope_scaling') or {}
  theta = rope.get('rope_theta') or config['rope_theta']
  kind = rope.get('rope_type', rope.get('type', 'default'))
  plain = np.array([theta ** (-2 * pair / width) for pair in range(width // 2)])
  if kind == 'default':
    return plain, 1.0
  factor = rope['factor']
  if kind == 'linear':
    return plain / factor, 1.0
  context = rope['original_max_position_embeddings']
  turns = context * plain / (2 * math.pi)  # within the original context
  if kind == 'llama3':
    low, high = rope['low_freq_factor'], rope['high_freq_factor']
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return kept * plain + (1 - kept) * plain / factor, 1.0
  assert kind == 'yarn'

  def pair_of(turned):
    return (
      width * math.log(context / (turned * 2 * math.pi)) / (2 * math.log(theta))
    )

  first = pair_of(rope.get('beta_fast', 32))
  last = pair_of(rope.get('beta_slow', 1))
  if rope.get('truncate', True):
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, width - 1)
  ramp = np.clip((np.arange(width // 2) - first) / (last - first), 0, 1)
  grown = rope.get('attention_factor') or 0.1 * math.log(factor) + 1
  return plain / factor * ramp + plain * (1 - ramp), grown


def _norm(x, scale, epsilon):
  return x / np.sqrt(np.mean(x**2) + epsilon) * scale


def _silu(x):
  return x / (1 + np.exp(-x))


def _softmax(x):
  powers = np.exp(x - np.max(x))
  return powers / np.sum(powers)


class Reference:
  """A checkpoint.

  Attributes:
    experts: of the last `logits`: those of each layer, sequence and token.
  """

  def __init__(self, folder: pathlib.Path):
    self.config = json.loads((folder / 'config.json').read_text())
    self.tensors = _tensors(folder)
    self.experts: list[list[list[set[int]]]] = []

  def _linear(self, name, x):
    bias = self.tensors.get(f'{name}.bias', 0.0)
    return self.tensors[f'{name}.weight'] @ x + bias

  def _perceptron(self, gate, up, down, x):
    return self._linear(
      down, _silu(self._linear(gate, x)) * self._linear(up, x)
    )

  def _experts_of(self, router, x):
    probs = _softmax(self._linear(router, x))
    count = self.config['num_experts_per_tok']
    chosen = sorted(range(len(probs)), key=lambda one: -probs[one])[:count]
    total = sum(probs[one] for one in chosen)
    if not self.config.get('norm_topk_prob', True):
      total = 1.0
    return {one: probs[one] / total for one in chosen}

  def _feed_forward(self, layer, x):
    if f'{layer}.mlp.gate_proj.weight' in self.tensors:
      names = (f'{layer}.mlp.{one}_proj' for one in ('gate', 'up', 'down'))
      return self._perceptron(*names, x), set()
    kind, parts = 'mlp', ('gate_proj', 'up_proj', 'down_proj')
    if self.config['model_type'] == 'mixtral':
      kind, parts = 'block_sparse_moe', ('w1', 'w3', 'w2')
    weights = self._experts_of(f'{layer}.{kind}.gate', x)
    out = sum(
      weight
      * self._perceptron(
        *(f'{layer}.{kind}.experts.{one}.{part}' for part in parts), x
      )
      for one, weight in weights.items()
    )
    return out, set(weights)

  def _heads(self, layer, kind, x, position):
    """Of one token, normed and turned."""
    config = self.config
    width = config.get('head_dim') or (
      config['hidden_size'] // config['num_attention_heads']
    )
    heads = self._linear(f'{layer}.self_attn.{kind}_proj', x).reshape(-1, width)
    if kind == 'v':
      return heads
    name = f'{layer}.self_attn.{kind}_norm.weight'
    if name in self.tensors:
      epsilon = config['rms_norm_eps']
      heads = np.array(
        [_norm(head, self.tensors[name], epsilon) for head in heads]
      )
    frequencies, factor = _frequencies(config, width)
    turned = np.empty_like(heads)
    for pair, frequency in enumerate(frequencies):
      cos, sin = np.cos(position * frequency), np.sin(position * frequency)
      first, second = heads[:, pair], heads[:, pair + width // 2]
      turned[:, pair] = first * cos - second * sin
      turned[:, pair + width // 2] = second * cos + first * sin
    return factor * turned

  def _attend(self, layer, normed):
    query, key, value = (
      [self._heads(layer, kind, x, at) for at, x in enumerate(normed)]
      for kind in 'qkv'
    )
    num_heads, width = query[0].shape
    group = num_heads // len(key[0])
    out = []
    for at, heads in enumerate(query):
      mixed = []
      for head in range(num_heads):
        scores = [
          heads[head] @ key[seen][head // group] / math.sqrt(width)
          for seen in range(at + 1)
        ]
        mixed.append(
          sum(
            prob * value[seen][head // group]
            for seen, prob in enumerate(_softmax(np.array(scores)))
          )
        )
      out.append(
        self._linear(f'{layer}.self_attn.o_proj', np.concatenate(mixed))
      )
    return out

  def _sequence(self, tokens):
    epsilon, tensors = self.config['rms_norm_eps'], self.tensors
    embedding = tensors['embed_tokens.weight']
    stream, experts = [embedding[token] for token in tokens], []
    for index in range(self.config['num_hidden_layers']):
      layer = f'layers.{index}'
      scale = tensors[f'{layer}.input_layernorm.weight']
      attended = self._attend(layer, [_norm(x, scale, epsilon) for x in stream])
      stream = [x + more for x, more in zip(stream, attended, strict=True)]
      scale = tensors[f'{layer}.post_attention_layernorm.weight']
      outs = [
        self._feed_forward(layer, _norm(x, scale, epsilon)) for x in stream
      ]
      stream = [x + out for x, (out, _) in zip(stream, outs, strict=True)]
      experts.append([chosen for _, chosen in outs])
    head = tensors.get('lm_head.weight', embedding)
    scale = tensors['norm.weight']
    return [head @ _norm(x, scale, epsilon) for x in stream], experts

  def logits(self, tokens: np.ndarray) -> np.ndarray:
    """Of the plain causal forward of `[B, L]` tokens."""
    sequences = [self._sequence(row) for row in tokens]
    self.experts = [
      list(layer) for layer in zip(*(own for _, own in sequences), strict=True)
    ]
    return np.array([logits for logits, _ in sequences])
