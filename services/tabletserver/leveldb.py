"""LevelDB as a Python module: plyvel, or its fork plyvel_next from Python 3.13 on.

plyvel has no wheels for Python 3.13 and newer. Both are the same library around the same LevelDB,
so a store can be opened by either, in turn.
"""

from __future__ import annotations

import sys
from typing import Protocol

from percolator.world import StorageBatch

if sys.version_info >= (3, 13):
    from plyvel_next import DB, CorruptionError, Error
else:
    from plyvel import DB, CorruptionError, Error

__all__ = ["DB", "CorruptionError", "Error", "WriteBatch"]


class WriteBatch(StorageBatch, Protocol):
    """Changes to a `DB`, which are applied all or not at all."""

    def write(self) -> None: ...
