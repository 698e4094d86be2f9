"""The lock service: sessions and advisory locks. All of it is hints.

Nothing that must be correct depends on what this service says: a live owner that is declared dead
merely aborts, and two workers that hold one lock merely do the same work twice.

`handler.py` has one method for each call, and the advisory locks; `sessions.py` decides which
sessions live, and checks requests before anything changes.
"""
