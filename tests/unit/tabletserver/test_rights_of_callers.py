"""Calls to a tablet server by tokens that have rights to some tables only."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from percolator.errors import (
    CellAddress,
    InvalidArgument,
    NotReady,
    PercolatorError,
    PermissionDenied,
)
from percolator.formats.records import (
    KIND_PUT,
    LockRecord,
    RecordKind,
    WriteRecord,
)
from percolator.protocol import steps
from percolator.services.tabletserver.rights import RowRights, refused
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import (
    SPACE_DATA,
    SPACE_LOCK,
    SPACE_NOTIFY,
    SPACE_ROLLBACK,
    SPACE_WRITE,
    Cell,
    RowRange,
)
from percolator.v1.master_pb2 import Table
from percolator.v1.tabletserver_pb2 import Change, Condition, StepList
from percolator.wire.status import from_detail
from percolator.wire.tokens import Right, Rights
from tests.restricted import NAME, refuses, token
from tests.unit.tabletserver.memory_store import COLUMN, COMMIT, START, Machine, put, target

STOCK, ORDERS, INDEX = 3, 4, 5
"""The machine's tablets are of table 3."""
EUROPE = Rights((Right("stock", b"eu/"),), (Right("stock", b"eu/"),))
ALL = Rights((Right("stock"),), (Right("stock"),))
READER = Rights(read=(Right("stock"),))
WRITER = Rights(write=(Right("stock"),))
OTHER = Rights((Right("orders"),), (Right("orders"),))
NOTHING = Rights()
OWN = START + 7
"""A timestamp that the token has been given."""
OWN_COMMIT = OWN + 1


@pytest.fixture
@asynccontextmanager
async def stock() -> AsyncIterator[Machine]:
    """A server with one tablet of the table `stock`."""
    machine = Machine()
    await machine.open(1)
    machine.described = {
        STOCK: Table(table_id=STOCK, name="stock"),
        ORDERS: Table(table_id=ORDERS, name="orders"),
        INDEX: Table(table_id=INDEX, name="stock by c", index_of=STOCK),
    }
    machine.handed_out = {(NAME, OWN), (NAME, OWN_COMMIT)}
    await machine.mutate(put(1, b"eu/1", b"eu0", b"us/1"))
    yield machine


async def read(machine: Machine, *rows: bytes) -> pb.ReadBatchResult:
    reads = [pb.RowRead(row=row, columns=[COLUMN], timestamp=COMMIT) for row in rows]
    batch = pb.ReadBatch(target=target(1), reads=reads)
    (result,) = (await machine.handler.read(pb.ReadRequest(batches=[batch]))).batches
    return result


async def scan(machine: Machine, start: bytes, end: bytes) -> list[pb.ScanResponse]:
    request = pb.ScanRequest(
        target=target(1),
        range=RowRange(start=start, end=end),
        all_columns=True,
        timestamp=COMMIT,
    )
    return [page async for page in machine.handler.scan(request)]


def denied(answer: pb.ReadBatchResult | pb.ScanResponse | pb.MutationBatchResult) -> str:
    """The message of the refusal."""
    error = from_detail(answer.error)
    assert isinstance(error, PermissionDenied), error
    return error.message


async def test_rows_are_read_within_the_rights(stock: Machine) -> None:
    with token(EUROPE):
        assert (await read(stock, b"eu/1")).found.values == [b"v"]
        (page,) = await scan(stock, b"eu/", b"eu0")
        assert page.found.rows == [b"eu/1"]


@pytest.mark.parametrize("rows", [(b"us/1",), (b"eu0",), (b"eu",), (b"eu/1", b"eu0"), (b"",)])
async def test_a_batch_with_a_row_outside_of_them_shows_nothing(
    stock: Machine, rows: Sequence[bytes]
) -> None:
    with token(EUROPE):
        answer = await read(stock, *rows)
        assert denied(answer) == "the token 'shop' may not read these rows of table 'stock'"
        assert not answer.found.values


@pytest.mark.parametrize("bounds", [(b"", b""), (b"eu/", b""), (b"", b"eu0"), (b"eu/", b"eu1")])
async def test_ranges_beyond_the_rights_are_not_scanned(
    stock: Machine, bounds: tuple[bytes, bytes]
) -> None:
    start, end = bounds
    with token(EUROPE):
        (page,) = await scan(stock, start, end)
        assert denied(page)
        assert not page.found.rows
        changes = pb.ScanChangesRequest(
            target=target(1), range=RowRange(start=start, end=end), after=START, until=COMMIT
        )
        (last,) = [page async for page in stock.handler.scan_changes(changes)]
        assert isinstance(from_detail(last.error), PermissionDenied)
        parts = pb.ProposePartsRequest(target=target(1), range=RowRange(start=start, end=end))
        with refuses("read"):
            await stock.handler.propose_parts(parts)


@pytest.mark.parametrize("rights", [WRITER, OTHER, NOTHING])
async def test_without_the_right_to_read_nothing_is_read(stock: Machine, rights: Rights) -> None:
    with token(rights):
        assert denied(await read(stock, b"eu/1"))
        (page,) = await scan(stock, b"eu/", b"eu0")
        assert denied(page)


@pytest.mark.parametrize("rights", [OTHER, NOTHING])
@pytest.mark.parametrize("rows", [(), (b"eu/1",)])
async def test_nothing_is_told_of_the_table_of_a_tablet_without_a_right_to_it(
    stock: Machine, rights: Rights, rows: Sequence[bytes]
) -> None:
    """Not even its name, its version and its epoch."""
    told = "the token 'shop' has no right to table 3"
    with token(rights):
        assert denied(await read(stock, *rows)) == told
        mutations = [pb.Mutation(row=row, column=COLUMN) for row in rows]
        batch = pb.MutationBatch(target=target(1, epoch=2), mutations=mutations)
        (answer,) = await stock.mutate(batch)
        assert denied(answer) == told
        error = from_detail((await commit(stock, *rows)).error)
        assert isinstance(error, PermissionDenied)
        assert error.message == told


async def test_changes_are_looked_for_in_whole_tables(stock: Machine) -> None:
    request = pb.LookForChangesRequest(
        looks=[pb.ChangesLook(target=target(1), after=START, until=COMMIT)]
    )
    for rights, is_denied in ((EUROPE, True), (READER, False)):
        with token(rights):
            (look,) = (await stock.handler.look_for_changes(request)).looks
        error = from_detail(look.error)
        assert isinstance(error, PermissionDenied) is is_denied, error


async def test_entries_of_an_index_are_read_with_the_right_to_the_whole_table(
    stock: Machine,
) -> None:
    stock.described[STOCK] = stock.described[INDEX]
    stock.described[INDEX] = Table()
    stock.described[STOCK].index_of = ORDERS
    with token(Rights(read=(Right("orders", b"eu/"), Right("stock by c")))):
        assert "may not read an index of table 'orders'" in denied(await read(stock, b"eu/1"))
    with token(Rights(read=(Right("orders"),))):
        assert (await read(stock, b"eu/1")).found.values == [b"v"]


async def test_a_server_without_masters_accepts_no_such_token() -> None:
    with token(READER), pytest.raises(PermissionDenied, match="has no masters"):
        await RowRights(refused).require_read_rows(STOCK, [b"eu/1"])


# ------------------------------------------------------------------------------------- locks


def lock(start: int, primary: CellAddress, value: bytes = b"v") -> LockRecord:
    return LockRecord(start, 0, 60_000, RecordKind.PUT, b"s" * 16, primary, value)


async def prewrite(machine: Machine, row: bytes, record: LockRecord) -> pb.MutationBatchResult:
    step = steps.prewrite(row, COLUMN, record.start_timestamp, record.encode(), None)
    batch = pb.MutationBatch(target=target(1), mutations=[step])
    (result,) = await machine.mutate(batch)
    return result


@pytest.mark.parametrize(
    "primary", [CellAddress(ORDERS, b"secret", b"c"), CellAddress(9, b"", b"")]
)
async def test_a_lock_does_not_show_its_session_and_a_primary_elsewhere(
    stock: Machine, primary: CellAddress
) -> None:
    await prewrite(stock, b"eu/2", lock(START + 1, primary))
    with token(READER):
        (shown,) = (await read(stock, b"eu/2")).locks
        (page,) = await scan(stock, b"eu/2", b"eu/3")
    for one in (shown, page.locks[0]):
        found = LockRecord.decode(one.lock.value)
        assert found == replace(
            lock(START + 1, primary), session=b"", primary=CellAddress(0, b"", b"")
        )


async def test_a_lock_shows_a_primary_that_the_token_may_read(stock: Machine) -> None:
    primary = CellAddress(STOCK, b"eu/9", b"c")
    await prewrite(stock, b"eu/2", lock(START + 1, primary))
    with token(EUROPE):
        (shown,) = (await read(stock, b"eu/2")).locks
        assert LockRecord.decode(shown.lock.value).primary == primary


async def test_a_refused_step_does_not_show_more_of_a_lock(stock: Machine) -> None:
    await prewrite(stock, b"eu/2", lock(START + 1, CellAddress(ORDERS, b"secret", b"c")))
    with token(ALL):
        result = await prewrite(stock, b"eu/2", lock(OWN, CellAddress(STOCK, b"eu/2", COLUMN)))
        assert b"secret" not in result.SerializeToString()
        answer = await commit(stock, b"eu/2")
        assert answer.uncommitted
        assert b"secret" not in answer.SerializeToString()


# ------------------------------------------------------------------------------------- steps


async def commit(
    machine: Machine, *rows: bytes, start: int = OWN, column: bytes = COLUMN
) -> pb.TransactionBatchResult:
    batch = pb.TransactionBatch(
        target=target(1),
        start_timestamps=[start],
        cells=[len(rows)],
        rows=rows,
        columns=[column] * len(rows),
        kinds=[KIND_PUT] * len(rows),
        values=[b"new"] * len(rows),
        followed=[0],
    )
    request = pb.CommitTransactionsRequest(batches=[batch])
    (result,) = (await machine.handler.commit_transactions(request)).batches
    return result


PRIMARY = CellAddress(STOCK, b"eu/2", COLUMN)


def listed(
    kind: StepList.Kind, row: bytes, value: bytes, start: int = OWN, commit: int = 0
) -> pb.StepList:
    is_commit = kind in (StepList.KIND_COMMIT_PRIMARY, StepList.KIND_COMMIT_SECONDARY)
    return pb.StepList(
        kinds=[kind],
        rows=[row],
        columns=[COLUMN],
        values=[value],
        start_timestamps=[start],
        commit_timestamps=[(commit or OWN_COMMIT) if is_commit else commit],
        min_commit_timestamps=[0],
    )


def record(start: int = OWN) -> bytes:
    return WriteRecord(start, RecordKind.PUT, b"v").encode()


async def steps_of(machine: Machine, one: pb.StepList) -> pb.MutationBatchResult:
    (result,) = await machine.mutate(pb.MutationBatch(target=target(1), steps=one))
    return result


async def test_an_own_transaction_is_committed_within_the_rights(stock: Machine) -> None:
    with token(EUROPE):
        locked = await steps_of(
            stock, listed(StepList.KIND_PREWRITE, b"eu/2", lock(OWN, PRIMARY).encode())
        )
        assert locked.mutations == 1
        assert not locked.unapplied
        done = await steps_of(
            stock, listed(StepList.KIND_COMMIT_PRIMARY, b"eu/2", record(), commit=OWN_COMMIT)
        )
        assert not done.HasField("error"), done.error
        assert not done.unapplied


@pytest.mark.parametrize("rights", [EUROPE, READER, WRITER, OTHER, NOTHING])
@pytest.mark.parametrize("row", [b"eu0", b"us/1"])
async def test_rows_outside_of_the_rights_are_not_written(
    stock: Machine, rights: Rights, row: bytes
) -> None:
    there = CellAddress(STOCK, row, COLUMN)
    with token(rights):
        for answer in (
            await prewrite(stock, row, lock(OWN, there)),
            await steps_of(stock, listed(StepList.KIND_PREWRITE, row, lock(OWN, there).encode())),
        ):
            assert denied(answer)
        assert isinstance(from_detail((await commit(stock, row)).error), PermissionDenied)
        assert isinstance(from_detail((await commit(stock, b"eu/2", row)).error), PermissionDenied)
    assert await stock.value(1, row) == b"v"


async def test_an_own_lock_names_no_primary_elsewhere(stock: Machine) -> None:
    """Clients that meet it would put a rollback marker there, whoever wrote the lock."""
    for primary in (
        CellAddress(ORDERS, b"a", b"c"),
        CellAddress(STOCK, b"us/1", COLUMN),
        CellAddress(INDEX, b"eu/1", b"c"),
        CellAddress(9, b"eu/1", b"c"),
    ):
        with token(EUROPE):
            forged = lock(OWN, primary)
            assert "decide" in denied(await prewrite(stock, b"eu/2", forged))
            assert "decide" in denied(
                await steps_of(stock, listed(StepList.KIND_PREWRITE, b"eu/2", forged.encode()))
            )


def changed(
    *changes: Change, conditions: Sequence[Condition] = (), column: bytes = COLUMN
) -> pb.Mutation:
    return pb.Mutation(row=b"eu/2", column=column, changes=changes, conditions=conditions)


def change(kind: Change.Kind, space: int, timestamp: int = 0, value: bytes = b"") -> Change:
    return Change(kind=kind, space=space, timestamp=timestamp, value=value)  # type: ignore[arg-type]


THEIRS = START + 1
_PUT, _DELETE, _IF_PREFIX = Change.KIND_PUT, Change.KIND_DELETE, Change.KIND_DELETE_IF_PREFIX
_NO_LOCK = Condition(space=SPACE_LOCK, expectation=Condition.EXPECTATION_ABSENT)

FORGED: dict[str, pb.Mutation] = {
    "a commit record of another transaction": changed(
        change(_PUT, SPACE_WRITE, OWN_COMMIT, record(THEIRS))
    ),
    "a record where another's may be": changed(change(_PUT, SPACE_WRITE, THEIRS, record())),
    "a record is deleted": changed(change(_DELETE, SPACE_WRITE, OWN_COMMIT)),
    "a marker against another transaction": changed(change(_PUT, SPACE_ROLLBACK, THEIRS)),
    "a marker is deleted": changed(change(_DELETE, SPACE_ROLLBACK, OWN)),
    "a lock is deleted": changed(change(_DELETE, SPACE_LOCK)),
    "a lock of another transaction is deleted": changed(
        change(_IF_PREFIX, SPACE_LOCK, value=THEIRS.to_bytes(8, "big"))
    ),
    "all locks of a time are deleted": changed(
        change(_IF_PREFIX, SPACE_LOCK, value=OWN.to_bytes(8, "big")[:7])
    ),
    "a lock over another": changed(change(_PUT, SPACE_LOCK, value=lock(OWN, PRIMARY).encode())),
    "a lock over another, with a condition that always holds": changed(
        change(_PUT, SPACE_LOCK, value=lock(OWN, PRIMARY).encode()),
        conditions=[
            Condition(
                space=SPACE_LOCK,
                expectation=Condition.EXPECTATION_ABSENT,
                prefix=OWN.to_bytes(8, "big"),
            )
        ],
    ),
    "a lock of another transaction": changed(
        change(_PUT, SPACE_LOCK, value=lock(THEIRS, PRIMARY).encode()), conditions=[_NO_LOCK]
    ),
    "a value of another transaction": changed(change(_PUT, SPACE_DATA, THEIRS, b"v")),
    "a value of another transaction is deleted": changed(change(_DELETE, SPACE_DATA, THEIRS)),
    "a notification is deleted": changed(change(_DELETE, SPACE_NOTIFY, OWN_COMMIT)),
    "a reserved column": changed(change(_PUT, SPACE_WRITE, OWN_COMMIT, record()), column=b"\0ack"),
}


@pytest.mark.parametrize("what", FORGED)
async def test_no_step_of_another_transaction_is_sent(stock: Machine, what: str) -> None:
    before = dict(stock.store.disks[1].durable)
    with token(ALL):
        (answer,) = await stock.mutate(pb.MutationBatch(target=target(1), mutations=[FORGED[what]]))
    assert isinstance(from_detail(answer.error), PercolatorError), what
    assert dict(stock.store.disks[1].durable) == before


@pytest.mark.parametrize(
    "one",
    [
        listed(StepList.KIND_PREWRITE, b"eu/2", lock(THEIRS, PRIMARY).encode(), THEIRS),
        listed(StepList.KIND_PREWRITE, b"eu/2", lock(THEIRS, PRIMARY).encode(), OWN),
        listed(StepList.KIND_COMMIT_PRIMARY, b"eu/2", record(THEIRS), THEIRS),
        listed(StepList.KIND_COMMIT_SECONDARY, b"eu/2", record(THEIRS), OWN),
        listed(StepList.KIND_COMMIT_SECONDARY, b"eu/2", record(), OWN, THEIRS),
    ],
)
async def test_no_listed_step_is_about_another_transaction(
    stock: Machine, one: pb.StepList
) -> None:
    with token(ALL):
        assert (await steps_of(stock, one)).HasField("error")


async def test_writes_outside_of_transactions_are_refused(stock: Machine) -> None:
    one = pb.StepList(
        kinds=[StepList.KIND_WRITE],
        rows=[b"eu/2"],
        columns=[COLUMN],
        values=[record()],
        start_timestamps=[0],
        commit_timestamps=[OWN_COMMIT],
        min_commit_timestamps=[0],
    )
    with token(ALL):
        assert "outside of transactions" in denied(await steps_of(stock, one))


async def test_no_transaction_of_another_is_committed(stock: Machine) -> None:
    with token(ALL):
        assert (await commit(stock, b"eu/2", start=THEIRS)).HasField("error")
        reserved = await commit(stock, b"eu/2", column=b"\0ack")
        assert isinstance(from_detail(reserved.error), PermissionDenied)
        assert not (await commit(stock, b"eu/2")).followed


async def test_nothing_is_written_while_the_oracle_does_not_answer(stock: Machine) -> None:
    stock.handed_out = None
    with token(ALL):
        answer = await commit(stock, b"eu/2")
    assert isinstance(from_detail(answer.error), NotReady)


async def test_the_oracle_is_asked_once_about_a_timestamp(stock: Machine) -> None:
    with token(ALL):
        await commit(stock, b"eu/2")
        stock.handed_out = None
        assert not (await commit(stock, b"eu/2")).HasField("error")


async def test_other_callers_are_not_restricted(stock: Machine) -> None:
    stock.handed_out, stock.described = None, {}
    for rights in (None,):
        with token(rights):
            assert (await read(stock, b"us/1")).found.values == [b"v"]
            assert not (await commit(stock, b"us/2", start=THEIRS)).HasField("error")


async def test_an_answer_is_not_lost_because_the_table_of_a_primary_is_not_known(
    stock: Machine,
) -> None:
    """A commit that came with it would be taken for not executed."""
    await prewrite(stock, b"eu/2", lock(START + 1, CellAddress(ORDERS, b"secret", b"c")))

    async def fails(table_id: int) -> Table:
        raise NotReady("no master answers")

    with token(ALL):
        await read(stock, b"eu/1")  # by now, the name of the table itself is known
        stock.rights._describe = fails
        own = steps.prewrite(
            b"eu/3", COLUMN, OWN, lock(OWN, CellAddress(STOCK, b"eu/3", COLUMN)).encode(), None
        )
        other = steps.prewrite(
            b"eu/2", COLUMN, OWN, lock(OWN, CellAddress(STOCK, b"eu/3", COLUMN)).encode(), None
        )
        (answer,) = await stock.mutate(pb.MutationBatch(target=target(1), mutations=[own, other]))
    assert not answer.HasField("error"), answer.error
    assert [one.mutation for one in answer.unapplied] == [1]


async def test_an_own_lock_is_shown_as_it_is(stock: Machine) -> None:
    """Its owner compares it with what it has sent."""
    mine = lock(OWN, CellAddress(STOCK, b"eu/2", COLUMN))
    with token(ALL):
        await prewrite(stock, b"eu/2", mine)
        answer = await prewrite(stock, b"eu/2", mine)
    assert LockRecord.decode(answer.unapplied[0].result.cell.value) == mine


async def test_lists_of_different_lengths_are_refused(stock: Machine) -> None:
    one = listed(StepList.KIND_PREWRITE, b"eu/2", lock(OWN, PRIMARY).encode())
    del one.columns[:]
    with token(ALL):
        assert isinstance(from_detail((await steps_of(stock, one)).error), InvalidArgument)
        damaged = listed(StepList.KIND_PREWRITE, b"eu/2", OWN.to_bytes(8, "big"))
        assert isinstance(from_detail((await steps_of(stock, damaged)).error), InvalidArgument)


# ------------------------------------------------------------------------- resolving locks


async def test_locks_are_resolved_for_rows_that_the_token_may_read(stock: Machine) -> None:
    asked: list[tuple[int, list[int]]] = []

    async def resolve(
        table_id: int, seen: Sequence[Cell], request: pb.ResolveLocksRequest, deadline: float
    ) -> pb.ResolveLocksResponse:
        asked.append((table_id, [LockRecord.decode(one.value).start_timestamp for one in seen]))
        return pb.ResolveLocksResponse()

    stock.handler._resolve_locks = resolve
    await prewrite(stock, b"eu/2", lock(START + 1, PRIMARY))
    await prewrite(stock, b"us/2", lock(START + 1, PRIMARY))

    def request(*rows: bytes, start: int = START + 1, read_at: int = 0) -> pb.ResolveLocksRequest:
        return pb.ResolveLocksRequest(
            target=target(1),
            rows=rows,
            columns=[COLUMN] * len(rows),
            start_timestamps=[start] * len(rows),
            read_at=read_at,
        )

    with token(EUROPE):
        with refuses("read"):
            await stock.handler.resolve_locks(request(b"eu/2", b"us/2"))
        await stock.handler.resolve_locks(request(b"eu/2"))
        # Locks that are not there, and of which the caller only says so.
        await stock.handler.resolve_locks(request(b"eu/1"))
        await stock.handler.resolve_locks(request(b"eu/2", start=START + 2))
        with pytest.raises(InvalidArgument):
            await stock.handler.resolve_locks(request(b"eu/2", read_at=1 << 63))
        uneven = request(b"eu/2")
        del uneven.columns[:]
        with pytest.raises(InvalidArgument):
            await stock.handler.resolve_locks(uneven)
    assert asked == [(STOCK, [START + 1]), (STOCK, []), (STOCK, [])]
