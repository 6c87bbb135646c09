"""The production decode loop, compiled for a device from shapes alone.

No weight is read or allocated: models are their configs, and everything that
`specdec.decode.advance` takes is abstract.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from models import hub
from models.compiling.devices import abstract_device
from models.compiling.devices import Device
from models.drafters import DEMO_TABLE
from models.drafters import DraftSettings
from models.drafters import make_drafter
from models.family import Config
from models.gpt2 import GPT2Config
from models.language_model import as_model
from models.pair import Pair
import specdec
from specdec.decode import advance
from specdec.decode import start
from specdec.drafter import Drafter
from specdec.model import Model
from specdec.ngram.table import load_table
from specdec.scorers.ngram import NGram

_GPT2 = GPT2Config(
  vocab_size=50257, num_positions=1024, width=768, num_layers=12, num_heads=12
)
SHAPES = {
  'gpt2-large': dataclasses.replace(
    _GPT2, width=1280, num_layers=36, num_heads=20
  ),
  'gpt2-xl': dataclasses.replace(
    _GPT2, width=1600, num_layers=48, num_heads=25
  ),
  'draft-40m': dataclasses.replace(_GPT2, width=512, num_layers=8, num_heads=8),
}
"""Models that are a shape and nothing else; 40M: parameters as in the paper."""

METHODS = ('plain', 'chain', 'tree', 'staged')

TPU_OPTIONS = {
  # Else the compiler takes each layer's cache onto the chip, writes the new
  # entries there, and copies all of it back. Programs that run on a TPU need
  # it in LIBTPU_INIT_ARGS (docs/accelerators.md).
  'xla_vf_vmem_max_outstanding_evictions': 0
}

# The counts should not hang on what a benchmark on this machine would choose,
# nor on its instruction set.
_OPTIONS: dict[str, dict[str, Any]] = {
  'cuda': {'xla_gpu_autotune_level': 0},
  'tpu': TPU_OPTIONS,
  'cpu': {'xla_cpu_max_isa': 'AVX2'},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
  """What is decoded.

  Attributes:
    target: a key of `SHAPES`, or what `hub.locate` takes; of a model only its
      config.json is read.
    draft: likewise; `demo` is the embedded draft. It gets the vocabulary of the
      target.
    dtype: of weights and cache.
    batch_size: B.
    prompt_tokens: room for the prompt.
    max_new_tokens: room for what is generated.
    drafting: as for `models.drafters.make_drafter`; the n-gram has the shape of
      the embedded one.
  """

  target: str = 'demo'
  draft: str = 'demo'
  dtype: str = 'bfloat16'
  batch_size: int = 1
  prompt_tokens: int = 256
  max_new_tokens: int = 192
  drafting: DraftSettings = dataclasses.field(default_factory=DraftSettings)


@dataclasses.dataclass(frozen=True)
class Work:
  """What a forward cannot do without.

  Attributes:
    bytes: the weights once, and the cache once when it is full.
    flops: of the weights, two for each and for each position.
  """

  bytes: int
  flops: int


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A decode loop for a device.

  Attributes:
    text: the optimised program.
    temporary_bytes: of memory that the program wants besides its arguments.
    work: of one forward, by who does it: `target` or the name of a stage.
  """

  text: str
  temporary_bytes: int
  work: dict[str, Work]


def config_of(name: str, vocab_size: int | None = None) -> Config:
  """The shape of a model.

  Args:
    name: see `Workload.target`.
    vocab_size: instead of its own.

  Raises:
    ValueError: there is no such model.
  """
  config = SHAPES[name] if name in SHAPES else hub.config_of(name)
  return dataclasses.replace(config, vocab_size=vocab_size or config.vocab_size)


def abstract_model(config: Config, dtype: jnp.dtype) -> Model:
  """A model whose weights are shapes."""
  return as_model(hub.shape_module(config, dtype))


def _with_table(drafter: Drafter, vocab_size: int) -> Drafter:
  """Adds an n-gram of the embedded one's shape to the innermost stage."""
  inner = drafter.inner
  if inner is not None:
    return drafter.replace(inner=_with_table(inner, vocab_size))
  table = jax.eval_shape(lambda: load_table(DEMO_TABLE)[0])
  ngram = NGram(table.replace(vocab_size=vocab_size))
  scorer = drafter.scorer
  return drafter.replace(
    scorer=scorer.replace(proposers=(*scorer.proposers, ngram))
  )


def _drafter(method: str, workload: Workload, target: Model) -> Drafter | None:
  if method == 'plain':
    return None
  vocab_size = target.definition.vocab_size
  name = hub.draft_name(workload.draft)
  draft = abstract_model(config_of(name, vocab_size), jnp.dtype(workload.dtype))
  # Nothing is encoded, so nobody asks for the tokenizer.
  pair = Pair(target, draft, None, ())  # type: ignore[arg-type]
  settings = dataclasses.replace(workload.drafting, inner='lookup')
  drafter = make_drafter(method, pair, settings)
  if drafter is None or method != 'staged':
    return drafter
  return _with_table(drafter, vocab_size)


def _request(workload: Workload) -> specdec.Request:
  rows = workload.batch_size

  def make():
    return specdec.Request(
      prompt=jnp.zeros((rows, workload.prompt_tokens), jnp.int32),
      prompt_length=jnp.ones(rows, jnp.int32),
      limit=jnp.ones(rows, jnp.int32),
      row_keys=specdec.row_keys(jax.random.key(0), rows),
      sampling=specdec.Sampling().validated(),
    )

  return jax.eval_shape(make)


def _work(model: Model, cache: specdec.KVCache, positions: int) -> Work:
  definition = model.definition
  rows = cache.length.shape[0]
  slots = rows * cache.num_slots
  leaves = jax.tree.leaves(model.params)
  itemsize = min(leaf.dtype.itemsize for leaf in leaves)
  return Work(
    bytes=definition.weight_bytes + slots * definition.cache_bytes_per_slot,
    flops=2 * rows * positions * definition.weight_bytes // itemsize,
  )


def _works(target: Model, drafter: Drafter | None, state) -> dict[str, Work]:
  num_nodes = 1 if drafter is None else drafter.config.num_nodes
  works = {'target': _work(target, state.target_cache, num_nodes)}
  if drafter is None:
    return works
  for stage, carried in zip(drafter.stages, state.stages.stages, strict=True):
    if isinstance(stage.scorer, specdec.LanguageModelScorer):
      works[stage.name] = _work(
        stage.scorer.model, carried.scorer.cache, stage.config.width
      )
  return works


def compile_program(
  method: str, workload: Workload, device: Device
) -> Compiled:
  """Compiles the decode loop of a method.

  Args:
    method: one of `METHODS`.
    workload: what is decoded.
    device: need not be there.

  Raises:
    ValueError: the method or a model is not known, or the compiler is missing.
  """
  if method not in METHODS:
    raise ValueError(f'method {method!r} is not known; choose from {METHODS}')
  config = config_of(workload.target)
  target = abstract_model(config, jnp.dtype(workload.dtype))
  drafter = _drafter(method, workload, target)
  request = _request(workload)
  decoding = specdec.DecodeConfig(
    max_new_tokens=workload.max_new_tokens, eos_ids=(0,)
  )
  state = jax.eval_shape(
    lambda *args: start(*args, config=decoding), target, drafter, request
  )
  sharding = SingleDeviceSharding(abstract_device(device))
  arguments = jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=sharding
    ),
    (target, drafter, request, state, jax.eval_shape(lambda: jnp.int32(0))),
  )
  compiled = (
    advance.trace(*arguments, config=decoding)
    .lower(lowering_platforms=(device.platform,))
    .compile(compiler_options=_OPTIONS[device.platform])
  )
  return Compiled(
    text=compiled.as_text(),
    temporary_bytes=compiled.memory_analysis().temp_size_in_bytes,
    work=_works(target, drafter, state),
  )
