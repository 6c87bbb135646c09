"""The production decode loop, compiled for a device from shapes alone.

The device need not be present. No weights are read or allocated: models are
their configurations, and all arguments of `specdec.loop.advance` are abstract.
"""

from collections.abc import Callable
from collections.abc import Mapping
import dataclasses
import functools
import math
import os
import pathlib
import tempfile
from typing import Any

import jax
from jax.experimental import topologies
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import SingleDeviceSharding
import numpy as np

import specdec
from specdec import arguments as arguments_lib
from specdec import decode_options
from specdec import loop
from specdec import memory
from specdec import watchers as watchers_lib
from specdec.draft import lookup
from specdec.models import user_cache
from specdec.models.checkpoints import hub
from specdec.models.lab.compiled import hlo
from specdec.models.nn import adapter
from specdec.models.nn import matrices as matrices_lib
from specdec.models.nn import sharding as sharding_lib
from specdec.models.text import drafters
from specdec.models.text import pair as pair_lib
from specdec.models.text import settings as settings_lib
from specdec.ngram import table as table_lib

LIBTPU = user_cache.folder('libtpu') / 'libtpu/libtpu.so'
"""The TPU compiler, where scripts/install_libtpu.py puts it."""

_TPU_ENVIRONMENT = {
  # Otherwise libtpu asks a metadata server and waits for the answer.
  'TPU_SKIP_MDS_QUERY': '1',
  'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
  'TPU_WORKER_HOSTNAMES': 'localhost',
  'TPU_WORKER_ID': '0',
  'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',  # For several processes.
}
# Counts must depend neither on benchmarks of the compiler on this machine nor
# on the instruction set of its processor. Programs that run on a GPU or TPU
# need the same options (docs/accelerators.md says what each does).
_OPTIONS: dict[str, dict[str, Any]] = {
  'cuda': {
    'xla_gpu_autotune_level': 0,
    'xla_gpu_enable_cublaslt': True,
    'xla_gpu_enable_triton_gemm': False,
  },
  'tpu': {'xla_vf_vmem_max_outstanding_evictions': 0},
  'cpu': {'xla_cpu_max_isa': 'AVX2'},
}
# XLA's `GpuTargetConfigProto`; cores are multiprocessors, FPUs float32 units.
_H100 = """
  gpu_device_info {
    threads_per_block_limit: 1024 threads_per_warp: 32
    threads_per_core_limit: 2048 block_dim_limit_x: 2147483647
    block_dim_limit_y: 65535 block_dim_limit_z: 65535
    thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
    registers_per_core_limit: 65536 registers_per_block_limit: 65536
    shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
    shared_memory_per_core: 233472 l2_cache_size: 52428800
    memory_bandwidth: 3350000000000 device_memory_size: 80000000000
    core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
    cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
    device_vendor: "NVIDIA Corporation" name: "NVIDIA H100 80GB HBM3"
    driver_version: "12.9.0" runtime_version: "12.9.0"
    compile_time_toolkit_version: "12.9.0" dnn_version: "9.10.0"
  }
  platform_name: "CUDA" device_description_str: "NVIDIA H100 80GB HBM3"
  dnn_version_info { major: 9 minor: 10 patch: 0 }
"""
DEVICES = {
  'h100': ('cuda', '1x1x1'),
  'v5e': ('tpu', 'v5e:2x2'),  # The smallest that the compiler knows.
  'v5e:2x4': ('tpu', 'v5e:2x4'),
  'cpu': ('cpu', ''),
}
"""The devices to compile for: JAX's name of the platform, and the topology."""


def abstract_devices(name: str) -> list[jax.Device]:
  """JAX's description of a key of `DEVICES`, on which nothing can run.

  Raises:
    ValueError: its compiler is not installed.
  """
  platform, topology = DEVICES[name]
  options: dict[str, str] = {}
  if platform == 'cuda':  # The plug-in ignores the name of a topology.
    options = {'target_config': _H100, 'topology': topology}
  if platform == 'cpu':
    return jax.devices('cpu')
  if platform == 'tpu':
    os.environ.update(_TPU_ENVIRONMENT, TPU_LIBRARY_PATH=str(LIBTPU))
  try:
    return topologies.get_topology_desc(
      topology, platform=platform, **options
    ).devices
  except (NotImplementedError, RuntimeError, KeyError) as error:
    raise ValueError(
      f'device={name}: its compiler is not installed; for a TPU run python'
      ' scripts/install_libtpu.py, for a GPU pip install'
      f' "jax[cuda12]=={jax.__version__}" (5 GB; no GPU is needed): {error}'
    ) from error


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledTask:
  """The models and the sizes of a decode that is compiled."""

  target: adapter.Config
  #: None for `plain`. It gets the target's vocabulary size.
  draft: adapter.Config | None
  dtype: str = 'bfloat16'
  drafting: settings_lib.DraftSettings = settings_lib.DraftSettings()
  sampling: specdec.Sampling = specdec.Sampling()
  verify: str = 'match'
  batch_size: int = 1
  prompt_tokens: int = 256  # Slots for the prompt.
  max_new_tokens: int = 192  # Slots for the new tokens.


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A decode loop that was compiled for a device, or for several."""

  text: str  # The optimised program, which each device runs.
  launches: str | None  # See `hlo.parse_launches`; of GPUs alone.
  #: Bytes: `temporary`, besides the arguments; `accessed`, all that XLA expects
  #: to read and write, each loop once; `held`, weights and caches per device;
  #: `least_held`: whole replicated arrays, and equal parts of divided ones.
  memory: dict[str, int]
  divided: frozenset[int]  # Elements of whole weights and caches.
  stages: tuple[str, ...]  # Names.

  def loops(self) -> list[dict[str, Any]]:
    """Figures of the decode step, then of its growth rounds (`hlo.Loop`).

    Raises:
      ValueError: the program does not have exactly one outermost loop.
    """
    graphs = []
    if self.launches is not None:
      graphs = hlo.parse_launches(self.launches).loops
    loops = hlo.count(hlo.parse(self.text), launched=iter(graphs)).loops
    if len(loops) != 1:
      names = [loop.name for loop in loops]
      raise ValueError(f'expected one decode loop, the program has {names}')
    return self._figures(loops[0], 0)

  def _figures(self, outer: hlo.Loop, depth: int) -> list[dict[str, Any]]:
    label = outer.name if depth else 'decode step'
    for stage in self.stages:  # Growth runs in a scope with its stage's name.
      if outer.name.endswith(f'grow_{stage}/while'):
        where = 'before' if depth == 1 else 'within'
        label = f'growth round of {stage}, {where}'
    rows = [{'loop': label} | outer.figures(self.divided)]
    for inner in outer.loops:
      rows += self._figures(inner, depth + 1)
    return rows


def _layout(
  name: str, devices: list[jax.Device], mesh: Mapping[str, int] | None
) -> sharding_lib.Layout:
  if mesh is None:
    return sharding_lib.Layout()
  if math.prod(mesh.values()) != len(devices):
    raise ValueError(
      f'mesh={mesh} is for {math.prod(mesh.values())} devices, but {name} has'
      f' {len(devices)}'
    )
  grid = np.array(devices).reshape([*mesh.values()])
  return sharding_lib.make_layout(Mesh(grid, [*mesh]))


def _drafter(
  method: str,
  task: CompiledTask,
  target: specdec.LanguageModel,
  layout: sharding_lib.Layout,
  model: Callable[..., specdec.LanguageModel],
) -> specdec.Drafter:
  """The drafter of a method; with `staged` it has an n-gram of shapes."""
  if method == 'plain':
    return specdec.PLAIN
  vocab_size = target.spec.vocab_size
  assert task.draft is not None
  config = dataclasses.replace(task.draft, vocab_size=vocab_size)
  form = matrices_lib.format_of(task.dtype)
  size = functools.partial(hub.layer_bytes, config, form)
  draft = model(config, sharding_lib.draft_layout(layout, 'auto', size))
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
  proposers = (*inner.scorer.proposers, ngram)
  inner = inner.replace(scorer=inner.scorer.replace(proposers=proposers))
  return drafter.replace(stages=(*outer, inner))


def _request(task: CompiledTask) -> specdec.Request:
  rows, vocab_size = task.batch_size, task.target.vocab_size
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


def memory_of(
  compiled: Any, held: list[jax.ShapeDtypeStruct], num_devices: int
) -> tuple[dict[str, int], frozenset[int]]:
  """`Compiled.memory` and `Compiled.divided`."""
  size = lambda leaf: leaf.size * leaf.dtype.itemsize
  divided = [leaf for leaf in held if memory.bytes_on_device(leaf) < size(leaf)]
  saved = (1 - 1 / num_devices) * sum(map(size, divided))
  memory_use, work = compiled.memory_analysis(), compiled.cost_analysis() or {}
  figures = {
    'temporary': memory_use and memory_use.temp_size_in_bytes,
    'accessed': work.get('bytes accessed'),
    'held': sum(map(memory.bytes_on_device, held)),
    'least_held': sum(map(size, held)) - saved,
  }
  # Compilers for GPUs say less where none is present.
  told = {name: round(x) for name, x in figures.items() if x is not None}
  return told, frozenset(leaf.size for leaf in divided)


def compile_program(
  method: str,
  task: CompiledTask,
  device: str,
  mesh: Mapping[str, int] | None = None,
) -> Compiled:
  """Compiles the decode loop of a method for a key of `DEVICES`.

  `mesh` has the sizes of the axes of a mesh of all its chips; None for one.

  Raises:
    ValueError: the compiler is not installed, the mesh is for another number of
      devices, or method, rule and models do not go together.
  """
  platform, devices = DEVICES[device][0], abstract_devices(device)
  layout = _layout(device, devices, mesh)

  def model(config: adapter.Config, layout: sharding_lib.Layout):
    module = hub.shape_module(config, jnp.dtype(task.dtype), layout)
    return adapter.as_model(module, layout, on_gpu=platform == 'cuda')

  target = model(task.target, layout)
  drafter = _drafter(method, task, target, layout, model)
  request, count = _request(task), jax.ShapeDtypeStruct((), jnp.int32)
  rule = decode_options.to_rule(task.verify, None, drafter)
  config = specdec.DecodeConfig(max_new_tokens=task.max_new_tokens, rule=rule)
  state = jax.eval_shape(
    lambda *args: loop.start(*args, config=config), target, drafter, request
  )
  lower = lambda traced: traced.lower(lowering_platforms=(platform,))
  if mesh:
    placed = lower(jax.jit(target.spec.place).trace(state)).compile()
    state = jax.tree.map(_placed, state, placed.output_shardings)
  everywhere = layout.everywhere or SingleDeviceSharding(devices[0])
  # Weights of several devices have their places.
  target, drafter, request, state, count = jax.tree.map(
    lambda leaf: leaf if leaf.sharding else _placed(leaf, everywhere),
    (target, drafter, request, state, count),
  )
  traced = loop.advance.trace(
    target, drafter, request, state, count, count, config=config
  )
  with tempfile.TemporaryDirectory() as folder:
    options = dict(_OPTIONS[platform])
    if platform == 'cuda':
      options['xla_dump_to'] = folder
    compiled = lower(traced).compile(compiler_options=options)
    dumped = pathlib.Path(folder).glob(hlo.LAUNCHES_FILE)
    lists = ''.join(path.read_text() for path in dumped)
  launches = lists if platform == 'cuda' else None
  is_cache = lambda leaf: isinstance(leaf, specdec.KVCache)
  caches = filter(is_cache, jax.tree.leaves(state, is_leaf=is_cache))
  held = jax.tree.leaves((target.params, drafter, *caches))
  figures, divided = memory_of(compiled, held, len(devices) if mesh else 1)
  names = tuple(stage.name for stage in drafter.stages)
  return Compiled(compiled.as_text(), launches, figures, divided, names)


def _placed(leaf: Any, sharding: Any) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
