"""Pictures of decodes: SVG and HTML with no further needs, and charts.

    from specdec import tracing as viz

    viz.tree(trace, 3)      # in a notebook: shown; else a string of SVG
    viz.report(trace)       # a whole page, to be stepped through

Nothing here is imported by the rest of the library.
"""

from specdec.tracing.charts import accepted_lengths
from specdec.tracing.charts import survival
from specdec.tracing.mask_picture import mask
from specdec.tracing.report_page import report
from specdec.tracing.text_picture import text
from specdec.tracing.timeline_picture import timeline
from specdec.tracing.tree_picture import tree

__all__ = (
  'accepted_lengths',
  'mask',
  'report',
  'survival',
  'text',
  'timeline',
  'tree',
)
