"""Tables and tablets as they change: made, assigned, split, moved, balanced, dropped.

Open `assignment.py` first: it gives tablets without a live owner to another server, under a new
epoch. `server_watch.py` says which servers are alive; `tables.py` makes and drops tables;
`tablet_changes.py` splits and moves; `balance.py` decides what should move; `closing.py` closes a
tablet before it is split or moved; `removal.py` deletes what dropped tables leave.

A change is in the map before any server hears of it, and an epoch is used once.
"""
