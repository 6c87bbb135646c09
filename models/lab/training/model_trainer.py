"""Training of a small language model, for `scripts/train.py`."""

from collections.abc import Iterator
import dataclasses
import pathlib
from typing import Any
from typing import Literal

from flax import nnx
import jax.numpy as jnp
import numpy as np
import transformers

from specdec.models.checkpoints import families
from specdec.models.checkpoints import hub
from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import kept
from specdec.models.lab.training import loss as loss_lib
from specdec.models.lab.training import tokenizer as tokenizer_lib
from specdec.models.lab.training import trainer
from specdec.models.nn import adapter
from specdec.models.nn import gpt2 as nn_gpt2
from specdec.models.nn import llama as nn_llama
from specdec.models.text import fields
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib

_CONFIGS: dict[str, Any] = {
  'gpt2': nn_gpt2.GPT2Config,
  'llama': nn_llama.LlamaConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelTraining(trainer.Training):
  """Settings of the training of a language model.

  Every phase is `(fraction of the steps, window length)`. Short windows come
  first, because attention is most of the cost of long windows, and the last
  phase is enough to learn far positions. With a teacher the model learns its
  distribution instead of the next token (see `models/lab/training/loss`), has
  its vocabulary, which may be padded, and starts with its token embedding if
  that has the same shape.

  Attributes:
    phases: windows longer than context or batch are cut.
    eval_tokens: per held-out loss, at most, in windows of the current length.
  """

  family: Literal['gpt2', 'llama'] = fields.described(
    'gpt2', 'family of the model'
  )
  width: int = fields.described(320, 'width of the residual stream')
  num_layers: int = fields.described(6, 'number of layers', flag='layers')
  num_heads: int = fields.described(5, 'attention heads', flag='heads')
  num_positions: int = fields.described(
    1024, 'longest context, in tokens', flag='context'
  )
  num_kv_heads: int | None = fields.described(
    None, 'heads of keys and values; default: as --heads', flag='kv_heads'
  )
  inner_width: int | None = fields.described(
    None, 'width of the feed-forward layer; default: as the family'
  )
  vocab_size: int = fields.described(4096, 'vocabulary of a new tokenizer')
  tokenizer: str | None = fields.described(
    None, 'folder of a tokenizer to use; default: train one'
  )
  teacher: str | None = fields.described(
    None, 'model folder to distil from (implies its tokenizer)'
  )
  phases: tuple[tuple[float, int], ...] = (
    (0.65, 128),
    (0.20, 256),
    (0.10, 512),
    (0.05, 1024),
  )
  eval_tokens: int = 32768

  def __post_init__(self):
    self.config(self.vocab_size)  # It raises ValueError.

  def config(self, vocab_size: int) -> adapter.Config:
    """The shape of the model, with tied embeddings.

    Raises:
      ValueError: a number does not fit the family or the other numbers.
    """
    is_gpt2, heads = self.family == 'gpt2', self.num_heads
    kv_heads = self.num_kv_heads or heads
    if heads % kv_heads or (is_gpt2 and kv_heads != heads):
      raise ValueError(
        f'--kv_heads={kv_heads} must {"equal" if is_gpt2 else "divide"}'
        f' --heads={heads} with --family={self.family}'
      )
    if self.width % (heads if is_gpt2 else 2 * heads):
      raise ValueError(
        f'--heads={heads} must divide --width={self.width} into heads of'
        f' {"equal" if is_gpt2 else "even"} width'
      )
    values = dataclasses.asdict(self) | {
      'vocab_size': vocab_size,
      'num_kv_heads': kv_heads,
      'head_width': self.width // heads,
      # Three matrices of a Llama have as many weights as the two of a GPT-2.
      'inner_width': self.inner_width
      or (None if is_gpt2 else 8 * self.width // 3),
      'tie_embeddings': True,
    }
    config = _CONFIGS[self.family]
    names = [field.name for field in dataclasses.fields(config)]
    return config(**{name: values[name] for name in names if name in values})

  def window_length(self, step: int) -> int:
    total = sum(fraction for fraction, _ in self.phases)
    end = 0.0
    for fraction, length in self.phases:  # noqa: B007
      end += fraction / total * self.num_steps
      if step < round(end):
        break
    return min(length, self.num_positions, self.batch_tokens)

  def prepare(
    self, claim: trainer.Claim, report: trainer.Report
  ) -> trainer.Trainee:
    given, teacher, facts = self.teacher or self.tokenizer, None, {}
    tokenizer = None
    if given is not None:
      checkpoint = hub.locate(given)
      tokenizer = checkpoint.tokenizer
      if tokenizer is None:
        raise ValueError(f'{given} has no tokenizer')
      facts['vocabulary_blake2b'] = pair_lib.vocabulary_digest(tokenizer)
    if self.teacher is not None:
      facts['teacher_blake2b'] = plan_lib.model_digest(checkpoint)
      teacher = hub.read_module(checkpoint)
      if teacher.config.num_positions < self.num_positions:
        raise ValueError(
          f'--context={self.num_positions} exceeds the context of the teacher,'
          f' {teacher.config.num_positions}'
        )
    workdir = claim(**facts)
    tokenizer = tokenizer or self.own_tokenizer(workdir, report)
    splits = self.corpus.splits(workdir, tokenizer)
    report('{} training, {} held-out tokens'.format(*map(len, splits)))
    num_tokens = teacher.config.vocab_size if teacher else len(tokenizer)
    model = _initial_model(self.config(num_tokens), self.seed, teacher)
    return self.trainee(model, *splits, teacher=teacher, tokenizer=tokenizer)

  def own_tokenizer(
    self, workdir: pathlib.Path, report: trainer.Report
  ) -> transformers.PreTrainedTokenizerBase:
    """Trains a tokenizer, once per workdir."""
    path = workdir / 'tokenizer'
    if not path.exists():
      report(f'training a tokenizer of {self.vocab_size} tokens')
      trained = tokenizer_lib.train_tokenizer(
        self.corpus.texts(held_out=False),
        vocab_size=self.vocab_size,
        context=self.num_positions,
      )
      kept.save(path, trained.save_pretrained)
    tokenizer = hub.locate(path).tokenizer
    assert tokenizer is not None
    return tokenizer

  def trainee(
    self,
    model: adapter.Module,
    train_tokens: np.ndarray,
    held_out_tokens: np.ndarray,
    *,
    teacher: adapter.Module | None,
    tokenizer: transformers.PreTrainedTokenizerBase,
  ) -> trainer.Trainee:
    """The model, its losses and its batches; tokens are `[tokens]` int32."""
    graph, variables = nnx.split(model)
    dtype = jnp.dtype(self.dtype)
    loss = loss_lib.make_loss(graph, dtype=dtype, teacher=teacher)
    next_token = loss_lib.make_loss(graph, dtype=dtype)

    def batch(step: int) -> np.ndarray:
      return corpus_lib.training_batch(
        train_tokens,
        step=step,
        seed=self.seed,
        batch_size=self.batch_size(step),
        length=self.window_length(step),
      )

    def held_out(step: int) -> Iterator[np.ndarray]:
      size, length = self.batch_size(step - 1), self.window_length(step - 1)
      return corpus_lib.held_out_batches(
        held_out_tokens,
        batch_size=size,
        length=length,
        limit=max(1, self.eval_tokens // (size * length)),
      )

    def save(params: Any, folder: pathlib.Path, dtype: str) -> None:
      module = nnx.merge(graph, params)
      hub.save_pretrained(
        module, folder, tokenizer=tokenizer, dtype=jnp.dtype(dtype)
      )

    return trainer.Trainee(
      params=nnx.to_pure_dict(variables),
      loss=loss,
      held_out_loss=next_token,
      batch=batch,
      held_out=held_out,
      save=save,
    )


def _initial_model(
  config: adapter.Config, seed: int, teacher: adapter.Module | None
) -> adapter.Module:
  """Draws the weights; copies the teacher's token embedding if it fits."""
  model = families.family_of(config).module(config, rngs=nnx.Rngs(seed))
  if teacher is not None:
    theirs, ours = (
      getattr(module, module.config.embedding).embedding
      for module in (teacher, model)
    )
    if theirs.shape == ours.shape:
      ours[...] = theirs[...].astype(ours.dtype)
  return model
