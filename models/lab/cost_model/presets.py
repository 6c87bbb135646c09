"""Models and machines by name, with the sources of their sizes.

Weights and caches of all models have 16 bits; for other sizes use
`dataclasses.replace(MODELS[name], weight_bytes=1)`.
"""

from typing import Any

from specdec.models.lab.cost_model import forward as forward_lib

_SIZES = (
  'num_layers',
  'width',
  'num_heads',
  'num_kv_heads',
  'mlp_width',
  'vocab_size',
  'num_experts',
  'experts_per_token',
  'head_width',
)
_MODELS = {
  # Touvron et al. 2023 (arXiv 2307.09288); config.json of Llama-2-70b-hf.
  'llama-2-70b': (80, 8192, 64, 8, 28672, 32000, 1, 1, 128),
  # Zhang et al. 2024 (arXiv 2401.02385) and config.json; Llama 2's tokenizer.
  'tinyllama-1.1b': (22, 2048, 32, 4, 5632, 32000, 1, 1, 64),
  # Llama Team 2024 (arXiv 2407.21783), table 3. The context of 3.1 is 128K.
  'llama-3-8b': (32, 4096, 32, 8, 14336, 128256, 1, 1, 128),
  'llama-3-70b': (80, 8192, 64, 8, 28672, 128256, 1, 1, 128),
  # Jiang et al. 2024 (arXiv 2401.04088), table 1.
  'mixtral-8x7b': (32, 4096, 32, 8, 14336, 32000, 8, 2, 128),
  # Qwen Team 2025 (arXiv 2505.09388), table 2, and config.json.
  'qwen3-30b-a3b': (48, 2048, 32, 4, 768, 151936, 128, 8, 128),
}


def _model(name: str, sizes: tuple[int, ...]) -> forward_lib.ModelShape:
  named: dict[str, Any] = dict(zip(_SIZES, sizes, strict=True))
  return forward_lib.ModelShape(name=name, **named)


MODELS = {name: _model(name, sizes) for name, sizes in _MODELS.items()}
"""Shapes of models by name."""


# GB/s and GB of memory; among eight devices, GB/s that one sends and
# microseconds of a collective; GFLOP/s of tensor cores by dtype, without
# sparsity and with float32 accumulation, 0 where the source has no rate.
#
# A GPU sends half of the bidirectional NVLink bandwidth of its data sheet. The
# time is that of the model in NCCL 2.12 (src/graph/tuning.cc): ring, protocol
# LL, 3.6 + 14 hops of 0.47.
#
# A TPU sends half of the bidirectional bandwidth of the Google Cloud pages. At
# a corner of 2 x 4 or 2 x 2 x 2 chips only half of its ports have a neighbour.
# A hop takes a microsecond (Austin et al. 2025, How to Scale Your Model,
# Sharded Matrices); a sum crosses these slices twice, in 8 or 6 hops.
_DTYPES = ('bfloat16', 'int8', 'float8', 'float32')
_DEVICES = {
  # NVIDIA data sheets, SXM, and Hopper architecture white paper.
  'a100': (2039, 80, 300, 10.2, 312_000, 624_000, 0, 19_500),
  'h100': (3350, 80, 450, 10.2, 989_400, 1_978_900, 1_978_900, 66_900),
  'h200': (4800, 141, 450, 10.2, 989_400, 1_978_900, 1_978_900, 66_900),
  # Google Cloud documentation, per chip.
  'v5e': (819, 16, 100, 8, 197_000, 393_000, 0, 0),
  'v5p': (2765, 95, 300, 6, 459_000, 918_000, 0, 0),
  'v6e': (1638, 32, 200, 8, 918_000, 1_836_000, 0, 0),
}


def _device(
  name: str,
  bandwidth: float,
  memory: float,
  link: float,
  latency: float,
  *rates: float,
) -> forward_lib.Hardware:
  known = zip(_DTYPES, rates, strict=True)
  return forward_lib.Hardware(
    name=name,
    bytes_per_second=1e9 * bandwidth,
    flops_per_second={dtype: 1e9 * rate for dtype, rate in known if rate},
    memory_bytes=1e9 * memory,
    link_bytes_per_second=1e9 * link,
    collective_seconds=1e-6 * latency,
  )


HARDWARE = {name: _device(name, *row) for name, row in _DEVICES.items()}
"""Single devices by name; use `Hardware.times` for several."""
