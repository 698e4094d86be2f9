"""Tunes Python's garbage collector for programs with thousands of transactions in flight.

Everything in flight is scanned after every 700 new objects, by default, and nothing is found there:
the library leaves no reference cycles behind. That is up to a quarter of what a small transaction
costs the client.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 50_000
"""Between two collections of new objects."""
YOUNG_COLLECTIONS = 20
"""Young collections for each collection of their survivors."""
MIDDLE_COLLECTIONS = 50
"""Collections of those for each full one."""


def tune_garbage_collector(
    new_objects: int = NEW_OBJECTS,
    young_collections: int = YOUNG_COLLECTIONS,
    middle_collections: int = MIDDLE_COLLECTIONS,
) -> None:
    """Makes Python's garbage collector run rarely, for thousands of transactions in flight.

    Call it once, when what lives long was built: modules, connections, caches. These are excluded
    from collection for good. It concerns the whole process, so reference cycles of your own program
    are freed later, too. `gc.unfreeze()` and `gc.set_threshold(700, 10, 10)` undo it.

    >>> percolator.tune_garbage_collector()
    """
    gc.collect()  # what is garbage already must not be excluded
    gc.freeze()
    gc.set_threshold(new_objects, young_collections, middle_collections)
