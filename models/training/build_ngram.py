"""From a draft and a corpus to an n-gram table: what build_ngram.py calls.

A drafter for the draft imitates the draft, so the n-grams are counted in text
that the draft made up; flattened by a high temperature, which shows more of its
likely alternatives (Spector and Ré 2023, arXiv 2308.04623, section 3.2: a
trigram model of 120 million tokens sampled at temperature 1.5).
"""

import dataclasses
import hashlib
import pathlib
from typing import Any

import jax
import numpy as np
import tqdm

from models.text.pair import load_pair
from models.text.pair import Pair
from models.text.pair import vocabulary_digest
from models.training.corpus import Corpus
from models.training.run_record import write_once
import specdec
from specdec.ngram.counting import count_ngrams
from specdec.ngram.katz import build_table
from specdec.ngram.katz import estimate
from specdec.ngram.table import save_table

_MAX_ORDER = 5
_TEXTS_PER_SHARD = 256


@dataclasses.dataclass(frozen=True, kw_only=True)
class Samples:
  """What to sample from the draft.

  Attributes:
    num_tokens: to sample; rounded up to whole shards of 256 texts. 0 for none.
    length: tokens of one text.
    batch_size: texts sampled at once, a divisor of 256. Small ones are best on
      a CPU: what is compiled grows with the batch.
    temperature: above 0.
    top_k: keep the k likeliest tokens; None keeps all.
    seed: of the sampling.
  """

  num_tokens: int
  length: int = 256
  batch_size: int = 16
  temperature: float = 1.5
  top_k: int | None = None
  seed: int = 0

  def __post_init__(self):
    least = {'num_tokens': 0, 'length': 1, 'batch_size': 1, 'top_k': 1}
    flags = {'length': 'sample_length'}
    for name, low in least.items():
      value = getattr(self, name)
      if value is not None and value < low:
        flag = flags.get(name, name)
        raise ValueError(f'--{flag} must be at least {low}, got {value}')
    if _TEXTS_PER_SHARD % self.batch_size:
      raise ValueError(
        f'--batch_size must divide {_TEXTS_PER_SHARD}, got {self.batch_size}'
      )
    if not 0 < self.temperature < float('inf'):
      raise ValueError(
        f'--temperature must be above 0, got {self.temperature}; greedy texts'
        ' would all be the same'
      )

  @property
  def shard_tokens(self) -> int:
    """Sampled tokens of one shard."""
    return self.length * _TEXTS_PER_SHARD

  @property
  def num_shards(self) -> int:
    """How many shards there will be."""
    return -(-self.num_tokens // self.shard_tokens)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConfig:
  """The size of the table.

  Attributes:
    order: n, from 1 to 5.
    num_continuations: K, next tokens kept per context.
    min_count: contexts seen less often are left out.
  """

  order: int = 3
  num_continuations: int = 8
  min_count: int = 2

  def __post_init__(self):
    if not 1 <= self.order <= _MAX_ORDER:
      raise ValueError(
        f'--order must be between 1 and {_MAX_ORDER}, got {self.order}'
      )
    if self.num_continuations < 1:
      raise ValueError(
        f'--continuations must be at least 1, got {self.num_continuations}'
      )
    if self.min_count < 1:
      raise ValueError(f'--min_count must be at least 1, got {self.min_count}')


def _weights_digest(params: Any) -> str:
  digest = hashlib.blake2b(digest_size=16)
  for leaf in jax.tree.leaves(params):
    digest.update(np.asarray(leaf).tobytes())
  return digest.hexdigest()


def _start_token(pair: Pair, draft: str) -> int:
  """What a text begins after: the BOS token, else an EOS token."""
  vocab_size = pair.target.spec.vocab_size
  for token in (pair.tokenizer.bos_token_id, *pair.eos_ids):
    if isinstance(token, int) and 0 <= token < vocab_size:
      return token
  raise ValueError(
    f'--draft={draft} has a tokenizer without a BOS or EOS token to start from'
  )


def _save_tokens(path: pathlib.Path, tokens: np.ndarray) -> None:
  """Writes a shard, all of it or nothing."""
  partial = path.with_suffix('.partial.npy')
  np.save(partial, tokens)
  partial.replace(path)


def _sample_texts(
  pair: Pair, samples: Samples, start: int, numbers: np.ndarray
) -> list[list[int]]:
  """Texts by their numbers; each a function of the seed and its number."""
  key = jax.random.key(samples.seed)
  return specdec.generate(
    pair.target,
    jax.vmap(jax.random.fold_in, (None, 0))(key, numbers),
    [[start]] * len(numbers),
    max_new_tokens=samples.length,
    # No EOS ids: after the end of a text the draft begins another, as in the
    # texts it was trained on.
    sampling=specdec.Sampling(
      temperature=samples.temperature, top_k=samples.top_k
    ),
  ).tokens


def _sample_shard(
  pair: Pair, samples: Samples, start: int, shard: int
) -> np.ndarray:
  """`[tokens]`: of every text the start token, its tokens, and -1."""
  numbers = shard * _TEXTS_PER_SHARD + np.arange(_TEXTS_PER_SHARD)
  texts = [
    [start, *text, -1]
    for batch in numbers.reshape(-1, samples.batch_size)
    for text in _sample_texts(pair, samples, start, batch)
  ]
  small = pair.target.spec.vocab_size <= 1 << 15
  return np.array(texts, np.int16 if small else np.int32).ravel()


def _sample(
  pair: Pair, draft: dict[str, str], samples: Samples, workdir: pathlib.Path
) -> list[pathlib.Path]:
  """Samples the shards that are not in the workdir yet; returns all."""
  longest = pair.target.spec.max_positions - 1
  if samples.length > longest:
    raise ValueError(
      f'--sample_length={samples.length} exceeds the {longest} tokens that'
      f' --draft={draft["name"]} can add to a start token; lower it'
    )
  start = _start_token(pair, draft['name'])
  record = dataclasses.asdict(samples) | {'draft': draft}
  del record['num_tokens']  # A longer run has the same first shards.
  write_once(workdir / 'samples.json', record)
  paths = [
    workdir / f'samples-{shard:06d}.npy' for shard in range(samples.num_shards)
  ]
  missing = [shard for shard, path in enumerate(paths) if not path.exists()]
  with _progress('sampling', len(missing) * samples.shard_tokens) as bar:
    for shard in missing:
      tokens = _sample_shard(pair, samples, start, shard)
      _save_tokens(paths[shard], tokens)
      bar.update(samples.shard_tokens)
  return paths


def _tokenize(
  corpus: Corpus, pair: Pair, draft: dict[str, str], workdir: pathlib.Path
) -> pathlib.Path:
  """The training split as a file, kept in the workdir for the next run."""
  record = dataclasses.asdict(corpus) | {'tokenizer': draft['name']}
  write_once(workdir / 'corpus.json', record)
  path = workdir / 'corpus.npy'
  if not path.exists():
    _save_tokens(path, corpus.tokens(pair.tokenizer, held_out=False))
  return path


def _progress(what: str, total: int) -> tqdm.tqdm:
  return tqdm.tqdm(total=total, desc=what, unit='token', unit_scale=True)


def build(
  *,
  draft: str,
  corpus: Corpus | None,
  samples: Samples,
  table: TableConfig,
  workdir: pathlib.Path,
  output: pathlib.Path,
) -> None:
  """Samples (or resumes), tokenizes, counts, estimates and writes `output`.

  The file depends on the arguments and the weights alone, however often the
  run was killed.

  Args:
    draft: `demo`, a folder or a hub id, with its tokenizer.
    corpus: whose training split is counted too; None for none.
    samples: what to sample from the draft.
    table: the size of the table.
    workdir: keeps the tokens.
    output: the file, see `specdec.ngram.table`.

  Raises:
    ValueError: nothing to count, or an argument that cannot be used; says which
      flag.
  """
  if corpus is None and not samples.num_tokens:
    raise ValueError('nothing to count; give --num_tokens or --corpus')
  pair = load_pair('demo-draft' if draft == 'demo' else draft, None)
  described = {
    'name': draft,
    'weights_blake2b': _weights_digest(pair.target.params),
  }
  shards, sources = [], {}
  if corpus is not None:
    shards.append(_tokenize(corpus, pair, described, workdir))
    sources['corpus'] = dataclasses.asdict(corpus) | {
      'tokens': len(np.load(shards[0], mmap_mode='r'))
    }
  if samples.num_tokens:
    shards += _sample(pair, described, samples, workdir)
    sources['samples'] = dataclasses.asdict(samples) | {
      'tokens': samples.num_shards * samples.shard_tokens
    }
  with _progress('counting', 0) as bar:

    def show(done, total):
      bar.total = total
      bar.update(done - bar.n)

    counts = count_ngrams(
      shards,
      order=table.order,
      vocab_size=pair.target.spec.vocab_size,
      min_count=table.min_count,
      progress=show,
    )
  model = estimate(counts)
  result = build_table(model, table.num_continuations)
  provenance = {
    'specdec': specdec.__version__,
    'draft': described,
    'tokenizer_blake2b': vocabulary_digest(pair.tokenizer),
    'sources': sources,
    'table': dataclasses.asdict(table),
    'discounts': [dataclasses.asdict(order) for order in model.discounts],
  }
  save_table(output, result, provenance)
  size = output.stat().st_size / 1e6
  print(f'wrote {output}: {result.num_contexts} contexts, {size:.1f} MB')
