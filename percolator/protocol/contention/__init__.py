"""Contention: when transactions that have lost at a cell try again.

Open `hot_cells.py` first: those of one client that lose at a cell take turns there, and `baton.py`
is what one that commits hands to the next. `rivals.py` spreads out those that lose to other
clients. `nested_calls.py` finds calls that must not stand in line: one that waits for them does.

Nothing here decides whether a transaction commits: a mistake costs time.
"""
