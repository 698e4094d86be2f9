"""Sessions in a directory: one file per owner, which only the owner writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import structlog

from percolator.errors import StoreUnusable
from percolator.world import Clock
from services.chassis.coordinator import stored_value
from services.chassis.coordinator.beating_session import value_of
from services.chassis.coordinator.interface import check_name
from services.chassis.coordinator.silence import SilentSessions
from services.chassis.store.files import Files

_UNFINISHED = ".new"
_log = structlog.get_logger("percolator.coordinator")


class SessionFile:
    """The file of one session."""

    def __init__(self, files: Files, path: Path) -> None:
        self._files = files
        self._path = path
        self._unfinished = path.with_name(path.name + _UNFINISHED)

    async def put(self, content: bytes) -> None:
        """Writes a sign of life. It is not durable: a session does not survive a power cut."""
        async with await self._files.create(self._unfinished, exclusive=False) as file:
            await file.append(stored_value.encode(content))
        await self._files.rename(self._unfinished, self._path)

    async def remove(self) -> None:
        await self._files.unlink(self._path)


class DirectorySessions:
    """What one reader knows about all sessions."""

    def __init__(
        self, files: Files, clock: Clock, directory: Path, *, grace_seconds: float
    ) -> None:
        self._files = files
        self._directory = directory
        self._silent = SilentSessions(clock, grace_seconds)

    async def alive(self, prefix: str) -> Mapping[str, bytes]:
        """The live sessions by name, with the value that each was opened with."""
        if prefix:
            check_name("prefix", prefix)
        now = self._silent.tick()
        judged = self._silent.judge(now, prefix, await self._contents(prefix))
        for name in judged.forgotten:
            await self._forget(name)
        return {name: value_of(content) for name, content in judged.alive.items()}

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
