"""The graphs of a program for a GPU, from XLA's list of launches.

XLA joins neighbouring launches into graphs (command buffers). A graph is one
launch, and ends where something cannot be part of it. The list is indented:

    002: kWhile         [prev=001 (1) | sink]
    condition:
        003: kCustomKernel  [source | sink] loop_and_fusion grid: [1, 1, 1] ...
      body:
        000: kCommandBuffer [source | next=010 (1)]
            004: kCustomKernel [source | sink] loop_add_fusion grid: ...
        010: kCopy          [prev=000 (1) | sink] kCopy
"""

from collections import Counter
import dataclasses
import re

FILE = '*.thunk_sequence_after_thunk_passes.txt'
"""The name of the list in the folder of `xla_dump_to`."""

# A launch, or the title of a part of a loop.
_LINE = re.compile(r'( *)(?:\d+: k(\w+)|(condition|body):)')


@dataclasses.dataclass
class Graphs:
  """The launches of the host in one round of a loop."""

  number: int = 0  #: Graphs, without those of the loops within this one.
  #: Launches outside of graphs end these; loops count, too. By kind.
  breaks: Counter[str] = dataclasses.field(default_factory=Counter)
  #: The loops within this one, in the order in which they run.
  loops: list['Graphs'] = dataclasses.field(default_factory=list)


def parse(text: str) -> Graphs:
  """Reads a list of launches.

  Conditions of loops are left out. Of a conditional outside of a graph, the
  launches of all branches count.

  Raises:
    ValueError: the text has no launches.
  """
  outermost, is_condition = Graphs(), False
  # Each line around has its indentation, its launches, and whether these are in
  # a graph.
  around = [(-1, outermost, False)]
  for match in filter(None, map(_LINE.match, text.splitlines())):
    indentation, kind, title = match.groups()
    if title:
      is_condition = title == 'condition'
    elif not is_condition:
      while around[-1][0] >= len(indentation):
        around.pop()
      _, graphs, in_graph = around[-1]
      if kind == 'CommandBuffer':
        graphs.number += 1
        around.append((len(indentation), graphs, True))
        continue
      if not in_graph:
        graphs.breaks[kind] += 1
      if kind == 'While':
        graphs.loops.append(Graphs())
        around.append((len(indentation), graphs.loops[-1], in_graph))
  if not (outermost.number or outermost.breaks):
    raise ValueError(
      'not a list of launches: no line begins as 001: kCopy does'
    )
  return outermost
