"""Traces of decodes, and pictures of them in SVG, HTML and matplotlib.

from specdec import tracing

tracing.tree(trace, 3)      # SVG; a notebook shows it
tracing.report(trace)       # an HTML page that steps through the blocks
"""

from specdec.tracing.charts import accepted_lengths
from specdec.tracing.report_page import report
from specdec.tracing.report_page import text
from specdec.tracing.svg import mask
from specdec.tracing.svg import tree
from specdec.tracing.trace import Block

__all__ = ('Block', 'accepted_lengths', 'mask', 'report', 'text', 'tree')
