"""The timestamp oracle: strictly increasing timestamps, with standbys.

Read `oracle.py` first: a window of timestamps below a durable mark, extended before it is used up.
`allocator.py` is its arithmetic, `physical_time.py` its clock, `ledger.py` and `mark.py` keep the
mark. `candidate.py` makes one process lead, and `probe.py` calls a leader that may be cut off.

Nothing here may answer without a look, after the timestamps were allocated, at whether this process
still leads.
"""
