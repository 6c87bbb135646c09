"""Staged, tree-structured speculative decoding in JAX."""

from specdec.cache import init_cache
from specdec.cache import KVCache
from specdec.decode import decode
from specdec.decode import DecodeConfig
from specdec.decode import DecodeResult
from specdec.generation import generate
from specdec.generation import Generation
from specdec.model import LanguageModel
from specdec.model import Model
from specdec.sampling import Sampling

__version__ = '0.1.0'

__all__ = (
  'DecodeConfig',
  'DecodeResult',
  'Generation',
  'KVCache',
  'LanguageModel',
  'Model',
  'Sampling',
  'decode',
  'generate',
  'init_cache',
)
