"""Rules of verification, and what a step emits.

`accept` has what all rules share, and the default; the other rules are in
`rejection`.
"""
