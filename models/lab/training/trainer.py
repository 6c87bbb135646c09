"""Training loop; a run that is killed resumes from its last checkpoint."""

from collections.abc import Callable
import dataclasses
import hashlib
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import families
from models.lab.training import corpus as corpus_lib
from models.lab.training import loss as loss_lib
from models.lab.training import run_record
from models.lab.training import training_loop
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
  return training_loop.make_train_step(
    loss_fn,
    learning_rate=config.learning_rate,
    warmup_steps=config.warmup_steps,
    num_steps=config.num_steps,
  )


def train(
  model_config: adapter.Config,
  config: TrainConfig,
  train_tokens: np.ndarray,
  held_out_tokens: np.ndarray,
  *,
  workdir: pathlib.Path,
  teacher: loss_lib.Teacher | None = None,
  report: Callable[[training_loop.Progress], None] = print,
) -> tuple[adapter.Module, list[training_loop.Progress]]:
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
  loop = _make_loop(graph, config, train_step, train_tokens, held_out_tokens)
  state = {'params': params, 'optimizer': init(params)}
  params, curve = loop.run(state, workdir, report)
  return nnx.merge(graph, params), curve


def _make_loop(
  graph: nnx.GraphDef,
  config: TrainConfig,
  train_step: Callable[[Any, Any], Any],
  train_tokens: np.ndarray,
  held_out_tokens: np.ndarray,
) -> training_loop.Loop:
  eval_loss = jax.jit(loss_lib.make_loss(graph, dtype=jnp.dtype(config.dtype)))

  def batch(step: int) -> np.ndarray:
    length = config.window_length(step)
    return corpus_lib.training_batch(
      train_tokens,
      step=step,
      seed=config.seed,
      batch_size=config.batch_tokens // length,
      length=length,
    )

  def evaluate(params: Any, step: int) -> tuple[float, tuple[()]]:
    """Over windows of the current length."""
    length = config.window_length(step - 1)
    batch_size = max(1, config.batch_tokens // length)
    batches = corpus_lib.held_out_batches(
      held_out_tokens,
      batch_size=batch_size,
      length=length,
      limit=max(1, config.eval_tokens // (batch_size * length)),
    )
    losses = [eval_loss(params, batch) for batch in batches]
    return float(np.mean(jax.device_get(losses))), ()

  return training_loop.Loop(
    num_steps=config.num_steps,
    eval_every=config.eval_every,
    train_step=train_step,
    batch=batch,
    num_tokens=lambda batch: batch[:, 1:].size,
    evaluate=evaluate,
  )
