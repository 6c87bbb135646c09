"""The production decode loop, compiled for a device from shapes alone.

No weight is read or allocated: models are their configs, and everything that
`specdec.decode.advance` takes is abstract.
"""

import dataclasses
import importlib.util
import os
import pathlib
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from models.checkpoints import hub
from models.nn.adapter import as_model
from models.nn.adapter import Config
from models.nn.gpt2 import GPT2Config
from models.text.drafters import DEMO_TABLE
from models.text.drafters import DraftSettings
from models.text.drafters import make_drafter
from models.text.pair import Pair
import specdec
from specdec.cost_model import HARDWARE
from specdec.draft.drafter import Drafter
from specdec.draft.ngram import NGram
from specdec.loop import advance
from specdec.loop import start
from specdec.model import LanguageModel
from specdec.ngram.table import load_table

LIBTPU = pathlib.Path(__file__).parents[2] / 'build' / 'libtpu'


"""Where scripts/install_libtpu.py puts it, in a folder of the same name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gpu:
  """What XLA wants to know about a GPU; bytes, and per multiprocessor.

  Attributes:
    description: as the driver gives it.
    capability: the major number of the compute capability; the minor is 0.
    cores: multiprocessors.
    lanes: float32 units.
    level_2_bytes: of the cache.
    clock: in GHz.
    memory_bytes: of the device.
    shared_bytes: shared memory; a block may have a KiB less.
    bandwidth: bytes per second.
  """

  description: str
  capability: int
  cores: int
  lanes: int
  level_2_bytes: int
  clock: float
  memory_bytes: int
  shared_bytes: int
  bandwidth: float

  def target_config(self) -> str:
    """XLA's `GpuTargetConfigProto`, as text."""
    extension = 'ACCELERATED_FEATURES' if self.capability >= 9 else 'NONE'
    return f"""
      gpu_device_info {{
        threads_per_block_limit: 1024
        threads_per_warp: 32
        shared_memory_per_block: 49152
        shared_memory_per_core: {self.shared_bytes}
        shared_memory_per_block_optin: {self.shared_bytes - 1024}
        threads_per_core_limit: 2048
        core_count: {self.cores}
        fpus_per_core: {self.lanes}
        block_dim_limit_x: 2147483647
        block_dim_limit_y: 65535
        block_dim_limit_z: 65535
        thread_dim_limit_x: 1024
        thread_dim_limit_y: 1024
        thread_dim_limit_z: 64
        memory_bandwidth: {self.bandwidth:.0f}
        l2_cache_size: {self.level_2_bytes}
        clock_rate_ghz: {self.clock}
        device_memory_size: {self.memory_bytes}
        registers_per_core_limit: 65536
        registers_per_block_limit: 65536
        cuda_compute_capability {{
          major: {self.capability} minor: 0 feature_extension: {extension}
        }}
        device_vendor: "NVIDIA Corporation"
        name: "{self.description}"
        driver_version: "12.9.0"
        runtime_version: "12.9.0"
        compile_time_toolkit_version: "12.9.0"
        dnn_version: "9.10.0"
      }}
      platform_name: "CUDA"
      dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
      device_description_str: "{self.description}"
    """


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
  """An accelerator; rates are those of its data sheet.

  Attributes:
    platform: as JAX names it, `tpu`, `cuda` or `cpu`.
    bandwidth: of main memory, bytes per second.
    flops: of bfloat16 products, per second, without sparsity.
    topology: of a TPU, the smallest that the compiler knows.
    gpu: of a GPU.
  """

  platform: str
  bandwidth: float
  flops: float
  topology: str = ''
  gpu: Gpu | None = None


_H200 = Gpu(
  description='NVIDIA H200',
  capability=9,
  cores=132,
  lanes=128,
  level_2_bytes=50 << 20,
  clock=1.98,
  memory_bytes=141 << 30,
  shared_bytes=228 << 10,
  bandwidth=HARDWARE['h200'].bytes_per_second,
)


_A100 = Gpu(
  description='NVIDIA A100-SXM4-80GB',
  capability=8,
  cores=108,
  lanes=64,
  level_2_bytes=40 << 20,
  clock=1.41,
  memory_bytes=79 << 30,
  shared_bytes=164 << 10,
  bandwidth=HARDWARE['a100'].bytes_per_second,
)


def _device(name: str, *, topology: str = '', gpu: Gpu | None = None) -> Device:
  limits = HARDWARE[name]
  return Device(
    platform='cuda' if gpu else 'tpu',
    bandwidth=limits.bytes_per_second,
    flops=limits.peak('bfloat16'),
    topology=topology,
    gpu=gpu,
  )


DEVICES = {
  'h200': _device('h200', gpu=_H200),
  'a100': _device('a100', gpu=_A100),
  'v5e': _device('v5e', topology='v5e:2x2'),
  'v5p': _device('v5p', topology='v5p:2x2x1'),
  'v6e': _device('v6e', topology='v6e:2x2'),
  # The machine at hand, if it is like that of docs/cpu.md.
  'cpu': Device(platform='cpu', bandwidth=28e9, flops=2e12),
}


"""By name."""


_TPU_ENVIRONMENT = {
  # Else it asks a server for what the machine is, and waits for an answer.
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
  # Several processes may compile at a time.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
  'TPU_MIN_LOG_LEVEL': '3',
  'TF_CPP_MIN_LOG_LEVEL': '3',
}


def find_libtpu() -> pathlib.Path | None:
  """The TPU compiler: `TPU_LIBRARY_PATH`, where we put it, or as installed."""
  candidates = [LIBTPU / 'libtpu' / 'libtpu.so']
  stated = os.environ.get('TPU_LIBRARY_PATH')
  if stated:
    candidates.insert(0, pathlib.Path(stated))
  installed = importlib.util.find_spec('libtpu')
  if installed is not None and installed.origin is not None:
    candidates.append(pathlib.Path(installed.origin).with_name('libtpu.so'))
  return next((path for path in candidates if path.is_file()), None)


def _tpu(topology: str) -> jax.Device:
  library = find_libtpu()
  if library is None:
    raise ValueError(
      'compiling for a TPU needs libtpu, which was not found; run'
      ' python scripts/install_libtpu.py'
    )
  for name, value in _TPU_ENVIRONMENT.items():
    os.environ.setdefault(name, value)
  os.environ['TPU_LIBRARY_PATH'] = str(library)
  return topologies.get_topology_desc(
    platform='tpu', topology_name=topology
  ).devices[0]


def _gpu(gpu: Gpu) -> jax.Device:
  try:
    description = topologies.get_topology_desc(
      platform='cuda', topology='1x1x1', target_config=gpu.target_config()
    )
  except (NotImplementedError, RuntimeError, KeyError) as error:
    raise ValueError(
      'compiling for a GPU needs the CUDA plugin of JAX, of the same version;'
      f' run pip install "jax[cuda12]=={jax.__version__}" (5 GB; no GPU is'
      f' needed): {error}'
    ) from error
  return description.devices[0]


def abstract_device(device: Device) -> jax.Device:
  """A device to compile for, and for nothing else.

  Raises:
    ValueError: the compiler is missing; says how to get it.
  """
  if device.platform == 'cpu':
    return jax.devices('cpu')[0]
  return _gpu(device.gpu) if device.gpu else _tpu(device.topology)


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


def abstract_model(config: Config, dtype: jnp.dtype) -> LanguageModel:
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


def _drafter(
  method: str, workload: Workload, target: LanguageModel
) -> Drafter | None:
  if method == 'plain':
    return None
  vocab_size = target.spec.vocab_size
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


def _work(model: LanguageModel, cache: specdec.KVCache, positions: int) -> Work:
  definition = model.spec
  rows = cache.length.shape[0]
  slots = rows * cache.num_slots
  leaves = jax.tree.leaves(model.params)
  itemsize = min(leaf.dtype.itemsize for leaf in leaves)
  return Work(
    bytes=definition.weight_bytes + slots * definition.cache_bytes_per_slot,
    flops=2 * rows * positions * definition.weight_bytes // itemsize,
  )


def _works(
  target: LanguageModel, drafter: Drafter | None, state
) -> dict[str, Work]:
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
