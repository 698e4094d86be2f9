"""A mount that hangs delays only its own callers, not the event loop or other callers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from percolator.services.chassis.files import RealFiles

pytestmark = pytest.mark.real_time

SLOW = "slow"


@asynccontextmanager
async def hanging(monkeypatch: pytest.MonkeyPatch, name: str) -> AsyncIterator[None]:
    """A system call hangs for paths named `slow`, for as long as this lasts."""
    gate = threading.Event()
    correct: Callable[..., Any] = getattr(os, name)

    def wrong(path: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(os.fsdecode(path)).name == SLOW:
            gate.wait(30)
        return correct(path, *args, **kwargs)

    monkeypatch.setattr(os, name, wrong)
    try:
        yield
    finally:
        gate.set()


CALLS: dict[str, Callable[[RealFiles, Path], Any]] = {
    "mkdir": lambda files, path: files.make_directory(path),
    "rmdir": lambda files, path: files.remove_directory(path),
    "link": lambda files, path: files.link(path, path.with_name("other")),
    "unlink": lambda files, path: files.unlink(path),
    "stat": lambda files, path: files.stat(path),
    "listdir": lambda files, path: files.list(path),
    "open": lambda files, path: files.create(path),
    "statvfs": lambda files, path: files.free_bytes(path),
}


@pytest.mark.parametrize("name", CALLS)
async def test_a_call_that_hangs_stops_only_its_caller(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    files, others = RealFiles("hanging"), RealFiles("others")
    async with hanging(monkeypatch, name):
        waiting = asyncio.ensure_future(CALLS[name](files, tmp_path / SLOW))
        # The loop keeps running, and so do callers with other threads.
        async with asyncio.timeout(10):
            await others.list(tmp_path)
            await others.stat(tmp_path)
        assert not waiting.done()
    await asyncio.gather(waiting, return_exceptions=True)
    files.close()
    others.close()


async def test_a_lock_whose_caller_left_is_free_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Otherwise a candidate that stopped waiting would keep all others from the role."""
    files = RealFiles()
    async with hanging(monkeypatch, "open"):
        waiting = asyncio.ensure_future(files.lock(tmp_path / SLOW))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    # In its order behind the one that was given up, and behind what gives it back.
    await files.list(tmp_path)
    await files.list(tmp_path)
    (await files.lock(tmp_path / SLOW)).release()
    files.close()
