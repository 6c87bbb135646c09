"""Makes tests/golden/own_heads.npz: the logits of heads that targets bring.

transformers computes the hidden states of the targets, after the final norm.
Assistants of Gemma 4 are transformers' own class. MTP layers are computed here,
in plain torch, from their formulas. They read the whole text again for every
token:

  u = fc [norm(embedding of x_t+1); norm(h_t)]   MiMo has the state first
  y = norm(layer(u)), whose attention sees all earlier rows
  logits of x_t+2 = output matrix y;  the next h is y

  pip install torch==2.13.0 transformers==5.24.0 safetensors ml_dtypes
  PYTHONPATH=tests python tests/golden/make_own_heads.py

Made with these on CPU.
"""

import pathlib
import tempfile

import numpy as np
import safetensors.torch
import torch
import transformers
import variants

_OPTIONS = {'dtype': torch.float32, 'attn_implementation': 'eager'}
_TEXT = torch.tensor(variants.LONG)
# The names of MiMo and of Qwen3.5.
_NAMES = {
  'model.mtp_layers.0.token_layernorm': 'mtp.pre_fc_norm_embedding',
  'model.mtp_layers.0.hidden_layernorm': 'mtp.pre_fc_norm_hidden',
  'model.mtp_layers.0.input_proj': 'mtp.fc',
  'model.mtp_layers.0.final_layernorm': 'mtp.norm',
  'model.mtp_layers.0.': 'mtp.layers.0.',
}


class MTP:
  """An MTP layer with the embedding and the output matrix of its target."""

  def __init__(self, keys, stored):
    self.keys, self.is_mimo = keys, keys['model_type'] == 'mimo'
    self.tensors = {}
    for name, array in stored.items():
      for theirs, ours in _NAMES.items():
        name = name.replace(theirs, ours)
      # Qwen3.5 has the scales of norms minus one.
      self.tensors[name] = array + ('norm' in name and not self.is_mimo)
    self.embedding = stored['model.embed_tokens.weight']
    self.head = stored.get('lm_head.weight', self.embedding)

  def norm(self, x, name):
    mean = (x * x).mean(-1, keepdim=True)
    scale = self.tensors[f'mtp.{name}.weight']
    return x / torch.sqrt(mean + self.keys['rms_norm_eps']) * scale

  def times(self, x, name):
    product = x @ self.tensors[f'mtp.{name}.weight'].T
    return product + self.tensors.get(f'mtp.{name}.bias', 0.0)

  def rotated(self, x):
    """Rotates the first numbers of heads `[rows, heads, width]`."""
    size = int(x.shape[-1] * self.keys.get('partial_rotary_factor', 1.0))
    speeds = self.keys['rope_theta'] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(len(x))[:, None] * speeds
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

  def attention(self, x):
    keys = self.keys
    heads, kv_heads = keys['num_attention_heads'], keys['num_key_value_heads']
    query = self.times(x, 'layers.0.self_attn.q_proj').view(len(x), heads, -1)
    key, value = (
      self.times(x, f'layers.0.self_attn.{k}_proj').view(len(x), kv_heads, -1)
      for k in 'kv'
    )
    if not self.is_mimo:
      query, gate = query.chunk(2, -1)
      query = self.norm(query, 'layers.0.self_attn.q_norm')
      key = self.norm(key, 'layers.0.self_attn.k_norm')
    query, key = self.rotated(query), self.rotated(key)
    out = torch.zeros_like(query)
    for head in range(heads):
      group = head * kv_heads // heads
      scores = query[:, head] @ key[:, group].T / query.shape[-1] ** 0.5
      hidden = torch.ones_like(scores).triu(1).bool()
      weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
      out[:, head] = weights @ value[:, group]
    if not self.is_mimo:
      out = out * torch.sigmoid(gate)
    return self.times(out.flatten(1), 'layers.0.self_attn.o_proj')

  def __call__(self, tokens, states):
    """Logits and states of the rows of tokens after the first one."""
    embedded = self.norm(self.embedding[tokens[1:]], 'pre_fc_norm_embedding')
    both = [embedded, self.norm(states, 'pre_fc_norm_hidden')]
    x = self.times(torch.cat(both[::-1] if self.is_mimo else both, -1), 'fc')
    x = x + self.attention(self.norm(x, 'layers.0.input_layernorm'))
    normed = self.norm(x, 'layers.0.post_attention_layernorm')
    gate = self.times(normed, 'layers.0.mlp.gate_proj')
    inner = self.times(normed, 'layers.0.mlp.up_proj')
    inner = inner * torch.nn.functional.silu(gate)
    y = self.norm(x + self.times(inner, 'layers.0.mlp.down_proj'), 'norm')
    return y @ self.head.T, y


def _of_mtp(folder, name):
  """The logits of an MTP layer, and what it drafts."""
  keys = variants.OWN_HEADS[name]['config']
  as_qwen2 = {'model_type': 'qwen2'} if name.startswith('mimo') else {}
  variants.write(variants.OWN_HEADS[name], folder, keys=as_qwen2)
  target = transformers.AutoModelForCausalLM.from_pretrained(folder, **_OPTIONS)
  states = target.model(_TEXT[None]).last_hidden_state[0, :-1]
  stored = safetensors.torch.load_file(folder / 'model.safetensors')
  layer, tokens, drafted = MTP(keys, stored), _TEXT, []
  logits, given = layer(tokens, states)
  rows = [*logits]
  for _ in range(variants.DEPTHS):
    drafted.append(rows[-1].argmax())
    tokens = torch.cat([tokens, drafted[-1][None]])
    states = torch.cat([states, given[-1:]])
    logits, given = layer(tokens, states)
    rows.append(logits[-1])
  return rows, drafted


def _of_assistant(folder, name):
  """The logits of transformers' own class, and what it drafts."""
  described = variants.FAMILIES[name.replace('gemma', 'gemma4')]
  target = transformers.AutoModelForCausalLM.from_pretrained(
    variants.write(described, folder / 'target'), **_OPTIONS
  )
  assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(
    variants.write(variants.OWN_HEADS[name], folder / 'assistant'), **_OPTIONS
  )
  read = target.model(
    _TEXT[None], use_cache=False, return_shared_kv_states=True
  )
  states, entries = read.last_hidden_state, read.shared_kv_states

  def step(token, state, root):
    embedded = target.get_input_embeddings()(token[None, None])
    outputs = assistant(
      inputs_embeds=torch.cat([embedded, state], -1),
      attention_mask=torch.ones(1, root + 1),
      position_ids=torch.tensor([[root]]),
      shared_kv_states={
        kind: tuple(part[:, :, :root] for part in both)
        for kind, both in entries.items()
      },
    )
    row = outputs.logits[0, 0]
    if assistant.config.use_ordered_embeddings:  # The others have no mass.
      row = row.masked_fill(row == row.min(), -torch.inf)
    return row, outputs.last_hidden_state

  rows, drafted, last = [], [], len(_TEXT) - 1
  for root in range(1, last + 1):
    row, state = step(_TEXT[root], states[:, root - 1 : root], root)
    rows.append(row)
  for _ in range(variants.DEPTHS):
    drafted.append(rows[-1].argmax())
    row, state = step(drafted[-1], state, last)
    rows.append(row)
  return rows, drafted


@torch.no_grad()
def main():
  """Writes the file."""
  results = {}
  for name in variants.OWN_HEADS:
    compute = _of_assistant if name.startswith('gemma') else _of_mtp
    with tempfile.TemporaryDirectory() as made:
      rows, drafted = compute(pathlib.Path(made) / 'model', name)
    for row in rows[-variants.DEPTHS - 1 : -1]:
      first, second = row.topk(2).values
      assert first - second > 1e-3, name  # Rounding does not decide.
    of_words = torch.stack(rows)[:, variants.SOME_WORDS].numpy()
    results[name] = of_words.astype(np.float32)
    results[f'{name}_drafted'] = np.uint8(drafted)
  np.savez_compressed(variants.OWN_HEAD_RESULTS, **results)


if __name__ == '__main__':
  main()
