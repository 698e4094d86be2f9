"""A mark from before oracles led through the coordinator: `STORE/oracle/mark`.

It is taken over once. Afterwards it is called `mark.moved`: a release from before then finds its
mark missing, and refuses to start instead of handing timestamps out a second time.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from percolator.errors import StoreFault, StoreUnusable, UsageError
from services.chassis.files import Files
from services.oracle.mark import Mark

_MARK = "mark"
_MOVED = "mark.moved"
_LOCK = "lock"
_MARK_BYTES_MAX = 64 * 1024
"""Far more than any mark has: longer ones are not even looked at."""


@asynccontextmanager
async def adopted(files: Files, store: Path) -> AsyncIterator[Mark | None]:
    """The former mark, or None where there is none. It is moved away at the end, if nothing fails
    in between: what a crash interrupts is done again."""
    directory = store / "oracle"
    path = directory / _MARK
    try:
        names = await files.list(directory)
    except FileNotFoundError:
        names = []
    if _MARK not in names:
        if _LOCK in names and _MOVED not in names:
            await _refuse_if_served(files, directory)
        yield None
        return
    try:
        lock = await files.lock(directory / _LOCK)
    except BlockingIOError:
        raise UsageError(
            f"{directory} is in use by an oracle of an older release; stop that one first"
        ) from None
    try:
        yield Mark.decode(await files.read(path, bytes_max=_MARK_BYTES_MAX), str(path))
        await files.rename(path, directory / _MOVED)
        await files.fsync_directory(directory)
    finally:
        lock.release()


async def _refuse_if_served(files: Files, directory: Path) -> None:
    """The lock names the last oracle that served, once its mark was durable."""
    holder = await files.read(directory / _LOCK, bytes_max=_MARK_BYTES_MAX)
    if holder:
        raise StoreUnusable(
            f"{directory / _MARK} is missing, though an oracle of an older release "
            f"({holder.decode(errors='replace')}) has served from it; see docs/formats.md",
            fault=StoreFault.DAMAGED,
        )
