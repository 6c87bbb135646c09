"""The same decoding by transformers on torch, which users install themselves.

Greedy or sampled, plain, with an assistant model, or with prompt lookup: on the
same weights, prompts and limits, with the same tokens at which to stop, and
counted in the same way. All else is as transformers has it by default.
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

from models.bench import machine as peak_memory
from models.bench.arms import ArmSpec
from models.bench.arms import ReadyArm
from models.bench.machine import ModelSize
from models.checkpoints import hub
from specdec.generation import Generation
from specdec.sampling import Sampling
from specdec.statistics import relative_bandwidth

# Transformers has no default for it; this is what its documentation shows.
_LOOKUP = {'prompt_lookup_num_tokens': 10}


def import_torch() -> Any:
  """Torch, which nothing else here needs.

  Raises:
    ValueError: it is not installed; says how to.
  """
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
    f' ({torch.__version__}) does not see; install a torch for it, or leave out'
    ' the transformers arms'
  )


def describe_torch() -> dict[str, Any]:
  """What the figures of peers depend on."""
  torch = import_torch()
  return {
    'torch': torch.__version__,
    'torch_threads': torch.get_num_threads(),
    'torch_device': _device(torch),
  }


def load_peer(name: str, dtype: str, revision: str | None) -> Any:
  """The model as transformers has it; see `hub.locate`.

  Raises:
    ValueError: torch is not installed, or sees another device than JAX.
  """
  torch = import_torch()
  model: Any = transformers.AutoModelForCausalLM.from_pretrained(
    hub.locate(name, revision=revision), dtype=getattr(torch, dtype)
  )
  # Its checkpoint's own settings would fill in what is left open here.
  model.generation_config = transformers.GenerationConfig()
  return model.to(_device(torch)).eval()


def _settings(
  sampling: Sampling, eos_ids: Sequence[int], limit: int
) -> dict[str, Any]:
  """What `sampling` says, in the words of transformers."""
  if sampling.logit_bias is not None:
    raise ValueError('transformers arms know no --logit_bias; leave it out')
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
  """Those of an arm, as numbers."""
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
  """Decodes with transformers; see `specdec.benchmarking.Arm`."""

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
    # Anew for every call: transformers adapts it as it goes.
    self._draft.generation_config = transformers.GenerationConfig(
      **self._options
    )
    return {'assistant_model': self._draft}

  def _tensors(self, prompts) -> dict[str, Any]:
    """Padded on the left, as transformers wants it."""
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
          outputs.logits[0, 0, 0].item()  # waits for it
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
    return peak_memory.peak_beyond(run)
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
  """Loads what some arms of transformers need, each model once per dtype.

  Args:
    specs: arms with `is_peer`.
    target: see `models.pair.load_pair`.
    draft: likewise.
    revision: of the target, on the hub.
    sampling: how to choose tokens; the draws are torch's own.
    eos_ids: tokens that end a text.
    seed: of the draws, for every batch anew.
    batch_size: prompts decoded together.

  Raises:
    ValueError: torch is not there, or cannot do what is asked; says what to do.
  """
  transformers.logging.set_verbosity_error()  # It warns of its own calls.
  transformers.logging.disable_progress_bar()
  # Of one folder too: their forwards are counted apart.
  load, load_draft = functools.cache(load_peer), functools.cache(load_peer)
  arms = {}
  for spec in specs:
    if batch_size > 1 and spec.method != 'transformers':
      raise ValueError(
        f'arm {str(spec)!r}: assisted generation of transformers has a batch'
        f' size of 1, not {batch_size}; leave the arm out, or --batch_size'
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
      sizes={name: model_size(one) for name, one in models.items()},
      weight_bytes=sum(num_bytes(one.parameters()) for one in models.values()),
      peak_beyond=_peak_beyond,
    )
  return arms


def _read_parameters(model: Any) -> list[Any]:
  """The tensors that a forward reads: not embeddings it looks up in."""
  looked_up = {
    id(module.weight)
    for module in model.modules()
    if type(module).__name__ == 'Embedding'
  } - {id(model.get_output_embeddings().weight)}
  return [one for one in model.parameters() if id(one) not in looked_up]


def _share_read(model: Any, parameter: Any) -> float:
  """How much of a tensor a forward of one position reads.

  The experts of a layer are one tensor `[experts, out, in]`.
  """
  if parameter.ndim < 3:
    return 1.0
  return model.config.num_experts_per_tok / parameter.shape[0]


def num_bytes(tensors: Iterable[Any]) -> int:
  """Of all of them, those that are shared only once if they are listed once."""
  return sum(one.numel() * one.element_size() for one in tensors)


def read_costs(model: Any) -> dict[str, int]:
  """Bytes read per forward and per visible slot of the cache."""
  return {
    'per_forward': round(
      sum(
        _share_read(model, one) * num_bytes([one])
        for one in _read_parameters(model)
      )
    ),
    'per_slot': model_size(model).cache_per_slot * model.dtype.itemsize,
  }


def model_size(model: Any) -> ModelSize:
  """See `models.roofline.ModelSize`."""
  config = model.config
  heads = config.num_attention_heads
  width = getattr(config, 'head_dim', None) or config.hidden_size // heads
  heads = getattr(config, 'num_key_value_heads', None) or heads
  return ModelSize(
    parameters=round(
      sum(
        _share_read(model, one) * one.numel()
        for one in _read_parameters(model)
        if one.ndim > 1
      )
    ),
    cache_per_slot=2 * config.num_hidden_layers * heads * width,
  )


@dataclasses.dataclass
class Forwards:
  """Counts the forwards of a model, as a hook called before each.

  Attributes:
    prompt_length: all of the prompt but its last token is prefill, and does not
      count.
    forwards: of the batch.
    positions: of all rows.
    slots: of the cache that were seen, padding included.
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
  """Those of `specdec.statistics.summarize` that can be known from outside.

  Args:
    prompts: of the rows.
    tokens: new ones of the rows, up to what ended them.
    target: its forwards, counted from the prompt on.
    draft: likewise, or None.
    costs: by model, see `read_costs`.
  """
  new_tokens = np.array([len(row) for row in tokens])
  lengths = np.array([len(prompt) for prompt in prompts])
  counted = {'target': target} | ({} if draft is None else {'draft': draft})
  count = lambda forwards, slots: {'forwards': int(forwards), 'slots': slots}
  plain = new_tokens * lengths + new_tokens * (new_tokens - 1) // 2
  reads = {'plain': count(new_tokens.max(initial=0), int(plain.sum()))}
  reads |= {
    name: count(one.forwards, one.slots) for name, one in counted.items()
  }
  return {
    'new_tokens': int(new_tokens.sum()),
    # A row of a batch may be done before the others are.
    'target_forwards': int(np.minimum(new_tokens, target.forwards).sum()),
    'accepted_histogram': None,
    'stage_forwards': {} if draft is None else {'draft': draft.forwards},
    'origins': None,
    'positions': {name: one.positions for name, one in counted.items()},
    'relative_bandwidth': relative_bandwidth(reads, costs),
    'reads': reads,
    'costs': costs,
  }
