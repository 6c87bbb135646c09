"""Accelerators that programs can be compiled for without having one.

XLA compiles ahead of time for a topology, a description of devices that need
not be there. TPUs: the compiler is in `libtpu.so`, which lies apart from the
environment, since an installed libtpu makes JAX look for a TPU, and complain,
whenever it starts (scripts/install_libtpu.py). GPUs: it is in the CUDA plugin.
"""

import dataclasses
import importlib.util
import os
import pathlib

import jax
from jax.experimental import topologies

from specdec.cost_model import HARDWARE

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
