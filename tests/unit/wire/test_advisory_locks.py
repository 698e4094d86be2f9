"""Advisory locks keep processes from doing the same work, and never from doing any."""

from __future__ import annotations

import asyncio

import pytest

from percolator.services.chassis.settings import load
from percolator.services.lockservice.service import LockServiceSettings
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire import advisory_locks
from percolator.wire.advisory_locks import NAME_BYTES_MAX, AdvisoryLocks, row_name

from .lock_services import A, client, lock_services


async def test_a_lock_that_one_session_holds_is_refused_to_others() -> None:
    async with lock_services(A) as services:
        one, other = client(services), client(services, seed=8)
        await one.current()
        await other.current()
        first, second = AdvisoryLocks(one), AdvisoryLocks(other)
        assert await first.try_lock([b"a", b"b"]) == [True, True]
        assert await second.try_lock([b"b", b"c", b"b"]) == [False, True, False]
        assert await first.renew([b"a", b"c"]) == [True, False]
        await first.unlock([b"b", b"c"])
        assert await second.try_lock([b"b", b"a"]) == [True, False]
        await one.close()
        assert await second.try_lock([b"a"]) == [True]
        await other.close()


async def test_a_lock_that_is_not_renewed_is_free_again() -> None:
    async with lock_services(A) as services:
        one, other = client(services), client(services, seed=8)
        await one.current()
        await other.current()
        first = AdvisoryLocks(one, ttl_seconds=1)
        await first.try_lock([b"kept", b"forgotten"])
        for _ in range(4):
            await asyncio.sleep(0.5)
            await first.renew([b"kept"])
        assert await AdvisoryLocks(other).try_lock([b"kept", b"forgotten"]) == [False, True]
        await one.close()
        await other.close()


async def test_work_continues_without_a_lock_service_or_a_session() -> None:
    async with lock_services(A) as services:
        session = client(services)
        locks = AdvisoryLocks(session)
        assert await locks.try_lock([b"a"]) == [True]
        assert services.calls == []
        await session.current()
        services.stop(A)
        assert await locks.try_lock([b"a", b"b"]) == [True, True]
        assert "refused" in str(locks.last_error)
        await locks.unlock([b"a"])
        services.start(A)
        await asyncio.sleep(10)
        assert await locks.renew([b"a"]) == [False]  # it is asked again as soon as it answers
        assert locks.last_error is None
        await session.close()


async def test_many_names_go_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advisory_locks, "NAMES_PER_CALL_MAX", 2)
    async with lock_services(A) as services:
        session = client(services)
        await session.current()
        locks = AdvisoryLocks(session)
        assert await locks.try_lock([b"%d" % number for number in range(5)]) == [True] * 5
        assert services.count("TryLock") == 3
        assert await locks.try_lock([]) == []
        await session.close()


def test_every_row_has_a_unique_name_that_the_lock_service_accepts() -> None:
    long = b"x" * 4096
    rows = [b"", b"a", b"a\0", long[:1000], long[:1001], long, long[:-1] + b"y"]
    names = {row_name(table_id, row) for table_id in (1, 256) for row in rows}
    assert len(names) == 2 * len(rows)
    assert max(map(len, names)) <= NAME_BYTES_MAX


def test_so_many_of_the_longest_names_fit_into_a_request_to_a_lock_service() -> None:
    names = [bytes(NAME_BYTES_MAX)] * advisory_locks.NAMES_PER_CALL_MAX
    request = pb.TryLockRequest(session_id=bytes(16), names=names, ttl_milliseconds=2**31 - 1)
    assert request.ByteSize() <= load(LockServiceSettings, [], {}).request_bytes_max
