"""From flags to a trained Hugging Face folder: what scripts/train.py calls."""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp
import numpy as np
import transformers

from models import hub
from models.family import Config
from models.gpt2 import GPT2Config
from models.llama import LlamaConfig
from models.mixtral import MixtralConfig
from models.run_record import write_once
from models.training.corpus import Corpus
from models.training.loss import Teacher
from models.training.tokenizer import train_tokenizer
from models.training.trainer import train
from models.training.trainer import TrainConfig
from models.training.trainer import write_curve

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
