"""What an open tablet keeps in memory: mirrors of what is stored, and counters.

Open `state.py` first; it holds all the others. `lock_mirror.py` and `notify_index.py` mirror locks
and notifications, so that a read finds the locks in its way, and a worker its work, without a
search on disk. `recent_writes.py` bounds how far back a prewrite has to look, `last_change.py` a
read. `held_cells.py` keeps others from cells whose commit is on its way. `timestamp_guard.py`
refuses timestamps that no oracle has handed out, and `load_fences.py` keeps bulk loads and calls
apart.

A mirror changes only after the batch that changed the disk is durable; the other order would show
readers what a crash takes back.
"""
