"""Staged, tree-structured speculative decoding in JAX.

`specdec.load` is where to begin: text in, text out.
"""

# An `as` says that a name is public, to type checkers, too (PEP 484).

import importlib
import typing

from specdec.adjusters import Adjuster as Adjuster
from specdec.cache import KVCache as KVCache
from specdec.carried import Added as Added
from specdec.carried import Texts as Texts
from specdec.carried import Verified as Verified
from specdec.context import StepContext as StepContext
from specdec.decode_options import Options as Options
from specdec.draft.candidates import CandidateScorer as CandidateScorer
from specdec.draft.candidates import Proposer as Proposer
from specdec.draft.candidates import Query as Query
from specdec.draft.drafter import Drafter as Drafter
from specdec.draft.drafter import fixed_drafter as fixed_drafter
from specdec.draft.drafter import PLAIN as PLAIN
from specdec.draft.drafter import Scorer as Scorer
from specdec.draft.drafter import ScorerFacts as ScorerFacts
from specdec.draft.drafter import Scores as Scores
from specdec.draft.drafter import Stage as Stage
from specdec.draft.drafter import StageConfig as StageConfig
from specdec.draft.drafter import staged as staged
from specdec.draft.head import Head as Head
from specdec.draft.head import HeadScorer as HeadScorer
from specdec.draft.head import HeadSpec as HeadSpec
from specdec.draft.language_model import (
  LanguageModelScorer as LanguageModelScorer,
)
from specdec.draft.lookup import NGram as NGram
from specdec.draft.lookup import PromptLookup as PromptLookup
from specdec.generation import Decoding as Decoding
from specdec.generation import generate as generate
from specdec.generation import Generation as Generation
from specdec.loop import advance as advance
from specdec.loop import decode as decode
from specdec.loop import extend as extend
from specdec.loop import insert as insert
from specdec.loop import start as start
from specdec.model import LanguageModel as LanguageModel
from specdec.model import ModelSpec as ModelSpec
from specdec.ngram.table import load_table as load_table
from specdec.sampling import EXCLUDED as EXCLUDED
from specdec.sampling import Sampling as Sampling
from specdec.slots import Growth as Growth
from specdec.slots import Slots as Slots
from specdec.step import DecodeConfig as DecodeConfig
from specdec.step import Request as Request
from specdec.text.constraint import Constraint as Constraint
from specdec.tracing.trace import Trace as Trace
from specdec.tree.topology import chain as chain
from specdec.tree.topology import k_ary as k_ary
from specdec.tree.topology import Topology as Topology
from specdec.tree.topology import TreeShape as TreeShape
from specdec.verify.accept import MatchRule as MatchRule
from specdec.verify.rejection import RejectionRule as RejectionRule
from specdec.verify.rejection import TraversalRule as TraversalRule

if typing.TYPE_CHECKING:
  from specdec.models.text.generator import Generator as Generator
  from specdec.models.text.generator import load as load
  from specdec.models.text.many import Completion as Completion
  from specdec.models.text.many import Job as Job
  from specdec.models.text.plan import Plan as Plan
  from specdec.models.text.result import TextGeneration as TextGeneration
  from specdec.models.text.settings import DraftSettings as DraftSettings

# Imported when they are asked for: transformers takes seconds, and the
# algorithms need none of it.
_TEXT_MODULES = {
  'Completion': 'many',
  'DraftSettings': 'settings',
  'Generator': 'generator',
  'Job': 'many',
  'Plan': 'plan',
  'TextGeneration': 'result',
  'load': 'generator',
}


def __getattr__(name: str) -> typing.Any:
  if name not in _TEXT_MODULES:
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
  try:
    module = importlib.import_module(
      f'specdec.models.text.{_TEXT_MODULES[name]}'
    )
  except ModuleNotFoundError as error:
    if error.name != 'specdec.models':
      raise
    raise ModuleNotFoundError(
      'specdec/models is not the link to the folder models/ that it is in the'
      ' repository; on Windows clone with `git clone -c core.symlinks=true`',
      name=error.name,
    ) from error
  return getattr(module, name)


def __dir__() -> list[str]:
  return sorted({*globals(), *_TEXT_MODULES})


__version__ = '0.9.0'
