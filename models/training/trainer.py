"""Trains a small model; killed at any moment, it resumes where it saved."""

from collections.abc import Callable
from collections.abc import Iterator
import dataclasses
import hashlib
import json
import pathlib
import time
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import transformers

from models.checkpoints import hub
from models.checkpoints.families import family_of
from models.checkpoints.family import Config
from models.checkpoints.family import Module
from models.nn.gpt2 import GPT2
from models.nn.gpt2 import GPT2Config
from models.nn.llama import LlamaConfig
from models.nn.mixtral import MixtralConfig
from models.training import corpus
from models.training.corpus import Corpus
from models.training.loss import make_loss
from models.training.loss import Teacher
from models.training.optimizer import make_optimizer
from models.training.run_record import write_once
from models.training.tokenizer import train_tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """How to train.

  Attributes:
    num_steps: optimizer steps of the whole run.
    batch_tokens: tokens per step.
    phases: `(fraction of the steps, window length)` in order. Short windows
      first: attention is most of the cost of long ones, and the last phase is
      enough to learn the far positions.
    learning_rate: the peak, reached after `warmup_steps`, then linear to zero.
    warmup_steps: of linear warm-up.
    seed: of the weights and of the batches.
    dtype: of the matrix products; weights and optimizer are float32.
    eval_every: steps between held-out losses (over windows of the length then
      trained on), each with a checkpoint.
    eval_tokens: at most so many held-out tokens are read for a loss.
    balance_weight: of the load-balancing loss of a mixture of experts; Switch
      Transformers' (arXiv 2101.03961, section 2.2).
  """

  num_steps: int = 2400
  batch_tokens: int = 4096
  phases: tuple[tuple[float, int], ...] = (
    (0.65, 128),
    (0.20, 256),
    (0.10, 512),
    (0.05, 1024),
  )
  learning_rate: float = 5e-3
  warmup_steps: int = 50
  seed: int = 0
  dtype: str = 'bfloat16'
  eval_every: int = 100
  eval_tokens: int = 32768
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
    """The length of the windows of one step, in tokens."""
    total = sum(fraction for fraction, _ in self.phases)
    end = 0.0
    for fraction, length in self.phases:
      end += fraction / total * self.num_steps
      if step < round(end):
        return length
    return self.phases[-1][1]


@dataclasses.dataclass(frozen=True)
class Progress:
  """One line of the loss curve; losses in nats per token."""

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


def train(
  model_config: Config,
  config: TrainConfig,
  train_tokens: np.ndarray,
  held_out_tokens: np.ndarray,
  *,
  workdir: pathlib.Path,
  teacher: Teacher | None = None,
  report: Callable[[Progress], None] = print,
) -> tuple[Module, list[Progress]]:
  """Trains to `config.num_steps`, from the last checkpoint if there is one.

  Args:
    model_config: the shape of the model.
    config: how to train it.
    train_tokens: `[tokens]` int32, see `Corpus.tokens`.
    held_out_tokens: `[tokens]` int32 from other files.
    workdir: holds `run.json`, `checkpoints/` and `loss_curve.json`.
    teacher: if given, the model learns the teacher's distribution instead of
      the next token (see `models.training.loss`), and starts with its token
      embedding if that is as wide.
    report: called with every `Progress`.

  Returns:
    The trained model in float32, and the loss curve.

  Raises:
    ValueError: `workdir` holds a run with other settings or data, or the
      windows are longer than the context.
    FloatingPointError: the loss is not a number; names the step.
  """
  longest = max(length for _, length in config.phases)
  if longest > model_config.num_positions:
    raise ValueError(
      f'windows of {longest} tokens exceed the context of'
      f' {model_config.num_positions}'
    )
  write_once(
    workdir / 'run.json',
    {
      'model': dataclasses.asdict(model_config),
      'train': dataclasses.asdict(config),
      'data': _fingerprint(train_tokens),
      'teacher': teacher.name if teacher else None,
    },
  )
  model = family_of(model_config).module(
    model_config, rngs=nnx.Rngs(config.seed)
  )
  if teacher is not None:
    _copy_embedding(teacher.model, model)
  graph, variables = nnx.split(model)
  params = nnx.to_pure_dict(variables)
  optimizer = make_optimizer(
    learning_rate=config.learning_rate,
    warmup_steps=config.warmup_steps,
    num_steps=config.num_steps,
  )
  state = {'params': params, 'optimizer': optimizer.init(params)}
  loss_fn = make_loss(
    graph,
    dtype=jnp.dtype(config.dtype),
    teacher=teacher,
    balance_weight=config.balance_weight,
  )
  eval_loss = jax.jit(make_loss(graph, dtype=jnp.dtype(config.dtype)))

  @jax.jit
  def train_step(state, batch):
    loss, grads = jax.value_and_grad(loss_fn)(state['params'], batch)
    updates, optimizer_state = optimizer.update(
      grads, state['optimizer'], state['params']
    )
    params = optax.apply_updates(state['params'], updates)
    return {'params': params, 'optimizer': optimizer_state}, loss

  def held_out_loss(params, length) -> float:
    batch_size = max(1, config.batch_tokens // length)
    losses = [
      eval_loss(params, batch)
      for batch in corpus.held_out_batches(
        held_out_tokens,
        batch_size=batch_size,
        length=length,
        limit=max(1, config.eval_tokens // (batch_size * length)),
      )
    ]
    return float(np.mean(jax.device_get(losses)))

  def batches(start: int) -> Iterator[np.ndarray]:
    for step in range(start, config.num_steps):
      length = config.window_length(step)
      yield corpus.training_batch(
        train_tokens,
        step=step,
        seed=config.seed,
        batch_size=config.batch_tokens // length,
        length=length,
      )

  with _checkpoints(workdir) as manager:
    state, curve = _restore(manager, state)
    start = manager.latest_step() or 0
    clock, tokens_since, losses = time.monotonic(), 0, []
    for step, batch in enumerate(batches(start), start + 1):
      state, loss = train_step(state, batch)
      losses.append(loss)
      tokens_since += batch[:, 1:].size
      if step % config.eval_every and step < config.num_steps:
        continue
      losses = jax.device_get(losses)
      if not np.all(np.isfinite(losses)):
        bad = step - len(losses) + 1 + int(np.argmin(np.isfinite(losses)))
        raise _not_a_number(f'the loss of step {bad}')
      # Steps that overflow have a finite loss, of the weights before them.
      evaluated = held_out_loss(state['params'], config.window_length(step - 1))
      if not np.isfinite(evaluated):
        raise _not_a_number(f'the held-out loss after step {step}')
      seconds, clock = time.monotonic() - clock, time.monotonic()
      done = curve[-1].tokens if curve else 0
      curve.append(
        Progress(
          step=step,
          tokens=done + tokens_since,
          train_loss=float(np.mean(losses)),
          held_out_loss=evaluated,
          tokens_per_second=tokens_since / seconds,
          seconds_left=seconds / len(losses) * (config.num_steps - step),
        )
      )
      report(curve[-1])
      _save(manager, step, state, curve, workdir)
      tokens_since, losses = 0, []
  return nnx.merge(graph, state['params']), curve


def _copy_embedding(teacher: Module, model: Module) -> None:
  theirs, ours = map(_embedding, (teacher, model))
  if theirs.shape == ours.shape:
    ours[...] = theirs[...].astype(ours.dtype)


def _embedding(module: Module) -> nnx.Param:
  return (
    module.wte.embedding
    if isinstance(module, GPT2)
    else (module.embed_tokens.embedding)
  )


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
  write_curve(workdir / 'loss_curve.json', curve)


def write_curve(path: pathlib.Path, curve: list[Progress]) -> None:
  """Writes a loss curve as JSON, all of it or nothing."""
  record = [dataclasses.asdict(progress) for progress in curve]
  partial = path.with_suffix('.partial')
  partial.write_text(json.dumps(record, indent=1) + '\n')
  partial.rename(path)


def _restore(manager, state) -> tuple[Any, list[Progress]]:
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


FAMILIES = ('gpt2', 'llama', 'mixtral')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The part of a model's shape that does not depend on the tokenizer.

  Attributes:
    family: one of `FAMILIES`.
    width: of the residual stream.
    num_layers: transformer blocks.
    num_heads: query heads.
    num_positions: the longest context.
    num_kv_heads: key and value heads; None for as many as `num_heads`.
    inner_width: of the feed-forward layer, or of an expert; None for the
      default of the family.
    num_experts: of a mixtral.
    experts_per_token: likewise.
  """

  width: int
  num_layers: int
  num_heads: int
  num_positions: int
  family: str = 'gpt2'
  num_kv_heads: int | None = None
  inner_width: int | None = None
  num_experts: int = 8
  experts_per_token: int = 2

  def config(self, vocab_size: int) -> Config:
    """The whole shape; embeddings are tied.

    Raises:
      ValueError: a number does not fit the family or the others.
    """
    common: dict[str, Any] = {
      'vocab_size': vocab_size,
      'num_positions': self.num_positions,
      'width': self.width,
      'num_layers': self.num_layers,
      'num_heads': self.num_heads,
      'tie_embeddings': True,
    }
    if self.family == 'gpt2':
      if self.num_kv_heads not in (None, self.num_heads):
        raise ValueError(
          f'--kv_heads={self.num_kv_heads}: a gpt2 has as many as --heads'
        )
      return GPT2Config(**common, inner_width=self.inner_width)
    if self.num_heads < 1 or self.width % (2 * self.num_heads):
      raise ValueError(
        f'--heads={self.num_heads} must divide --width={self.width} into heads'
        ' of even width'
      )
    common |= {
      'num_kv_heads': self.num_kv_heads or self.num_heads,
      'head_width': self.width // self.num_heads,
      # Three matrices of it have as many weights as the two of a GPT-2.
      'inner_width': self.inner_width or 8 * self.width // 3,
    }
    if self.family == 'llama':
      return LlamaConfig(**common)
    if self.family != 'mixtral':
      raise ValueError(
        f'--family={self.family} is not known; choose from {FAMILIES}'
      )
    return MixtralConfig(
      **common,
      num_experts=self.num_experts,
      experts_per_token=self.experts_per_token,
    )


def _tokenizer(folder, corpus, workdir, *, vocab_size, context):
  """Loads the tokenizer asked for, or trains one, once per workdir."""
  own = workdir / 'tokenizer'
  if folder is None and not own.exists():
    print(f'training a tokenizer of {vocab_size} tokens')
    texts = corpus.texts(held_out=False)
    trained = train_tokenizer(texts, vocab_size=vocab_size, context=context)
    partial = workdir / 'tokenizer.partial'
    trained.save_pretrained(partial)
    partial.rename(own)
  return transformers.AutoTokenizer.from_pretrained(
    hub.locate(folder) if folder else own
  )


def _within(phases, shape):
  """The phases, with no window longer than the context."""
  longest = shape.num_positions
  return tuple((part, min(length, longest)) for part, length in phases)


def _tokens(corpus, tokenizer, workdir, *, held_out) -> np.ndarray:
  """The tokens of one split, kept in the workdir for the next resume."""
  path = workdir / ('held_out_tokens.npy' if held_out else 'train_tokens.npy')
  if not path.exists():
    tokens = corpus.tokens(tokenizer, held_out=held_out)
    partial = path.with_suffix('.partial.npy')
    np.save(partial, tokens)
    partial.rename(path)
  tokens = np.load(path)
  print(f'{"held-out" if held_out else "training"} split: {len(tokens)} tokens')
  return tokens


def run(
  *,
  corpus: Corpus,
  config: TrainConfig,
  shape: Shape,
  vocab_size: int,
  tokenizer_folder: str | None,
  teacher_folder: str | None,
  workdir: pathlib.Path,
  output: pathlib.Path,
  output_dtype: str,
) -> None:
  """Tokenizes, trains (or resumes) and writes `output`.

  Args:
    corpus: what to learn from.
    config: how to train.
    shape: of the model.
    vocab_size: of the tokenizer, when one is trained.
    tokenizer_folder: a tokenizer to use instead of training one.
    teacher_folder: a model to distil from; its tokenizer is used.
    workdir: everything a resumed run needs.
    output: the Hugging Face folder to write at the end, with the loss curve.
    output_dtype: to store the weights in.
  """
  # What the files kept in the workdir were made of.
  write_once(
    workdir / 'data.json',
    {
      'corpus': dataclasses.asdict(corpus),
      'vocab_size': vocab_size,
      'tokenizer': teacher_folder or tokenizer_folder,
    },
  )
  tokenizer = _tokenizer(
    teacher_folder or tokenizer_folder,
    corpus,
    workdir,
    vocab_size=vocab_size,
    context=shape.num_positions,
  )
  num_tokens, teacher = len(tokenizer), None
  if teacher_folder:
    module = hub.load_module(teacher_folder)
    if module.config.num_positions < shape.num_positions:
      raise ValueError(
        f'--context={shape.num_positions} exceeds that of the teacher,'
        f' {module.config.num_positions}'
      )
    # May be padded: a draft must have the very vocabulary of its target.
    num_tokens = module.config.vocab_size
    teacher = Teacher(teacher_folder, module)
  model, curve = train(
    shape.config(num_tokens),
    dataclasses.replace(config, phases=_within(config.phases, shape)),
    _tokens(corpus, tokenizer, workdir, held_out=False),
    _tokens(corpus, tokenizer, workdir, held_out=True),
    workdir=workdir,
    teacher=teacher,
  )
  hub.save_pretrained(
    model, output, tokenizer=tokenizer, dtype=jnp.dtype(output_dtype)
  )
  write_curve(output / 'loss_curve.json', curve)
  print(f'wrote {output}')
