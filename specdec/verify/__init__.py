"""Rules of verification, and what a step emits.

`accept` has what all rules share; `match` (the default), `rejection` and
`traversal` are the rules; `stop_strings` finds ends of texts.
"""
