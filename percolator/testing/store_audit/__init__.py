"""The structural rules of a store at rest, one family per module.

Open `audit.py` first: it applies all of them to the cells of a store (`stored_cells.py`) and to the
history of those who wrote it. `stored_tables.py` reads the cells of a running cluster.
`invariants.py` lists the rules by name.

An audit runs when nothing else does: a transaction under way would look like a violation.
"""
