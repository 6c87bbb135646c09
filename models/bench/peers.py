"""Decoding by transformers on torch, which users install themselves.

Greedy or sampled decoding, plain, with an assistant model, or with prompt
lookup: on the same weights, prompts, limits and EOS tokens, with the same
counts. Everything else has the defaults of transformers.
"""

from collections.abc import Callable
from collections.abc import Iterable
from collections.abc import Mapping
from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import transformers

from models.bench import machine
from models.bench.arms import ArmSpec
from models.bench.arms import ReadyArm
from models.bench.machine import ModelSize
from models.checkpoints import hub
from specdec.generation import Generation
from specdec.sampling import Sampling
from specdec.statistics import relative_bandwidth

# Transformers has no default; this value is that of its documentation.
_LOOKUP = {'prompt_lookup_num_tokens': 10}


def import_torch() -> Any:
  """Torch, an optional package; ValueError if it is not installed."""
  try:
    import torch
  except ImportError as error:
    raise ValueError(
      'transformers decodes with torch, which is not installed; pip install'
      ' torch, or leave out --peer and the transformers arms'
    ) from error
  return torch


def _device(torch) -> str:
  if jax.default_backend() == 'cpu':
    return 'cpu'
  if jax.default_backend() == 'gpu' and torch.cuda.is_available():
    return 'cuda'
  raise ValueError(
    f'JAX decodes on {jax.default_backend()}, which this torch'
    f' ({torch.__version__}) cannot use; install a torch for it, or leave out'
    ' the transformers arms'
  )


def describe_torch() -> dict[str, Any]:
  """Version, threads and device of torch, for the record of a result."""
  torch = import_torch()
  return {
    'torch': torch.__version__,
    'torch_threads': torch.get_num_threads(),
    'torch_device': _device(torch),
  }


def load_peer(name: str, dtype: str, revision: str | None) -> Any:
  """A model of transformers; see `hub.locate` for its name.

  Raises:
    ValueError: torch is not installed, or cannot use the device that JAX uses.
  """
  torch = import_torch()
  model: Any = transformers.AutoModelForCausalLM.from_pretrained(
    hub.locate(name, revision=revision), dtype=getattr(torch, dtype)
  )
  # The settings of the checkpoint would replace defaults.
  model.generation_config = transformers.GenerationConfig()
  return model.to(_device(torch)).eval()


def _settings(
  sampling: Sampling, eos_ids: Sequence[int], limit: int
) -> dict[str, Any]:
  """The arguments of `generate` of transformers for a `Sampling`."""
  if sampling.logit_bias is not None:
    raise ValueError('transformers arms have no --logit_bias; leave it out')
  settings: dict[str, Any] = {
    'max_new_tokens': limit,
    'do_sample': sampling.temperature > 0,
    'eos_token_id': list(eos_ids) or None,
    'pad_token_id': 0,
    'repetition_penalty': sampling.repetition_penalty,
  }
  if sampling.temperature > 0:
    settings |= {
      'temperature': sampling.temperature,
      'top_k': sampling.top_k or 0,
      'top_p': sampling.top_p,
      'min_p': sampling.min_p,
    }
  return {name: value for name, value in settings.items() if value is not None}


def _until_eos(row: list[int], eos_ids: Sequence[int]) -> list[int]:
  ends = [index for index, token in enumerate(row) if token in eos_ids]
  return row[: ends[0] + 1] if ends else row


def _options(spec: ArmSpec) -> dict[str, Any]:
  """The options of an arm as numbers."""
  options: dict[str, Any] = {}
  if spec.method == 'transformers-lookup':
    options |= _LOOKUP
  for name, value in spec.options:
    is_share = name == 'assistant_confidence_threshold'
    try:
      options[name] = float(value) if is_share else int(value)
      if options[name] < (0 if is_share else 1):
        raise ValueError
    except ValueError:
      raise ValueError(
        f'arm {str(spec)!r}: {name} must be'
        f' {"a number from 0" if is_share else "an integer from 1"}'
      ) from None
  return options


class _Peer:
  """Decodes with transformers; a `specdec.study.timing.Arm`."""

  def __init__(self, spec, target, draft, *, sampling, eos_ids, seed):
    self._target, self._draft = target, draft
    self._sampling, self._eos_ids, self._seed = sampling, eos_ids, seed
    self._options = _options(spec)
    self._costs = {'target': read_costs(target)}
    if draft is not None:
      self._costs['draft'] = read_costs(draft)

  def _how(self) -> dict[str, Any]:
    if self._draft is None:
      return self._options
    # New for every call, because transformers changes it while decoding.
    self._draft.generation_config = transformers.GenerationConfig(
      **self._options
    )
    return {'assistant_model': self._draft}

  def _tensors(self, prompts) -> dict[str, Any]:
    """Ids and mask, padded on the left."""
    torch = import_torch()
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), np.int64)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
      ids[row, longest - len(prompt) :] = prompt
      mask[row, longest - len(prompt) :] = 1
    device = self._target.device
    return {
      'input_ids': torch.tensor(ids, device=device),
      'attention_mask': torch.tensor(mask, device=device),
    }

  def __call__(self, prompts: Sequence[Sequence[int]], limit: int):
    torch = import_torch()
    tensors = self._tensors(prompts)
    width = tensors['input_ids'].shape[1]
    context = self._target.config.max_position_embeddings
    if width + limit > context:
      raise ValueError(
        f'a prompt of {width} tokens and max_new_tokens={limit} exceed the'
        f' context of the target, {context} tokens'
      )
    target = Forwards(width)
    draft = None if self._draft is None else Forwards(width)
    hooks = [
      model.register_forward_pre_hook(counter, with_kwargs=True)
      for model, counter in ((self._target, target), (self._draft, draft))
      if model is not None
    ]
    try:
      if limit == 0:
        with torch.inference_mode():
          outputs = self._target(**tensors, use_cache=True, logits_to_keep=1)
          outputs.logits[0, 0, 0].item()  # waits for the device
        rows: list[list[int]] = [[] for _ in prompts]
      else:
        torch.manual_seed(self._seed)
        output = self._target.generate(
          **tensors,
          **_settings(self._sampling, self._eos_ids, limit),
          **self._how(),
        )
        rows = output[:, width:].tolist()
    finally:
      for hook in hooks:
        hook.remove()
    tokens = [_until_eos(row, self._eos_ids) for row in rows]
    return Generation(
      tokens=tokens,
      origins=[],
      labels=('target',),
      log_probs=None,
      finish_reasons=[
        'eos' if row and row[-1] in self._eos_ids else 'length'
        for row in tokens
      ],
      errors=[None] * len(tokens),
      stats=statistics(prompts, tokens, target, draft, self._costs),
    )


def _peak_beyond(run: Callable[[], Any]) -> int | None:
  torch = import_torch()
  if _device(torch) == 'cpu':
    return machine.peak_beyond(run)
  before = torch.cuda.memory_allocated()
  torch.cuda.reset_peak_memory_stats()
  run()
  return torch.cuda.max_memory_allocated() - before


def make_arms(
  specs: Sequence[ArmSpec],
  *,
  target: str,
  draft: str | None,
  revision: str | None,
  sampling: Sampling,
  eos_ids: Sequence[int],
  seed: int,
  batch_size: int,
) -> dict[ArmSpec, ReadyArm]:
  """Loads the models of arms of transformers, each model once per dtype.

  Args:
    specs: arms with `is_peer`.
    target: see `models.text.pair.load_pair`.
    draft: see `models.text.pair.load_pair`.
    revision: of the target, on the hub.
    sampling: see `specdec.generate`; the random draws are those of torch.
    eos_ids: tokens that end a text.
    seed: of the draws, set again for every batch.
    batch_size: prompts decoded together.

  Raises:
    ValueError: torch is missing, or an arm is not supported.
  """
  transformers.logging.set_verbosity_error()  # warns of its own calls
  transformers.logging.disable_progress_bar()
  # Two caches, because forwards of target and draft are counted separately.
  load, load_draft = functools.cache(load_peer), functools.cache(load_peer)
  arms = {}
  for spec in specs:
    if batch_size > 1 and spec.method != 'transformers':
      raise ValueError(
        f'arm {str(spec)!r}: assisted generation of transformers has a batch'
        f' size of 1, not {batch_size}; leave out the arm or --batch_size'
      )
    if spec.method == 'transformers-assisted' and draft is None:
      raise ValueError(f'arm {str(spec)!r} needs a draft; give --draft')
    model = load(target, spec.dtype, revision)
    assistant = None
    if spec.method == 'transformers-assisted' and draft is not None:
      assistant = load_draft(hub.draft_name(draft), spec.dtype, None)
      sizes = (model.config.vocab_size, assistant.config.vocab_size)
      if sizes[0] != sizes[1]:
        raise ValueError(
          f'arm {str(spec)!r}: transformers wants a draft of the vocabulary of'
          f' the target, {sizes[0]} tokens, not {sizes[1]}; leave the arm out'
        )
    models = {'target': model}
    if assistant is not None:
      models['draft'] = assistant
    arms[spec] = ReadyArm(
      decode=_Peer(
        spec, model, assistant, sampling=sampling, eos_ids=eos_ids, seed=seed
      ),
      sizes={name: model_size(part) for name, part in models.items()},
      weight_bytes=sum(
        num_bytes(part.parameters()) for part in models.values()
      ),
      peak_beyond=_peak_beyond,
    )
  return arms


def _read_parameters(model: Any) -> list[Any]:
  """The tensors that a forward reads, without embedding tables."""
  looked_up = {
    id(module.weight)
    for module in model.modules()
    if type(module).__name__ == 'Embedding'
  } - {id(model.get_output_embeddings().weight)}
  return [p for p in model.parameters() if id(p) not in looked_up]


def _share_read(model: Any, parameter: Any) -> float:
  """The share of a tensor that a forward of one position reads.

  The experts of a layer are one tensor `[experts, out, in]`.
  """
  if parameter.ndim < 3:
    return 1.0
  return model.config.num_experts_per_tok / parameter.shape[0]


def num_bytes(tensors: Iterable[Any]) -> int:
  """The size of all tensors together."""
  return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def read_costs(model: Any) -> dict[str, int]:
  """Bytes read per forward and per visible slot of the cache."""
  return {
    'per_forward': round(
      sum(
        _share_read(model, parameter) * num_bytes([parameter])
        for parameter in _read_parameters(model)
      )
    ),
    'per_slot': model_size(model).cache_per_slot * model.dtype.itemsize,
  }


def model_size(model: Any) -> ModelSize:
  """The size of a model of transformers."""
  config = model.config
  heads = config.num_attention_heads
  width = getattr(config, 'head_dim', None) or config.hidden_size // heads
  heads = getattr(config, 'num_key_value_heads', None) or heads
  return ModelSize(
    parameters=round(
      sum(
        _share_read(model, parameter) * parameter.numel()
        for parameter in _read_parameters(model)
        if parameter.ndim > 1
      )
    ),
    cache_per_slot=2 * config.num_hidden_layers * heads * width,
  )


@dataclasses.dataclass
class Forwards:
  """A hook that counts the forwards of a model.

  Attributes:
    prompt_length: padded length of the prompts, of which all but the last token
      are prefill and not counted.
    forwards: of the batch.
    positions: of all rows.
    slots: visible slots of the cache, padding included.
  """

  prompt_length: int
  forwards: int = 0
  positions: int = 0
  slots: int = 0

  def __call__(self, module, args, kwargs):
    del module
    ids = kwargs['input_ids'] if 'input_ids' in kwargs else args[0]
    cache = kwargs.get('past_key_values')
    before = 0 if cache is None else cache.get_seq_length()
    batch_size, length = ids.shape
    prefilled = max(self.prompt_length - 1 - before, 0)
    before, length = before + prefilled, length - prefilled
    self.forwards += 1
    self.positions += batch_size * length
    self.slots += batch_size * (before + length)


def statistics(
  prompts: Sequence[Sequence[int]],
  tokens: Sequence[Sequence[int]],
  target: Forwards,
  draft: Forwards | None,
  costs: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
  """The figures of `specdec.statistics.summarize`, as far as known.

  Args:
    prompts: of the rows.
    tokens: new tokens of the rows, including EOS.
    target: the counted forwards of the target.
    draft: the counted forwards of the draft, or None.
    costs: by model, see `read_costs`.
  """
  new_tokens = np.array([len(row) for row in tokens])
  lengths = np.array([len(prompt) for prompt in prompts])
  counted = {'target': target} | ({} if draft is None else {'draft': draft})
  count = lambda forwards, slots: {'forwards': int(forwards), 'slots': slots}
  plain = new_tokens * lengths + new_tokens * (new_tokens - 1) // 2
  reads = {'plain': count(new_tokens.max(initial=0), int(plain.sum()))}
  reads |= {
    name: count(hook.forwards, hook.slots) for name, hook in counted.items()
  }
  return {
    'new_tokens': int(new_tokens.sum()),
    # A row of a batch may end before the others.
    'target_forwards': int(np.minimum(new_tokens, target.forwards).sum()),
    'accepted_histogram': None,
    'stage_forwards': {} if draft is None else {'draft': draft.forwards},
    'origins': None,
    'positions': {name: hook.positions for name, hook in counted.items()},
    'relative_bandwidth': relative_bandwidth(reads, costs),
    'reads': reads,
    'costs': costs,
  }
