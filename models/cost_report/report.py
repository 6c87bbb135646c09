"""All studies of one setting, as figures and as text."""

from collections.abc import Mapping
from typing import Any

from models.cost_report import paper
from models.cost_report import studies
from models.cost_report import tables
from specdec.cost_model import Deployment
from specdec.cost_model import MODELS

_MIXTURES = ('mixtral-8x7b', 'qwen3-30b-a3b', 'deepseek-v3')


def run(
  deployment: Deployment, *, acceptance: float, context: int
) -> dict[str, Any]:
  """The figures of all studies, for JSON.

  Args:
    deployment: models and machine of (a), (b) and (c); the machine of (d),
      where mixtures are left out whose dtype it does not have.
    acceptance: of a drafted token.
    context: of a row, where it does not vary.
  """
  known = deployment.hardware.flops_per_second
  mixtures = [MODELS[name] for name in _MIXTURES if MODELS[name].dtype in known]
  greedy = {name: step for name, (step, _) in paper.COUNTED['greedy'].items()}
  return {
    'setting': {
      'target': deployment.target.name,
      'draft': deployment.draft.name if deployment.draft else None,
      'hardware': deployment.hardware.name,
      'acceptance': acceptance,
    },
    'options': studies.options(deployment.target),
    'by_batch_size': studies.by_batch_size(
      deployment, acceptance, context=context
    ),
    'by_context': studies.by_context(deployment, acceptance),
    'expert_share': studies.expert_share(mixtures),
    'by_experts': studies.by_experts(
      mixtures, deployment, acceptance, context=context
    ),
    'paper': paper.compare(),
    'roofs': studies.roofs(paper.DEPLOYMENT, greedy, context=paper.CONTEXT),
  }


def to_markdown(figures: Mapping[str, Any]) -> str:
  """All tables."""
  setting = figures['setting']
  by_context = figures['by_context']
  sections = {
    f'(a) Two ways to 10 tokens, {setting["target"]}': tables.options(
      figures['options']
    ),
    '(b) Speedup over batch sizes': tables.by_batch_size(
      figures['by_batch_size']
    ),
    f'(c) Speedup over contexts, {by_context["num_draft_tokens"]} drafted': (
      tables.speedups(by_context, 'context')
    ),
    '(d) Mixtures of experts': tables.by_experts(figures['by_experts']),
    '(e) The paper': tables.paper(figures['paper']),
    '(f) Under the roofs': tables.roofs(figures['roofs']),
  }
  return '\n\n'.join(
    f'## {title}\n\n{table}' for title, table in sections.items()
  )
