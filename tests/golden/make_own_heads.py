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

import json
import pathlib
import tempfile

import numpy as np
import own_heads
import torch
import transformers
import variants


class MTP:
  """An MTP layer with the embedding and the output matrix of its target."""

  def __init__(self, keys, stored):
    self.keys, self.is_mimo = keys, keys['model_type'] == 'mimo'
    prefix = 'model.mtp_layers.0.' if self.is_mimo else 'mtp.'
    shift = lambda name: not self.is_mimo and own_heads.is_norm(name)
    self.tensors = {
      name.removeprefix(prefix): torch.tensor(array + shift(name)).float()
      for name, array in stored.items()
      if name.startswith(prefix)
    }
    self.embedding = torch.tensor(stored['model.embed_tokens.weight']).float()
    head = stored.get('lm_head.weight')
    self.head = self.embedding if head is None else torch.tensor(head).float()

  def norm(self, x, name):
    mean = (x * x).mean(-1, keepdim=True)
    scale = self.tensors[f'{name}.weight']
    return x / torch.sqrt(mean + self.keys['rms_norm_eps']) * scale

  def times(self, x, name):
    product = x @ self.tensors[f'{name}.weight'].T
    return product + self.tensors.get(f'{name}.bias', 0.0)

  def rotated(self, x):
    """Rotates the first numbers of heads `[rows, heads, width]`."""
    size = int(x.shape[-1] * self.keys.get('partial_rotary_factor', 1.0))
    speeds = self.keys['rope_theta'] ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(len(x))[:, None] * speeds
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b, rest = x.split([size // 2, size // 2, x.shape[-1] - size], -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

  def attention(self, x, prefix):
    keys, rows = self.keys, len(x)
    heads, kv_heads = keys['num_attention_heads'], keys['num_key_value_heads']
    query = self.times(x, f'{prefix}self_attn.q_proj').view(rows, heads, -1)
    key, value = (
      self.times(x, f'{prefix}self_attn.{letter}_proj').view(rows, kv_heads, -1)
      for letter in 'kv'
    )
    if not self.is_mimo:
      query, gate = query.chunk(2, -1)
      query = self.norm(query, f'{prefix}self_attn.q_norm')
      key = self.norm(key, f'{prefix}self_attn.k_norm')
    query, key = self.rotated(query), self.rotated(key)
    out = torch.zeros_like(query)
    for head in range(heads):
      group = head * kv_heads // heads
      scores = query[:, head] @ key[:, group].T / query.shape[-1] ** 0.5
      hidden = torch.ones(rows, rows).triu(1).bool()
      weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
      out[:, head] = weights @ value[:, group]
    if not self.is_mimo:
      out = out * torch.sigmoid(gate)
    return self.times(out.reshape(rows, -1), f'{prefix}self_attn.o_proj')

  def __call__(self, tokens, states):
    """Logits and states of the rows of tokens after the first one."""
    prefix = '' if self.is_mimo else 'layers.0.'
    names = ('pre_fc_norm_embedding', 'pre_fc_norm_hidden', 'fc', 'norm')
    if self.is_mimo:
      names = ('token_layernorm', 'hidden_layernorm', 'input_proj')
      names += ('final_layernorm',)
    both = [self.embedding[tokens[1:]], states]
    both = [self.norm(x, n) for x, n in zip(both, names[:2], strict=True)]
    x = self.times(
      torch.cat(both[::-1] if self.is_mimo else both, -1), names[2]
    )
    normed = self.norm(x, f'{prefix}input_layernorm')
    x = x + self.attention(normed, prefix)
    normed = self.norm(x, f'{prefix}post_attention_layernorm')
    gate = torch.nn.functional.silu(
      self.times(normed, f'{prefix}mlp.gate_proj')
    )
    inner = gate * self.times(normed, f'{prefix}mlp.up_proj')
    y = self.norm(x + self.times(inner, f'{prefix}mlp.down_proj'), names[3])
    return y @ self.head.T, y


def _states(folder, keys):
  """The target's states after the final norm, at all tokens of the text."""
  if keys['model_type'] == 'mimo':
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(
      json.dumps(config | {'model_type': 'qwen2'})
    )
  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager'
  )
  return model.model(torch.tensor(own_heads.TEXT)[None]).last_hidden_state[0]


def _of_assistant(parent, number):
  """The logits of transformers' own class, and what it drafts."""
  described = variants.FAMILIES[f'gemma4_{number}']
  folder = variants.write(described, parent / 'target')
  options = {'dtype': torch.float32, 'attn_implementation': 'eager'}
  target = transformers.AutoModelForCausalLM.from_pretrained(folder, **options)
  path = own_heads.write_assistant(parent / 'assistant', number)
  assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(
    path, **options
  )
  text = torch.tensor(own_heads.TEXT)[None]
  read = target.model(text, use_cache=False, return_shared_kv_states=True)
  states, entries = read.last_hidden_state, read.shared_kv_states

  def step(token, state, root):
    embedded = target.get_input_embeddings()(torch.tensor([[token]]))
    kept = {
      kind: tuple(part[:, :, :root] for part in both)
      for kind, both in entries.items()
    }
    outputs = assistant(
      inputs_embeds=torch.cat([embedded, state], -1),
      attention_mask=torch.ones(1, root + 1),
      position_ids=torch.tensor([[root]]),
      shared_kv_states=kept,
    )
    row = outputs.logits[0, 0]
    if assistant.config.use_ordered_embeddings:  # The others have no mass.
      row = row.masked_fill(row == row.min(), -torch.inf)
    return row, outputs.last_hidden_state

  rows, drafted, last = [], [], text.shape[1] - 1
  for root in range(1, last + 1):
    row, state = step(int(text[0, root]), states[:, root - 1 : root], root)
    rows.append(row)
  for _ in range(own_heads.DEPTHS):
    drafted.append(int(rows[-1].argmax()))
    row, state = step(drafted[-1], state, last)
    rows.append(row)
  return torch.stack(rows), drafted


@torch.no_grad()
def main():
  """Writes the file."""
  results = {}
  for number in range(own_heads.NUM_SHAPES):
    with tempfile.TemporaryDirectory() as made:
      rows, drafted = _of_assistant(pathlib.Path(made), number)
    name, of_words = f'gemma_{number}', rows[:, own_heads.WORDS]
    results[name] = of_words.numpy().astype(np.float32)
    results[f'{name}_drafted'] = np.uint8(drafted)
  for family in ('qwen', 'mimo'):
    for number in range(own_heads.NUM_SHAPES):
      keys = own_heads.config(family, number)
      with tempfile.TemporaryDirectory() as made:
        folder = own_heads.write(pathlib.Path(made) / 'a', family, number)
        states = _states(folder, keys)[:-1]
      layer, tokens = MTP(keys, own_heads.tensors(keys)), [*own_heads.TEXT]
      logits, given = layer(torch.tensor(tokens), states)
      rows = [*logits]
      for _ in range(own_heads.DEPTHS):
        first, second = rows[-1].topk(2).values
        assert first - second > 1e-3  # Rounding does not decide.
        tokens.append(int(rows[-1].argmax()))
        states = torch.cat([states, given[-1:]])
        logits, given = layer(torch.tensor(tokens), states)
        rows.append(logits[-1])
      of_words = torch.stack(rows)[:, own_heads.WORDS].numpy()
      results[f'{family}_{number}'] = of_words.astype(np.float32)
      drafted = tokens[len(own_heads.TEXT) :]
      results[f'{family}_{number}_drafted'] = np.uint8(drafted)
  np.savez_compressed(own_heads.GOLDEN, **results)


if __name__ == '__main__':
  main()
