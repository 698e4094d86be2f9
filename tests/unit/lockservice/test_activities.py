"""What sessions say of their processes is listed for those who ask, and never harms a session."""

from __future__ import annotations

import pytest

from percolator.errors import InvalidArgument
from percolator.services.lockservice.handler import LockServiceHandler
from percolator.services.lockservice.sessions import LockServiceLimits
from percolator.v1 import lockservice_pb2 as pb
from tests.unit.lockservice.lock_calls import info, listed, lock_service, opened, renewed


def _busy(commits: int, column: bytes = b"stock") -> pb.SessionInfo:
    about = info()
    about.activity.CopyFrom(
        pb.Activity(
            commits=commits,
            cells=[pb.ContendedCell(table_id=7, row=b"tea", column=column, conflicts=2)],
        )
    )
    return about


async def _activities(handler: LockServiceHandler) -> list[int | None]:
    page = await handler.list_sessions(pb.ListSessionsRequest(activity=True))
    return [
        one.info.activity.commits if one.info.HasField("activity") else None
        for one in page.sessions
    ]


async def test_the_newest_activity_is_listed_for_those_who_ask_and_for_no_others() -> None:
    async with lock_service() as handler:
        session_id = await opened(handler, _busy(1))
        await opened(handler)
        assert await _activities(handler) == [1, None]
        await renewed(handler, session_id, _busy(2))
        for _ in range(2):
            assert await _activities(handler) == [2, None]
        assert [one.info for one in await listed(handler)] == [info(), info()]


async def test_an_activity_that_is_too_large_is_refused_by_name_and_changes_nothing() -> None:
    async with lock_service(LockServiceLimits(activity_bytes_max=100)) as handler:
        session_id = await opened(handler, _busy(1))
        with pytest.raises(InvalidArgument) as caught:
            await renewed(handler, session_id, _busy(2, column=b"c" * 200))
        assert caught.value.field == "info.activity"
        assert await _activities(handler) == [1]


async def test_without_room_for_activities_sessions_live_on_and_say_nothing() -> None:
    size = len(_busy(1).activity.SerializeToString())
    async with lock_service(LockServiceLimits(activity_bytes_total_max=2 * size)) as handler:
        first, second, third = [await opened(handler, _busy(1)) for _ in range(3)]
        assert await _activities(handler) == [1, 1, None]
        await handler.end_session(pb.EndSessionRequest(session_id=first))
        assert not await renewed(handler, second, _busy(2))
        assert not await renewed(handler, third, _busy(3))
        assert await _activities(handler) == [2, 3]


async def test_pages_with_activities_are_shorter() -> None:
    limits = LockServiceLimits(page_activities_max=2)
    async with lock_service(limits) as handler:
        for _ in range(3):
            await opened(handler, _busy(1))
        page = await handler.list_sessions(pb.ListSessionsRequest(page_size=3, activity=True))
        assert len(page.sessions) == 2
        assert page.next_page_token
        assert len(await listed(handler, page_size=3)) == 3
