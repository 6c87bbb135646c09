"""Training loop; a run that is killed resumes from its last checkpoint."""

from collections.abc import Callable
import dataclasses
import hashlib
import pathlib
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

from models.checkpoints import families
from models.lab.training import corpus as corpus_lib
from models.lab.training import loss as loss_lib
from models.lab.training import optimizer as optimizer_lib
from models.lab.training import run_record
from models.nn import adapter


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """Settings of a training run.

  Every phase is `(fraction of the steps, window length)`. Short windows come
  first, because attention is most of the cost of long windows, and the last
  phase is enough to learn far positions. The learning rate rises linearly to
  its peak, then falls to zero. With every held-out loss, over windows of the
  current length, a checkpoint is saved. `balance_weight` is that of the
  load-balancing loss of a mixture of experts (arXiv 2101.03961, section 2.2).
  """

  num_steps: int = 2400
  batch_tokens: int = 4096  # Tokens per step.
  phases: tuple[tuple[float, int], ...] = (
    (0.65, 128),
    (0.20, 256),
    (0.10, 512),
    (0.05, 1024),
  )
  learning_rate: float = 5e-3  # Peak, reached after `warmup_steps`.
  warmup_steps: int = 50
  seed: int = 0  # Of the weights and of the batches.
  dtype: str = 'bfloat16'  # Of matrix products; weights and optimizer: float32.
  eval_every: int = 100  # Steps between held-out losses.
  eval_tokens: int = 32768  # Per held-out loss, at most.
  balance_weight: float = 0.01

  def __post_init__(self):
    if not 0 <= self.warmup_steps < self.num_steps:
      raise ValueError(
        f'warmup_steps must be below num_steps={self.num_steps}, got'
        f' {self.warmup_steps}'
      )
    for fraction, length in self.phases:
      if fraction <= 0 or not 1 <= length <= self.batch_tokens:
        raise ValueError(
          'every phase needs a positive fraction and a length of at most'
          f' batch_tokens={self.batch_tokens}, got {(fraction, length)}'
        )

  def window_length(self, step: int) -> int:
    """The window length of one step, in tokens."""
    total = sum(fraction for fraction, _ in self.phases)
    end = 0.0
    for fraction, length in self.phases:
      end += fraction / total * self.num_steps
      if step < round(end):
        return length
    return self.phases[-1][1]


@dataclasses.dataclass(frozen=True)
class Progress:
  """One point of the loss curve; losses are in nats per token."""

  step: int
  tokens: int
  train_loss: float
  held_out_loss: float
  tokens_per_second: float
  seconds_left: float

  def __str__(self):
    minutes, seconds = divmod(round(self.seconds_left), 60)
    return (
      f'step {self.step:6d}  loss {self.train_loss:.3f}  held out'
      f' {self.held_out_loss:.3f}  {self.tokens_per_second:7.0f} tokens/s '
      f' {minutes:3d}:{seconds:02d} left'
    )


def _not_a_number(what: str) -> FloatingPointError:
  return FloatingPointError(
    f'{what} is not a number; start again in another workdir with a lower'
    ' learning rate'
  )


def _fingerprint(tokens: np.ndarray) -> str:
  digest = hashlib.blake2b(tokens.tobytes(), digest_size=8).hexdigest()
  return f'{len(tokens)} tokens, {digest}'


def _initial_model(
  model_config: adapter.Config, seed: int, teacher: loss_lib.Teacher | None
) -> adapter.Module:
  """Draws the weights; copies the teacher's token embedding if it fits."""
  model = families.family_of(model_config).module(
    model_config, rngs=nnx.Rngs(seed)
  )
  if teacher is not None:
    theirs, ours = _embedding(teacher.model), _embedding(model)
    if theirs.shape == ours.shape:
      ours[...] = theirs[...].astype(ours.dtype)
  return model


def _embedding(module: adapter.Module) -> nnx.Param:
  return getattr(module, module.config.embedding).embedding


def _make_train_step(
  graph, config: TrainConfig, teacher: loss_lib.Teacher | None
):
  """Makes the optimizer's `init`, and `(state, batch) -> (state, loss)`."""
  loss_fn = loss_lib.make_loss(
    graph,
    dtype=jnp.dtype(config.dtype),
    teacher=teacher,
    balance_weight=config.balance_weight,
  )
  optimizer = optimizer_lib.make_optimizer(
    learning_rate=config.learning_rate,
    warmup_steps=config.warmup_steps,
    num_steps=config.num_steps,
  )

  @jax.jit
  def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state['params'], batch)
    updates, optimizer_state = optimizer.update(
      grads, state['optimizer'], state['params']
    )
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'optimizer': optimizer_state}, loss

  return optimizer.init, train_step


def train(
  model_config: adapter.Config,
  config: TrainConfig,
  train_tokens: np.ndarray,
  held_out_tokens: np.ndarray,
  *,
  workdir: pathlib.Path,
  teacher: loss_lib.Teacher | None = None,
  report: Callable[[Progress], None] = print,
) -> tuple[adapter.Module, list[Progress]]:
  """Trains to `config.num_steps`, from the last checkpoint if there is one.

  Tokens are `[tokens]` int32, see `Corpus.tokens`. `workdir` holds `run.json`,
  `checkpoints/` and `loss_curve.json`. With a teacher the model learns its
  distribution instead of the next token (see `models.lab.training.loss`), and
  starts with its token embedding if that has the same shape.

  Returns:
    The trained model in float32, and the loss curve.

  Raises:
    ValueError: `workdir` holds a run with other settings or data, or the
      windows are longer than the context.
    FloatingPointError: the loss is not a number; the message names the step.
  """
  longest = max(length for _, length in config.phases)
  context = model_config.num_positions
  if longest > context:
    raise ValueError(
      f'windows of {longest} tokens exceed the context of {context}'
    )
  record = {
    'model': dataclasses.asdict(model_config),
    'train': dataclasses.asdict(config),
    'data': _fingerprint(train_tokens),
    'teacher': teacher.name if teacher else None,
  }
  run_record.write_once(workdir / 'run.json', record)
  graph, variables = nnx.split(
    _initial_model(model_config, config.seed, teacher)
  )
  params = nnx.to_pure_dict(variables)
  init, train_step = _make_train_step(graph, config, teacher)
  loop = _Loop(
    config=config,
    train_step=train_step,
    eval_loss=jax.jit(loss_lib.make_loss(graph, dtype=jnp.dtype(config.dtype))),
    train_tokens=train_tokens,
    held_out_tokens=held_out_tokens,
  )
  state = {'params': params, 'optimizer': init(params)}
  params, curve = loop.run(state, workdir, report)
  return nnx.merge(graph, params), curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Loop:
  """The training loop; the fields are what does not change between steps."""

  config: TrainConfig
  train_step: Callable[[Any, np.ndarray], tuple[Any, jax.Array]]
  eval_loss: Callable[[Any, np.ndarray], jax.Array]
  train_tokens: np.ndarray
  held_out_tokens: np.ndarray

  def _batch(self, step: int) -> np.ndarray:
    """The batch of the step after `step` steps."""
    length = self.config.window_length(step)
    return corpus_lib.training_batch(
      self.train_tokens,
      step=step,
      seed=self.config.seed,
      batch_size=self.config.batch_tokens // length,
      length=length,
    )

  def _held_out_loss(self, params, length: int) -> float:
    batch_size = max(1, self.config.batch_tokens // length)
    batches = corpus_lib.held_out_batches(
      self.held_out_tokens,
      batch_size=batch_size,
      length=length,
      limit=max(1, self.config.eval_tokens // (batch_size * length)),
    )
    losses = [self.eval_loss(params, batch) for batch in batches]
    return float(np.mean(jax.device_get(losses)))

  def _evaluate(self, step, params, losses) -> tuple[float, float]:
    """The training and held-out loss, checked to be finite."""
    finite = np.isfinite(losses)
    if not np.all(finite):
      bad = step - len(losses) + 1 + int(np.argmin(finite))
      raise _not_a_number(f'the loss of step {bad}')
    # The loss of a step belongs to the weights before it, so it is finite even
    # if the step overflows.
    length = self.config.window_length(step - 1)
    held_out_loss = self._held_out_loss(params, length)
    if not np.isfinite(held_out_loss):
      raise _not_a_number(f'the held-out loss after step {step}')
    return float(np.mean(losses)), held_out_loss

  def run(self, state, workdir: pathlib.Path, report):
    """Runs from the last checkpoint to the end; returns params and curve."""
    config = self.config
    with _checkpoints(workdir) as manager:
      state, curve = _restore(manager, state)
      clock, tokens, losses = time.monotonic(), 0, []
      for step in range((manager.latest_step() or 0) + 1, config.num_steps + 1):
        batch = self._batch(step - 1)
        state, loss = self.train_step(state, batch)
        losses.append(loss)
        tokens += batch[:, 1:].size
        if step % config.eval_every and step < config.num_steps:
          continue
        train_loss, held_out_loss = self._evaluate(
          step, state['params'], jax.device_get(losses)
        )
        seconds, clock = time.monotonic() - clock, time.monotonic()
        curve.append(
          Progress(
            step=step,
            tokens=tokens + (curve[-1].tokens if curve else 0),
            train_loss=train_loss,
            held_out_loss=held_out_loss,
            tokens_per_second=tokens / seconds,
            seconds_left=seconds / len(losses) * (config.num_steps - step),
          )
        )
        report(curve[-1])
        _save(manager, step, state, curve, workdir)
        tokens, losses = 0, []
    return state['params'], curve


def _checkpoints(workdir: pathlib.Path) -> ocp.CheckpointManager:
  return ocp.CheckpointManager(
    (workdir / 'checkpoints').absolute(),
    options=ocp.CheckpointManagerOptions(max_to_keep=2),
  )


def _save(manager, step, state, curve, workdir) -> None:
  record = [dataclasses.asdict(progress) for progress in curve]
  manager.save(
    step,
    args=ocp.args.Composite(
      state=ocp.args.StandardSave(state), curve=ocp.args.JsonSave(record)
    ),
  )
  run_record.save_json(workdir / 'loss_curve.json', record)


def _restore(manager, state) -> tuple[Any, list[Progress]]:
  """The last checkpoint, or the given state and an empty curve."""
  if manager.latest_step() is None:
    return state, []
  restored = manager.restore(
    manager.latest_step(),
    args=ocp.args.Composite(
      state=ocp.args.StandardRestore(
        jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
      ),
      curve=ocp.args.JsonRestore(),
    ),
  )
  return restored['state'], [Progress(**line) for line in restored['curve']]
