"""Tunes Python's garbage collector for a service that handles many rows.

Nearly all objects here are freed by their reference count, while those that are indexed, queued or
in flight live long and are numerous. Scanning them after every 700 new objects, which is the
default, cost a tablet server 5 to 10 % of its whole CPU time.
"""

from __future__ import annotations

import gc

from percolator.garbage_collector import tune_garbage_collector

NEW_OBJECTS = 20_000
"""Between two collections of new objects: about five batches of a hundred mutations."""
YOUNG_COLLECTIONS = 50
"""Young collections for each collection of their survivors; also those for each full one."""


def skip_imports() -> None:
    """Excludes what was imported from collection. It stays, so nothing looks through it before."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, YOUNG_COLLECTIONS)


def collect_seldom() -> None:
    """Excludes all present objects from collection; call it when everything is built."""
    tune_garbage_collector(NEW_OBJECTS, YOUNG_COLLECTIONS, YOUNG_COLLECTIONS)
