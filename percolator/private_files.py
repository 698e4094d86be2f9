"""Files and directories for their owner only, whatever the umask of the user."""

from __future__ import annotations

import os
import stat
from pathlib import Path

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700
_GROUP = stat.S_IRWXG
_OTHERS = stat.S_IRWXO


def opener(path: str, flags: int) -> int:
    """For `open(..., opener=opener)`. A file that is already there keeps its mode."""
    return os.open(path, flags, FILE_MODE)


def tighten(directory: Path) -> bool:
    """Closes a directory that earlier releases have made for everybody. Returns whether it was
    open. Raises `OSError`, for instance if it belongs to another user."""
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
