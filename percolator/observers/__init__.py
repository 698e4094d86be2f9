"""Observers: functions that a worker runs when a column they watch has changed.

Open `definition.py` first, then `worker.py`, which wires the rooms together:

    finding/   which changes are waiting for an observer
    running/   one run for a change, and what follows from its end
    registry/  registering observers, backfilling for them, removing them

`watched.py` is an observer as a worker knows it, and `work_queue.py` a worker's queue of `work.py`.
`context.py` is what a worker needs of a database, and `port.py` what it asks of an engine.
`waiting.py` waits until nothing is left to do; `run_time.py` says how long a function may take;
`traced.py` reads what `running/trace.py` has written.

Nothing may be concluded from a notification: it only says where to look. Only the commit of a run
answers a change.
"""
