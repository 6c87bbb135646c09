"""Traces of decodes, and pictures of them in SVG and HTML.

trace = tracing.record(decoding)[0]
tracing.tree(trace, 3)      # SVG; a notebook shows it
tracing.report(trace)       # an HTML page that steps through the blocks
"""

from specdec.tracing.report_page import report
from specdec.tracing.report_page import text
from specdec.tracing.svg import mask
from specdec.tracing.svg import tree
from specdec.tracing.trace import Block
from specdec.tracing.trace import record

__all__ = ('Block', 'mask', 'record', 'report', 'text', 'tree')
