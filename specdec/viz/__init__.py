"""Pictures of decodes: SVG and HTML with no further needs, and charts.

    from specdec import viz

    viz.tree(trace, 3)      # in a notebook: shown; else a string of SVG
    viz.report(trace)       # a whole page, to be stepped through

Nothing here is imported by the rest of the library.
"""

from specdec.viz.charts import accepted_lengths
from specdec.viz.charts import survival
from specdec.viz.mask_picture import mask
from specdec.viz.report_page import report
from specdec.viz.text_picture import text
from specdec.viz.timeline_picture import timeline
from specdec.viz.tree_picture import tree

__all__ = (
  'accepted_lengths',
  'mask',
  'report',
  'survival',
  'text',
  'timeline',
  'tree',
)
