"""Makes tests/golden/block_drafters.npz: what the packages of formats compute.

For each drafter of `block_folders.py` it has the scores of a block. For the
drafters of z-lab it also has the tokens of their own greedy loop, with what was
drafted.

  pip install torch==2.13.0 transformers==5.24.0 safetensors loguru pydantic
  pip install --no-deps dflash==0.1.0 speculators==0.9.0
  PYTHONPATH=tests python tests/golden/make_block_drafters.py

Made with these on CPU. speculators imports packages that nothing here uses;
those that are not installed are replaced by empty modules.
"""

import importlib
import pathlib
import sys
import tempfile
import types
from typing import Any

import block_folders
from dflash import model as dflash
import numpy as np
import safetensors.torch
import torch
import transformers
import variants

_MODELS = 'speculators.models'
_CLASSES = {
  'dflash': ('DFlashDraftModel', 'DFlashSpeculatorConfig'),
  'dspark': ('DSparkDraftModel', 'DSparkSpeculatorConfig'),
  'dflash2': ('DFlash2DraftModel', 'DFlash2SpeculatorConfig'),
}
_PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
_NEW = 64


class _Empty(types.ModuleType):
  def __getattr__(self, name):
    if name.startswith('__'):
      raise AttributeError(name)
    return type(name, (), {})


def _import(name: str) -> Any:
  while True:
    try:
      return importlib.import_module(name)
    except ModuleNotFoundError as error:
      if str(error.name).startswith('speculators'):
        raise
      sys.modules[str(error.name)] = _Empty(str(error.name))
      for loaded in [name for name in sys.modules if 'speculators' in name]:
        del sys.modules[loaded]


def _load(model: torch.nn.Module, folder: pathlib.Path, ours: set[str]) -> Any:
  """Loads the tensors; only tensors of the target (`ours`) may be missing."""
  stored = safetensors.torch.load_file(folder / 'model.safetensors')
  parameters = model.state_dict()
  # z-lab loads it under another name.
  stored = {
    n if n in parameters else f'{n}.weight': t for n, t in stored.items()
  }
  missing, left = model.load_state_dict(stored, strict=False)
  assert not left, left
  assert {*missing} <= ours, missing
  return model.eval()


def _target() -> Any:
  config = transformers.Qwen3Config(**block_folders.TARGET)
  model = transformers.Qwen3ForCausalLM(config)
  tensors = variants.drawn(variants.BLOCK_DRAFTERS['target'])
  model.load_state_dict({n: torch.tensor(t) for n, t in tensors.items()})
  return model.eval()


def _z_lab(case: str, folder: pathlib.Path, target: Any) -> dict[str, Any]:
  config = transformers.Qwen3Config(**block_folders.CONFIGS[case])
  kind = dflash.DFlash2DraftModel if '2' in case else dflash.DFlashDraftModel
  model = _load(kind(config), folder, set())
  length, block = block_folders.TEXT, block_folders.BLOCK
  tokens = torch.full((1, block), block_folders.MASK)
  tokens[0, 0] = 3
  states = torch.tensor(block_folders.states())
  scale = dflash._draft_value(config, 'input_embedding_scale', 1.0)
  hidden = model(
    target_hidden=torch.cat(list(states), -1)[None],
    noise_embedding=dflash._raw_input_embeddings(target, tokens, scale),
    position_ids=torch.arange(length + block)[None],
    past_key_values=dflash._make_cache(config),
    use_cache=True,
  )[:, 1:]
  scores = model.compute_logits(hidden, target.lm_head)
  results = {'scores': scores}
  if '2' in case:
    selector = model.candidate_selector
    projected = selector.hidden_projection(hidden)
    before = selector.predecessor_codebook(torch.tensor([[3, 7, 2]]))
    after = selector.successor_codebook.weight
    results['edges'] = torch.einsum('bdr,vr->bdv', before * projected, after)
  fed: list[torch.Tensor] = []
  target.register_forward_pre_hook(lambda _, args: fed.append(args[0]))
  text = dflash.dflash_generate(
    model, target, torch.tensor([_PROMPT]), _NEW, None
  )
  whole = [tokens for tokens in fed[1:] if tokens.shape[1] == block]
  target._forward_pre_hooks.clear()
  return results | {'text': text[0, len(_PROMPT) :], 'fed': torch.cat(whole)}


def _speculators(case: str, folder: pathlib.Path, target: Any) -> Any:
  keys = block_folders.CONFIGS[case]
  name = keys['speculators_model_type']
  kind, shape = _CLASSES[name]
  module = _import(f'{_MODELS}.{name}.core')
  configs = importlib.import_module(f'{_MODELS}.{name}.config')
  config = getattr(configs, shape)(
    # A file without the key is of a version that had no other layout.
    **{'sample_from_anchor': False} | keys
  )
  config.transformer_layer_config._attn_implementation = 'eager'
  ours = {'embed_tokens', 'lm_head', 'verifier_norm', 'verifier_lm_head'}
  model = getattr(module, kind)(config)
  model = _load(model, folder, {'t2d', *(f'{name}.weight' for name in ours)})
  if not model.use_draft_vocab:
    model.embed_tokens.weight = target.model.embed_tokens.weight
    model.lm_head.weight = target.lm_head.weight
  length, block = block_folders.TEXT, block_folders.BLOCK
  padding = torch.zeros((1, 3 * block, 2 * block_folders.WIDTH))
  states = torch.tensor(block_folders.states())
  states = torch.cat([torch.cat(list(states), -1)[None], padding], 1)
  tokens = torch.zeros(states.shape[:2], dtype=torch.long)
  tokens[0, length] = 3  # The root; what follows is not seen.
  may_be_root = torch.zeros(tokens.shape)
  may_be_root[0, length] = 1
  hidden, scores, *_ = model._backbone_forward(
    states,
    tokens,
    may_be_root,
    torch.zeros((1, states.shape[1], block_folders.WIDTH)),
    torch.zeros_like(tokens),
    max_anchors=1,
  )
  first = not config.sample_from_anchor
  results = {'scores': scores[:, first:]}
  before = torch.tensor([[3, 7, 2, 5][: block - first]])
  hidden = hidden[:, first:]
  if getattr(model, 'markov_head', None) is not None:
    results['edges'] = model.markov_head.block_bias(
      prev_token_ids=before, hidden_states=hidden
    )
    rows = [hidden]
    if config.confidence_head_with_markov:
      rows.append(model.markov_head.prev_embeddings(before))
    results['confidence'] = torch.sigmoid(
      model.confidence_head(torch.cat(rows, -1))
    )
  if name == 'dflash2':
    all_tokens = torch.arange(block_folders.VOCAB).expand(*hidden.shape[:2], -1)
    results['edges'] = model.candidate_selector.transition_scores(
      hidden, before, all_tokens
    )
  return results


@torch.no_grad()
def main():
  """Writes the file."""
  target, results = _target(), {}
  with tempfile.TemporaryDirectory() as made:
    for case in block_folders.CONFIGS:
      compute = {'z-lab': _z_lab, 'speculators': _speculators}.get(
        case.split()[0]
      )
      if compute is None:
        continue
      folder = block_folders.write(pathlib.Path(made) / case, case)
      for name, values in compute(case, folder, target).items():
        array = values.detach().numpy()
        kind = np.uint8 if array.dtype == np.int64 else np.float32
        results[f'{case}: {name}'] = array.astype(kind)
  np.savez_compressed(block_folders.GOLDEN, **results)


if __name__ == '__main__':
  main()
