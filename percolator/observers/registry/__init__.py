"""Which observers a table has: registering them, backfilling for them, removing them.

Open `registration.py` first: once it returns, every change of a watched column notifies the
observer. `backfilling.py` notifies a new observer of the cells that were there before; `removal.py`
ends one, with its notifications. `loading.py` imports observers by name. `observer_change.py`
applies a change to a table, in the master.

A table has one list of observers, and the master alone changes it.
"""
