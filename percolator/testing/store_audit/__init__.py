"""The structural invariants of a store at rest, one family per module.

`percolator.testing.audit.audit` applies them all.
"""
