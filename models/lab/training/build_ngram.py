"""From a draft and a corpus to an n-gram table, for `scripts/build_ngram.py`.

A drafter for the draft should predict what the draft predicts, so the n-grams
are counted in text sampled from the draft, at a high temperature, which shows
more of its probable alternatives (Spector and Ré 2023, arXiv 2308.04623,
section 3.2: a trigram model of 120 million tokens sampled at temperature 1.5).
"""

import dataclasses
import functools
import pathlib

import jax
import numpy as np
import tqdm

import specdec
from specdec.models.checkpoints import hub
from specdec.models.lab.training import corpus as corpus_lib
from specdec.models.lab.training import kept
from specdec.models.text import choice as choice_lib
from specdec.models.text import pair as pair_lib
from specdec.models.text import plan as plan_lib
from specdec.models.text import sources as sources_lib
from specdec.ngram import katz
from specdec.ngram import table as table_lib

_TEXTS_PER_SHARD = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
  """Settings of sampling from the draft: whole shards of 256 texts.

  The compile time grows with the batch size, so a CPU prefers small batches.
  """

  num_tokens: int  # Rounded up to whole shards; 0 samples nothing.
  length: int = 256  # Tokens per text.
  batch_size: int = 16  # Texts sampled at once, a divisor of 256.
  temperature: float = 1.5
  top_k: int | None = None
  seed: int = 0

  def __post_init__(self):
    if _TEXTS_PER_SHARD % self.batch_size:
      raise ValueError(
        f'--batch_size must divide {_TEXTS_PER_SHARD}, got {self.batch_size}'
      )

  @property
  def shard_tokens(self) -> int:
    return self.length * _TEXTS_PER_SHARD

  @property
  def num_shards(self) -> int:
    return -(-self.num_tokens // self.shard_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
  """Size of the table."""

  order: int = 3  # n, from 1 to 5.
  num_continuations: int = 8  # K, next tokens kept per context.
  min_count: int = 2  # Contexts with fewer occurrences are dropped.


def _start_token(pair: pair_lib.Pair, draft: str) -> int:
  """The token that precedes every text: the BOS token, else an EOS token."""
  vocab_size = pair.target.spec.vocab_size
  for token in (pair.tokenizer.bos_token_id, *pair.eos_ids):
    if isinstance(token, int) and 0 <= token < vocab_size:
      return token
  raise ValueError(
    f'--draft={draft} has a tokenizer without a BOS or EOS token to start from'
  )


def _sample_shard(
  pair: pair_lib.Pair, samples: Samples, start: int, shard: int
) -> np.ndarray:
  """A shard `[tokens]`: of every text the start token, its tokens, and -1.

  Each text is a function of the seed and its number alone.
  """
  key = jax.random.key(samples.seed)
  sampling = specdec.Sampling(
    temperature=samples.temperature, top_k=samples.top_k
  )
  numbers = shard * _TEXTS_PER_SHARD + np.arange(_TEXTS_PER_SHARD)
  texts: list[list[int]] = []
  for batch in numbers.reshape(-1, samples.batch_size):
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, batch)
    # Without EOS ids the draft begins another text after the end of a text, as
    # in its training data.
    sampled = specdec.generate(
      pair.target,
      keys,
      [[start]] * len(batch),
      max_new_tokens=samples.length,
      sampling=sampling,
    )
    texts += [[start, *text, -1] for text in sampled.tokens]
  small = pair.target.spec.vocab_size <= 1 << 15
  return np.array(texts, np.int16 if small else np.int32).ravel()


def _sample(
  pair: pair_lib.Pair,
  draft: dict[str, str],
  samples: Samples,
  workdir: pathlib.Path,
) -> list[pathlib.Path]:
  """Samples the shards that are not in the workdir yet; returns all paths."""
  longest = pair.target.spec.max_positions - 1
  if samples.length > longest:
    raise ValueError(
      f'--sample_length={samples.length} exceeds the {longest} tokens that'
      f' --draft={draft["name"]} can add to a start token; lower it'
    )
  start = _start_token(pair, draft['name'])
  record = dataclasses.asdict(samples) | {'draft': draft}
  del record['num_tokens']  # The first shards of a longer run are equal.
  kept.write_once(workdir / 'samples.json', record)
  paths = [
    workdir / f'samples-{shard:06d}.npy' for shard in range(samples.num_shards)
  ]
  for shard, path in enumerate(tqdm.tqdm(paths, 'sampling', unit='shard')):
    make = functools.partial(_sample_shard, pair, samples, start, shard)
    kept.array(path, make)
  return paths


def build(
  *,
  draft: str,
  corpus: corpus_lib.Corpus | None,
  samples: Samples,
  table: TableConfig,
  workdir: pathlib.Path,
  output: pathlib.Path,
) -> None:
  """Samples (or resumes), tokenizes, counts, estimates and writes `output`.

  The file depends on the arguments, the weights and the dtype of the draft on
  this platform alone, even if the run was killed and resumed. `draft` is
  `demo`, a folder or a hub id, with a tokenizer. The training split of a corpus
  is counted too. `workdir` keeps the tokens. For the file see
  `specdec.ngram.table`.

  Raises:
    ValueError: there is nothing to count, or an argument is not usable; the
      message names the flag.
  """
  if corpus is None and not samples.num_tokens:
    raise ValueError('nothing to count; give --num_tokens or --corpus')
  choice = choice_lib.ModelChoice(hub.draft_name(draft), None)
  opened = sources_lib.open_sources(choice)
  checkpoint, tokenizer = opened.target, opened.tokenizer
  described = {
    'name': draft,
    'model_blake2b': plan_lib.model_digest(checkpoint),
  }
  vocabulary = pair_lib.vocabulary_digest(tokenizer)
  shards, sources = [], {}
  if corpus is not None:
    record = dataclasses.asdict(corpus)
    kept.write_once(workdir / 'corpus.json', record | {'tokenizer': vocabulary})
    path = workdir / 'corpus.npy'
    tokens = kept.array(
      path, functools.partial(corpus.tokens, tokenizer, held_out=False)
    )
    shards.append(path)
    sources['corpus'] = record | {'tokens': len(tokens)}
  if samples.num_tokens:
    pair = pair_lib.load_pair(choice)
    shards += _sample(pair, described, samples, workdir)
    sources['samples'] = dataclasses.asdict(samples) | {
      'tokens': samples.num_shards * samples.shard_tokens
    }
  counts = katz.count_ngrams(
    shards,
    order=table.order,
    vocab_size=checkpoint.config.vocab_size,
    min_count=table.min_count,
  )
  model = katz.estimate(counts)
  result = katz.build_table(model, table.num_continuations)
  provenance = {
    'specdec': specdec.__version__,
    'draft': described,
    'tokenizer_blake2b': vocabulary,
    'sources': sources,
    'table': dataclasses.asdict(table),
    'discounts': model.discounts,
  }
  table_lib.save_table(output, result, provenance)
  size = output.stat().st_size / 1e6
  print(f'wrote {output}: {result.num_contexts} contexts, {size:.1f} MB')
