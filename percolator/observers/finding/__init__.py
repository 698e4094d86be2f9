"""Finding work: which cells have changed that an observer has not answered yet.

`percolator/observers/port.py` says what workers ask of an engine. Open `scanner.py` first: it makes
a worker's passes. `admission.py` locks and queues what they find; `row_locks.py` keeps workers out
of each other's way.

    tablets    tablet_notifications.py; tablet_pass.py visits them, each from a random row,
               tablet_search.py asks them for what waits, and notification_watch.py hears of new
               work as soon as it is there
    rows       intent_notifications.py follows what transactions have announced

All of it is hints. Two workers that find the same change do no harm: only one run commits.
"""
