"""Rows find their tablets, wherever these have moved."""

from __future__ import annotations

import asyncio

import pytest

from percolator.errors import (
    DeadlineExceeded,
    PercolatorError,
    Retry,
    SchemaChanged,
    SchemaError,
    TabletLocation,
)
from percolator.routing.cells import APPLIED
from percolator.v1 import tabletserver_pb2 as pb

from .tablet_servers import (
    Cluster,
    Server,
    cancelled_while_it_waits,
    moved,
    row_request,
    step,
    tablet,
)


async def test_rows_of_one_batch_go_to_different_servers_after_a_split() -> None:
    old, new = Server(), Server()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    children = (
        tablet("a:1", b"", b"m", tablet_id=2),
        tablet("b:1", b"m", b"", tablet_id=3),
    )
    old.refuse_batch = lambda target, rows: moved(*children) if target.tablet_id == 1 else None
    answers = await cluster.router.mutate([step(b"a"), step(b"z")], cluster.deadline())
    assert answers == [APPLIED, APPLIED]
    assert new.rows_mutated() == [b"z"]
    assert cluster.searches == 0


async def test_after_a_server_that_knows_nothing_the_master_is_asked() -> None:
    old, new = Server(), Server()
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    old.refuse_batch = lambda target, rows: moved()
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert new.rows_mutated() == [b"a"]


async def test_rows_of_an_unknown_tablet_wait_until_it_is_known() -> None:
    cluster = Cluster({"a:1": Server()})
    pending = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline()))
    await asyncio.sleep(2.0)
    cluster.now_at = [tablet("a:1")]
    assert await pending == [APPLIED]


async def test_mutations_of_a_tablet_that_never_appears_are_definitely_not_executed() -> None:
    cluster = Cluster({})
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline(2.0))
    assert isinstance(answer, DeadlineExceeded)
    assert answer.retry is Retry.SAFE
    assert "no tablet is known" in answer.message
    with pytest.raises(DeadlineExceeded):
        await cluster.router.read([row_request(b"a")], cluster.deadline(2.0))


async def test_a_missing_table_is_a_schema_error() -> None:
    cluster = Cluster({})

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        raise SchemaError("there is no such table")

    cluster.tablets._find = find
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, SchemaError)
    with pytest.raises(SchemaError):
        await cluster.router.read([row_request(b"a")], cluster.deadline())


async def test_a_dead_servers_reads_are_answered_by_the_next_owner() -> None:
    old, new = Server(), Server()
    old.down = True
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    pending = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline()))
    await asyncio.sleep(1.0)
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await pending
    assert answer.found[b"c"].value == b"value of a"


async def test_a_dead_servers_mutations_trigger_a_search_for_the_next_owner() -> None:
    old, new = Server(), Server()
    old.down = True
    cluster = Cluster({"a:1": old, "b:1": new})
    cluster.tablets.learn([tablet("a:1")])
    cluster.now_at = [tablet("b:1", epoch=2)]
    (answer,) = await cluster.router.mutate([step(b"a")], cluster.deadline())
    assert isinstance(answer, PercolatorError)
    await asyncio.sleep(0.1)
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]


def _has_schema_5(target: pb.TabletTarget, rows: list[bytes]) -> PercolatorError | None:
    if target.schema_version == 5:
        return None
    return SchemaChanged("newer", table_id=1, schema_version=5)


async def test_steps_that_mean_the_same_in_every_schema_follow_the_tablets_version() -> None:
    server = Server()
    server.refuse_batch = _has_schema_5
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    assert await cluster.router.mutate([step(b"a")], cluster.deadline()) == [APPLIED]
    assert await cluster.router.read([row_request(b"a")], cluster.deadline())
    assert len(server.mutate_calls) == 2


async def test_steps_built_for_a_schema_are_returned_when_it_has_changed() -> None:
    server = Server()
    server.refuse_batch = _has_schema_5
    cluster = Cluster({"a:1": server})
    cluster.tablets.learn([tablet("a:1")])
    old, new = await cluster.router.mutate(
        [step(b"a", schema_version=4), step(b"b", schema_version=5)], cluster.deadline()
    )
    assert isinstance(old, SchemaChanged)
    assert new is APPLIED


# ---------------------------------------------------------------------------- scans


async def test_a_read_cancelled_before_its_tablet_is_known_leaves_no_exception_behind() -> None:
    """conftest.py fails the test if the deadline sets one that nothing retrieves."""
    cluster = Cluster({})
    router, deadline = cluster.router, cluster.deadline(2.0)
    await cancelled_while_it_waits(router.read([row_request(b"a")], deadline))
    await cancelled_while_it_waits(router.read_cell(1, b"a", b"c", 7, deadline))
    await asyncio.sleep(3.0)


async def test_a_request_cancelled_before_its_first_step_leaves_no_exception_behind() -> None:
    """A coroutine that is cancelled so early never runs, and could not give up its future."""
    cluster = Cluster({})
    router, deadline = cluster.router, cluster.deadline(2.0)
    await cancelled_while_it_waits(router.read([row_request(b"a")], deadline), 0.0)
    await cancelled_while_it_waits(router.read_cell(1, b"a", b"c", 7, deadline), 0.0)
    await cancelled_while_it_waits(router.mutate([step(b"a")], deadline), 0.0)
    await asyncio.sleep(3.0)
    assert not router._open


async def test_closing_answers_those_that_still_look_for_their_tablet() -> None:
    cluster = Cluster({})
    writing = asyncio.ensure_future(cluster.router.mutate([step(b"a")], cluster.deadline(1e9)))
    reading = asyncio.ensure_future(cluster.router.read([row_request(b"a")], cluster.deadline(1e9)))
    await asyncio.sleep(0.5)
    await cluster.router.close()
    (answer,) = await writing
    assert isinstance(answer, PercolatorError)
    assert answer.retry is Retry.SAFE
    with pytest.raises(DeadlineExceeded, match="closed"):
        await reading


async def test_a_bug_in_the_search_for_a_tablet_reaches_the_caller() -> None:
    cluster = Cluster({})

    async def find(table_id: int, row: bytes) -> list[TabletLocation]:
        raise LookupError("a bug")

    cluster.tablets._find = find
    with pytest.raises(LookupError):
        await cluster.router.read([row_request(b"a")], cluster.deadline())
