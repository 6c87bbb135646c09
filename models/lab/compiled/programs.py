"""The production decode loop, compiled for a device from shapes alone.

The device need not be present. No weights are read or allocated: models are
their configurations, and all arguments of `specdec.loop.advance` are abstract.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import pathlib
import re
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import NamedSharding
from jax.sharding import SingleDeviceSharding
import numpy as np

import specdec
from specdec import arguments as arguments_lib
from specdec import loop
from specdec import memory
from specdec import model as model_lib
from specdec import step as step_lib
from specdec import watchers as watchers_lib
from specdec.draft import drafter as drafter_lib
from specdec.draft import lookup
from specdec.models.checkpoints import hub
from specdec.models.lab import cost_model
from specdec.models.lab import task as task_lib
from specdec.models.lab.compiled import counts
from specdec.models.nn import adapter
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import llama_config
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.models.text import choice as choice_lib
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.ngram import table as table_lib
from specdec.verify import rules as rules_lib

METHODS = ('plain', 'chain', 'tree', 'staged')

LIBTPU = pathlib.Path(__file__).parents[3] / 'build' / 'libtpu'
"""Folder that scripts/install_libtpu.py installs the TPU compiler into."""

_TPU_ENVIRONMENT = {
  # Otherwise libtpu asks a metadata server and waits for the answer.
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
  # Several processes may compile at the same time.
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',
  'TPU_MIN_LOG_LEVEL': '3',
  'TF_CPP_MIN_LOG_LEVEL': '3',
}

# Counts must depend neither on benchmarks of the compiler on this machine nor
# on the instruction set of its processor.
_OPTIONS: dict[str, dict[str, Any]] = {
  'cuda': {
    'xla_gpu_autotune_level': 0,
    # So that a library's products add bias and residual, and activate. Programs
    # that run on a GPU need both in XLA_FLAGS (docs/accelerators.md).
    'xla_gpu_enable_cublaslt': True,
    'xla_gpu_enable_triton_gemm': False,
  },
  # Otherwise the compiler moves the cache of each layer onto the chip, writes
  # the new entries there and copies all of it back. Programs that run on a TPU
  # need the option in LIBTPU_INIT_ARGS (docs/accelerators.md).
  'tpu': {'xla_vf_vmem_max_outstanding_evictions': 0},
  'cpu': {'xla_cpu_max_isa': 'AVX2'},
}


@dataclasses.dataclass(frozen=True)
class Device:
  """A device to compile for.

  The description of a GPU is XLA's `GpuTargetConfigProto` as text, that of a
  TPU the topology: the smallest that the compiler knows, or that of `device`.
  """

  platform: str  # For JAX: `tpu`, `cuda` or `cpu`.
  description: str = ''
  num_gpus: int = 1  # One host has so many.


def _gpu(key: str, name: str, limits: str) -> Device:
  """A GPU, by its name in `HARDWARE`, that of its driver, and its own limits.

  To XLA, cores are multiprocessors, and FPUs are float32 units.
  """
  description = f"""
    gpu_device_info {{
      threads_per_block_limit: 1024 threads_per_warp: 32
      threads_per_core_limit: 2048
      block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
      block_dim_limit_z: 65535
      thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
      registers_per_core_limit: 65536 registers_per_block_limit: 65536
      shared_memory_per_block: 49152
      memory_bandwidth: {cost_model.HARDWARE[key].bytes_per_second:.0f}
      device_memory_size: {cost_model.HARDWARE[key].memory_bytes:.0f}
      {limits}
      device_vendor: "NVIDIA Corporation" name: "{name}"
      driver_version: "12.9.0" runtime_version: "12.9.0"
      compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
    }}
    platform_name: "CUDA"
    dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
    device_description_str: "{name}"
  """
  return Device('cuda', description)


_HOPPER = """
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
"""
_A100 = """
  core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41
  l2_cache_size: 41943040
  shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912
  cuda_compute_capability { major: 8 feature_extension: NONE }
"""
DEVICES = {
  'h200': _gpu('h200', 'NVIDIA H200', _HOPPER),
  'h100': _gpu('h100', 'NVIDIA H100 80GB HBM3', _HOPPER),
  'a100': _gpu('a100', 'NVIDIA A100-SXM4-80GB', _A100),
  'v5e': Device('tpu', 'v5e:2x2'),
  'v5p': Device('tpu', 'v5p:2x2x1'),
  'v6e': Device('tpu', 'v6e:2x2'),
  'cpu': Device('cpu'),
}
"""The devices that programs can be compiled for, by name."""


def device(name: str) -> Device:
  """A key of `DEVICES`, or several that are connected: `v5e:2x4`, `h100:8`.

  Raises:
    ValueError: there is no such device.
  """
  kind, colon, size = name.partition(':')
  one = DEVICES.get(kind)
  if one and not colon:
    return one
  if one and one.platform == 'tpu' and re.fullmatch(r'\d+(x\d+){1,2}', size):
    return dataclasses.replace(one, description=name)
  if one and one.platform == 'cuda' and re.fullmatch(r'[1-9]\d*', size):
    return dataclasses.replace(one, num_gpus=int(size))
  raise ValueError(
    f'device={name} is not known; choose from {", ".join(DEVICES)}, or give a'
    ' TPU with a topology, such as v5e:2x4 or v5p:2x2x2, or GPUs of a host,'
    ' such as h100:8'
  )


def find_libtpu() -> pathlib.Path | None:
  """Path of the TPU compiler, or None if it is not installed.

  It is that of `TPU_LIBRARY_PATH`, in `LIBTPU` or in the Python environment.
  """
  installed = importlib.util.find_spec('libtpu')
  installed_in = installed.submodule_search_locations if installed else ()
  folders = (LIBTPU / 'libtpu', *map(pathlib.Path, installed_in or ()))
  stated = os.environ.get('TPU_LIBRARY_PATH', '')
  candidates = (pathlib.Path(stated), *(at / 'libtpu.so' for at in folders))
  return next((path for path in candidates if path.is_file()), None)


def abstract_devices(device: Device) -> list[jax.Device]:
  """JAX's description of devices, on which nothing can run."""
  if device.platform == 'cpu':
    return jax.devices('cpu')
  if device.platform == 'tpu':
    library = find_libtpu()
    if library is None:
      raise ValueError(
        'compiling for a TPU needs libtpu, which is not installed; run'
        ' python scripts/install_libtpu.py'
      )
    for name, value in _TPU_ENVIRONMENT.items():
      os.environ.setdefault(name, value)
    os.environ['TPU_LIBRARY_PATH'] = str(library)
    return topologies.get_topology_desc(
      platform='tpu', topology_name=device.description
    ).devices
  try:
    return topologies.get_topology_desc(
      platform='cuda',
      topology=f'1x1x{device.num_gpus}',
      target_config=device.description,
    ).devices
  except (NotImplementedError, RuntimeError, KeyError) as error:
    raise ValueError(
      'compiling for a GPU needs the CUDA plugin of the same version as JAX;'
      f' run pip install "jax[cuda12]=={jax.__version__}" (5 GB; no GPU is'
      f' needed): {error}'
    ) from error


def _gpt2(width: int, num_layers: int, num_heads: int) -> nn_gpt2.GPT2Config:
  return nn_gpt2.GPT2Config(
    vocab_size=50257,
    num_positions=1024,
    width=width,
    num_layers=num_layers,
    num_heads=num_heads,
  )


def _llama_2(name: str) -> llama_config.LlamaConfig:
  sizes = cost_model.MODELS[name]
  return llama_config.LlamaConfig(
    vocab_size=sizes.vocab_size,
    num_positions=4096,
    width=sizes.width,
    num_layers=sizes.num_layers,
    num_heads=sizes.num_heads,
    num_kv_heads=sizes.num_kv_heads,
    head_width=sizes.head_width,
    inner_width=sizes.mlp_width,
  )


SHAPES: dict[str, adapter.Config] = {
  'gpt2-large': _gpt2(1280, 36, 20),
  'gpt2-xl': _gpt2(1600, 48, 25),
  'draft-40m': _gpt2(512, 8, 8),
  'llama-2-70b': _llama_2('llama-2-70b'),
  'tinyllama-1.1b': _llama_2('tinyllama-1.1b'),
}
"""Models without weights, by name.

`draft-40m` stands for the draft of the paper: 25 million parameters in layers,
and 26 million in the embedding of 50,257 tokens.
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledTask(task_lib.Task):
  """The models and the sizes of a decode that is compiled.

  Of `models` target, draft, dtype (a float) and draft_mesh count. A model is a
  key of `SHAPES` or a name that `hub.locate` takes, of which only the shape is
  read. The draft gets the vocabulary size of the target, and the n-gram has the
  shape of the embedded n-gram. Seed and break_even do not matter.
  """

  models: choice_lib.ModelChoice = choice_lib.ModelChoice(dtype='bfloat16')
  max_new_tokens: int = 192  # Slots for the new tokens.
  prompt_tokens: int = 256  # Slots for the prompt.
  num_layers: int | None = None  # The target's, at most; None for all.


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A decode loop that was compiled for a device, or for several.

  `held`: bytes of weights and caches per device, and their lower bound:
  replicated arrays in full, divided ones over the number of devices.
  """

  text: str  # The optimised program, which each device runs.
  # By XLA, None where a compiler does not say it: memory besides the arguments,
  # and all that is read and written, each loop once.
  temporary_bytes: int | None
  accessed_bytes: int | None
  held: tuple[int, float]
  #: The sizes of the axes of whole weights and caches that are divided.
  divided: frozenset[tuple[int, ...]]
  stages: tuple[str, ...]  # Names.
  #: Bytes of a forward of the outermost stage over the target's.
  cost_ratio: float | None


def config_of(name: str, vocab_size: int | None = None) -> adapter.Config:
  """The configuration of a model, with another vocabulary size if given.

  Raises:
    ValueError: there is no such model.
  """
  config = SHAPES[name] if name in SHAPES else hub.locate(name).config
  return dataclasses.replace(config, vocab_size=vocab_size or config.vocab_size)


def _model(
  config: adapter.Config,
  dtype: jax.typing.DTypeLike,
  layout: sharding_lib.Layout = sharding_lib.Layout(),
  *,
  platform: str,
) -> model_lib.LanguageModel:
  """A model whose weights are shapes."""
  module = hub.shape_module(config, jnp.dtype(dtype), layout)
  return adapter.as_model(module, layout, on_gpu=platform == 'cuda')


def _first_layers(config: adapter.Config, most: int | None) -> adapter.Config:
  """A shape with fewer layers, and the values of those alone."""
  number = min(config.num_layers, most or config.num_layers)
  by_layer: dict[str, Any] = {
    field.name: value[:number]
    for field in dataclasses.fields(config)
    if isinstance(value := getattr(config, field.name), tuple)
    and len(value) == config.num_layers
  }
  return dataclasses.replace(config, num_layers=number, **by_layer)


def _target(
  task: CompiledTask, layout: sharding_lib.Layout, platform: str
) -> model_lib.LanguageModel:
  config = _first_layers(config_of(task.models.target), task.num_layers)
  return _model(config, task.models.dtype, layout, platform=platform)


def _drafter(
  method: str,
  task: CompiledTask,
  target: model_lib.LanguageModel,
  layout: sharding_lib.Layout,
  platform: str,
) -> drafter_lib.Drafter:
  if method == 'plain':
    return specdec.PLAIN
  vocab_size = target.spec.vocab_size
  choice = task.models
  assert choice.draft is not None
  config = config_of(hub.draft_name(choice.draft), vocab_size)
  layer_bytes = functools.partial(
    hub.layer_bytes, config, matrices_lib.format_of(choice.dtype)
  )
  draft_layout = sharding_lib.draft_layout(
    layout, choice.draft_mesh, layer_bytes
  )
  draft = _model(config, choice.dtype, draft_layout, platform=platform)
  # The tokenizer is not used, because no text is encoded.
  pair = pair_lib.Pair(target, draft, None, (), layout)  # type: ignore[arg-type]
  settings = dataclasses.replace(task.drafting, inner='lookup')
  drafter = drafters.make_drafter(method, pair, settings)
  if method != 'staged':
    return drafter
  table = jax.eval_shape(lambda: table_lib.load_table(drafters.DEMO_TABLE)[0])
  ngram = lookup.NGram(table.replace(vocab_size=vocab_size))
  *outer, inner = drafter.stages
  assert isinstance(inner.scorer, specdec.CandidateScorer)
  scorer = inner.scorer.replace(proposers=(*inner.scorer.proposers, ngram))
  return drafter.replace(stages=(*outer, inner.replace(scorer=scorer)))


def _request(task: CompiledTask, vocab_size: int) -> specdec.Request:
  rows = task.batch_size
  return jax.eval_shape(
    lambda: specdec.Request(
      prompt=jnp.zeros((rows, task.prompt_tokens), jnp.int32),
      prompt_length=jnp.ones(rows, jnp.int32),
      limit=jnp.ones(rows, jnp.int32),
      row_keys=arguments_lib.row_keys(jax.random.key(0), rows),
      sampling=arguments_lib.to_params(task.sampling, rows, vocab_size),
      watchers=(watchers_lib.EndOfText(jnp.zeros((1, 1), jnp.int32)),),
    )
  )


def _placed(
  target: model_lib.LanguageModel,
  tree: Any,
  devices: list[jax.Device],
  platform: str,
) -> Any:
  """Shapes with the shardings that `ModelSpec.place` gives them."""
  if len(devices) == 1:
    one = SingleDeviceSharding(devices[0])
    shardings = jax.tree.map(lambda _: one, tree)
  else:
    lowered = jax.jit(target.spec.place).trace(tree)
    compiled = lowered.lower(lowering_platforms=(platform,)).compile()
    shardings = compiled.output_shardings
  return jax.tree.map(_with_sharding, tree, shardings)


def _with_sharding(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _bytes(leaf: jax.ShapeDtypeStruct) -> int:
  return leaf.size * leaf.dtype.itemsize


def _held(
  target: model_lib.LanguageModel,
  drafter: drafter_lib.Drafter,
  state: step_lib.DecodeState,
) -> list[jax.ShapeDtypeStruct]:
  """All weights and caches."""
  is_cache = lambda leaf: isinstance(leaf, specdec.KVCache)
  caches = filter(is_cache, jax.tree.leaves(state, is_leaf=is_cache))
  return jax.tree.leaves((target.params, drafter, *caches))


def _layout(
  devices: list[jax.Device], mesh: dict[str, int] | None, name: str
) -> sharding_lib.Layout:
  if mesh is None:
    return sharding_lib.Layout()
  if math.prod(mesh.values()) != len(devices):
    sizes = ','.join(f'{axis}:{size}' for axis, size in mesh.items())
    raise ValueError(
      f'mesh={sizes} is for {math.prod(mesh.values())} devices, but {name} has'
      f' {len(devices)}; give as many devices, such as v5e:2x4 or h100:8'
    )
  grid = np.array(devices).reshape([*mesh.values()])
  return sharding_lib.make_layout(Mesh(grid, [*mesh]))


def _cost_ratio(
  target: model_lib.LanguageModel, drafter: drafter_lib.Drafter
) -> float | None:
  if not drafter.stages:
    return None
  outermost = drafter.stages[0]
  read = outermost.scorer.facts.bytes_of(outermost.config.width)
  return read / target.spec.weight_bytes


def analyses(compiled: jax.stages.Compiled) -> dict[str, int | None]:
  """What a compiler says of a program; without a GPU one may say nothing."""
  memory_use, work = compiled.memory_analysis(), compiled.cost_analysis() or {}
  accessed = work.get('bytes accessed')
  return {
    'temporary_bytes': memory_use and memory_use.temp_size_in_bytes,
    'accessed_bytes': None if accessed is None else int(accessed),
  }


def compile_program(
  method: str,
  task: CompiledTask,
  device: Device,
  mesh: dict[str, int] | None = None,
) -> Compiled:
  """Compiles the decode loop of a method, one of `METHODS`.

  `mesh` has the sizes of the axes of a mesh of all devices; None for one.

  Raises:
    ValueError: the method or a model is not known, the compiler is not
      installed, the mesh is not for so many devices, or the rule is not for
      the method.
  """
  if method not in METHODS:
    raise ValueError(f'method {method!r} is not known; choose from {METHODS}')
  devices = abstract_devices(device)
  layout = _layout(devices, mesh, device.description or device.platform)
  devices = devices if mesh else devices[:1]
  target = _target(task, layout, device.platform)
  drafter = _drafter(method, task, target, layout, device.platform)
  request = _request(task, target.spec.vocab_size)
  children = task.children if drafter.stages else None
  rule = rules_lib.to_rule(task.verify, children, drafter)
  config = specdec.DecodeConfig(max_new_tokens=task.max_new_tokens, rule=rule)
  state = jax.eval_shape(
    lambda *args: loop.start(*args, config=config), target, drafter, request
  )
  count = jax.ShapeDtypeStruct((), jnp.int32)  # Counts steps, or rows.
  # Weights of several devices have their places.
  everywhere = layout.everywhere or SingleDeviceSharding(devices[0])
  target, drafter, request, count = jax.tree.map(
    lambda leaf: (
      leaf
      if isinstance(leaf.sharding, NamedSharding)
      else _with_sharding(leaf, everywhere)
    ),
    (target, drafter, request, count),
  )
  state = _placed(target, state, devices, device.platform)
  traced = loop.advance.trace(
    target, drafter, request, state, count, count, config=config
  )
  lowered = traced.lower(lowering_platforms=(device.platform,))
  compiled = lowered.compile(compiler_options=_OPTIONS[device.platform])
  held = _held(target, drafter, state)
  divided = [one for one in held if memory.bytes_on_device(one) < _bytes(one)]
  saved = (1 - 1 / len(devices)) * sum(map(_bytes, divided))
  own = sum(map(memory.bytes_on_device, held))
  return Compiled(
    text=compiled.as_text(),
    **analyses(compiled),
    held=(own, sum(map(_bytes, held)) - saved),
    divided=frozenset(counts.axes_of(leaf.shape) for leaf in divided),
    stages=tuple(stage.name for stage in drafter.stages),
    cost_ratio=_cost_ratio(target, drafter),
  )
