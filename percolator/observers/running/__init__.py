"""Running observers: one change, one transaction, and what follows from its end.

Open `run.py` first: a run is a transaction that also writes the acknowledgement of the change
(`acknowledgement.py`). `run_pool.py` runs many at a time and repeats what failed; `turns.py` says
which of them take turns; `time_limits.py` interrupts those that take too long, and `threads.py` has
the threads of blocking functions. `deletions.py` removes notifications after the commit, and
`dead_letter.py` puts aside what failed too often.

No notification may be deleted before the run that handles it has committed, or the change was put
aside as a dead letter.
"""
