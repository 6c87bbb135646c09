"""Rules of verification, and what a step emits.

`accept` has what all rules share; the rules are in `match` (the default) and
`rejection`.
"""
