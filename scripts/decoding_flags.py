"""Flags that every decoding script shares, and what they stand for."""

import dataclasses
import hashlib
import json
import pathlib
import sys
from typing import Any

from absl import flags

from models.checkpoints import hub
from models.text import drafters
import specdec
from specdec.step import RULES
from specdec.verify.rejection import CHILDREN as CHILDREN_KINDS

_DEFAULTS = drafters.DraftSettings()
_TREE, _INNER_TREE = _DEFAULTS.tree, _DEFAULTS.inner_tree

DEFAULT_PROMPT = '''def copy_file(source, destination):
    """Copy a file, and its permissions."""
    if'''

TARGET = flags.DEFINE_string(
  'target', 'demo', 'demo (embedded), a model folder or a hub id'
)
DRAFT = flags.DEFINE_string(
  'draft', 'demo', 'demo (embedded), a model folder, a hub id, or none'
)
PLAN = flags.DEFINE_string(
  'plan',
  None,
  'how to decode: a file made by tune.py, or auto: the one of this machine,'
  ' these models, dtype, batch size and sampling; made first if there is none',
)
PLAN_SECONDS = flags.DEFINE_float(
  'plan_seconds', 300.0, 'time budget for making a plan', lower_bound=1.0
)
REVISION = flags.DEFINE_string('revision', None, 'of the target, on the hub')
PROMPT_FILE = flags.DEFINE_string(
  'prompt_file',
  None,
  'prompts: one JSON object per line with the key prompt (*.jsonl), else one'
  ' prompt per line',
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens', 128, 'tokens to generate at most'
)
TEMPERATURE = flags.DEFINE_float('temperature', 0.0, '0 is greedy')
TOP_K = flags.DEFINE_integer('top_k', None, 'keep the k likeliest tokens')
TOP_P = flags.DEFINE_float(
  'top_p', None, 'keep the likeliest tokens up to this probability'
)
MIN_P = flags.DEFINE_float(
  'min_p', None, 'keep tokens this likely relative to the likeliest'
)
SEED = flags.DEFINE_integer('seed', 0, 'of the sampling')
REPETITION_PENALTY = flags.DEFINE_float(
  'repetition_penalty', None, 'above 1, repeating a token is less likely'
)
LOGIT_BIAS = flags.DEFINE_list(
  'logit_bias', [], 'token:number, added to the logits; token:-inf bans it'
)
VERIFY = flags.DEFINE_enum(
  'verify',
  'match',
  RULES,
  'match: the tokens of plain decoding with the same seed; rejection, block'
  ' (chains): other tokens of the same law',
)
CHILDREN = flags.DEFINE_enum(
  'children',
  None,
  CHILDREN_KINDS,
  'the guesses of --verify=rejection and block; default: drawn without'
  ' replacement where the topology is fixed and the drafter is a model',
)
NUM_DRAFT_TOKENS = flags.DEFINE_integer(
  'num_draft_tokens',
  _DEFAULTS.num_draft_tokens,
  'tokens drafted per target forward, in a chain',
)
INNER = flags.DEFINE_enum(
  'inner',
  None,
  drafters.INNERS,
  'who guesses for the draft (--method=staged), or in its place (--draft=none);'
  ' default: ngram+lookup if the n-gram has the vocabulary, else lookup',
)
NGRAM = flags.DEFINE_string(
  'ngram', _DEFAULTS.ngram, 'demo (embedded) or a file made by build_ngram.py'
)
LOOKUP_CONFIDENCE = flags.DEFINE_list(
  'lookup_confidence',
  [str(one) for one in _DEFAULTS.lookup.confidence],
  'of what followed a match of 1 token, 2 tokens and so on; 0: do not match',
)

NUM_NODES = flags.DEFINE_integer(
  'num_nodes',
  _TREE.num_nodes,
  'of the tree that the target verifies, root included',
)
WIDTH = flags.DEFINE_integer('width', _TREE.width, 'nodes per draft forward')
BRANCHING = flags.DEFINE_integer(
  'branching', _TREE.branching, 'children per node'
)
ROUNDS = flags.DEFINE_integer(
  'rounds', _TREE.rounds, 'draft forwards per tree, at most'
)
MAX_DEPTH = flags.DEFINE_integer('max_depth', _TREE.max_depth, 'of the tree')
CAPACITY = flags.DEFINE_integer(
  'capacity', _TREE.capacity, 'nodes of the growing tree'
)
CALIBRATION = flags.DEFINE_float(
  'calibration', _TREE.calibration, 'exponent of the probabilities of the draft'
)
COST_RATIO = flags.DEFINE_float(
  'cost_ratio',
  None,
  'of a draft forward to a target forward, for stopping early; 0: never stop;'
  ' default: by the bytes they read',
)
MIN_GAIN = flags.DEFINE_float(
  'min_gain', 0.0, 'tokens that another round must be expected to bring'
)
TOPOLOGY = flags.DEFINE_string(
  'topology',
  None,
  'fixed tree instead: chain:4, k_ary:2x3 (children x levels) or a JSON file of'
  ' paths',
)
INNER_WIDTH = flags.DEFINE_integer(
  'inner_width', _INNER_TREE.width, 'likewise, of --inner'
)
INNER_BRANCHING = flags.DEFINE_integer(
  'inner_branching', _INNER_TREE.branching, 'likewise'
)
INNER_ROUNDS = flags.DEFINE_integer(
  'inner_rounds',
  _INNER_TREE.rounds,
  'levels that --inner guesses between draft forwards',
)
INNER_CALIBRATION = flags.DEFINE_float(
  'inner_calibration', _INNER_TREE.calibration, 'likewise'
)
INNER_ROUNDS_ALONE = flags.DEFINE_integer(
  'inner_rounds_alone',
  _DEFAULTS.inner_rounds_alone,
  'levels that --inner guesses without a draft',
)
BREAK_EVEN = flags.DEFINE_float(
  'break_even',
  None,
  'plain steps that a speculative one takes on this machine: decoding goes on'
  ' plainly while it brings fewer tokens; default: as the plan says, or never',
)
DTYPE = flags.DEFINE_enum(
  'dtype',
  'float32',
  hub.DTYPES,
  'of the target; int8 has eight-bit weights and computes the rest in bfloat16',
)
DRAFT_DTYPE = flags.DEFINE_enum(
  'draft_dtype', None, hub.DTYPES, 'of the draft; default: as --dtype'
)


def _logit_bias() -> dict[int, float] | None:
  try:
    pairs = [one.split(':') for one in LOGIT_BIAS.value]
    return {int(token): float(bias) for token, bias in pairs} or None
  except ValueError as error:
    raise ValueError(
      f'--logit_bias={",".join(LOGIT_BIAS.value)}: expected token:number,'
      ' separated by commas'
    ) from error


def sampling() -> specdec.Sampling:
  """What the sampling flags say."""
  return specdec.Sampling(
    logit_bias=_logit_bias(),
    repetition_penalty=REPETITION_PENALTY.value,
    temperature=TEMPERATURE.value,
    top_k=TOP_K.value,
    top_p=TOP_P.value,
    min_p=MIN_P.value,
  )


def draft_settings(plan: Any = None) -> drafters.DraftSettings:
  """What the flags say about drafting, and for the method `plan` the plan."""
  try:
    confidence = tuple(float(one) for one in LOOKUP_CONFIDENCE.value)
    lookup = specdec.PromptLookup(confidence=confidence)
  except ValueError as error:
    raise ValueError(f'--lookup_confidence: {error}') from error
  options = {name: flags.FLAGS[name].value for name in drafters.OPTIONS}
  try:
    settings = drafters.with_options(_DEFAULTS, options)
  except ValueError as error:
    raise ValueError(f'--{error}') from error
  return dataclasses.replace(settings, lookup=lookup, plan=plan)


def draft_name() -> str | None:
  """What `--draft` says, in the terms of `models.pair.load_pair`."""
  return None if DRAFT.value == 'none' else DRAFT.value


def read_prompts(name: str, limit: int | None = None) -> list[str]:
  """The first prompts of a file, see `--prompt_file`.

  Args:
    name: of the file.
    limit: how many, or None for all.

  Raises:
    ValueError: the file cannot be read, or has fewer; names file and line.
  """
  path = pathlib.Path(name)
  try:
    text = path.read_text('utf-8')
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f'--prompt_file={path} cannot be read: {error}') from error
  numbered = enumerate(text.split('\n'), 1)  # JSON may hold other line ends
  lines = [(number, line) for number, line in numbered if line.strip()]
  if not lines or (limit and len(lines) < limit):
    raise ValueError(
      f'--prompt_file={path} has {len(lines)} prompts, {limit or 1} needed;'
      ' see --batch_size and --num_prompts'
    )
  prompts = []
  for number, line in lines[:limit]:
    if path.suffix == '.jsonl':
      try:
        line = json.loads(line)['prompt']
      except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
          f'--prompt_file={path}, line {number}: expected a JSON object with'
          ' the key prompt'
        ) from error
      if not isinstance(line, str):
        raise ValueError(
          f'--prompt_file={path}, line {number}: prompt must be a string'
        )
    prompts.append(line)
  return prompts


def as_dict() -> dict[str, Any]:
  """All flags of the running script, for the record of a result."""
  record = {
    flag.name: flag.value
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  } | {
    flag.name: flag.value
    for flag in flags.FLAGS.flags_by_module_dict()[__name__]
  }
  for name in ('output', 'plots'):  # Where results go does not change them.
    record.pop(name, None)
  for name in ('target', 'draft'):
    folder = pathlib.Path(str(record[name]))
    record[name] = folder.name if folder.is_dir() else record[name]
  if record['plan'] is not None:
    record['plan'] = pathlib.Path(record['plan']).name
  path = record.pop('prompt_file')
  if path is not None:  # The name may be private; the contents are what counts.
    digest = hashlib.sha256(pathlib.Path(path).read_bytes()).hexdigest()
    record |= {'prompts': pathlib.Path(path).name, 'prompts_sha256': digest}
  return record
