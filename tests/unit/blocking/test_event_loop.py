"""The library and its services run on uvloop, and do without it; a task does not end the loop."""

from __future__ import annotations

import asyncio
import sys

import pytest

from percolator.blocking.loop_thread import LoopThread
from percolator.event_loop import new_event_loop


def test_the_loop_is_that_of_uvloop_if_it_is_installed() -> None:
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__.startswith("uvloop")


def test_without_uvloop_the_loop_is_that_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
@pytest.mark.parametrize("has_uvloop", [True, False])
def test_a_task_that_exits_ends_nothing_but_itself(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException], *, has_uvloop: bool
) -> None:
    """It would end the thread of the event loop, and all callers would wait for ever."""
    if not has_uvloop:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    thread = LoopThread()
    tasks: list[asyncio.Task[None]] = []

    async def leave() -> None:
        raise error

    async def call() -> str:
        tasks.append(asyncio.create_task(leave()))
        await asyncio.sleep(0.05)
        return "went on"

    pending = thread.start(call)
    assert pending._done.acquire(timeout=5.0)
    pending._done.release()
    assert pending.wait() == "went on"
    with pytest.raises(error):
        tasks[0].result()
    thread._at_exit()
    assert not thread._running
