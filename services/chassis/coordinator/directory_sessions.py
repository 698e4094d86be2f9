"""Sessions: one file per owner, which only the owner writes, and which changes while it lives.

A reader judges by its own clock: a session that has not changed for the grace period is silent. A
reader that has just started takes all sessions for alive.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from percolator.errors import StoreUnusable
from percolator.world import Clock
from services.chassis.coordinator import stored_value
from services.chassis.coordinator.interface import check_name
from services.chassis.lived_time import LivedTime, milliseconds_between
from services.chassis.store.files import Files

_UNFINISHED = ".new"
_FORGET_FACTOR = 20
"""A file that was silent for this many grace periods is removed."""

_log = structlog.get_logger("percolator.coordinator")


class DirectorySession:
    """A session, which rewrites its file until it is closed."""

    def __init__(
        self, files: Files, clock: Clock, path: Path, value: bytes, *, beat_seconds: float
    ) -> None:
        self._files = files
        self._clock = clock
        self._path = path
        self._unfinished = path.with_name(path.name + _UNFINISHED)
        self._value = value
        self._beat_seconds = beat_seconds
        self._counts = itertools.count(1)
        self._beating: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        await self._beat()
        self._beating = asyncio.create_task(self._keep_beating(), name=f"session {self._path.name}")

    async def close(self) -> None:
        beating, self._beating = self._beating, None
        if beating is None:
            return
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)
        try:
            await self._files.unlink(self._path)
        except OSError as error:
            # The session becomes silent instead.
            _log.info("session not removed", session=self._path.name, error=str(error))

    async def _keep_beating(self) -> None:
        while True:
            await self._clock.sleep(self._beat_seconds)
            try:
                await self._beat()
            except OSError as error:
                _log.warning("session not renewed", session=self._path.name, error=str(error))

    async def _beat(self) -> None:
        """Writes a sign of life. It is not durable: a session does not survive a power cut."""
        count = next(self._counts).to_bytes(8, "big")
        async with await self._files.create(self._unfinished, exclusive=False) as file:
            await file.append(stored_value.encode(count + self._value))
        await self._files.rename(self._unfinished, self._path)


@dataclass
class _Seen:
    content: bytes
    changed: int


class DirectorySessions:
    """What one reader knows about all sessions."""

    def __init__(
        self, files: Files, clock: Clock, directory: Path, *, grace_seconds: float
    ) -> None:
        self._files = files
        self._directory = directory
        self._time = LivedTime(clock)
        self._grace_milliseconds = round(grace_seconds * 1000)
        self._seen: dict[str, _Seen] = {}

    async def alive(self, prefix: str) -> Mapping[str, bytes]:
        """The live sessions by name, with the value that each was opened with."""
        if prefix:
            check_name("prefix", prefix)
        now = self._time.tick()
        found = await self._contents(prefix)
        self._seen = {
            name: seen
            for name, seen in self._seen.items()
            if name in found or not name.startswith(prefix)
        }
        alive = {}
        for name, content in found.items():
            seen = self._seen.get(name)
            if seen is None or seen.content != content:
                seen = self._seen[name] = _Seen(content, now)
            silence = milliseconds_between(seen.changed, now)
            if silence <= self._grace_milliseconds:
                alive[name] = content[8:]
            elif silence > _FORGET_FACTOR * self._grace_milliseconds:
                await self._forget(name)
        return alive

    async def _contents(self, prefix: str) -> dict[str, bytes]:
        found = {}
        for name in await self._files.list(self._directory):
            if not name.startswith(prefix) or name.endswith(_UNFINISHED):
                continue
            try:
                found[name] = await stored_value.read(self._files, self._directory / name)
            except FileNotFoundError:
                continue
            except StoreUnusable as error:
                # Left by a power cut: its owner is gone, or will soon write it again.
                _log.info("unreadable session", session=name, error=str(error))
        return found

    async def _forget(self, name: str) -> None:
        try:
            await self._files.unlink(self._directory / name)
        except FileNotFoundError:
            return
