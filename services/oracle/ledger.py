"""The durable mark and the exclusive right to it, in a directory of its own.

    STORE/oracle/mark     the mark, replaced atomically
    STORE/oracle/lock     locked while an oracle lives; its content names the last one that served

Invariants:
- `write` returns only when the mark is durable: file and directory entry are fsynced.
- A mark that cannot be read, or is missing where one was, is never replaced by a guess.
- One process at a time: the lock is the operating system's, and ends with the process.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Self

from percolator.errors import (
    InvariantViolation,
    StoreFault,
    StoreUnusable,
    UsageError,
    WrongCluster,
)
from services.chassis.files import FileLock, Files, FileStatus, replace_durably
from services.oracle.mark import Mark

DIRECTORY = "oracle"

_MARK = "mark"
_LOCK = "lock"
_MARK_BYTES_MAX = 64 * 1024
"""Far more than any mark has: longer ones are not even looked at."""
_HOLDER_BYTES_MAX = 256


class Ledger:
    """The mark of one store. Made by `open`; `close` lets the next one in."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        *,
        holder: str,
        lock: FileLock,
        locked: FileStatus,
        mark: Mark,
    ) -> None:
        self._files = files
        self._mark_path = directory / _MARK
        self._lock_path = directory / _LOCK
        self._holder = holder
        self._is_signed = False
        self._lock = lock
        self._locked = locked
        self._mark = mark
        self._writing: asyncio.Future[None] | None = None

    @classmethod
    async def open(cls, files: Files, store: Path, *, holder: str, cluster_id: str) -> Self:
        """Takes the store for this process. `holder` tells a rival who has it."""
        directory = store / DIRECTORY
        await _make_directory(files, store)
        await _make_directory(files, directory)
        lock_path = directory / _LOCK
        try:
            lock = await files.lock(lock_path)
        except BlockingIOError:
            found = await _read_holder(files, directory)
            raise UsageError(
                f"{directory} is in use by another oracle, {found or 'which is just starting'}"
            ) from None
        try:
            mark = await _read_mark(files, directory, cluster_id)
            locked = await files.stat(lock_path)
            known = mark or Mark(0, cluster_id)
            ledger = cls(files, directory, holder=holder, lock=lock, locked=locked, mark=known)
            if mark is not None:
                await ledger._sign()
        except BaseException:
            lock.release()
            raise
        return ledger

    @property
    def mark_milliseconds(self) -> int:
        """Above the physical part of every timestamp that was ever handed out. 0 at first."""
        return self._mark.milliseconds

    @property
    def fsyncs(self) -> int:
        """Waits for the disk since the process started, failed ones too."""
        return self._files.fsyncs

    async def write(self, milliseconds: int) -> None:
        """Returns when the mark is durable.

        An `OSError` means that a restart may find this mark or the one before: a higher one, to
        be written next, is right in both cases.
        """
        if milliseconds < self._mark.milliseconds:
            raise InvariantViolation(
                f"the mark would go back from {self._mark.milliseconds} to {milliseconds} ms"
            )
        # Not torn by a cancellation: a rename still on its way while the next oracle has the lock
        # could put a lower mark in the place of a higher one.
        self._writing = asyncio.ensure_future(
            self._replace(Mark(milliseconds, self._mark.cluster_id))
        )
        await asyncio.shield(self._writing)

    def is_still_ours(self) -> bool:
        """Whether the directory is the one that was locked.

        Whoever removes or replaces it under a living oracle frees its name, and the next oracle
        locks another file: then only this look keeps the first one from answering.
        """
        try:
            found = self._files.stat_now(self._lock_path)
        except OSError:
            # What cannot be looked at is not known to be ours.
            return False
        return (found.inode, found.device) == (self._locked.inode, self._locked.device)

    async def close(self) -> None:
        """Lets the next oracle in, once a write that is on its way has ended."""
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
        self._lock.release()

    async def _replace(self, mark: Mark) -> None:
        await replace_durably(self._files, self._mark_path, mark.encode())
        self._mark = mark
        if not self._is_signed:
            await self._sign()

    async def _sign(self) -> None:
        """Names the holder, once a mark is durable: a name without a mark tells of a loss."""
        async with await self._files.create(self._lock_path, exclusive=False) as file:
            await file.append(self._holder.encode()[:_HOLDER_BYTES_MAX])
        self._is_signed = True


async def _make_directory(files: Files, path: Path) -> None:
    try:
        await files.make_directory(path)
    except FileExistsError:
        return
    # Without this a power cut could take the directory, and the mark in it, away.
    await files.fsync_directory(path.parent)


async def _read_mark(files: Files, directory: Path, cluster_id: str) -> Mark | None:
    """None where no oracle has ever served."""
    path = directory / _MARK
    try:
        mark = Mark.decode(await files.read(path, bytes_max=_MARK_BYTES_MAX), str(path))
    except FileNotFoundError:
        holder = await _read_holder(files, directory)
        if not holder:
            return None
        raise StoreUnusable(
            f"{path} is missing, though an oracle ({holder}) has served from it; "
            "see docs/formats.md",
            fault=StoreFault.DAMAGED,
        ) from None
    if cluster_id and mark.cluster_id and mark.cluster_id != cluster_id:
        raise WrongCluster(
            f"{path} belongs to cluster {mark.cluster_id}, not to {cluster_id}",
            expected=cluster_id,
            found=mark.cluster_id,
        )
    return Mark(mark.milliseconds, mark.cluster_id or cluster_id)


async def _read_holder(files: Files, directory: Path) -> str:
    data = await files.read(directory / _LOCK, bytes_max=_HOLDER_BYTES_MAX)
    return data.decode(errors="replace")
