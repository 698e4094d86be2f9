"""Python's garbage collector, told what a tablet server is like.

Nearly everything here dies by its reference count, while the lock mirrors and indexes live long
and grow large. Looking through all of it after every 700 new objects, which is the default, cost
5 to 10 % of the whole server's CPU time.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 20_000
"""Between two looks at what is new: about five batches of a hundred mutations."""
YOUNG_COLLECTIONS = 50
"""Between two looks at what survived the first, and again between two at all the rest."""


def collect_seldom() -> None:
    """Call once everything is imported: what exists now is never looked at again."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, YOUNG_COLLECTIONS)
