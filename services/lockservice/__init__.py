"""The lock service: sessions and advisory locks. All of it is hints.

Nothing that must be correct depends on what this service says: a live owner that is declared dead
merely aborts, and two workers that hold one lock merely do the same work twice.

Open `handler.py` first: one method for each call. `sessions.py` and `advisory_locks.py` decide;
`deadlines.py` finds what has run out; `limits.py` checks requests before anything changes.
"""
