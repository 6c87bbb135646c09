"""Staged, tree-structured speculative decoding in JAX."""

from specdec.adjusters import Adjuster
from specdec.cache import KVCache
from specdec.carried import Added
from specdec.carried import Texts
from specdec.context import StepContext
from specdec.decode_options import Options
from specdec.draft.candidates import CandidateScorer
from specdec.draft.candidates import Proposer
from specdec.draft.drafter import Drafter
from specdec.draft.drafter import fixed_drafter
from specdec.draft.drafter import PLAIN
from specdec.draft.drafter import Scorer
from specdec.draft.drafter import ScorerFacts
from specdec.draft.drafter import Scores
from specdec.draft.drafter import Stage
from specdec.draft.drafter import StageConfig
from specdec.draft.drafter import staged
from specdec.draft.head import Head
from specdec.draft.head import HeadScorer
from specdec.draft.head import HeadSpec
from specdec.draft.language_model import LanguageModelScorer
from specdec.draft.lookup import NGram
from specdec.draft.lookup import PromptLookup
from specdec.draft.lookup import recent_tokens
from specdec.draft.prompt_tail import PromptTailScorer
from specdec.generation import Decoding
from specdec.generation import generate
from specdec.generation import Generation
from specdec.loop import advance
from specdec.loop import decode
from specdec.loop import extend
from specdec.loop import insert
from specdec.loop import start
from specdec.model import LanguageModel
from specdec.model import ModelSpec
from specdec.ngram.table import load_table
from specdec.sampling import EXCLUDED
from specdec.sampling import Sampling
from specdec.slots import Slots
from specdec.step import DecodeConfig
from specdec.step import Request
from specdec.text.constraint import Constraint
from specdec.tracing.trace import Trace
from specdec.tree.topology import chain
from specdec.tree.topology import k_ary
from specdec.tree.topology import Topology
from specdec.tree.topology import TreeShape
from specdec.tree.tree import histories
from specdec.verify.match import MatchRule
from specdec.verify.rejection import RejectionRule
from specdec.verify.rejection import TraversalRule

__version__ = '0.9.0.dev0'

__all__ = (
  'EXCLUDED',
  'PLAIN',
  'Added',
  'Adjuster',
  'CandidateScorer',
  'Constraint',
  'DecodeConfig',
  'Decoding',
  'Drafter',
  'Generation',
  'Head',
  'HeadScorer',
  'HeadSpec',
  'KVCache',
  'LanguageModel',
  'LanguageModelScorer',
  'MatchRule',
  'ModelSpec',
  'NGram',
  'Options',
  'PromptLookup',
  'PromptTailScorer',
  'Proposer',
  'RejectionRule',
  'Request',
  'Sampling',
  'Scorer',
  'ScorerFacts',
  'Scores',
  'Slots',
  'Stage',
  'StageConfig',
  'StepContext',
  'Texts',
  'Topology',
  'Trace',
  'TraversalRule',
  'TreeShape',
  'advance',
  'chain',
  'decode',
  'extend',
  'fixed_drafter',
  'generate',
  'histories',
  'insert',
  'k_ary',
  'load_table',
  'recent_tokens',
  'staged',
  'start',
)
