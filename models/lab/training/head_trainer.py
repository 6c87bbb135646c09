"""Training of an EAGLE-3 head for a target, for `scripts/train.py --head`."""

from collections.abc import Callable
import dataclasses
import pathlib
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from models.checkpoints import checkpoint as checkpoint_lib
from models.checkpoints import heads
from models.checkpoints import hub
from models.lab.training import corpus as corpus_lib
from models.lab.training import head_features
from models.lab.training import head_loss
from models.lab.training import run_record
from models.lab.training import training_loop
from models.nn import adapter
from models.nn import dtypes
from models.nn import eagle
from models.nn import rope as rope_lib
from models.nn.cpu import build
from specdec import cache as cache_lib
from specdec import model as model_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadTraining:
  """Settings of the training of a head.

  Attributes:
    target: the name of the target, see `models.load`.
    dtype: that the target computes in.
    vocabulary: D, tokens that the head may draft, the most frequent ones, with
      an output matrix of its own; None: all, with the matrix of the target.
    num_heads: attention heads; None: as the target.
    num_kv_heads: heads of keys and values; None: as the target.
    inner_width: of the feed-forward layer; None: as the target.
    depth: S, steps of training-time test.
    length: tokens of a window.
    feature_bytes: the most bytes of features on disk.
    num_steps: optimizer steps.
    batch_tokens: tokens of a step.
    learning_rate: the peak.
    warmup_steps: until the peak.
    eval_every: steps between held-out figures.
    eval_windows: windows of held-out text, at most.
    seed: of weights and batches.
    train_dtype: of the matrix products of the head.
  """

  target: str = 'demo'
  dtype: str = dtypes.AUTO
  vocabulary: int | None = None
  num_heads: int | None = None
  num_kv_heads: int | None = None
  inner_width: int | None = None
  depth: int = 4
  length: int = 256
  feature_bytes: int = 10 << 30
  num_steps: int = 2400
  batch_tokens: int = 4096
  learning_rate: float = 2e-3
  warmup_steps: int = 50
  eval_every: int = 50
  eval_windows: int = 64
  seed: int = 0
  train_dtype: str = 'bfloat16'

  def __post_init__(self):
    for name in ('depth', 'length', 'num_steps', 'batch_tokens'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name} must be positive, got {getattr(self, name)}')
    if self.batch_tokens < self.length:
      raise ValueError(
        f'--batch_tokens={self.batch_tokens} is less than a window,'
        f' --context={self.length}'
      )


def _rotation(target: adapter.Config) -> rope_lib.Rope:
  """The rotation of a head: that of the last layer of the target with one."""
  of_layers = getattr(target, 'of_layers', lambda field: ())
  ropes = of_layers('rope')
  return next((rope for rope in reversed(ropes) if rope), rope_lib.Rope())


def head_config(
  settings: HeadTraining, target: adapter.Config
) -> eagle.HeadConfig:
  """The shape of a head for a target.

  Raises:
    ValueError: a number does not fit the others.
  """
  num_heads = settings.num_heads or target.num_heads
  kv_heads = settings.num_kv_heads or (
    num_heads if settings.num_heads else target.num_kv_heads
  )
  if target.width % (2 * num_heads):
    raise ValueError(
      f'--heads={num_heads} must divide the width {target.width} of the target'
      ' into heads of even width'
    )
  return eagle.HeadConfig(
    vocab_size=target.vocab_size,
    num_positions=target.num_positions,
    width=target.width,
    num_layers=1,
    num_heads=num_heads,
    num_kv_heads=kv_heads,
    head_width=target.width // num_heads,
    inner_width=settings.inner_width
    or getattr(target, 'inner_width', None)
    or 8 * target.width // 3,
    rope=_rotation(target),
    target_width=target.width,
    reads=heads.default_reads(target.num_layers),
  )


def _most_frequent(choices: np.ndarray, size: int, number: int) -> np.ndarray:
  """The ids of the tokens that the target chooses most often, ascending."""
  counts = np.bincount(choices.ravel(), minlength=size)
  return np.sort(np.argsort(-counts, kind='stable')[:number])


@dataclasses.dataclass(frozen=True)
class _Run:
  """What all parts of a run share.

  Attributes:
    settings: of the run.
    config: the shape of the head.
    target: keeps the states that are learned from.
    embedding: of the target.
    lm_head: the output matrix of the target.
    workdir: of the run.
    report: called with what is printed.
  """

  settings: HeadTraining
  config: eagle.HeadConfig
  target: model_lib.LanguageModel
  embedding: Any
  lm_head: Any
  workdir: pathlib.Path
  report: Callable[[Any], None]

  def features(
    self, tokens: dict[str, np.ndarray]
  ) -> tuple[head_features.Features, head_features.Features]:
    """Features of training and held-out windows; the size is stated before."""
    settings = self.settings
    each = (settings.length + 1) * head_features.bytes_per_token(
      len(self.config.reads), self.config.width
    )
    room = settings.feature_bytes // each - settings.eval_windows
    number = min((len(tokens['train']) - 1) // settings.length, max(room, 0))
    self.report(
      f'features: {number} training windows of {settings.length} tokens take'
      f' {number * each / 1e9:.2f} GB in {self.workdir}, of'
      f' {settings.feature_bytes / 1e9:.2f} GB that they may'
    )
    most = {'train': number, 'held_out': settings.eval_windows}
    train, held_out = (
      head_features.compute(
        self.target,
        self.lm_head,
        head_features.windows(tokens[split], settings.length, most[split]),
        self.config.reads,
        self.workdir / 'features' / split,
        width=self.config.width,
        batch_size=max(1, 1024 // settings.length),
        report=self.report,
      )
      for split in ('train', 'held_out')
    )
    return train, held_out

  def _initial(
    self, ids: np.ndarray | None
  ) -> tuple[nnx.GraphDef, Any, jax.Array]:
    """The module's graph and parameters, and the target's output matrix."""
    graph, variables = nnx.split(
      eagle.Head(self.config, rngs=nnx.Rngs(self.settings.seed))
    )
    params = nnx.to_pure_dict(variables)
    # The output matrix is made for states that the target has normalised.
    norm = self.target.params.get('norm') or self.target.params['ln_f']
    params['norm']['scale'] = jnp.asarray(norm['scale'])
    # Of matrices that are packed for kernels no gradients can be computed.
    rows = np.arange(self.config.vocab_size) if ids is None else ids
    of_target = jnp.asarray(heads.rows_of(self.lm_head, rows))
    if ids is not None:
      params['lm_head'] = of_target  # To begin with.
    return graph, params, of_target.astype(self.settings.train_dtype)

  def fit(
    self,
    ids: np.ndarray | None,
    train_set: head_features.Features,
    held_out: head_features.Features,
  ) -> tuple[eagle.Head, np.ndarray | None, list[training_loop.Progress]]:
    """The trained module, its output matrix if it has one, and the curve."""
    settings = self.settings
    graph, params, of_target = self._initial(ids)
    loss = head_loss.make_loss(
      graph,
      self.config,
      embedding=self.embedding,
      lm_head=of_target,
      ids=ids,
      num_steps=settings.depth,
      dtype=jnp.dtype(settings.train_dtype),
    )
    init, train_step = training_loop.make_train_step(
      jax.tree_util.Partial(lambda loss, *inputs: loss(*inputs)[0], loss),
      learning_rate=settings.learning_rate,
      warmup_steps=settings.warmup_steps,
      num_steps=settings.num_steps,
    )
    size = settings.batch_tokens // settings.length
    judge = jax.jit(lambda loss, *inputs: loss(*inputs))

    def evaluate(params: Any, step: int) -> tuple[float, tuple[float, ...]]:
      del step
      found = [
        jax.device_get(judge(loss, params, batch))
        for batch in held_out.batches_of(size)
      ]
      losses, accepted = zip(*found, strict=True)
      return float(np.mean(losses)), tuple(np.mean(accepted, axis=0).tolist())

    loop = training_loop.Loop(
      num_steps=settings.num_steps,
      eval_every=settings.eval_every,
      train_step=train_step,
      batch=lambda step: train_set.random_batch(step, size, settings.seed),
      num_tokens=lambda batch: batch.tokens[:, 1:].size,
      evaluate=evaluate,
    )
    state = {'params': params, 'optimizer': init(params)}
    params, curve = loop.run(state, self.workdir, self.report)
    own_head = params.pop('lm_head', None)
    return nnx.merge(graph, params), own_head, curve


def train(
  settings: HeadTraining,
  corpus: corpus_lib.Corpus,
  *,
  workdir: pathlib.Path,
  output: pathlib.Path,
  output_dtype: str,
  report: Callable[[Any], None] = print,
) -> None:
  """Computes features, trains (or resumes) and writes the folder of a head.

  `workdir` holds all that a resumed run needs: `run.json`, tokens, features,
  checkpoints and the loss curve.

  Raises:
    ValueError: `workdir` holds another run, or settings do not fit the target.
    FloatingPointError: the loss is not a number; the message names the step.
  """
  checkpoint = hub.locate(settings.target)
  config = head_config(settings, checkpoint.config)
  record = {
    'head': dataclasses.asdict(settings),
    'corpus': dataclasses.asdict(corpus),
  }
  run_record.write_once(workdir / 'run.json', record)
  tokenizer = checkpoint.tokenizer
  if tokenizer is None:
    raise ValueError(f'--target={settings.target} has no tokenizer')
  tokens = {
    split: corpus.kept_tokens(
      workdir / f'{split}_tokens.npy', tokenizer, held_out=split == 'held_out'
    )
    for split in ('train', 'held_out')
  }
  module = hub.read_module(
    checkpoint,
    dtype=checkpoint_lib.resolve_dtype(settings.dtype, checkpoint),
    packed=build.is_available(),
  )
  hidden = (*config.reads, cache_lib.AFTER_NORM)
  target = adapter.as_model(module, hidden=hidden)
  matrices = heads.matrices_of(target, checkpoint.config)
  run = _Run(settings, config, target, *matrices, workdir, report)
  train_set, held_out = run.features(tokens)
  ids = None
  if settings.vocabulary is not None:
    ids = _most_frequent(
      train_set.choices, config.vocab_size, settings.vocabulary
    )
  trained, own_head, curve = run.fit(ids, train_set, held_out)
  heads.save(trained, output, lm_head=own_head, ids=ids, dtype=output_dtype)
  curve_file = output / 'loss_curve.json'
  run_record.save_json(curve_file, list(map(dataclasses.asdict, curve)))
  report(f'wrote {output}')
