"""How the target checks a tree: `verdict` scores it and cuts what is emitted.

Each of the other modules is one rule for how far down the tree to go: `match`
(the default), `rejection` and `block`.
"""
