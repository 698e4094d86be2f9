"""Settings of the library for its process: garbage collector, event loop, and the modes of
files."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
from importlib import import_module
from pathlib import Path

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

    By default, everything in flight is scanned after every 700 new objects, and nothing is found
    there: the library leaves no reference cycles behind. That is up to a quarter of what a small
    transaction costs the client.

    Call it once, when what lives long was built: modules, connections, caches. These are excluded
    from collection for good. It concerns the whole process, so reference cycles of your own program
    are freed later, too. `gc.unfreeze()` and `gc.set_threshold(700, 10, 10)` undo it.

    >>> percolator.tune_garbage_collector()
    """
    gc.collect()  # what is garbage already must not be excluded
    gc.freeze()
    gc.set_threshold(new_objects, young_collections, middle_collections)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop, if that is installed, or of asyncio: for the loops that the library and its
    services make themselves. Programs with asyncio choose their own.

    docs/performance.md says what it gains. uvloop's time has whole milliseconds, and stands still
    while the loop waits: what other threads measure, or what is shorter, needs the machine's clock.
    """
    try:
        uvloop = import_module("uvloop")
    except ImportError:
        return asyncio.new_event_loop()
    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


PRIVATE_FILE_MODE = 0o600
PRIVATE_DIRECTORY_MODE = 0o700
"""Files and directories for their owner only, whatever the umask of the user."""
_GROUP = stat.S_IRWXG
_OTHERS = stat.S_IRWXO


def private_opener(path: str, flags: int) -> int:
    """For `open(..., opener=private_opener)`. A file that is already there keeps its mode."""
    return os.open(path, flags, PRIVATE_FILE_MODE)


def make_private(directory: Path) -> bool:
    """Closes a directory that others can read, as `mkdir` makes it by default. Returns whether it
    was open. Raises `OSError`, for instance if it belongs to another user."""
    mode, closed = _modes(directory)
    if mode == closed:
        return False
    directory.chmod(closed)
    return True


def umask_below(directory: Path) -> int:
    """The umask for what is made in a directory: whoever may read the directory, once it is closed,
    may read that. Nobody but the owner may write to it."""
    _, closed = _modes(directory)
    return ~closed & (_GROUP | _OTHERS) | stat.S_IWGRP | stat.S_IWOTH


def _modes(directory: Path) -> tuple[int, int]:
    """The mode of a directory, and the one that it should have.

    Others lose their access if they may read but not write: so it is made by default. The group
    loses its own, too, unless somebody must have chosen it: it is not the group of this process, or
    new files inherit it. All other directories are as somebody wanted them.
    """
    found = directory.stat()
    mode = stat.S_IMODE(found.st_mode)
    if not mode & _OTHERS or mode & stat.S_IWOTH:
        return mode, mode
    has_chosen_group = mode & stat.S_ISGID or found.st_gid != os.getegid()
    return mode, mode & ~(_OTHERS if has_chosen_group else _GROUP | _OTHERS)
