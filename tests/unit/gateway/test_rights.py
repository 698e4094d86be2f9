"""Calls by tokens that have rights to some tables only."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator import Table, codecs
from percolator.errors import NotReady, PermissionDenied, SnapshotTooOld, UniqueViolation
from percolator.services.chassis.access import Access, CallerIdentity, Grant
from percolator.services.master.handlers import MasterHandler
from percolator.v1 import gateway_pb2 as pb
from percolator.v1 import master_pb2
from percolator.v1.cells_pb2 import RowRange
from percolator.v1.errors_pb2 import CellAddress as WireAddress
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.methods import method_name
from percolator.wire.roles import ADMINISTERS_TABLE, CHECKS_RIGHTS, REQUIRED, Role
from percolator.wire.tokens import Right, Rights
from percolator.world import MachineClock
from tests.restricted import refuses, token
from tests.unit.gateway.gateways import (
    COLUMN,
    DELETE,
    LOCK,
    PUT,
    TABLE,
    Cluster,
    Gateway,
    commits_primary,
    write,
)

EUROPE = Rights(read=(Right(TABLE, b"eu/"),), write=(Right(TABLE, b"eu/"),))
READER = Rights(read=(Right(TABLE),))
WRITER = Rights(write=(Right(TABLE),))
OTHER = Rights(read=(Right("other"),), write=(Right("other"),))
NOTHING = Rights()
OPERATOR = Rights(administer=(Right(TABLE),))


def scan(start: int, first: bytes = b"", end: bytes = b"") -> pb.ScanTableRequest:
    return pb.ScanTableRequest(
        start_timestamp=start, table=TABLE, range=RowRange(start=first, end=end)
    )


@pytest.mark.parametrize("rights", [EUROPE, OPERATOR])
@pytest.mark.parametrize("path", [*sorted(REQUIRED), "/percolator.v1.MasterService/Unheard"])
def test_only_what_checks_rights_is_called_with_such_a_token(path: str, rights: Rights) -> None:
    """A server that does not check rights would give the token the rights of all clients."""

    class Tokens:
        def grant_of(self, digest: bytes) -> Grant:
            return Grant("shop", Role.CLIENT, None, rights)

    access = Access(Tokens(), MachineClock())  # type: ignore[arg-type]
    metadata = [(AUTHORIZATION, SCHEME + "s3cret")]

    def caller() -> CallerIdentity:
        required = REQUIRED.get(path)
        return access.require(path, required, metadata, lambda: (), lambda: "unix:")

    if path in CHECKS_RIGHTS or (path in ADMINISTERS_TABLE and rights is OPERATOR):
        assert caller().rights == rights
    else:
        with pytest.raises(PermissionDenied):
            caller()


async def test_rows_are_read_and_written_within_the_rights(one: Gateway) -> None:
    with token(EUROPE):
        await one.commit(await one.begin(), [write(b"eu/1", b"v"), write(b"eu/2", b"w")])
        assert await one.read(b"eu/1", b"eu/2") == [b"v", b"w"]
        start = await one.begin()
        assert await one.scan(scan(start, b"eu/", b"eu0")) == [b"eu/1", b"eu/2"]
        assert await one.scan(scan(start, b"eu/2", b"eu/3")) == [b"eu/2"]


@pytest.mark.parametrize("rights", [EUROPE, WRITER, OTHER, NOTHING])
async def test_rows_outside_of_them_are_not_read(one: Gateway, rights: Rights) -> None:
    await one.commit(await one.begin(), [write(b"eu/1", b"v"), write(b"us/1", b"v")])
    start = await one.begin()
    with token(rights):
        with refuses("read"):
            await one.get(start, b"us/1")
        with refuses("read"):
            await one.get(start, b"eu/1", b"us/1")
        for bounds in ((b"", b""), (b"eu/", b""), (b"", b"eu0"), (b"eu/", b"eu1"), (b"d", b"f")):
            with refuses("read"):
                await one.scan(scan(start, *bounds))
        with refuses("read"):
            await anext(
                one.handler.find_rows(pb.FindRowsRequest(start_timestamp=start, table=TABLE))
            )
        with refuses("read"):
            async for _ in one.handler.follow_changes(
                pb.FollowChangesRequest(table=TABLE, after=start)
            ):
                break


async def test_who_may_not_write_holds_up_no_writer(one: Gateway) -> None:
    query = pb.RowQuery(table=TABLE, row=b"a", columns=[COLUMN])
    asked = pb.GetRequest(start_timestamp=await one.begin(), rows=[query], for_update=True)
    with token(READER), refuses("write"):
        await one.handler.get(asked)


@pytest.mark.parametrize("kind", [PUT, DELETE, LOCK, pb.CellWrite.KIND_READ_LOCK])
@pytest.mark.parametrize("rights", [EUROPE, READER, OTHER, NOTHING])
async def test_a_commit_with_a_row_outside_of_them_writes_nothing(
    one: Gateway, cluster: Cluster, rights: Rights, kind: pb.CellWrite.Kind
) -> None:
    start = await one.begin()
    with token(rights), refuses("write"):
        await one.commit(start, [write(b"eu/1", b"v"), write(b"us/1", kind=kind)])
    assert await one.read(b"eu/1", b"us/1") == [None, None]
    assert cluster.mutations == 0


async def test_a_unique_value_does_not_show_rows_outside_of_them(one: Gateway) -> None:
    await one.database.create_index(Table(TABLE).column(COLUMN, codecs.raw, unique=True))
    await one.commit(await one.begin(), [write(b"us/1", b"v")])
    with token(EUROPE), pytest.raises(UniqueViolation, match=r"^another row has") as caught:
        await one.commit(await one.begin(), [write(b"eu/1", b"v")])
    assert caught.value.rows == (b"eu/1",)


async def test_a_token_that_may_only_write_reads_nothing(one: Gateway) -> None:
    with token(WRITER):
        await one.commit(await one.begin(), [write(b"a", b"v")])
        start = await one.begin()
        with refuses("read"):
            await one.get(start, b"a")
    with token(READER):
        assert await one.get(start, b"a") == [b"v"]


async def test_a_reader_resolves_a_lock_whose_primary_it_may_not_read(
    one: Gateway, other: Gateway, cluster: Cluster
) -> None:
    """Its owner has died; only the primary, in another table, says that it has committed."""
    await cluster.create_table(master_pb2.CreateTableRequest(name="zoo"))
    start = await one.begin()
    secondary = pb.CellWrite(kind=PUT, table="zoo", row=b"z", column=COLUMN, value=b"v")
    cluster.loses_answer = commits_primary
    committing = asyncio.create_task(one.commit(start, [write(b"a", b"secret"), secondary]))
    await asyncio.sleep(0.1)
    committing.cancel()
    cluster.loses_answer = lambda _: False
    with token(Rights(read=(Right("zoo"),))):
        read_at = await other.begin()
        query = pb.RowQuery(table="zoo", row=b"z", columns=[COLUMN])
        answer = await other.handler.get(pb.GetRequest(start_timestamp=read_at, rows=[query]))
        assert [cell.value for row in answer.rows for cell in row.cells] == [b"v"]
        with refuses("read"):
            await other.get(read_at, b"a")


async def test_an_outcome_is_asked_for_by_cells_that_may_be_written(one: Gateway) -> None:
    """Asking may roll a transaction back, so it takes the right to write."""
    with token(READER), refuses("write"):
        await one.resolve(await one.begin(), b"eu/1")
    with token(EUROPE):
        start = await one.begin()
        with refuses("write"):
            await one.resolve(start, b"us/1")
        primary = WireAddress(table_id=1, row=b"eu/1", column=COLUMN)
        request = pb.ResolveRequest(start_timestamp=start, primary=primary)
        with pytest.raises(PermissionDenied, match="names the cells or the writes instead"):
            await one.handler.resolve(request)
        outcome = await one.resolve(start, b"eu/1")
    assert outcome.fate == pb.ResolveResponse.FATE_ABORTED


@pytest.mark.parametrize("victim", [None, "another token"])
async def test_a_transaction_of_somebody_else_is_neither_committed_nor_rolled_back(
    one: Gateway, other: Gateway, cluster: Cluster, victim: str | None
) -> None:
    """Its locks elsewhere would follow what the caller did in the rows that it may write."""
    with token(None if victim is None else EUROPE, victim or ""):
        start = await one.begin()
    with token(EUROPE):
        for gateway in (one, other):
            with pytest.raises(SnapshotTooOld, match="does not know that it has handed out"):
                await gateway.commit(start, [write(b"eu/1", b"forged")])
            with pytest.raises(SnapshotTooOld, match="does not know that it has handed out"):
                await gateway.resolve(start, b"eu/1")
    assert cluster.mutations == 0
    with token(None if victim is None else EUROPE, victim or ""):
        await other.commit(start, [write(b"eu/1", b"v"), write(b"eu/2", b"w")])
    assert await one.read(b"eu/1", b"eu/2") == [b"v", b"w"]


async def test_every_gateway_commits_what_another_has_begun_for_the_same_token(
    one: Gateway, other: Gateway, third: Gateway, cluster: Cluster
) -> None:
    with token(EUROPE):
        start, writes = await one.begin(), [write(b"eu/1", b"v")]
        commit = await other.commit(start, writes)
        assert await one.commit(start, writes) == commit
        assert await other.commit(start, writes) == commit
        assert cluster.checks == 1, "only a gateway that did not begin it asks the oracle, once"
        assert (await third.resolve(start, b"eu/1")).commit_timestamp == commit


async def test_for_callers_with_all_rights_the_oracle_is_asked_about_nothing(
    one: Gateway, other: Gateway, cluster: Cluster
) -> None:
    start = await one.begin()
    await other.commit(start, [write(b"a", b"v")])
    await one.resolve(start, b"a")
    assert not cluster.checks
    assert not cluster.handed_out


async def test_what_was_committed_here_is_told_although_the_oracle_has_forgotten_whose_it_is(
    one: Gateway, other: Gateway, cluster: Cluster
) -> None:
    with token(EUROPE):
        start, writes = await one.begin(), [write(b"eu/1", b"v")]
        commit = await one.commit(start, writes)
        cluster.handed_out.clear()
        assert await one.commit(start, writes) == commit
        with pytest.raises(SnapshotTooOld, match=r"outcome .* can no longer be determined"):
            await other.commit(start, writes)


class NoLeader:
    """A master that has to find a leader first."""

    def leading(self) -> Any:
        raise NotReady("no leader")

    current = leading


def about_table(path: str, table: str) -> Any:
    """The request of a procedure of masters, about this table."""
    name = path.rpartition("/")[2]
    request = getattr(master_pb2, f"{name}Request")()
    setattr(request, "name" if hasattr(request, "name") else "table", table)
    return request


@pytest.mark.parametrize("path", sorted(ADMINISTERS_TABLE))
async def test_only_its_own_tables_are_administered(path: str) -> None:
    handler: Any = MasterHandler(MachineClock(), NoLeader())  # type: ignore[arg-type]
    call = getattr(handler, method_name(path.rpartition("/")[2]))
    for rights in (EUROPE, OPERATOR):
        with token(rights), refuses("administer table 'other'"):
            await call(about_table(path, "other"))
    with token(OPERATOR), pytest.raises(NotReady):
        await call(about_table(path, TABLE))
    with token(None), pytest.raises(NotReady):
        await call(about_table(path, "other"))


@given(
    prefix=st.binary(max_size=2),
    start=st.binary(max_size=3),
    end=st.binary(max_size=3),
    row=st.binary(max_size=4),
)
def test_no_row_of_a_range_that_may_be_read_is_outside_of_the_prefix(
    prefix: bytes, start: bytes, end: bytes, row: bytes
) -> None:
    right = Right("t", prefix)
    assert not right.covers("u", start, end)
    if right.covers("t", start, end) and start <= row and (row < end or not end):
        assert row.startswith(prefix)
    assert right.covers("t", row, row + b"\0") == row.startswith(prefix)
