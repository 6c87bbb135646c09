"""From flags to a trained Hugging Face folder: what scripts/train.py calls."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import transformers

from models import hub
from models.gpt2 import GPT2Config
from models.run_record import write_once
from models.training.corpus import Corpus
from models.training.loss import Teacher
from models.training.tokenizer import train_tokenizer
from models.training.trainer import train
from models.training.trainer import TrainConfig
from models.training.trainer import write_curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The part of a `GPT2Config` that does not depend on the tokenizer."""

  width: int
  num_layers: int
  num_heads: int
  num_positions: int


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
    GPT2Config(vocab_size=num_tokens, **dataclasses.asdict(shape)),
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
