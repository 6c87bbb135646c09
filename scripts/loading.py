"""The models of the flags, their plan, and the generator made from them."""

from collections.abc import Callable
from collections.abc import Sequence
import functools
import math
import sys
from typing import Any

from absl import flags
import options

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import hub
from models.lab.tune import plan_lookup
from models.nn import dtypes
from models.nn import matrices as matrices_lib
from models.nn import sharding as sharding_lib
from models.nn.cpu import build
from models.text import chat_template
from models.text import generator as generator_lib
from models.text import pair as pair_lib
from models.text import plan as plan_lib
from models.text import settings as settings_lib


def _uses_kernels() -> bool:
  return (
    options.CPU_KERNELS.value == 'auto'
    and math.prod(options.mesh_sizes().values()) == 1
    and build.is_available()
  )


@functools.cache
def dtype() -> str:
  """The dtype of the target; what `auto` stands for is printed."""
  name = options.DTYPE.value
  if name == dtypes.AUTO:
    found = hub.locate(options.TARGET.value, revision=options.REVISION.value)
    name = checkpoint_lib.resolve_dtype(name, found, packed=_uses_kernels())
    print(f'--dtype=auto: {name}', file=sys.stderr)
  return name


def is_exact() -> bool:
  """Whether drafted tokens are those of plain decoding without exceptions."""
  if dtype() == 'float32':
    return True
  return dtype() in matrices_lib.KERNEL_DTYPES and _uses_kernels()


def models() -> pair_lib.ModelChoice:
  """The models of the flags; starts the devices of a mesh."""
  sizes = options.mesh_sizes()
  with options.named_as_flag():
    mesh = sharding_lib.make_mesh(sizes) if sizes else None
  return pair_lib.ModelChoice(
    target=options.TARGET.value,
    draft=options.draft_name(),
    revision=options.REVISION.value,
    dtype=dtype(),
    draft_dtype=options.DRAFT_DTYPE.value,
    draft_vocab=options.draft_vocab(),
    cpu_kernels=options.CPU_KERNELS.value == 'auto',
    mesh=mesh,
    draft_mesh=options.DRAFT_MESH.value,
    eos_ids=options.eos_ids(),
    head=options.HEAD.value,
  )


def plan_setup(batch_size: int) -> plan_lookup.Setup:
  """What a plan for the flags is made for."""
  return plan_lookup.Setup(
    models=models(), batch_size=batch_size, sampling=options.sampling()
  )


def planning() -> dict[str, Any]:
  """Arguments of `models.lab.tune.planner.make_plan` that the flags set."""
  return {
    'drafting': options.draft_settings(),
    'seed': options.SEED.value,
    'max_new_tokens': options.MAX_NEW_TOKENS.value,
    'plan_seconds': options.PLAN_SECONDS.value,
  }


def plan(
  batch_size: int, samples: Callable[[], Sequence[chat_template.Prompt]]
) -> plan_lib.Plan | None:
  """The plan of `--plan`, if there is one, for batches of a size.

  `samples` returns prompts, and is called only if a plan has to be made.
  """
  if options.PLAN.value is None:
    return None
  if not options.keeps_tokens():
    raise ValueError(
      f'--plan is for --verify=match, got {options.VERIFY.value}: other rules'
      ' accept other numbers of tokens'
    )
  return plan_lookup.find_plan(
    options.PLAN.value,
    samples,
    plan_setup(batch_size),
    **planning(),
    report=lambda line: print(f'plan: {line}', file=sys.stderr),
  )


def _check_contradictions(plan: plan_lib.Plan) -> None:
  """Refuses flags that were given and differ from the plan."""
  ours, method = options.draft_settings(), flags.FLAGS['method']
  given = {
    name: (option.read(ours), option.read(plan.drafting))
    for name, option in settings_lib.OPTIONS.items()
    if options.DRAFTING[name].present
  }
  if options.LOOKUP_CONFIDENCE.present:
    lookups = ours.lookup.confidence, plan.drafting.lookup.confidence
    given['lookup_confidence'] = lookups
  if method.present and method.value != settings_lib.PLANNED:
    given['method'] = method.value, plan.method
  for name, (value, planned) in given.items():
    if value != planned:
      raise ValueError(
        f'--{name}={value} contradicts --plan={options.PLAN.value}, which has'
        f' {planned}; leave out one of the two'
      )


def _load(
  found: plan_lib.Plan | None, messages: Any = None
) -> generator_lib.Generator:
  if found is not None:
    _check_contradictions(found)
  return generator_lib.load(
    **vars(models()),
    method=flags.FLAGS.method,
    drafting=options.draft_settings(),
    plan=found,
    messages=messages,
  )


def generator(
  samples: list[str], batch_size: int, messages: Any = None
) -> generator_lib.Generator:
  """The generator of the flags; see `plan`, and `models.load` for messages."""
  return _load(plan(batch_size, lambda: samples), messages)


def many(
  samples: Callable[[], list[str]], batch_size: int
) -> tuple[generator_lib.Generator, dict[int, int]]:
  """The generator of the flags, and the `tree_sizes` for many prompts.

  With `--plan=auto` there is a plan for the full batch and one for a single
  prompt, see `plan_lookup.join_plans`. The arguments are those of `plan`.
  """
  found, sizes = plan(batch_size, samples), dict[int, int]()
  if found is not None and options.PLAN.value == 'auto' and batch_size > 1:
    alone = plan(1, samples)
    assert alone is not None
    found, sizes = plan_lookup.join_plans(alone, found, batch_size)
  return _load(found), sizes
