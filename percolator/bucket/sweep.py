"""The sweep of a bucket: deletes objects of tablets that nothing names, and nothing ever will.

The leading master sweeps. An owner deletes the entries of its log by itself (`TabletLog.trim`);
what is left are files and checkpoints that were compacted away, uploaded in vain, or of tablets
that were dropped or split. Rules, each with the failure that it prevents:

- Names are listed first, and logs are read afterwards. Otherwise a file that is uploaded and
  published between the two looks like one that no log names.
- A list may lag, so it never says which logs there are: all tablets that the master's map names are
  read, also parents whose children were not served yet, and all others that the list shows.
  Otherwise a tablet whose log a list lacks loses its files, and those of its own parent.
- A file stays if the base of any log names it, also that of a parent which was split: its children
  begin with it. Only a log that is sealed, and of a tablet that the map has given up, counts no
  more; and it does as long as another log needs its entries.
- A file that no log names stays if it may still be published: only the present owner of a log can
  publish, and only what it has uploaded since it made its last checkpoint. That is in its key, and
  no clock takes part: an owner that was paused for a day may publish what it uploaded before.
- One log or checkpoint that cannot be read ends the sweep before anything is deleted. Otherwise
  whatever only that one names is lost.
- Files are deleted only while the master still leads, and only if an earlier sweep of the same term
  has found them as well, so long ago as the grace period. No rule needs that: it leaves time to
  notice a mistake.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import aclosing
from typing import NamedTuple

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import TABLETS, FileKey, all_done, read_checkpoint, tablet_folder
from percolator.bucket.log import Entry, Kind, TabletLog
from percolator.world import Clock, Random

GRACE_SECONDS = 3600.0
_EPOCH_AFTER_ALL = (1 << 63) - 1
"""No owner has a later one."""
_AT_ONCE = 8
_FOLDER = re.compile(rf"({TABLETS}/([0-9]+))/.*")


class Swept(NamedTuple):
    """The result of one sweep."""

    deleted: int
    """Objects that were deleted."""
    waiting: int
    """Objects that nothing names, and that are deleted after the grace period."""
    gone: frozenset[int]
    """Tablets that were given up, of which nothing is left but the end of a log."""


class _Found(NamedTuple):
    """Everything that decides, as it was read."""

    files: dict[str, list[str]]
    """Keys of files and checkpoints, by the folder that they are in."""
    ends: dict[str, Entry]
    """The last entry of each log."""
    given_up: frozenset[str]
    """Folders of sealed logs that count no more."""
    named: frozenset[str]
    """Keys that the bases of logs name."""


class Sweep:
    """The sweeps of one term of a master. Belongs to one event loop."""

    def __init__(
        self,
        bucket: Bucket,
        clock: Clock,
        random: Random,
        *,
        grace_seconds: float = GRACE_SECONDS,
    ) -> None:
        self._bucket = bucket
        self._clock = clock
        self._random = random
        self._grace_seconds = grace_seconds
        self._seen: dict[str, float] = {}
        """When objects that can be deleted were first found."""

    async def run(
        self,
        tablets: Collection[int],
        given_up: Collection[int],
        still_leads: Callable[[], Awaitable[None]],
    ) -> Swept:
        """Sweeps once. `tablets` are those that the map names, `given_up` those that it needs no
        more: their logs are sealed. `still_leads` raises if another master may lead."""
        found = await self._look(tablets, given_up)
        await still_leads()
        now = self._clock.monotonic_seconds()
        dead = {key for folder in found.files for key in self._dead(found, folder)}
        self._seen = {key: self._seen.get(key, now) for key in dead}
        due = [key for key, since in self._seen.items() if now - since >= self._grace_seconds]
        await self._each(self._bucket.delete, due)
        for folder in found.given_up:
            await self._log(folder).clear()
        gone = frozenset(
            tablet_id
            for tablet_id in given_up
            if (folder := tablet_folder(tablet_id)) in found.given_up or folder not in found.ends
            if set(due).issuperset(found.files.get(folder, ()))
        )
        for key in due:
            del self._seen[key]
        return Swept(len(due), len(self._seen), gone)

    async def _look(self, tablets: Collection[int], given_up: Collection[int]) -> _Found:
        files = await self._listed()
        retired = {tablet_folder(tablet_id) for tablet_id in given_up}
        for folder in retired:
            if await self._log(folder).end() is not None:
                await self._log(folder).seal()
        folders = {*files, *retired, *map(tablet_folder, tablets)}
        ends: dict[str, Entry] = {}

        async def read(folder: str) -> None:
            end = await self._log(folder).end()
            if end is not None:
                ends[folder] = end

        await self._each(read, folders)
        needed = {part.folder for end in ends.values() for part in end.base.segments}
        # A sealed log that is needed names what it needs itself: its base has the same segments.
        no_more = frozenset(
            folder
            for folder in retired - needed
            if folder in ends and ends[folder].kind is Kind.SEAL
        )
        bases = {end.base.checkpoint for folder, end in ends.items() if folder not in no_more}
        named = set(bases)

        async def name(checkpoint: str) -> None:
            stored = await read_checkpoint(self._bucket, checkpoint)
            named.update(file.key for file in stored.files.values())

        await self._each(name, bases - {""})
        return _Found(files, ends, no_more, frozenset(named))

    async def _listed(self) -> dict[str, list[str]]:
        """Files and checkpoints by folder; a folder with a log alone has none."""
        files: dict[str, list[str]] = {}
        async with aclosing(self._bucket.all(TABLETS)) as listed:
            async for key, _ in listed:
                match = _FOLDER.fullmatch(key)
                if match is not None:
                    of_folder = files.setdefault(match[1], [])
                    if FileKey.parse(key) is not None:
                        of_folder.append(key)
        return files

    @staticmethod
    def _dead(found: _Found, folder: str) -> Iterable[str]:
        """Keys of the folder that no log names, and none ever will."""
        end = found.ends.get(folder)
        for key in found.files[folder]:
            file = FileKey.parse(key)
            if file is None or key in found.named or end is None:
                continue
            is_over = end.kind is Kind.SEAL or file.writer != end.writer
            # Its owner has published another checkpoint since, which it made later.
            if is_over or file.number < end.base.number:
                yield key

    def _log(self, folder: str) -> TabletLog:
        return TabletLog(self._bucket, self._random, folder, _EPOCH_AFTER_ALL)

    @staticmethod
    async def _each(do: Callable[[str], Awaitable[None]], keys: Iterable[str]) -> None:
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> None:
            async with at_once:
                await do(key)

        await all_done(one(key) for key in keys)
