"""The flags that all decoding scripts share, and their values.

This module imports what takes no time, so that a wrong flag is refused before
`loading` imports what reads models.
"""

from collections.abc import Iterator
from collections.abc import Sequence
import contextlib
import dataclasses
import hashlib
import json
import pathlib
import re
import sys
from typing import Any
from typing import get_args

from absl import flags
import command_line
import several_hosts

from models.lab.bench import questions as questions_lib
from models.nn import dtypes
from models.nn import matrices as matrices_lib
from models.nn import sharding as sharding_lib
from models.text import settings as settings_lib
import specdec
from specdec import checks as checks_lib
from specdec import sampling as sampling_lib
from specdec import text_files

_DEFAULTS = settings_lib.DraftSettings()

LARGEST_BATCH = 1024
"""Rows of a batch, at most: writes to caches are unrolled by row."""

DEFAULT_PROMPT = '''def copy_file(source, destination):
    """Copy a file, and its permissions."""
    if'''

TARGET = flags.DEFINE_string(
  'target', 'demo', 'demo (embedded), a model folder, a GGUF file or a hub id'
)
DRAFT = flags.DEFINE_string(
  'draft',
  'demo',
  'demo (embedded), a model folder, a GGUF file, a hub id, or none',
)
HEAD = flags.DEFINE_string(
  'head',
  None,
  'a drafting head of the target in place of a draft: demo (of the embedded'
  ' target), a folder, a GGUF file or a hub id',
)
PLAN = flags.DEFINE_string(
  'plan',
  None,
  'how to decode: a file made by tune.py, or auto: the plan of this machine and'
  ' these flags, made first if there is none',
)
PLAN_SECONDS = flags.DEFINE_float(
  'plan_seconds', 300.0, 'time budget for making a plan', lower_bound=1.0
)
REVISION = flags.DEFINE_string('revision', None, 'of the target, on the hub')
PROMPT_FILE = flags.DEFINE_string(
  'prompt_file',
  None,
  'prompts: one JSON object per line with the key prompt (*.jsonl, *.ndjson,'
  ' *.json, and -, standard input), else one prompt per line; in UTF-8;'
  ' benchmark.py also reads questions: lines with the keys category and turns',
)
MAX_NEW_TOKENS = flags.DEFINE_integer(
  'max_new_tokens',
  128,
  'tokens to generate at most',
  lower_bound=0,
  upper_bound=1 << 20,
)
SEED = flags.DEFINE_integer(
  'seed',
  0,
  'of the sampling',
  lower_bound=-(2**31),
  upper_bound=2**32 - 1,
)
EOS = flags.DEFINE_multi_string(
  'eos',
  None,
  'a token that ends a text, as its id or as its text; may be repeated; none:'
  " only the limit and stop strings end a text; default: as the target's files"
  ' say',
)
VERIFY = flags.DEFINE_enum(
  'verify',
  'match',
  list(checks_lib.RULES),
  'match: the tokens of plain decoding with the same seed; rejection, traversal'
  ' (block: the same on chains): other tokens of the same distribution',
)
CHILDREN = flags.DEFINE_enum(
  'children',
  None,
  sampling_lib.CHILDREN,
  'the candidates of --verify=rejection and traversal; default: drawn without'
  ' replacement where the topology is fixed and the drafter is a model',
)
BREAK_EVEN = flags.DEFINE_float(
  'break_even',
  None,
  'how many plain steps take as long as a speculative step on this machine:'
  ' while a speculative step emits fewer tokens, decoding is plain; default: as'
  ' the plan, or never',
)
DTYPE = flags.DEFINE_enum(
  'dtype',
  dtypes.AUTO,
  (dtypes.AUTO, *matrices_lib.DTYPES),
  'of the target; auto: stored for GGUF files of few bits where the kernels for'
  ' CPU are used, otherwise the 16-bit type of the checkpoint where this'
  ' platform computes in it natively, else float32; int8, int4: weights of'
  ' eight or four bits, the rest computed in bfloat16; stored: as the GGUF file'
  ' has them',
)
DRAFT_DTYPE = flags.DEFINE_enum(
  'draft_dtype',
  None,
  matrices_lib.DTYPES,
  'of the draft; default: as --dtype, but where the kernels for CPU are used'
  ' four bits beside bfloat16 and fewer bits (eight if its files have less than'
  ' 64 MiB); what is decoded does not depend on it',
)
DRAFT_VOCAB = flags.DEFINE_string(
  'draft_vocab',
  None,
  'how many tokens the draft computes and proposes: N, for those that the'
  ' tokenizer learned first, or N:FILE, for those of the largest counts, an'
  ' array [V] in a .npy file; what is decoded does not depend on it; default:'
  ' all',
)
CPU_KERNELS = flags.DEFINE_enum(
  'cpu_kernels',
  'auto',
  ('auto', 'off'),
  'on CPU, whether products and attention use kernels that are compiled once'
  ' with the C++ compiler of the system; auto: where there is one',
)
MESH = flags.DEFINE_string(
  'mesh',
  None,
  'several devices, as sizes of the axes data (rows) and model (weights):'
  ' data:2,model:4 for eight; default: one device',
)
DRAFT_MESH = flags.DEFINE_enum(
  'draft_mesh',
  'auto',
  sharding_lib.DRAFT_MESHES,
  'with --mesh, whether every device has the whole draft or the draft is'
  ' divided as the target is; auto: what should be faster by its size',
)
COORDINATOR = flags.DEFINE_string(
  'coordinator',
  None,
  'several hosts, of which each runs the same command: host:port of the first;'
  ' auto: as a TPU pod, Slurm or Open MPI says, the other two flags with it',
)
NUM_PROCESSES = flags.DEFINE_integer(
  'num_processes', None, 'with --coordinator, of all hosts', lower_bound=1
)
PROCESS_ID = flags.DEFINE_integer(
  'process_id',
  None,
  'with --coordinator, the number of this process; 0 prints and writes',
  lower_bound=0,
)
HOST_TIMEOUT = flags.DEFINE_integer(
  'host_timeout',
  60,
  'seconds after which a host that is not heard of ends the others',
  lower_bound=1,
)
LOOKUP_CONFIDENCE = flags.DEFINE_list(
  'lookup_confidence',
  [str(value) for value in _DEFAULTS.lookup.confidence],
  'probability that the text goes on as it did after a match of 1 token, 2'
  ' tokens and so on; 0: ignore such matches',
)


_SAMPLING_HELP = {
  'logit_bias': 'token:number, added to the logits; token:-inf bans it',
  'repetition_penalty': 'above 1, repeating a token is less likely',
  'temperature': '0 is greedy',
  'top_k': 'keep the k likeliest tokens',
  'top_p': 'keep the likeliest tokens up to this probability',
  'min_p': 'keep tokens this likely relative to the likeliest',
}


def _define_sampling(name: str, default: Any) -> flags.FlagHolder:
  """The flag of a field of `specdec.Sampling`."""
  text = _SAMPLING_HELP[name]
  if name == 'logit_bias':
    return flags.DEFINE_list(name, [], text)
  if name == 'top_k':
    return flags.DEFINE_integer(name, default, text, lower_bound=1)
  return flags.DEFINE_float(name, default, text)


_SAMPLING = {
  field.name: _define_sampling(field.name, field.default)
  for field in dataclasses.fields(specdec.Sampling)
}


def _define(name: str, option: settings_lib.Option) -> flags.FlagHolder:
  """The flag of a setting."""
  of_inner = 'of --inner: ' if option.record == 'inner_stage' else ''
  text = of_inner + option.field.metadata['help']
  default, choices = option.read(_DEFAULTS), get_args(option.kind)
  if choices:
    return flags.DEFINE_enum(name, default, choices, text)
  kinds: dict[Any, Any] = {int: flags.DEFINE_integer, float: flags.DEFINE_float}
  return kinds.get(option.kind, flags.DEFINE_string)(name, default, text)


DRAFTING = {
  name: _define(name, settings_lib.OPTIONS[name])
  for name in settings_lib.OPTIONS
}

# Listed by --help of the script, and kept in its results.
flags.adopt_module_key_flags(command_line)
for _flag in flags.FLAGS.get_key_flags_for_module(__name__):
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], _flag)

# Flags that some scripts have. Each belongs to the script that defines it.
_OF_SCRIPT: dict[str, Any] = {'module_name': sys.argv[0]}


def define_method(
  default: str = 'staged',
  methods: Sequence[str] = ('plain', 'chain', 'tree', 'staged'),
) -> None:
  """Defines `--method`, which `loading` reads."""
  text = 'how to decode; the text is the same; --plan chooses'
  flags.DEFINE_enum('method', default, methods, text, **_OF_SCRIPT)


def define_batch_size(default: int, text: str) -> flags.FlagHolder:
  """Defines `--batch_size`."""
  bounds = 1, LARGEST_BATCH
  return flags.DEFINE_integer(
    'batch_size', default, text, *bounds, **_OF_SCRIPT
  )


def define_num_prompts(text: str = 'default: all') -> None:
  """Defines `--num_prompts`, which `file_prompts` reads."""
  flags.DEFINE_integer('num_prompts', None, text, lower_bound=1, **_OF_SCRIPT)


def define_stop() -> None:
  """Defines `--stop`, which `stop` reads."""
  text = r'the text ends before this; \n is a line end; may be repeated'
  flags.DEFINE_multi_string('stop', [], text, **_OF_SCRIPT)


def stop() -> list[str]:
  """The `stop` argument of decoding."""
  return unescaped(flags.FLAGS.stop)


def define_constraint() -> None:
  """Defines `--regex` and `--json_schema`, which `constraint` reads."""
  flags.DEFINE_string(
    'regex',
    None,
    "an expression that the text matches, in the syntax of Rust's regex",
    **_OF_SCRIPT,
  )
  text = 'a JSON schema that the text matches, or the file of one'
  flags.DEFINE_string('json_schema', None, text, **_OF_SCRIPT)
  command_line.checked_first(_check_constraint)


def _check_constraint() -> None:
  """Refuses a schema that is no JSON; that of a file takes its place."""
  schema = flags.FLAGS.json_schema
  if schema is None:
    return
  if flags.FLAGS.regex is not None:
    raise ValueError('give --regex or --json_schema, not both')
  if not schema.lstrip().startswith('{'):
    with named_as_flag('json_schema='):
      schema = text_files.to_json(text_files.read_object(schema))
  try:
    json.loads(schema)
  except (ValueError, RecursionError) as error:
    raise ValueError(
      f'--json_schema is neither a file nor JSON: {error}'
    ) from error
  flags.FLAGS.json_schema = schema


def constraint() -> dict[str, Any]:
  """The arguments `regex` and `json_schema` of decoding."""
  values = {name: flags.FLAGS[name].value for name in ('regex', 'json_schema')}
  return {name: one for name, one in values.items() if one is not None}


@contextlib.contextmanager
def named_as_flag(name: str = '') -> Iterator[None]:
  """An error names its flag: `name`, or the argument that it begins with."""
  try:
    yield
  except ValueError as error:
    raise ValueError(f'--{name}{error}') from error


def _logit_bias(given: list[str]) -> dict[int, float] | None:
  try:
    pairs = [text.split(':') for text in given]
    return {int(token): float(bias) for token, bias in pairs} or None
  except ValueError as error:
    raise ValueError(
      f'--logit_bias={",".join(given)}: expected token:number, separated by'
      ' commas'
    ) from error


def sampling() -> specdec.Sampling:
  """The sampling options of the flags."""
  given = {name: flag.value for name, flag in _SAMPLING.items()}
  bias = _logit_bias(given['logit_bias'])
  return specdec.Sampling(**given | {'logit_bias': bias})


def eos_ids() -> list[int | str] | None:
  """The `eos_ids` argument of `models.load`."""
  given = EOS.value
  if given is None:
    return None
  if 'none' in given:
    if len(given) > 1:
      raise ValueError(
        f'--eos=none ends no text, but there are other values: {given}'
      )
    return []
  return [int(one) if one.isdecimal() else one for one in unescaped(given)]


def draft_vocab() -> int | list[int] | None:
  """The `draft_vocab` argument of `models.load`."""
  if DRAFT_VOCAB.value is None:
    return None
  number, _, path = DRAFT_VOCAB.value.partition(':')
  if not number.isdecimal() or int(number) < 1:
    raise ValueError(
      f'--draft_vocab={DRAFT_VOCAB.value} is neither N nor N:FILE, such as'
      ' 32768'
    )
  if not path:
    return int(number)
  from models.text import draft_vocabulary

  return draft_vocabulary.most_frequent(path, int(number))


def unescaped(texts: list[str]) -> list[str]:
  r"""Texts of flags in which \n is a line end."""
  return [text.replace('\\n', '\n') for text in texts]


def decoding() -> dict[str, Any]:
  """The arguments of `models.Generator.generate` that the flags set."""
  return {
    'max_new_tokens': MAX_NEW_TOKENS.value,
    'sampling': sampling(),
    'seed': SEED.value,
    'verify': VERIFY.value,
    'children': CHILDREN.value,
    'break_even': BREAK_EVEN.value,
  }


def draft_settings(plan: Any = None) -> settings_lib.DraftSettings:
  """The drafting settings of the flags, with the plan of the method `plan`."""
  with named_as_flag('lookup_confidence: '):
    confidence = tuple(map(float, LOOKUP_CONFIDENCE.value))
    lookup = specdec.PromptLookup(confidence=confidence)
  with named_as_flag():
    changed = settings_lib.with_options(
      _DEFAULTS, {name: flag.value for name, flag in DRAFTING.items()}
    )
  return dataclasses.replace(changed, lookup=lookup, plan=plan)


@command_line.checked_first
def _check() -> None:
  """Refuses values of the shared flags that no model could take."""
  with named_as_flag():
    for name, flag in _SAMPLING.items():
      if isinstance(flag.value, float):
        checks_lib.sampling_value(name, flag.value)
    checks_lib.to_break_even(BREAK_EVEN.value)
  sampling()
  eos_ids()
  draft_vocab()
  draft_name()
  draft_settings()
  mesh_sizes()
  _check_hosts()


def _check_hosts() -> None:
  own = NUM_PROCESSES, PROCESS_ID
  given = [flag.name for flag in own if flag.value is not None]
  address = COORDINATOR.value
  if address is None:
    if given:
      raise ValueError(f'--{given[0]} needs --coordinator, host:port')
    return
  if MESH.value is None:
    raise ValueError('--coordinator needs --mesh, of the devices of all hosts')
  if PROMPT_FILE.value == '-':
    raise ValueError(
      '--prompt_file=-: with --coordinator, name a file that every host has'
    )
  if PLAN.value == 'auto':
    raise ValueError(
      '--plan=auto measures, and hosts would find different plans; make one'
      ' with tune.py and name its file'
    )
  if address == 'auto':
    if given:
      raise ValueError(f'--coordinator=auto finds --{given[0]}; leave it out')
    return
  if not re.fullmatch(r'.+:\d+', address):
    raise ValueError(f'--coordinator={address}: expected host:port, or auto')
  number, index = (flag.value for flag in own)
  if number is None or index is None or index >= number:
    raise ValueError(
      f'--coordinator={address} needs --num_processes and a --process_id less'
      f' than that, got {number} and {index}'
    )


@command_line.before_main
def _join_hosts() -> None:
  if COORDINATOR.value is not None:
    several_hosts.join(
      COORDINATOR.value,
      NUM_PROCESSES.value,
      PROCESS_ID.value,
      HOST_TIMEOUT.value,
    )


def mesh_sizes() -> dict[str, int]:
  """The sizes of the axes of `--mesh`; empty without it."""
  with named_as_flag():
    return sharding_lib.parse_mesh(MESH.value) if MESH.value is not None else {}


def draft_name() -> str | None:
  """The `draft` argument of `models.load`."""
  if HEAD.value is not None:
    if DRAFT.present and DRAFT.value != 'none':
      raise ValueError(
        f'--head={HEAD.value} takes the place of --draft={DRAFT.value}; give'
        ' one of the two'
      )
    return None
  return None if DRAFT.value == 'none' else DRAFT.value


def prompt_lines(errors: str = 'strict') -> Iterator[tuple[int, str]]:
  """Yields the lines of `--prompt_file` that are not blank, and their numbers.

  The arguments and errors are those of `text_files.lines`.
  """
  if PROMPT_FILE.value is None:
    raise ValueError('--prompt_file is needed: a file of prompts')
  with named_as_flag('prompt_file='):
    for number, line in text_files.lines(PROMPT_FILE.value, errors=errors):
      if line.strip():
        yield number, line


def _read_prompts(
  limit: int | None, lines: Sequence[tuple[int, str]]
) -> list[str]:
  """The first prompts of the lines of `--prompt_file`; None: all.

  Raises:
    ValueError: the file cannot be read, or has fewer; names file and line.
  """
  name = PROMPT_FILE.value
  if not lines or (limit and len(lines) < limit):
    raise ValueError(
      f'--prompt_file={name} has {len(lines)} prompts, {limit or 1} needed;'
      ' see --batch_size and --num_prompts'
    )
  if not text_files.is_json_lines(str(name)):
    return [line.rstrip('\n') for _, line in lines[:limit]]
  prompts = []
  for number, line in lines[:limit]:
    try:
      prompts.append(json.loads(line)['prompt'])
    except (ValueError, KeyError, TypeError, RecursionError):
      prompts.append(None)
    if not isinstance(prompts[-1], str):
      raise ValueError(
        f'--prompt_file={name}, line {number}: expected a JSON object with the'
        ' key prompt and a string'
      )
    checks_lib.check_text(f'--prompt_file={name}, line {number}', prompts[-1])
  return prompts


def file_prompts() -> list[str]:
  """The prompts of `--prompt_file` that `--num_prompts` asks for."""
  return _read_prompts(flags.FLAGS.num_prompts, [*prompt_lines()])


def file_questions(categories: Sequence[str]) -> list[questions_lib.Question]:
  """The questions of `--prompt_file`, or its prompts as questions.

  It has questions if its first line has. `--num_prompts` is for each of the
  `categories`, none of which stand for all.

  Raises:
    ValueError: see `_read_prompts`, `questions.parse` and `questions.choose`.
  """
  name, lines = str(PROMPT_FILE.value), [*prompt_lines()]
  limit = flags.FLAGS.num_prompts
  is_json = text_files.is_json_lines(name)
  if not (is_json and lines and questions_lib.has_turns(lines[0][1])):
    if categories:
      raise ValueError(
        f'--categories={",".join(categories)}: --prompt_file={name} has prompts'
        ' without categories'
      )
    texts = _read_prompts(limit, lines)
    return [questions_lib.Question((text,)) for text in texts]
  with named_as_flag('prompt_file='):
    questions = questions_lib.parse(name, lines)
  with named_as_flag():
    return questions_lib.choose(questions, limit, categories)


def prompts(prompt: flags.FlagHolder, number: int) -> list[str]:
  """So many prompts of the file, or copies of the flag `--prompt`."""
  if PROMPT_FILE.value is None:
    checks_lib.check_text(f'--{prompt.name}', prompt.value)
    return [prompt.value] * number
  if prompt.present:
    raise ValueError('give --prompt or --prompt_file, not both')
  return _read_prompts(number, [*prompt_lines()])


def as_dict() -> dict[str, Any]:
  """All flags of the running script, for result files."""
  record = {
    flag.name: flag.value
    for flag in flags.FLAGS.get_key_flags_for_module(sys.argv[0])
  }
  # These do not change results.
  of_hosts = (COORDINATOR, NUM_PROCESSES, PROCESS_ID, HOST_TIMEOUT)
  for name in ('output', 'plots', *(flag.name for flag in of_hosts)):
    record.pop(name, None)
  # Folders may be private.
  for name in ('target', 'draft', 'head', 'plan', 'ngram', 'llama_cpp'):
    path = pathlib.Path(str(record.get(name)))
    record |= {name: path.name} if path.exists() else {}
  prompts = record.pop('prompt_file')
  if prompts not in (None, '-'):
    path = pathlib.Path(prompts)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    record |= {'prompts': path.name, 'prompts_sha256': digest}
  return record


def keeps_tokens() -> bool:
  """Whether the tokens with `--verify` are those of plain decoding."""
  return checks_lib.RULES[VERIFY.value](sampling_lib.BEST).keeps_tokens
