"""Decoding by transformers on torch, which users install themselves.

Greedy or sampled decoding, plain, with an assistant model, or with prompt
lookup: on the same weights, prompts, limits and EOS tokens. Tokens, times and
forwards are counted. Everything else has the defaults of transformers.
"""

from collections.abc import Mapping
from collections.abc import Sequence
import contextlib
import functools
from typing import Any

import jax
import numpy as np
import transformers

from specdec import sampling as sampling_lib
from specdec.models.checkpoints import checkpoint as checkpoint_lib
from specdec.models.checkpoints import gguf
from specdec.models.lab.bench import peer as peer_lib


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


def _settings(sampling: sampling_lib.Sampling) -> dict[str, Any]:
  """The arguments of `generate` of transformers for a `Sampling`."""
  settings: dict[str, Any] = {'repetition_penalty': sampling.repetition_penalty}
  if sampling.temperature > 0:
    names = ('temperature', 'top_p', 'min_p')
    settings |= {name: getattr(sampling, name) for name in names}
    settings['top_k'] = sampling.top_k or 0
  return {name: value for name, value in settings.items() if value is not None}


def _options(spec: peer_lib.ArmSpec) -> dict[str, int]:
  """The options of an arm as numbers."""
  options = {}
  if spec.method == 'transformers-lookup':
    # Transformers has no default; this value is that of its documentation.
    options['prompt_lookup_num_tokens'] = 10
  for name, value in spec.options:
    if not value.isdecimal() or int(value) < 1:
      raise ValueError(f'arm {str(spec)!r}: {name} must be an integer from 1')
    options[name] = int(value)
  return options


class _Arm:
  """Decodes with transformers; a `timing.Arm`."""

  def __init__(self, spec, models, task, eos_ids):
    self._models, self._task, self._eos_ids = models, task, eos_ids
    self._options = _options(spec)

  def _rows(self, prompts, limit: int) -> list[list[int]]:
    """The new tokens of each row, those after EOS included."""
    torch = import_torch()
    target, draft = self._models['target'], self._models.get('draft')
    longest = max(map(len, prompts))
    ids = np.zeros((2, len(prompts), longest), np.int64)  # ids and mask
    for row, prompt in enumerate(prompts):
      ids[:, row, longest - len(prompt) :] = prompt, [1] * len(prompt)
    tensors = torch.tensor(ids, device=target.device)
    inputs = {'input_ids': tensors[0], 'attention_mask': tensors[1]}
    if limit == 0:
      with torch.inference_mode():
        outputs = target(**inputs, use_cache=True, logits_to_keep=1)
        outputs.logits[0, 0, 0].item()  # waits for the device
      return [[] for _ in prompts]
    options = self._options
    if draft is not None:
      # New for every call, because transformers changes it while decoding.
      draft.generation_config = transformers.GenerationConfig(**options)
      options = {'assistant_model': draft}
    torch.manual_seed(self._task.seed)
    output = target.generate(
      **inputs,
      max_new_tokens=limit,
      do_sample=self._task.sampling.temperature > 0,
      pad_token_id=0,
      **({'eos_token_id': list(self._eos_ids)} if self._eos_ids else {}),
      **_settings(self._task.sampling),
      **options,
    )
    return output[:, longest:].tolist()

  def __call__(self, prompts: Sequence[Sequence[int]], limit: int):
    forwards = dict.fromkeys(self._models, 0)

    def count(name: str, *_) -> None:
      forwards[name] += 1

    with contextlib.ExitStack() as hooks:
      for name, model in self._models.items():
        counting = functools.partial(count, name)
        hooks.callback(model.register_forward_pre_hook(counting).remove)
      rows = self._rows(prompts, limit)
    return peer_lib.as_generation(rows, self._eos_ids, forwards)


class Transformers(peer_lib.Peer):
  """See the top of the file."""

  methods: Mapping[str, tuple[str, ...]] = {
    'transformers': (),
    'transformers-assisted': ('num_assistant_tokens',),
    'transformers-lookup': ('prompt_lookup_num_tokens',),
  }
  dtypes = ('float32', 'bfloat16')
  batched = ('transformers',)  # Its assisted generation has a batch size of 1.
  drafted = ('transformers-assisted',)

  def describe(self, task: peer_lib.BenchmarkTask) -> dict[str, Any]:
    """Version, threads and device of torch."""
    del task
    torch = import_torch()
    return {
      'torch': torch.__version__,
      'torch_threads': torch.get_num_threads(),
      'torch_device': _device(torch),
    }

  def load(
    self, found: checkpoint_lib.Checkpoint, given: str, dtype: str
  ) -> Any:
    """A model of transformers; see the base class.

    Raises:
      ValueError: torch is not installed, or cannot use the device of JAX.
    """
    del given
    torch, path = import_torch(), found.path
    transformers.logging.set_verbosity_error()  # warns of its own calls
    transformers.logging.disable_progress_bar()
    where = {'gguf_file': path.name} if isinstance(found, gguf.GGUFFile) else {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
      path.parent if where else path, dtype=getattr(torch, dtype), **where
    )
    # The settings of the checkpoint would replace defaults.
    model.generation_config = transformers.GenerationConfig()
    return model.to(_device(torch)).eval()

  def make_arm(self, spec, task, models, eos_ids):
    """Makes an arm, whose random draws are torch's; the seed is set per batch.

    Raises:
      ValueError: the draft has another vocabulary, or an option is bad.
    """
    sizes = [model.config.vocab_size for model in models.values()]
    if sizes[0] != sizes[-1]:
      raise ValueError(
        f'arm {str(spec)!r}: transformers needs a draft of the vocabulary of'
        f' the target, {sizes[0]} tokens, not {sizes[1]}; leave the arm out'
      )
    return _Arm(spec, models, task, eos_ids)
