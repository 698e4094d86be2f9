"""A lock is in the way, and the time is up in the middle of a call: the error names the lock."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import pytest

from percolator.errors import ConflictError, DeadlineExceeded
from percolator.protocol.commit import Commit
from percolator.protocol.environment import Statistics
from percolator.protocol.read import read_rows
from percolator.routing.cells import RowRequest
from percolator.v1.tabletserver_pb2 import RowRead

from .cells_and_steps import PATIENT, A, locked, put, world

Call = Callable[..., Awaitable[list[Any]]]


def answering_once(answer: Call, late: Callable[[Sequence[object]], list[Any]]) -> Call:
    """Answers the first call; later ones get what `late` returns or raises."""
    calls = 0

    async def call(requests: Sequence[object], deadline: float, **how: Any) -> list[Any]:
        nonlocal calls
        calls += 1
        return await answer(requests, deadline, **how) if calls == 1 else late(requests)

    return call


async def test_a_read_ends_with_the_lock_that_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answer(_: Sequence[object]) -> list[Any]:
        raise DeadlineExceeded("no answer in time")

    here = world()
    writer, reader = here.client(PATIENT), here.client(PATIENT)
    commit = await locked(writer, A)
    timestamp = await reader.start_timestamp()
    cells = reader.env.cells
    monkeypatch.setattr(cells, "read", answering_once(cells.read, no_answer))
    request = RowRequest(1, RowRead(row=b"a", columns=[b"x"], timestamp=timestamp))
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await read_rows(reader.env, reader.cleanup, [request], reader.deadline(), Statistics())
    assert caught.value.other_start_timestamp == commit._write.start
    assert isinstance(caught.value.__cause__, DeadlineExceeded)


async def test_a_commit_ends_with_the_lock_that_it_met(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_answers(steps: Sequence[object]) -> list[Any]:
        return [DeadlineExceeded("no answer in time") for _ in steps]

    here = world()
    older, younger = here.client(PATIENT), here.client(PATIENT)
    holder = await locked(older, A)
    commit = younger.commit(await younger.start_timestamp(), {A: put(b"new")})
    lock = commit.begin_two_phases()
    send = answering_once(partial(commit._send_prewrites, lock), no_answers)
    monkeypatch.setattr(Commit, "_send_prewrites", lambda self, lock, *sent: send(*sent))
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await commit.run(younger.deadline(0.1))
    assert caught.value.other_start_timestamp == holder._write.start


async def test_a_commit_that_waits_for_a_lock_keeps_time_for_its_marker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its message was sent, so without the marker a late copy may commit it: nobody would know."""
    here = world()
    older, younger = here.client(PATIENT), here.client(PATIENT)
    holder = await locked(older, A)
    mutate = younger.env.cells.mutate

    async def slowly(steps: Sequence[Any], deadline: float) -> list[Any]:
        if deadline - younger.env.now() < 0.005:
            return [DeadlineExceeded("no answer in time") for _ in steps]
        return await mutate(steps, deadline)

    monkeypatch.setattr(younger.env.cells, "mutate", slowly)
    start = await younger.start_timestamp()
    commit = younger.commit(start, {A: put(b"new")}, two_phases=False)
    with pytest.raises(ConflictError, match="is locked by transaction") as caught:
        await commit.run(younger.deadline(0.1))
    assert caught.value.other_start_timestamp == holder._write.start
    assert not commit.may_be_committed
