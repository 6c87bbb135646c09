"""Staged, tree-structured speculative decoding in JAX."""

from specdec.arguments import row_keys
from specdec.cache import init_cache
from specdec.cache import KVCache
from specdec.decode import decode
from specdec.decode import DecodeResult
from specdec.drafter import Drafter
from specdec.drafter import staged
from specdec.generation import Decoding
from specdec.generation import generate
from specdec.generation import Generation
from specdec.model import LanguageModel
from specdec.model import Model
from specdec.recording import trace
from specdec.request import DecodeConfig
from specdec.request import Request
from specdec.sampling import Sampling
from specdec.scorers.candidates import CandidateScorer
from specdec.scorers.language_model import LanguageModelScorer
from specdec.scorers.lookup import PromptLookup
from specdec.scorers.ngram import NGram
from specdec.topology import Topology
from specdec.tracing import Block
from specdec.tracing import Trace
from specdec.tree_config import TreeConfig

__version__ = '0.6.3'

__all__ = (
  'Block',
  'CandidateScorer',
  'DecodeConfig',
  'DecodeResult',
  'Decoding',
  'Drafter',
  'Generation',
  'KVCache',
  'LanguageModel',
  'LanguageModelScorer',
  'Model',
  'NGram',
  'PromptLookup',
  'Request',
  'Sampling',
  'Topology',
  'Trace',
  'TreeConfig',
  'decode',
  'generate',
  'init_cache',
  'row_keys',
  'staged',
  'trace',
)
