"""Observers: functions that a worker runs when a column they watch has changed.

Open `definition.py` first, then `worker.py`, which connects the rest:

    finding work   scanner.py makes a worker's passes, and locks and queues what they find in
                   work_queue.py; tablet_notifications.py and intent_notifications.py look into
                   tablets and row stores
    running        runs.py: one change, one transaction, and what follows from its end.
                   watched_cell.py says which changes were handled, time_limits.py interrupts
                   functions that take too long, dead_letters.py puts aside what failed too often
    registering    registration.py registers and removes observers, backfill.py notifies a new
                   one of older cells; observer_change.py applies the change, in the master

`context.py` is the port on which workers stand; `watched.py` is an observer as a worker knows it.
`quiet.py` waits until nothing is left to do; `trace.py` writes and reads traces of runs.

Nothing may be concluded from a notification: it only says where to look. Two workers that find one
change do no harm, since only one run commits. Only the commit of a run answers a change. No
notification may be deleted before the run that handles it has committed, or the change was put
aside as a dead letter.
"""
