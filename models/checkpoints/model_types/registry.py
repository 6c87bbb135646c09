"""All model types."""

from specdec.models.checkpoints.model_types import gemma_rows
from specdec.models.checkpoints.model_types import llama_rows
from specdec.models.checkpoints.model_types import mixture_rows
from specdec.models.checkpoints.model_types import model_type
from specdec.models.checkpoints.model_types import recurrent_rows

ROWS: tuple[model_type.ModelType, ...] = (
  *llama_rows.ROWS,
  *gemma_rows.ROWS,
  *mixture_rows.ROWS,
  *recurrent_rows.ROWS,
)
MODEL_TYPES = {row.name: row for row in ROWS}
# Models that have more than a language model.
WHOLES = {row.whole: row for row in ROWS if row.whole}
# By the names that GGUF files have.
ARCHITECTURES = {row.gguf.name: (row, row.gguf) for row in ROWS if row.gguf}
