"""Invalid requests: each gets an error that names the field, and changes nothing."""

from __future__ import annotations

import pytest

from percolator.errors import InvalidArgument, SchemaError
from percolator.services.master import cluster_map
from percolator.v1 import master_pb2 as pb
from percolator.wire import methods
from percolator.world import UnaryMethod
from tests.unit.master.cluster_world import ModelCluster, cluster

Options = pb.TableOptions
Observer = pb.Observer
Create = pb.CreateTableRequest
Change = pb.ChangeObserversRequest


def state(world: ModelCluster) -> bytes:
    leader = world.masters[0].master.leader
    assert leader is not None
    return cluster_map.encode(leader.store.current)


@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        (methods.CREATE_TABLE, Create(), "name"),
        (methods.CREATE_TABLE, Create(name="x" * 256), "name"),
        (methods.CREATE_TABLE, Create(name="new\nline"), "name"),
        (methods.CREATE_TABLE, Create(name=" t"), "name"),
        (methods.CREATE_TABLE, Create(name="t"), "name"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b""]), "splits[0]"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b"a", b"a"]), "splits[1]"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b"b", b"c", b"a"]), "splits[2]"),
        (methods.CREATE_TABLE, Create(name="u", splits=[b"x" * 4097]), "splits[0]"),
        (
            methods.CREATE_TABLE,
            Create(name="u", options=Options(split_bytes=1)),
            "options.split_bytes",
        ),
        (
            methods.CREATE_TABLE,
            Create(name="u", options=Options(retention_milliseconds=1 << 60)),
            "options.retention_milliseconds",
        ),
        (methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=99), "tablet_id"),
        (methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=2, row=b""), "row"),
        (methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=2, row=b"m"), "row"),
        (methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=3, row=b"m"), "row"),
        (methods.SPLIT_TABLET, pb.SplitTabletRequest(tablet_id=2), "row"),
        (methods.MOVE_TABLET, pb.MoveTabletRequest(tablet_id=99), "tablet_id"),
        (methods.MOVE_TABLET, pb.MoveTabletRequest(tablet_id=2, server="z:1"), "server"),
        (methods.DRAIN_SERVER, pb.DrainServerRequest(), "server"),
        (methods.DRAIN_SERVER, pb.DrainServerRequest(server="z:1"), "server"),
        (methods.DRAIN_SERVER, pb.DrainServerRequest(server="a:1"), "server"),
        (methods.CHANGE_OBSERVERS, Change(table="t", add=[Observer()]), "add[0].name"),
        (methods.CHANGE_OBSERVERS, Change(table="t", add=[Observer(name="o")]), "add[0].columns"),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="t", add=[Observer(name="o", columns=[b"x" * 256])]),
            "add[0].columns",
        ),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="t", add=[Observer(name="o", columns=[b"c"])] * 2),
            "add[1].name",
        ),
        (methods.CHANGE_OBSERVERS, Change(table="t", remove=["o"]), "remove"),
        (methods.CHANGE_OBSERVERS, Change(table="t", pause=["o"]), "pause"),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="t", add=[Observer(name="o", columns=[b"c"], weak=True, backfill=True)]),
            "add[0].backfill",
        ),
        (
            methods.CHANGE_OBSERVERS,
            Change(table="", add=[Observer(name="o", columns=[b"c"])], awaited=True),
            "table",
        ),
        (methods.CHANGE_OBSERVERS, Change(table="u", remove=["o"], awaited=True), "remove"),
        (methods.CHANGE_OBSERVERS, Change(table="u", pause=["o"], awaited=True), "pause"),
    ],
)
async def test_a_bad_request_names_the_field_and_changes_nothing(
    method: UnaryMethod[pb.CreateTableRequest, pb.CreateTableResponse],
    request_: pb.CreateTableRequest,
    field: str,
) -> None:
    async with cluster("a:1") as world:
        await world.ask(methods.CREATE_TABLE, Create(name="t", splits=[b"m"]))
        before = state(world)
        with pytest.raises(InvalidArgument) as caught:
            await world.ask(method, request_)
        assert caught.value.field == field
        assert state(world) == before


async def test_a_missing_table_is_a_schema_error() -> None:
    async with cluster("a:1") as world:
        with pytest.raises(SchemaError):
            await world.ask(methods.LIST_TABLETS, pb.ListTabletsRequest(table="u"))
        with pytest.raises(SchemaError):
            await world.ask(methods.CHANGE_OBSERVERS, Change(table="u"))
        with pytest.raises(SchemaError):
            await world.ask(methods.REPORT_BACKFILL, pb.ReportBackfillRequest(table_id=99))


async def test_an_existing_table_is_left_as_it_is_with_exist_ok() -> None:
    async with cluster("a:1") as world:
        first = await world.ask(methods.CREATE_TABLE, Create(name="t", splits=[b"m"]))
        again = Create(name="t", splits=[b"x", b"y"], exist_ok=True)
        second = await world.ask(methods.CREATE_TABLE, again)
        assert (first.created, second.created) == (True, False)
        assert second.table == first.table


@pytest.mark.parametrize(
    ("options", "others", "field"),
    [
        (
            pb.TableOptions(retention_milliseconds=600_000),
            pb.TableOptions(retention_milliseconds=700_000),
            "options.retention_milliseconds",
        ),
        (
            pb.TableOptions(split_bytes=600_000),
            pb.TableOptions(split_bytes=700_000),
            "options.split_bytes",
        ),
    ],
    ids=["retention", "split_bytes"],
)
async def test_an_existing_table_with_other_options_is_not_what_was_asked_for(
    options: pb.TableOptions, others: pb.TableOptions, field: str
) -> None:
    async with cluster("a:1") as world:
        first = await world.ask(methods.CREATE_TABLE, Create(name="t", options=options))
        await world.ask(methods.CREATE_TABLE, Create(name="u"))
        for same in (options, pb.TableOptions()):
            again = Create(name="t", exist_ok=True, options=same)
            assert (await world.ask(methods.CREATE_TABLE, again)).table == first.table
        for name, found in (("t", "600000"), ("u", "the cluster's default")):
            wanted = Create(name=name, exist_ok=True, options=others)
            why = f"table '{name}' exists with {found}.*, not 700000 "
            with pytest.raises(InvalidArgument, match=why) as refused:
                await world.ask(methods.CREATE_TABLE, wanted)
            assert refused.value.field == field


async def test_an_existing_table_without_a_feed_is_no_table_with_one() -> None:
    async with cluster("a:1") as world:
        await world.ask(methods.CREATE_TABLE, Create(name="t"))
        wanted = Create(name="t", exist_ok=True, options=pb.TableOptions(change_feed=True))
        with pytest.raises(InvalidArgument, match="exists without a change feed") as refused:
            await world.ask(methods.CREATE_TABLE, wanted)
        assert refused.value.field == "options.change_feed"
        await world.ask(
            methods.SET_CHANGE_FEED, pb.SetChangeFeedRequest(table="t", change_feed=True)
        )
        assert not (await world.ask(methods.CREATE_TABLE, wanted)).created
