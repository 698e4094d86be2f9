"""Keeps users who have no access to the store root from what this process makes in it."""

from __future__ import annotations

import os
from pathlib import Path

from structlog.stdlib import BoundLogger

from percolator import private_files


def limit_new_files(root: Path) -> None:
    """Sets the umask of the process: LevelDB has no other way to choose the mode of its files."""
    try:
        os.umask(private_files.umask_below(root))
    except OSError:
        os.umask(0o077)  # it is made with this, or opening it says what is wrong


def close_root(root: Path, log: BoundLogger) -> None:
    """Takes the access of others from a root that an earlier release has made, once it is known to
    be that of this cluster."""
    try:
        if private_files.tighten(root):
            log.warning("other users could read the store, and no longer can", store=str(root))
    except OSError as error:
        log.warning(
            "other users can read the store, and this process cannot change that",
            store=str(root),
            reason=str(error),
        )
