"""Google's drafters of Gemma 4 in folders, as transformers writes them."""

from collections.abc import Iterator
import dataclasses
import functools
from typing import Any

import numpy as np

from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import families
from specdec.models.checkpoints.heads import head_tensors
from specdec.models.nn import assistant
from specdec.models.nn import gemma as gemma_lib
from specdec.text import text_files

_ORDERING = 'masked_embedding.token_ordering'
_SHARED = 'num_kv_shared_layers'
_TYPES = {
  'text_config': dict,
  'backbone_hidden_size': int,
  'use_ordered_embeddings': bool | None,
  'num_centroids': int,
  'centroid_intermediate_top_k': int,
}


class StoredAssistant(head_tensors.Drafter):
  """An assistant."""

  name = 'Gemma 4 assistant'
  module = staticmethod(
    lambda config, num_outputs, **options: assistant.Assistant(
      config, **options
    )
  )

  @functools.cached_property
  def stored(self) -> head_tensors.HeadFolder | head_tensors.HeadFile:
    """The tensors; `embed_tokens` is the output matrix."""
    return _Folder(self.path)

  def tensors(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors."""
    for name, tensor in self.stored.all.items():
      if name != _ORDERING:
        yield name, tensor

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> assistant.AssistantConfig:
    """The shape; raises ValueError if it is for another target."""
    target, keys = self.target, self.stored.keys
    text_files.check_types(keys, _TYPES)
    if not isinstance(target, gemma_lib.Gemma4Config):
      raise ValueError('is an assistant of a Gemma 4; the target is none')
    if keys.get('backbone_hidden_size') != target.width:
      raise ValueError(
        f'backbone_hidden_size={keys.get("backbone_hidden_size")!r}, but the'
        f' target has the width {target.width}'
      )
    # With keys of their own the layers would be those of a Gemma 4.
    layers: Any = families.config_from_keys(
      {**keys['text_config'], _SHARED: 0}, self.path
    )
    self._check(layers)
    of_kind: dict[bool, int] = {}
    own = zip(
      target.of_layers('window'), target.of_layers('kv_source'), strict=True
    )
    for layer, (window, source) in enumerate(own):
      if source is None:
        of_kind[window is None] = layer
    kinds = [window is None for window in layers.of_layers('window')]
    used = list(dict.fromkeys(kinds))
    sources = tuple(of_kind[kind] for kind in used if kind in of_kind)
    first = [kinds.index(kind) for kind in used]
    fields = {
      field: self._with_sources(layers.of_layers(field), first)
      for field in ('window', 'head_width', 'rope', 'inner_width')
    }
    shape = {
      field.name: getattr(layers, field.name)
      for field in dataclasses.fields(layers)
    }
    shape |= fields | {
      'num_layers': len(used) + layers.num_layers,
      'kv_source': (None,) * len(used) + tuple(map(used.index, kinds)),
      'tie_embeddings': False,
    }
    grouped = bool(keys.get('use_ordered_embeddings'))
    config = assistant.AssistantConfig(
      **shape,
      target=target,
      sources=sources,
      num_groups=keys.get('num_centroids', 2048) if grouped else 0,
      top_groups=keys.get('centroid_intermediate_top_k', 32) if grouped else 0,
    )
    self._check_sources(config, used)
    return config

  @staticmethod
  def _with_sources(
    values: tuple[Any, ...], first: list[int]
  ) -> tuple[Any, ...]:
    """The values of all layers, after the values of the target's layers."""
    return tuple(values[layer] for layer in first) + values

  def _check(self, layers: Any) -> None:
    """Raises ValueError if it has other tokens or embeddings per layer."""
    if layers.vocab_size != self.target.vocab_size or layers.layer_width:
      raise ValueError(
        f'has {layers.vocab_size} tokens and embeddings per layer of width'
        f' {layers.layer_width}, expected {self.target.vocab_size} and 0'
      )

  def _check_sources(self, config: Any, used: list[bool]) -> None:
    """Raises ValueError if its heads do not fit the target's entries."""
    widths = self.target.of_layers('head_width')
    theirs = (
      [widths[layer] for layer in config.sources],
      (self.target.num_kv_heads),
    )
    ours = [*config.cache_widths], config.num_kv_heads
    if len(config.sources) < len(used) or ours != theirs:
      raise ValueError(
        f'reads entries with heads of widths {ours[0]} and {ours[1]} heads; the'
        f' target has {theirs[0]} and {theirs[1]}'
      )

  def ordering(self, config: assistant.AssistantConfig) -> np.ndarray | None:
    """`[groups, tokens]`, the tokens of each group; None without groups."""
    if not config.num_groups:
      return None
    if _ORDERING not in self.stored.all:
      raise ValueError(f'{self.path}: lacks the tensor {_ORDERING}')
    parts = [rows for _, rows in self.stored.all[_ORDERING].rows()]
    tokens = np.concatenate(parts)
    if sorted(tokens.tolist()) != list(range(config.vocab_size)):
      raise ValueError(f'{self.path}: {_ORDERING} does not order all tokens')
    return tokens.reshape(config.num_groups, -1)


class _Folder(head_tensors.HeadFolder):
  """A folder with an assistant."""

  def named(self) -> Iterator[tuple[str, Any]]:
    """Yields canonical names and tensors; see `HeadTensors`."""
    for tensor in self.stored():
      name = tensor.name.removeprefix('model.')
      if name == 'embed_tokens.weight':
        name = 'lm_head.weight'
      yield name.replace('masked_embedding.cent', 'cent'), tensor
