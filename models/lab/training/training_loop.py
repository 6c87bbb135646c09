"""The training loop; a run that is killed resumes from its last checkpoint."""

from collections.abc import Callable
import dataclasses
import functools
import pathlib
import time
from typing import Any

import jax
import numpy as np
import optax

from models.lab.training import optimizer as optimizer_lib
from models.lab.training import run_checkpoints
from models.lab.training import run_record


@dataclasses.dataclass(frozen=True)
class Progress:
  """One point of the loss curve; losses are in nats per token."""

  step: int
  tokens: int
  train_loss: float
  held_out_loss: float
  tokens_per_second: float
  seconds_left: float
  #: Of a drafting head: the fraction of held-out tokens that it finds, of those
  #: right after a text, one token later, and so on.
  accepted: tuple[float, ...] = ()

  def __str__(self):
    minutes, seconds = divmod(round(self.seconds_left), 60)
    accepted = ' '.join(f'{100 * one:.1f}' for one in self.accepted)
    accepted = f'  accepted {accepted} %' if accepted else ''
    return (
      f'step {self.step:6d}  loss {self.train_loss:.3f}  held out'
      f' {self.held_out_loss:.3f}{accepted}  {self.tokens_per_second:7.0f}'
      f' tokens/s  {minutes:3d}:{seconds:02d} left'
    )


def _not_a_number(what: str, last: str) -> FloatingPointError:
  return FloatingPointError(
    f'{what} is not a number; {last}; start again in another workdir with a'
    ' lower learning rate'
  )


def make_train_step(
  loss_fn: jax.tree_util.Partial,
  *,
  learning_rate: float,
  warmup_steps: int,
  num_steps: int,
) -> tuple[Callable[[Any], Any], Callable[[Any, Any], tuple[Any, jax.Array]]]:
  """Makes the optimizer's `init`, and `(state, batch) -> (state, loss)`.

  `loss_fn` is `(params, batch) -> loss`; what it holds is an argument of the
  compiled step, not a constant. For the numbers see `optimizer`.
  """
  optimizer = optimizer_lib.make_optimizer(
    learning_rate=learning_rate, warmup_steps=warmup_steps, num_steps=num_steps
  )

  @jax.jit
  def train_step(loss_fn, state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state['params'], batch)
    updates, optimizer_state = optimizer.update(
      grads, state['optimizer'], state['params']
    )
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'optimizer': optimizer_state}, loss

  return optimizer.init, functools.partial(train_step, loss_fn)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
  """The training loop; the fields are what does not change between steps.

  Attributes:
    num_steps: of the run.
    eval_every: steps between held-out losses, with which checkpoints are saved.
    train_step: `(state, batch) -> (state, loss)`; the state has `params`.
    batch: makes the batch of the step after so many steps.
    num_tokens: the tokens of a batch that are learned.
    evaluate: `(params, step) -> (held-out loss, Progress.accepted)`, after the
      step.
  """

  num_steps: int
  eval_every: int
  train_step: Callable[[Any, Any], tuple[Any, jax.Array]]
  batch: Callable[[int], Any]
  num_tokens: Callable[[Any], int]
  evaluate: Callable[[Any, int], tuple[float, tuple[float, ...]]]

  def _evaluate(
    self, step: int, params: Any, losses: Any, last: str
  ) -> tuple[float, float, tuple[float, ...]]:
    """The training and held-out loss, checked to be finite, and `accepted`."""
    finite = np.isfinite(losses)
    if not np.all(finite):
      bad = step - len(losses) + 1 + int(np.argmin(finite))
      raise _not_a_number(f'the loss of step {bad}', last)
    # The loss of a step belongs to the weights before it, so it is finite even
    # if the step overflows.
    held_out_loss, accepted = self.evaluate(params, step)
    if not np.isfinite(held_out_loss):
      raise _not_a_number(f'the held-out loss after step {step}', last)
    return float(np.mean(losses)), held_out_loss, accepted

  def run(self, state, workdir: pathlib.Path, report):
    """Runs from the last checkpoint to the end; returns params and curve."""
    checkpoints = run_checkpoints.Checkpoints(workdir / 'checkpoints', report)
    state, records = checkpoints.restore(state)
    curve = [
      Progress(**record | {'accepted': tuple(record['accepted'])})
      for record in records
    ]
    clock, tokens, losses = time.monotonic(), 0, []
    first = curve[-1].step + 1 if curve else 1
    for step in range(first, self.num_steps + 1):
      batch = self.batch(step - 1)
      state, loss = self.train_step(state, batch)
      losses.append(loss)
      tokens += self.num_tokens(batch)
      if step % self.eval_every and step < self.num_steps:
        continue
      train_loss, held_out_loss, accepted = self._evaluate(
        step,
        state['params'],
        jax.device_get(losses),
        checkpoints.describe_last(),
      )
      seconds, clock = time.monotonic() - clock, time.monotonic()
      curve.append(
        Progress(
          step=step,
          tokens=tokens + (curve[-1].tokens if curve else 0),
          train_loss=train_loss,
          held_out_loss=held_out_loss,
          tokens_per_second=tokens / seconds,
          seconds_left=seconds / len(losses) * (self.num_steps - step),
          accepted=accepted,
        )
      )
      report(curve[-1])
      records.append(dataclasses.asdict(curve[-1]))
      checkpoints.save(step, state, records)
      run_record.save_json(workdir / 'loss_curve.json', records)
      tokens, losses = 0, []
    return state['params'], curve
