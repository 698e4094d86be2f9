"""The changes of a table through a gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import pytest

from percolator.errors import InvalidArgument, NotReady, Retry, SchemaError
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.v1 import gateway_pb2 as pb
from percolator.v1 import master_pb2
from percolator.wire.roles import Role
from tests.unit.gateway.gateways import COLUMN, DELETE, TABLE, Gateway, gateways, write


async def follow(gateway: Gateway, **fields: object) -> list[pb.FollowChangesResponse]:
    request = pb.FollowChangesRequest(table=TABLE, **fields)  # type: ignore[arg-type]
    return [one async for one in gateway.handler.follow_changes(request)]


async def test_changes_are_streamed_in_the_order_of_commits() -> None:
    async with gateways(2) as (cluster, (one, other)):
        await cluster.set_change_feed(
            master_pb2.SetChangeFeedRequest(table=TABLE, change_feed=True)
        )
        after = await one.begin()
        first = await one.commit(await one.begin(), [write(b"b", b"1"), write(b"a", b"")])
        second = await one.commit(await one.begin(), [write(b"b", kind=DELETE)])
        until = await one.begin()
        pages = await follow(other, after=after, until=until, before=True)
        assert pages[-1].reached == until
        changes = [change for page in pages for change in page.changes]
        assert [
            (
                one.commit_timestamp,
                one.row,
                one.column,
                one.value if one.HasField("value") else None,
                one.before if one.HasField("before") else None,
            )
            for one in changes
        ] == [
            (first, b"a", COLUMN, b"", None),
            (first, b"b", COLUMN, b"1", None),
            (second, b"b", COLUMN, None, b"1"),
        ]
        assert [page.changes for page in await follow(other, after=second, until=until)] == []


async def test_an_endless_stream_tells_how_far_it_is_while_nothing_changes() -> None:
    async with gateways(1) as (cluster, (gateway,)):
        await cluster.set_change_feed(
            master_pb2.SetChangeFeedRequest(table=TABLE, change_feed=True)
        )
        after = await gateway.begin()
        stream = gateway.handler.follow_changes(pb.FollowChangesRequest(table=TABLE, after=after))
        idle = await anext(stream)
        assert not idle.changes
        assert idle.reached > after
        oldest = gateway.database.internal.engine.open_starts.oldest
        commit = await gateway.commit(await gateway.begin(), [write(b"a", b"1")])
        found = await anext(stream)
        assert [one.commit_timestamp for one in found.changes] == [commit]
        assert found.reached >= commit
        assert oldest() > after
        await cast(AsyncGenerator[Any, None], stream).aclose()
        assert oldest() == 0


async def test_a_gateway_that_shuts_down_ends_the_streams_that_never_end_by_themselves() -> None:
    async with gateways(1) as (cluster, (gateway,)):
        await cluster.set_change_feed(
            master_pb2.SetChangeFeedRequest(table=TABLE, change_feed=True)
        )
        after = await gateway.begin()
        commit = await gateway.commit(await gateway.begin(), [write(b"a", b"1")])
        stream = gateway.handler.follow_changes(pb.FollowChangesRequest(table=TABLE, after=after))
        assert [one.commit_timestamp for one in (await anext(stream)).changes] == [commit]
        waiting = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0.5)
        began = gateway.database.internal.engine.now()
        await gateway.handler.end_streams()
        with pytest.raises(NotReady, match="shutting down") as caught:
            await waiting
        assert caught.value.retry is Retry.SAFE
        assert gateway.database.internal.engine.now() == began, "at once"
        assert gateway.database.internal.engine.open_starts.oldest() == 0
        with pytest.raises(NotReady):
            await follow(gateway, after=after)
        assert (await follow(gateway, after=after, until=commit))[-1].reached == commit


async def test_bad_requests_are_refused() -> None:
    async with gateways(1) as (_, (gateway,)):
        now = await gateway.begin()
        with pytest.raises(InvalidArgument, match="after: is missing"):
            await follow(gateway)
        with pytest.raises(InvalidArgument, match=r"until: .* in the future"):
            await follow(gateway, after=now, until=now << 1)
        with pytest.raises(InvalidArgument, match=r"until: .* is below after"):
            await follow(gateway, after=now, until=now - 1)
        for until in (now, await gateway.begin(), 0):
            with pytest.raises(InvalidArgument, match=f"^table: '{TABLE}' has no change feed"):
                await follow(gateway, after=now, until=until)
        request = pb.FollowChangesRequest(table="nothing", after=now)
        with pytest.raises(SchemaError):
            await anext(gateway.handler.follow_changes(request))


async def test_the_more_followers_a_client_has_the_less_often_each_looks_for_changes() -> None:
    async with gateways(1) as (cluster, (gateway,)):
        await cluster.set_change_feed(
            master_pb2.SetChangeFeedRequest(table=TABLE, change_feed=True)
        )
        after = await gateway.begin()

        async def looks(followers: int, caller: CallerIdentity) -> int:
            """In a minute."""
            request = pb.FollowChangesRequest(table=TABLE, after=after)
            token = rpc._caller.set(caller)
            try:
                reading = [
                    asyncio.create_task(_read_all(gateway.handler.follow_changes(request)))
                    for _ in range(followers)
                ]
            finally:
                rpc._caller.reset(token)
            await asyncio.sleep(30)
            before = cluster.looks
            await asyncio.sleep(60)
            counted = cluster.looks - before
            for one in reading:
                one.cancel()
            await asyncio.wait(reading)
            return counted

        client = CallerIdentity(Role.CLIENT, (b"a token", "192.0.2.1"))
        one = await looks(1, client)
        assert one > 100
        many = await looks(250, client)
        assert many <= 25 * one * 1.1
        assert await looks(25, client) >= 20 * one, "so few are not slowed down"
        assert not gateway.handler._followers


async def _read_all(stream: AsyncIterator[pb.FollowChangesResponse]) -> None:
    async for _ in stream:
        pass
