"""From a corpus to the folder of a trained model, for `scripts/train.py`."""

import dataclasses
import pathlib
from typing import Any

import jax.numpy as jnp

from models.checkpoints import hub
from models.lab.training import corpus as corpus_lib
from models.lab.training import kept
from models.lab.training import loss as loss_lib
from models.lab.training import run_record
from models.lab.training import tokenizer as tokenizer_lib
from models.lab.training import trainer
from models.nn import adapter
from models.nn import gpt2 as nn_gpt2
from models.nn import llama as nn_llama
from models.nn import mixtral as mixtral_lib

FAMILIES = ('gpt2', 'llama', 'mixtral')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
  """The part of a model's shape that does not depend on the tokenizer.

  See `GPT2Config`, `LlamaConfig` and `MixtralConfig`.
  """

  width: int
  num_layers: int
  num_heads: int
  num_positions: int
  family: str = 'gpt2'  # One of `FAMILIES`.
  num_kv_heads: int | None = None  # None means `num_heads`.
  inner_width: int | None = None  # None means the default of the family.
  num_experts: int = 8
  experts_per_token: int = 2

  def config(self, vocab_size: int) -> adapter.Config:
    """The whole shape, with tied embeddings.

    Raises:
      ValueError: a number does not fit the family or the other numbers.
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
          f'--kv_heads={self.num_kv_heads} must equal --heads={self.num_heads}'
          ' with --family=gpt2'
        )
      return nn_gpt2.GPT2Config(**common, inner_width=self.inner_width)
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
      return nn_llama.LlamaConfig(**common)
    if self.family != 'mixtral':
      raise ValueError(
        f'--family={self.family} is not known; choose from {FAMILIES}'
      )
    return mixtral_lib.MixtralConfig(
      **common,
      num_experts=self.num_experts,
      experts_per_token=self.experts_per_token,
    )


def _tokenizer(folder, corpus, workdir, *, vocab_size, context):
  """Loads the tokenizer of a folder, or trains one, once per workdir."""
  # The inputs of the files that are kept in the workdir.
  record = {
    'corpus': dataclasses.asdict(corpus),
    'vocab_size': vocab_size,
    'tokenizer': folder,
  }
  run_record.write_once(workdir / 'data.json', record)
  own = workdir / 'tokenizer'
  if folder is None and not kept.is_whole(own):
    print(f'training a tokenizer of {vocab_size} tokens')
    texts = corpus.texts(held_out=False)
    trained = tokenizer_lib.train_tokenizer(
      texts, vocab_size=vocab_size, context=context
    )
    kept.save(own, trained.save_pretrained)
  found = hub.locate(folder or own).tokenizer
  if found is None:
    raise ValueError(f'--tokenizer={folder} has no tokenizer')
  return found


def _load_teacher(folder: str, num_positions: int) -> loss_lib.Teacher:
  module = hub.load_module(folder)
  if module.config.num_positions < num_positions:
    raise ValueError(
      f'--context={num_positions} exceeds the context of the teacher,'
      f' {module.config.num_positions}'
    )
  return loss_lib.Teacher(folder, module)


def run(
  *,
  corpus: corpus_lib.Corpus,
  config: trainer.TrainConfig,
  shape: Shape,
  vocab_size: int,
  tokenizer_folder: str | None,
  teacher_folder: str | None,
  workdir: pathlib.Path,
  output: pathlib.Path,
  output_dtype: str,
) -> None:
  """Tokenizes, trains (or resumes) and writes `output`.

  Windows longer than the context are cut. A tokenizer of `vocab_size` is
  trained unless a folder of one is given, or of a teacher to distil from, whose
  tokenizer is used. `workdir` holds everything that a resumed run needs, and
  `output` is a Hugging Face folder, with the loss curve.
  """
  tokenizer_folder = teacher_folder or tokenizer_folder
  context = shape.num_positions
  tokenizer = _tokenizer(
    tokenizer_folder, corpus, workdir, vocab_size=vocab_size, context=context
  )
  num_tokens, teacher = len(tokenizer), None
  if teacher_folder:
    teacher = _load_teacher(teacher_folder, context)
    # The vocabulary of the teacher may be padded; the draft gets the same.
    num_tokens = teacher.model.config.vocab_size
  train_tokens, held_out_tokens = (
    corpus.kept_tokens(
      workdir / f'{split}_tokens.npy', tokenizer, held_out=split == 'held_out'
    )
    for split in ('train', 'held_out')
  )
  print(f'{len(train_tokens)} training, {len(held_out_tokens)} held-out tokens')
  phases = tuple((part, min(length, context)) for part, length in config.phases)
  model, curve = trainer.train(
    shape.config(num_tokens),
    dataclasses.replace(config, phases=phases),
    train_tokens,
    held_out_tokens,
    workdir=workdir,
    teacher=teacher,
  )
  hub.save_pretrained(
    model, output, tokenizer=tokenizer, dtype=jnp.dtype(output_dtype)
  )
  run_record.save_json(
    output / 'loss_curve.json', list(map(dataclasses.asdict, curve))
  )
  print(f'wrote {output}')
