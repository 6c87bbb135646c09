"""Google's drafters of Gemma 4 in folders, as transformers writes them."""

from collections.abc import Iterator
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
_TYPES = {
  'text_config': dict,
  'backbone_hidden_size': int,
  'use_ordered_embeddings': bool | None,
  'num_centroids': int,
  'centroid_intermediate_top_k': int,
}


class _Folder(head_tensors.HeadFolder):
  """A folder with an assistant; its embedding is its output matrix."""

  def named(self) -> Iterator[tuple[str, Any]]:
    for tensor in self.stored():
      name = tensor.name.removeprefix('model.')
      name = name.replace('masked_embedding.cent', 'cent')
      yield name.replace('embed_tokens', 'lm_head'), tensor


class StoredAssistant(head_tensors.Drafter):
  """An assistant."""

  name = 'Gemma 4 assistant'
  module = staticmethod(
    lambda config, num_outputs, **options: assistant.Assistant(
      config, **options
    )
  )

  containers = _Folder, head_tensors.HeadFile

  def tensors(self) -> Iterator[tuple[str, Any]]:
    named = self.stored.all.items()
    yield from (item for item in named if item[0] != _ORDERING)

  @functools.cached_property
  @checkpoint_lib.named
  def config(self) -> assistant.AssistantConfig:
    """The shape; raises ValueError if it is for another target."""
    target, keys = self.target, self.stored.keys
    text_files.check_types(keys, _TYPES)
    width = keys.get('backbone_hidden_size')
    if not isinstance(target, gemma_lib.Gemma4Config) or width != target.width:
      raise ValueError(
        f'is an assistant of a Gemma 4 of backbone_hidden_size={width!r}; the'
        f' target is of the family {families.family_of(target).name} and has'
        f' the width {target.width}'
      )
    # With keys of their own, these are the layers of a Gemma 4.
    layers: Any = families.read(
      {**keys['text_config'], 'num_kv_shared_layers': 0}, self.path
    )[1]
    kinds = [window is None for window in layers.of_layers('window')]
    used = list(dict.fromkeys(kinds))
    target_layers = zip(
      target.of_layers('window'), target.of_layers('kv_source'), strict=True
    )
    last_of_kind = {
      window is None: layer
      for layer, (window, source) in enumerate(target_layers)
      if source is None
    }
    sources = tuple(last_of_kind[kind] for kind in used if kind in last_of_kind)
    # A source has the sizes of the first layer that reads it.
    order = [*map(kinds.index, used), *range(layers.num_layers)]
    fields = ('window', 'head_width', 'rope', 'inner_width')
    grouped = bool(keys.get('use_ordered_embeddings'))
    config = assistant.AssistantConfig(
      **vars(layers)
      | {
        field: tuple(layers.of_layers(field)[layer] for layer in order)
        for field in fields
      }
      | {
        'num_layers': len(order),
        'kv_source': (None,) * len(used) + tuple(map(used.index, kinds)),
        'tie_embeddings': False,
      },
      target=target,
      sources=sources,
      num_groups=keys.get('num_centroids', 2048) if grouped else 0,
      top_groups=keys.get('centroid_intermediate_top_k', 32) if grouped else 0,
    )
    widths = [target.of_layers('head_width')[layer] for layer in sources]
    theirs = (target.vocab_size, target.num_kv_heads, widths, 0)
    ours = (config.vocab_size, config.num_kv_heads, [*config.cache_widths])
    if (*ours, config.layer_width) != theirs:
      raise ValueError(
        f'has {ours[0]} tokens and reads {ours[1]} heads of the widths'
        f' {ours[2]}; the target has {theirs[0]}, {theirs[1]} and {widths}'
      )
    return config

  def ordering(self) -> np.ndarray | None:
    """`[groups, tokens]`, the tokens of each group; None without groups."""
    config = self.config
    if not config.num_groups:
      return None
    tokens = np.arange(0)
    if _ORDERING in self.stored.all:
      rows = self.stored.all[_ORDERING].rows()
      tokens = np.concatenate([part for _, part in rows])
    if not np.array_equal(np.sort(tokens), np.arange(config.vocab_size)):
      raise ValueError(f'{self.path}: {_ORDERING} does not order all tokens')
    return tokens.reshape(config.num_groups, -1)
