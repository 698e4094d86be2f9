"""Finding work: which cells have changed that an observer has not answered yet.

Open `scanner.py` first: a worker's passes over the notifications, each from a random row.
`notifications.py` asks tablets for what waits; `notification_watch.py` hears of new work as soon as
it is there; `row_locks.py` keeps workers out of each other's way; `survey.py` looks at everything.

All of it is hints. Two workers that find the same change do no harm: only one run commits.
"""
