"""Calls to masters pass a gateway without naming one: the leader answers."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import errors
from percolator.services.chassis.gate import failure
from percolator.v1 import cluster_pb2
from percolator.v1.cluster_pb2 import Server
from percolator.v1.master_pb2 import CreateTableRequest, CreateTableResponse
from percolator.wire import methods
from percolator.wire.channels import SERVER_METADATA
from tests.unit.gateway.forwarding_site import SECONDS, Behind, site

pytestmark = pytest.mark.real_time


async def test_calls_to_masters_need_no_server_name_and_a_standby_is_skipped() -> None:
    async with site() as here:
        asked: list[str] = []

        def master(name: str, answer: errors.PercolatorError | None) -> Behind:
            async def create(raw: bytes, context: Any) -> bytes:
                asked.append(name)
                if answer is not None:
                    await context.abort(*failure(answer))
                return CreateTableResponse(created=True).SerializeToString()

            return Behind(unary=create)

        standby = master("standby", errors.NotReady("ask the leader"))
        leader = master("leader", None)
        here.master.servers += [
            Server(
                kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=name, address=await here.listen(one)
            )
            for name, one in (("standby", standby), ("leader", leader))
        ]
        create = here.through.unary(here.address, methods.CREATE_TABLE)
        for _ in range(3):
            assert (await create(CreateTableRequest(name="t"), SECONDS)).created
        assert asked == ["standby", "leader", "leader", "leader"], "who leads is remembered"
        assert leader.seen[0][SERVER_METADATA] == "leader"


async def test_who_leads_is_remembered_while_calls_to_other_servers_are_forwarded() -> None:
    async with site() as here:
        asked: list[str] = []

        def master(name: str, answer: errors.PercolatorError | None) -> Behind:
            async def create(raw: bytes, context: Any) -> bytes:
                asked.append(name)
                if answer is not None:
                    await context.abort(*failure(answer))
                return CreateTableResponse(created=True).SerializeToString()

            return Behind(unary=create)

        async def answer(raw: bytes, context: Any) -> bytes:
            return b""

        here.behind.unary = answer
        standby = master("standby", errors.NotReady("ask the leader"))
        here.master.servers += [
            Server(
                kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=name, address=await here.listen(one)
            )
            for name, one in (("standby", standby), ("leader", master("leader", None)))
        ]
        create = here.through.unary(here.address, methods.CREATE_TABLE)
        await create(CreateTableRequest(name="t"), SECONDS)
        await here.read()
        await create(CreateTableRequest(name="t"), SECONDS)
        assert asked == ["standby", "leader", "leader"]


async def test_a_master_that_is_gone_fails_one_call_and_not_the_next() -> None:
    async with site() as here:

        async def create(raw: bytes, context: Any) -> bytes:
            return CreateTableResponse(created=True).SerializeToString()

        there = await here.listen(Behind(unary=create))
        here.master.servers += [
            Server(kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=name, address=address)
            for name, address in (("gone", "127.0.0.1:1"), ("there", there))
        ]
        call = here.through.unary(here.address, methods.CREATE_TABLE)
        with pytest.raises(errors.Unavailable):
            await call(CreateTableRequest(name="t"), SECONDS)
        assert (await call(CreateTableRequest(name="t"), SECONDS)).created


async def test_several_masters_that_are_gone_do_not_hide_the_one_that_is_there() -> None:
    async with site() as here:

        async def create(raw: bytes, context: Any) -> bytes:
            return CreateTableResponse(created=True).SerializeToString()

        there = await here.listen(Behind(unary=create))
        here.master.servers += [
            Server(kind=cluster_pb2.SERVICE_KIND_MASTER, server_id=name, address=address)
            for name, address in (
                ("gone", "127.0.0.1:1"),
                ("gone, too", "127.0.0.1:2"),
                ("there", there),
            )
        ]
        call = here.through.unary(here.address, methods.CREATE_TABLE)
        for _ in range(2):
            with pytest.raises(errors.Unavailable):
                await call(CreateTableRequest(name="t"), SECONDS)
        for _ in range(3):
            assert (await call(CreateTableRequest(name="t"), SECONDS)).created
