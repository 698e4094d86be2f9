"""Python's garbage collector, told what a service is like that handles many rows.

Nearly everything here dies by its reference count, while what is indexed, queued or on its way
lives long and is much. Looking through all of it after every 700 new objects, which is the default,
cost a tablet server 5 to 10 % of its whole CPU time.
"""

from __future__ import annotations

import gc

NEW_OBJECTS = 20_000
"""Between two looks at what is new: about five batches of a hundred mutations."""
YOUNG_COLLECTIONS = 50
"""Between two looks at what survived the first, and again between two at all the rest."""


def collect_seldom() -> None:
    """What exists now is never looked at again. Call it when all is imported and built."""
    gc.freeze()
    gc.set_threshold(NEW_OBJECTS, YOUNG_COLLECTIONS, YOUNG_COLLECTIONS)
