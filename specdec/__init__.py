"""Staged, tree-structured speculative decoding in JAX."""

from specdec.cache import init_cache
from specdec.cache import KVCache
from specdec.checks import row_keys
from specdec.draft.candidates import CandidateScorer
from specdec.draft.drafter import Drafter
from specdec.draft.drafter import staged
from specdec.draft.drafter import TreeConfig
from specdec.draft.language_model import LanguageModelScorer
from specdec.draft.lookup import PromptLookup
from specdec.draft.ngram import NGram
from specdec.generation import Decoding
from specdec.generation import generate
from specdec.generation import Generation
from specdec.generation import trace
from specdec.loop import decode
from specdec.loop import DecodeResult
from specdec.model import LanguageModel
from specdec.model import Model
from specdec.sampling import Sampling
from specdec.step import DecodeConfig
from specdec.step import Request
from specdec.tracing.trace import Block
from specdec.tracing.trace import Trace
from specdec.tree.topology import Topology

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
