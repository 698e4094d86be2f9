"""Data that tablets have left in the cluster's store, as far as the master looks after it.

DirectoryTablets  directories below the store root
BucketTablets     logs and files in a bucket, which the sweep deletes
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Protocol

import structlog

from percolator.bucket.checkpoint import TABLETS, tablet_folder
from percolator.bucket.sweep import Sweep
from percolator.errors import PercolatorError, StoreUnusable
from percolator.services.chassis.cluster_store import BucketClusterStore
from percolator.services.chassis.epoch_directory import remove_tree
from percolator.services.chassis.files import Files, fault_of
from percolator.services.chassis.records import unusable
from percolator.world import World

GivenUp = tuple[int, int]
"""A tablet that the map needs no more: its table's id, and its own."""

_log = structlog.get_logger("percolator.master")


class TabletData(Protocol):
    """The data of all tablets."""

    async def newer_than(self, next_id: int) -> str | None:
        """The place of data of a tablet with this id or a later one; None if there is none. Raises
        `StoreUnusable`."""

    async def remove(
        self,
        given_up: Sequence[GivenUp],
        tablets: Collection[int],
        still_leads: Callable[[], Awaitable[None]],
    ) -> Collection[GivenUp]:
        """Removes what is left of tablets, and returns those of which nothing is. `tablets` are
        those that the map names; `still_leads` raises if another master may lead."""


class DirectoryTablets:
    """Directories of tables, and in them of tablets, below a store root."""

    def __init__(self, files: Files, root: Path) -> None:
        self._files = files
        self._root = root
        self._kept: dict[GivenUp, str] = {}
        """Directories that could not be removed in the last round, and why."""

    async def newer_than(self, next_id: int) -> str | None:
        try:
            for name in await self._files.list(self._root):
                directory = self._root / name
                if _is_id(name, next_id) and any(map(_is_id, await self._files.list(directory))):
                    return str(directory)
        except OSError as error:
            raise StoreUnusable(
                f"cannot list the tables in {self._root}: {error}", fault=fault_of(error)
            ) from error
        return None

    async def remove(
        self,
        given_up: Sequence[GivenUp],
        tablets: Collection[int],
        still_leads: Callable[[], Awaitable[None]],
    ) -> Collection[GivenUp]:
        removed: list[GivenUp] = []
        kept: dict[GivenUp, str] = {}
        for table_id, tablet_id in given_up:
            try:
                if await self._removed(self._root / str(table_id), tablet_id):
                    removed.append((table_id, tablet_id))
            except OSError as error:
                # It may stay like this until an operator comes; all others are removed meanwhile.
                kept[table_id, tablet_id] = str(error)
        self._tell(kept)
        return removed

    def _tell(self, kept: dict[GivenUp, str]) -> None:
        """Logs each problem once, since it occurs again every second."""
        before, self._kept = self._kept, kept
        for (table_id, tablet_id), problem in kept.items():
            if before.get((table_id, tablet_id)) != problem:
                _log.warning(
                    "a directory that is no longer needed cannot be removed",
                    directory=str(self._root / str(table_id) / str(tablet_id)),
                    error=problem,
                )

    async def _removed(self, table: Path, tablet_id: int) -> bool:
        """False if a process still writes there; then the next round tries again."""
        directory = table / str(tablet_id)
        try:
            for name in await self._files.list(directory):
                await remove_tree(self._files, directory / name)
            await self._files.remove_directory(directory)
            if not await self._files.list(table):
                await self._files.remove_directory(table)
        except FileNotFoundError:
            return True
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise
            return False
        return True


def _is_id(name: str, least: int = 1) -> bool:
    """True if it names the directory of a table or tablet with at least this id."""
    return name.isdecimal() and name.isascii() and int(name) >= least


class BucketTablets:
    """Logs and files of tablets in a bucket, as a master sees them in one term."""

    def __init__(self, store: BucketClusterStore, world: World, *, sweep_seconds: float) -> None:
        """It sweeps so often: each time, it reads the end of each log."""
        self._store = store
        self._bucket = bucket = store.large
        self._clock = world.clock
        self._sweep = Sweep(bucket, world.clock, world.random)
        self._sweep_seconds = sweep_seconds
        self._swept_at = world.clock.monotonic_seconds()

    async def newer_than(self, next_id: int) -> str | None:
        try:
            found = await self._bucket.list(
                TABLETS, after=tablet_folder(next_id - 1) + "/~", limit=1
            )
        except PercolatorError as error:
            # Any other error would end the process: this master only cannot lead.
            raise unusable(error, "the bucket") from error
        return f"{self._bucket.name}: {found[0].key}" if found else None

    async def remove(
        self,
        given_up: Sequence[GivenUp],
        tablets: Collection[int],
        still_leads: Callable[[], Awaitable[None]],
    ) -> Collection[GivenUp]:
        now = self._clock.monotonic_seconds()
        if now - self._swept_at < self._sweep_seconds:
            return ()
        # Also if it fails: it would fail again, and each attempt costs calls for every tablet.
        self._swept_at = now
        swept = await self._sweep.run(
            tablets, [tablet_id for _, tablet_id in given_up], still_leads
        )
        await self._store.look_at_settings()
        if swept.deleted:
            _log.info("swept", deleted=swept.deleted, waiting=swept.waiting)
        return [one for one in given_up if one[1] in swept.gone]
