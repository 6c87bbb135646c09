"""The training loop, for all kinds of training; a killed run is resumed.

A kind of training is a subclass of `Training`: its fields are the settings,
`scripts/train.py` has a flag for each that is described, and `prepare` makes
what is trained.
"""

import abc
from collections.abc import Callable
from collections.abc import Iterable
import dataclasses
import functools
import pathlib
import shutil
import time
from typing import Any
from typing import Literal

import jax
import numpy as np
import optax
from optax import contrib
import orbax.checkpoint as ocp

from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import kept
from specdec.models.text import fields

Report = Callable[[Any], None]
Claim = Callable[..., pathlib.Path]

# Weights are stored [out, in]; the default of optax is [in, out].
_OUT_IN = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=0)


@dataclasses.dataclass(frozen=True)
class Progress:
  """One point of the loss curve; losses are in nats per token."""

  step: int
  tokens: int
  train_loss: float
  held_out_loss: float
  tokens_per_second: float
  seconds_left: float
  #: The fraction of held-out tokens that a drafter finds: of those right after
  #: a text, of those one token later, and so on.
  accepted: tuple[float, ...] = ()

  def __str__(self):
    minutes, seconds = divmod(round(self.seconds_left), 60)
    accepted = ' '.join(f'{100 * share:.1f}' for share in self.accepted)
    accepted = f'  accepted {accepted} %' if accepted else ''
    return (
      f'step {self.step:6d}  loss {self.train_loss:.3f}  held out'
      f' {self.held_out_loss:.3f}{accepted}  {self.tokens_per_second:7.0f}'
      f' tokens/s  {minutes:3d}:{seconds:02d} left'
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trainee:
  """A thing to train, its data, and how it is written.

  A loss is `(params, batch) -> (loss [], accepted [S])`, see `Progress`; S may
  be 0. It is a `jax.tree_util.Partial`: the arrays that it holds are arguments
  of the compiled step, not constants in it.

  Attributes:
    params: a pytree of float32 arrays, with which training begins.
    loss: of training.
    held_out_loss: of held-out batches.
    batch: `step -> batch`, what is learned in a step; the first is 0.
    held_out: `step -> batches`, the held-out batches at a step.
    save: `(params, folder, dtype)`: writes the result, in a dtype by its name.
  """

  params: Any
  loss: jax.tree_util.Partial
  held_out_loss: jax.tree_util.Partial
  batch: Callable[[int], Any]
  held_out: Callable[[int], Iterable[Any]]
  save: Callable[[Any, pathlib.Path, str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training(abc.ABC):
  """Settings that all kinds of training share.

  The learning rate rises linearly to its peak, then falls to zero. With every
  held-out loss a checkpoint is saved.
  """

  corpus: corpus_lib.Corpus = fields.record(corpus_lib.Corpus(), '')
  num_steps: int = fields.described(
    2400, 'number of optimizer steps', flag='steps'
  )
  batch_tokens: int = fields.described(4096, 'tokens per step, at most')
  learning_rate: float = fields.described(
    5e-3, 'peak learning rate; decays to zero'
  )
  warmup_steps: int = 50  # At most a tenth of the steps.
  optimizer: Literal['muon', 'adamw'] = fields.described(
    'muon',
    'muon: for the matrices of layers, AdamW for the rest; its work does not'
    ' depend on batch_tokens, so with few of them adamw makes faster steps',
  )
  eval_every: int = 100  # Steps between held-out losses.
  seed: int = fields.described(0, 'seed of weights and batches')
  dtype: Literal['float32', 'bfloat16'] = fields.described(
    'bfloat16', 'of the matrix products; the rest is float32'
  )

  @abc.abstractmethod
  def window_length(self, step: int) -> int:
    """The tokens of a window in a step, at most `batch_tokens`."""

  def batch_size(self, step: int) -> int:
    """The windows of a batch in a step."""
    return self.batch_tokens // self.window_length(step)

  @abc.abstractmethod
  def prepare(self, claim: Claim, report: Report) -> Trainee:
    """Makes what is trained.

    Args:
      claim: returns the workdir, which from then on belongs to these settings
        and to the facts given as keywords, such as digests. It is called once
        the settings are known to fit.
      report: is called with what is printed.
    """


def _is_block_matrix(path, leaf) -> bool:
  keys = [getattr(entry, 'key', None) for entry in path]
  return leaf.ndim == 2 and keys[0] in ('h', 'layers')


@functools.cache  # Equal optimizers share the compiled step.
def make_optimizer(
  name: str, *, learning_rate: float, warmup_steps: int, num_steps: int
) -> optax.GradientTransformation:
  """`muon` (AdamW outside of blocks) or `adamw`; the rate rises, then falls.

  Updates of Muon (Jordan et al. 2024) are scaled to the root mean square of
  others (Liu et al. 2025, arXiv 2502.16982, eq. 4), so one learning rate, the
  peak, serves all. The work of Muon does not depend on the tokens of a step.
  With few of them it is most of a step.
  """
  rate = optax.join_schedules(
    [
      optax.linear_schedule(0.0, learning_rate, warmup_steps),
      optax.linear_schedule(learning_rate, 0.0, num_steps - warmup_steps),
    ],
    [warmup_steps],
  )
  return optax.chain(
    optax.clip_by_global_norm(1.0),
    contrib.muon(
      rate,
      muon_weight_dimension_numbers=lambda params: (
        jax.tree_util.tree_map_with_path(
          lambda path, leaf: (
            _OUT_IN if name == 'muon' and _is_block_matrix(path, leaf) else None
          ),
          params,
        )
      ),
      consistent_rms=0.2,
      weight_decay=0.1,
      adam_b2=0.95,
    ),
  )


@functools.partial(jax.jit, static_argnums=0)
def train_step(optimizer, loss, state, batch):
  """`(state, loss [])` after a step; a state has `params` and `optimizer`."""
  params, inner = state['params'], state['optimizer']
  (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
  updates, inner = optimizer.update(grads, inner, params)
  params = optax.apply_updates(params, updates)
  return {'params': params, 'optimizer': inner}, value


_apply = jax.jit(lambda loss, params, batch: loss(params, batch))
_norm = jax.jit(optax.tree.norm)


def _evaluate(
  trainee: Trainee, step: int, state: Any, losses: list[Any]
) -> dict[str, Any]:
  """The losses of `Progress`, and `accepted`.

  Raises:
    FloatingPointError: a loss or weight is not a number.
  """
  losses = jax.device_get(losses)
  results = [
    jax.device_get(_apply(trainee.held_out_loss, state['params'], batch))
    for batch in trainee.held_out(step)
  ]
  held_out_losses, accepted = zip(*results, strict=True)
  held_out_loss = float(np.mean(held_out_losses))
  # The loss of a step belongs to the weights before it, so it is finite even if
  # the step overflows.
  steps = range(step - len(losses) + 1, step + 1)
  numbers = {
    f'loss of step {n}': loss for n, loss in zip(steps, losses, strict=True)
  } | {
    f'held-out loss after step {step}': held_out_loss,
    f'norm of the weights after step {step}': _norm(state['params']),
  }
  for what, value in numbers.items():
    if not np.isfinite(value):
      raise FloatingPointError(f'the {what} is not a number')
  return {
    'train_loss': float(np.mean(losses)),
    'held_out_loss': held_out_loss,
    'accepted': tuple(np.mean(accepted, axis=0).tolist()),
  }


_MORE_BYTES = 1 << 16  # A checkpoint has fewer besides arrays.


def _checkpoint_manager(folder: pathlib.Path) -> ocp.CheckpointManager:
  options = ocp.CheckpointManagerOptions(
    max_to_keep=2, enable_async_checkpointing=False
  )
  return ocp.CheckpointManager(folder.absolute(), options=options)


def restore_checkpoint(
  folder: pathlib.Path, state: Any
) -> tuple[Any, list[dict[str, Any]]]:
  """The last checkpoint, else the given state and an empty curve.

  `state` is a pytree of arrays.

  Raises:
    ValueError: the checkpoint cannot be read, or has another structure; the
      message names it.
  """
  expected = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
  items = ocp.args.Composite(
    state=ocp.args.StandardRestore(expected), curve=ocp.args.JsonRestore()
  )
  with _checkpoint_manager(folder) as manager:
    step = manager.latest_step()
    if step is None:
      return state, []
    try:
      stored = manager.restore(step, args=items)
    except Exception as error:  # Orbax has many.
      reason = str(error).partition('\n')[0]
      raise ValueError(
        f'{folder / str(step)} is damaged, or of another program: {reason};'
        ' remove it, and the run continues from the checkpoint before'
      ) from error
  return stored['state'], stored['curve']


def save_checkpoint(
  folder: pathlib.Path, state: Any, curve: list[dict[str, Any]]
) -> None:
  """Saves a checkpoint at the end of a curve; keeps only the one before it.

  Raises:
    OSError: it cannot be written; those before it are kept.
  """
  path = folder / str(curve[-1]['step'])
  folder.mkdir(parents=True, exist_ok=True)
  needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + _MORE_BYTES
  free = shutil.disk_usage(folder).free
  items = ocp.args.Composite(
    state=ocp.args.StandardSave(state), curve=ocp.args.JsonSave(curve)
  )
  try:
    # Each of orbax's writer threads would print that the disk is full.
    if free < needed:
      raise OSError(f'it takes {needed} bytes, and {free} are free')
    with _checkpoint_manager(folder) as manager:
      manager.save(curve[-1]['step'], args=items)
  except Exception as error:
    raise OSError(
      f'{path} cannot be written: {error}; make room and run again: what was'
      ' written before is kept'
    ) from error


def fit(
  training: Training, trainee: Trainee, workdir: pathlib.Path, report: Report
) -> tuple[Any, list[dict[str, Any]]]:
  """Trains to the last step, from the last checkpoint if there is one.

  Returns:
    The parameters, and `Progress` as a dict for each point of the loss curve.

  Raises:
    FloatingPointError: a loss or weight is not a number.
    OSError: a checkpoint cannot be written; those before it are kept.
  """
  optimizer = make_optimizer(
    training.optimizer,
    learning_rate=training.learning_rate,
    warmup_steps=min(training.warmup_steps, training.num_steps // 10),
    num_steps=training.num_steps,
  )
  params = trainee.params
  state = {'params': params, 'optimizer': jax.jit(optimizer.init)(params)}
  checkpoints = workdir / 'checkpoints'
  state, curve = restore_checkpoint(checkpoints, state)
  last = curve[-1] if curve else {'step': 0, 'tokens': 0}
  clock, tokens, losses = time.monotonic(), 0, []
  for step in range(last['step'] + 1, training.num_steps + 1):
    batch = trainee.batch(step - 1)
    state, loss = train_step(optimizer, trainee.loss, state, batch)
    losses.append(loss)
    tokens += training.batch_size(step - 1) * training.window_length(step - 1)
    if step % training.eval_every and step < training.num_steps:
      continue
    try:
      evaluation = _evaluate(trainee, step, state, losses)
    except FloatingPointError as error:
      raise FloatingPointError(
        f'{error}; what is in {checkpoints} is from before that; start again in'
        ' another --workdir with a lower --learning_rate'
      ) from error
    seconds, clock = time.monotonic() - clock, time.monotonic()
    progress = Progress(
      step=step,
      tokens=last['tokens'] + tokens,
      tokens_per_second=tokens / seconds,
      seconds_left=seconds / len(losses) * (training.num_steps - step),
      **evaluation,
    )
    report(progress)
    last = dataclasses.asdict(progress)
    curve.append(last)
    save_checkpoint(checkpoints, state, curve)
    kept.save_json(workdir / 'loss_curve.json', curve)
    tokens, losses = 0, []
  return state['params'], curve


def run(
  training: Training,
  *,
  workdir: pathlib.Path,
  output: pathlib.Path,
  output_dtype: str,
  report: Report = print,
) -> None:
  """Trains, or resumes, and writes the folder `output`, with the loss curve.

  `workdir` keeps everything that a resumed run needs.

  Raises:
    ValueError: the settings do not fit each other, or `workdir` holds a run
      with other settings.
    FloatingPointError: a loss or weight is not a number.
    OSError: a file or folder cannot be written.
  """
  output.mkdir(parents=True, exist_ok=True)

  def claim(**facts: Any) -> pathlib.Path:
    record = {'kind': type(training).__name__, **dataclasses.asdict(training)}
    kept.write_once(workdir / 'run.json', record | facts)
    return workdir

  trainee = training.prepare(claim, report)
  params, curve = fit(training, trainee, workdir, report)
  trainee.save(params, output, output_dtype)
  kept.save_json(output / 'loss_curve.json', curve)
  report(f'wrote {output}')
