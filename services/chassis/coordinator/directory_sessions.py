"""Sessions in a directory: one file per owner, which only the owner writes."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from percolator.errors import StoreUnusable
from percolator.services.chassis.coordinator import stored_value
from percolator.services.chassis.coordinator.beating_session import value_of
from percolator.services.chassis.coordinator.interface import VALUE_BYTES_MAX, check_name
from percolator.services.chassis.coordinator.silence import SilentSessions
from percolator.services.chassis.store.files import Files
from percolator.world import Clock

_UNFINISHED = ".new"


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
        alive = {}
        for name, content in judged.alive.items():
            with suppress(StoreUnusable):  # torn by a power cut: it does not change any more
                alive[name] = value_of(stored_value.decode(content, name))
        return alive

    async def _contents(self, prefix: str) -> dict[str, bytes]:
        """The bytes of the files, whether or not they can be decoded: else one that nobody can read
        would never become silent, and stay."""
        found = {}
        for name in await self._files.list(self._directory):
            if not name.startswith(prefix) or name.endswith(_UNFINISHED):
                continue
            with suppress(FileNotFoundError):
                path = self._directory / name
                found[name] = await self._files.read(path, bytes_max=VALUE_BYTES_MAX)
        return found

    async def _forget(self, name: str) -> None:
        with suppress(FileNotFoundError):
            await self._files.unlink(self._directory / name)
