"""Computes with transformers what the models in two files of configs are.

A line of variants.json or families.json is a model: `config` is the config of
its folder. A new line needs nothing else; names and shapes of the tensors that
transformers stores are added to it. The NumPy files have float32 logits. The
file of the variants has the logits of all tokens. The file of the families has
the logits of some tokens, at every position of a longer text. No file has
weights: `variants.py` draws them by name.

  PYTHONPATH=tests python tests/golden/make_variants.py

Made with torch 2.13.0+cpu and transformers 5.24.0.
"""

import collections
import json
import pathlib
import re
import tempfile
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers
import variants

Config = dict[str, Any]


def _known(config: Config) -> Config:
  """The config of a MiniCPM as the Granite that computes the same.

  The former has the keys of the code in its folders, not of transformers.
  """
  config = dict(config)
  if config['model_type'] == 'minicpm':
    config['model_type'] = 'granite'
    config['embedding_multiplier'] = config.pop('scale_emb')
    config['residual_multiplier'] = config.pop('scale_depth') / 2**0.5
    config['logits_scaling'] = 16 / config.pop('dim_model_base')
    config['attention_multiplier'] = 0.5
    del config['mup_denominator']
  return config


def _shapes(config: Config) -> dict[str, list[int]]:
  """The tensors that transformers stores of a config."""
  # It changes objects within.
  made = transformers.AutoConfig.for_model(**json.loads(json.dumps(config)))
  with tempfile.TemporaryDirectory() as folder:
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(folder)
    stored = safetensors.torch.load_file(f'{folder}/model.safetensors')
  return {name: list(array.shape) for name, array in stored.items()}


def _packed(shapes: dict[str, list[int]]) -> dict[str, list[int]]:
  """Shapes by the names of files, where layers that are alike have one."""
  layers = collections.defaultdict(list)
  for name, shape in shapes.items():
    match = re.fullmatch(r'(.+?\.)(\d+)(\..+)', name)
    before, layer, after = match.groups() if match else (name, '', '')
    layers[before, after, *shape].append(layer)
  packed = {}
  for (before, after, *shape), numbers in layers.items():
    listed = ','.join(numbers)
    listed = f'[{listed}]' if len(numbers) > 1 else listed
    packed[f'{before}{listed}{after}'] = shape
  return packed


@torch.no_grad()
def _run(variant: variants.Variant, tokens: np.ndarray) -> Any:
  """The output of transformers in float32 for the weights of a folder."""
  with tempfile.TemporaryDirectory() as parent:
    folder = variants.write(variant, pathlib.Path(parent) / 'model')
    model = transformers.AutoModelForCausalLM.from_pretrained(
      folder, dtype=torch.float32, attn_implementation='eager'
    )
  return model.eval()(torch.from_numpy(tokens))


def _of_variant(name: str, variant: variants.Variant) -> dict[str, np.ndarray]:
  tokens = variants.tokens(variant)
  logits = _run(variant, tokens).logits.numpy()
  first, second = np.sort(logits)[..., [-1, -2]].reshape(-1, 2).T
  # Rounding must not decide, and the text must not be trivial.
  assert np.min(first - second) > 2e-4, name
  assert len(np.unique(logits.argmax(-1))) > 3, name
  return {name: logits}


def _of_family(name: str, variant: variants.Variant) -> dict[str, np.ndarray]:
  logits = _run(variant, variants.LONG[None]).logits.numpy()[0]
  return {name: logits[:, variants.SOME_WORDS]}


def main() -> None:
  """Adds what the files of configs lack, and writes the results."""
  for path, results, compute, save in (
    (variants.DESCRIBED, variants.RESULTS, _of_variant, np.savez),
    (
      variants.FAMILIES_DESCRIBED,
      variants.FAMILY_RESULTS,
      _of_family,
      np.savez_compressed,
    ),
  ):
    arrays: dict[str, np.ndarray] = {}
    described = json.loads(path.read_text())
    for name, variant in described.items():
      config = _known(variant['config'])
      if 'tensors' not in variant:
        variant['tensors'] = _packed(_shapes(config))
      whole = variants.expanded(variant) | {'config': config}
      arrays |= compute(name, whole)
    save(results, **arrays)
    lines = [f'{json.dumps(n)}: {json.dumps(v)}' for n, v in described.items()]
    path.write_text('{\n' + ',\n'.join(lines) + '\n}\n')


if __name__ == '__main__':
  main()
