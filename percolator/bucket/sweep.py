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
- The end of a sealed log outlasts all that it names, since it is never deleted. If the map has
  forgotten its tablet, it keeps only its own tablet's checkpoint, which may be gone. Otherwise,
  what a dropped tablet began with stays for ever, and no sweep succeeds any more.
- Files are deleted only while the master still leads, and only if an earlier sweep of the same term
  has found them as well, so long ago as the grace period. No rule needs that: it leaves time to
  notice a mistake.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
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


class Unnamed(NamedTuple):
    """A file or checkpoint that no log names."""

    key: str
    why_never: str
    """Why no log ever will; empty if one may."""


class Plan(NamedTuple):
    """The outcome of a sweep now, apart from the grace period."""

    unnamed: tuple[Unnamed, ...]
    cleared: tuple[str, ...]
    """Folders of tablets that were given up, whose logs lose all entries that nobody needs."""


class _Found(NamedTuple):
    """Everything that decides, as it was read."""

    files: dict[str, list[str]]
    """Keys of files and checkpoints, by the folder that they are in."""
    ends: dict[str, Entry]
    """The last entry of each log."""
    given_up: frozenset[str]
    """Folders of logs that count no more: sealed, or about to be."""
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
        await self._seal(given_up)
        found = await self._look(tablets, given_up, are_sealed=True)
        await still_leads()
        now = self._clock.monotonic_seconds()
        dead = {one.key for one in self._unnamed(found) if one.why_never}
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

    async def plan(self, tablets: Collection[int], given_up: Collection[int]) -> Plan:
        """The sweep of now, of which nothing is done: nothing is written either."""
        found = await self._look(tablets, given_up, are_sealed=False)
        return Plan(tuple(self._unnamed(found)), tuple(sorted(found.given_up)))

    async def _seal(self, given_up: Collection[int]) -> None:
        async def seal(folder: str) -> None:
            log = self._log(folder)
            end = await log.end()
            # Each seal waits for a lease: one that is there is not waited for again.
            if end is not None and end.kind is not Kind.SEAL:
                await log.seal()

        await self._each(seal, map(tablet_folder, given_up))

    async def _look(
        self, tablets: Collection[int], given_up: Collection[int], *, are_sealed: bool
    ) -> _Found:
        """`are_sealed`: logs of tablets that were given up are sealed, or else count as if."""
        files = await self._listed()
        retired = {tablet_folder(tablet_id) for tablet_id in given_up}
        folders = {*files, *retired, *map(tablet_folder, tablets)}
        ends: dict[str, Entry] = {}

        async def read(folder: str) -> None:
            end = await self._log(folder).end()
            if end is not None:
                ends[folder] = end

        await self._each(read, folders)
        known = {*retired, *map(tablet_folder, tablets)}
        sealed = {folder for folder, end in ends.items() if end.kind is Kind.SEAL}
        forgotten = sealed - known
        over = retired & (sealed if are_sealed else ends.keys())
        # A log that counts and needs another one's entries names all that this one needs itself.
        needed = {
            part.folder
            for folder, end in ends.items()
            if folder not in over | forgotten
            for part in end.base.segments
        }
        no_more = frozenset(over - needed)
        bases = {
            end.base.checkpoint
            for folder, end in ends.items()
            if folder not in no_more and folder not in forgotten
        }
        # The map may be older than such a log, and its tablet have been split since.
        perhaps = {
            end.base.checkpoint
            for folder in forgotten
            if (end := ends[folder]).base.checkpoint.startswith(f"{folder}/")
        }
        named = bases | perhaps

        async def name(checkpoint: str) -> None:
            if checkpoint not in bases and await self._bucket.head(checkpoint) is None:
                return
            stored = await read_checkpoint(self._bucket, checkpoint)
            named.update(file.key for file in stored.files.values())

        await self._each(name, named - {""})
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
    def _unnamed(found: _Found) -> Iterator[Unnamed]:
        for folder, keys in found.files.items():
            end = found.ends.get(folder)
            for key in keys:
                file = FileKey.parse(key)
                if file is not None and key not in found.named:
                    yield Unnamed(key, _why_never(file, end, folder in found.given_up))

    def _log(self, folder: str) -> TabletLog:
        return TabletLog(self._bucket, self._random, folder, _EPOCH_AFTER_ALL)

    @staticmethod
    async def _each(do: Callable[[str], Awaitable[None]], keys: Iterable[str]) -> None:
        at_once = asyncio.Semaphore(_AT_ONCE)

        async def one(key: str) -> None:
            async with at_once:
                await do(key)

        await all_done(one(key) for key in keys)


def _why_never(file: FileKey, end: Entry | None, is_given_up: bool) -> str:
    """Why no log will name a file that none names now; empty if one may."""
    if end is None:
        return ""
    if end.kind is Kind.SEAL or is_given_up:
        return "nothing more is published in a log that is sealed"
    if file.writer != end.writer:
        return "a former owner has uploaded it, and only the present one can publish"
    if file.number < end.base.number:
        return "its owner has published a checkpoint that it has made later"
    return ""
