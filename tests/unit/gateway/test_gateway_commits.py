"""One transaction has one outcome, however often and wherever it is committed.

Through gateways, too, a transaction never meets the successor of a table that it has used.

A read through a gateway that a lock blocks until its time is up.

Read locks through gateways: shared, exclusive, repeated, and resolved.
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest

from percolator import Table, codecs
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    NotExecuted,
    NotReady,
    OutcomeUnknown,
    Overloaded,
    PercolatorError,
    Retry,
    SchemaError,
    UniqueViolation,
)
from percolator.limits import Limits
from percolator.protocol import commit
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.commit import Commit
from percolator.services.chassis import rpc
from percolator.services.chassis.access import CallerIdentity
from percolator.services.gateway.commits import Writes
from percolator.v1 import gateway_pb2 as pb
from percolator.v1 import master_pb2
from percolator.v1.errors_pb2 import CellAddress as WireAddress
from percolator.v1.gateway_pb2 import ResolveResponse, ScanTableRequest
from percolator.v1.tabletserver_pb2 import MutateRequest
from percolator.wire.roles import Role
from tests.unit.connected import written_out
from tests.unit.gateway.gateways import (
    COLUMN,
    DELETE,
    LOCK,
    TABLE,
    Cluster,
    Gateway,
    Site,
    a_site,
    commits_primary,
    gateways,
    write,
)

COMMITTED = ResolveResponse.FATE_COMMITTED
ABORTED = ResolveResponse.FATE_ABORTED


async def test_a_commit_is_visible_at_every_gateway_from_then_on(
    one: Gateway, other: Gateway, start: int
) -> None:
    commit = await one.commit(start, [write(b"bob", b"1"), write(b"zoe", b"2")])
    assert commit > start
    assert await other.read(b"bob", b"zoe", b"nobody") == [b"1", b"2", None]
    assert await other.get(start, b"bob") == [None], "a snapshot stays as it was"
    assert (await other.resolve(start, b"zoe", b"bob")).commit_timestamp == commit
    request = ScanTableRequest(start_timestamp=await other.begin(), table=TABLE)
    assert await other.scan(request) == [b"bob", b"zoe"]
    request.reverse, request.row_limit = True, 1
    assert await other.scan(request) == [b"zoe"]


READ_LOCK = pb.CellWrite.KIND_READ_LOCK

PRIMARIES = pytest.mark.parametrize(
    ("primary", "value"),
    [(write(b"bob", b"1"), b"1"), (write(b"bob", kind=READ_LOCK), None)],
    ids=["a written primary", "a read-locked primary"],
)


@PRIMARIES
async def test_the_same_commit_again_gives_the_same_timestamp_everywhere(
    primary: pb.CellWrite,
    value: bytes | None,
    one: Gateway,
    other: Gateway,
    third: Gateway,
    start: int,
) -> None:
    writes = [primary, write(b"zoe", b"2"), write(b"yan", kind=DELETE)]
    commit = await one.commit(start, writes)
    assert await one.commit(start, writes) == commit
    assert await other.commit(start, writes[::-1]) == commit, "in any order"
    request = pb.ResolveRequest(start_timestamp=start, writes=writes)
    assert (await third.handler.resolve(request)).commit_timestamp == commit
    for gateway in (one, third):
        with pytest.raises(InvalidArgument, match="another write set"):
            await gateway.commit(start, [write(b"bob", kind=LOCK), *writes[1:]])
    assert await third.read(b"bob", b"zoe") == [value, b"2"]


async def test_commits_through_gateways_keep_indexes_however_often_they_are_repeated() -> None:
    async with gateways(2) as (_, (one, other)):
        by_value = Table(TABLE, key=codecs.raw).column(COLUMN, codecs.raw, unique=True)
        await one.database.create_index(by_value)
        start = await one.begin()
        writes = [write(b"bob", b"1"), write(b"zoe", b"2")]
        commit = await one.commit(start, writes)
        assert await other.commit(start, writes) == commit
        later = await other.begin()
        taken = [write(b"kim", b"1")]
        with pytest.raises(UniqueViolation, match="row 'bob' has the same value"):
            await other.commit(later, taken)
        with pytest.raises(ConflictError, match="is rolled back"):
            await one.commit(later, taken)
        await one.commit(await one.begin(), [write(b"bob", b"3"), write(b"zoe", kind=DELETE)])
        async with other.database.snapshot() as snapshot:
            assert [row.raw() async for row in snapshot.find(by_value)] == [{COLUMN: b"3"}]
        assert await other.database.check_index(by_value) == []


@PRIMARIES
async def test_gateways_that_commit_the_same_transaction_at_once_agree(
    primary: pb.CellWrite, value: bytes | None
) -> None:
    for seed in range(25):
        async with gateways(3) as (cluster, all_gateways):
            chance = random.Random(seed)
            cluster.delay = lambda _, chance=chance: 0.02 * chance.random()  # type: ignore[misc]
            start = await all_gateways[0].begin()
            writes = [primary, write(b"zoe", b"2"), write(b"max", kind=LOCK)]
            commits = await asyncio.gather(*(one.commit(start, writes) for one in all_gateways))
            assert len(set(commits)) == 1
            assert await all_gateways[1].read(b"bob", b"zoe") == [value, b"2"]


async def test_a_transaction_that_lost_a_conflict_stays_aborted_everywhere(
    one: Gateway, other: Gateway
) -> None:
    loser, winner = await one.begin(), await one.begin()
    await one.commit(winner, [write(b"zoe", b"w")])
    writes = [write(b"bob", b"l"), write(b"zoe", b"l")]
    with pytest.raises(ConflictError) as caught:
        await one.commit(loser, writes)
    assert caught.value.other_start_timestamp == winner
    assert caught.value.retry is Retry.USELESS, "the same again would fail again"
    for gateway in (one, other):
        with pytest.raises(ConflictError):
            await gateway.commit(loser, writes)
        assert (await gateway.resolve(loser, b"bob", b"zoe")).fate == ABORTED
    assert await other.read(b"bob", b"zoe") == [None, b"w"]


async def test_nothing_of_what_an_aborted_transaction_would_have_written_is_kept(
    one: Gateway,
) -> None:
    """A gateway remembers that it is aborted, but its writes may have 16 MiB."""
    loser = await one.begin()
    await one.commit(await one.begin(), [write(b"bob", b"w")])
    with pytest.raises(ConflictError):
        await one.commit(loser, [write(b"bob", b"l")])
    gc.collect()
    assert not [kept for kept in gc.get_objects() if isinstance(kept, Writes)]
    with pytest.raises(ConflictError, match="was committed by transaction"):
        await one.commit(loser, [write(b"bob", b"l")])


async def test_a_commit_whose_answer_is_lost_is_unknown_until_another_gateway_resolves_it() -> None:
    async with gateways(2, commit_seconds=1.0) as (cluster, (one, other)):
        start = await one.begin()
        writes = [write(b"bob", b"1"), write(b"zoe", b"2")]
        cluster.loses_answer = commits_primary
        with pytest.raises(OutcomeUnknown) as caught:
            await one.commit(start, writes)
        assert caught.value.start_timestamp == start
        assert caught.value.primary is not None
        assert caught.value.primary.row == b"bob"
        cluster.loses_answer = lambda _: False
        commit = await other.commit(start, writes)
        assert await one.commit(start, writes) == commit
        assert await one.read(b"bob", b"zoe") == [b"1", b"2"]


async def test_a_caller_that_leaves_finds_its_commit_done_when_it_comes_back(
    cluster: Cluster, one: Gateway
) -> None:
    cluster.delay = lambda request: 3.0 if commits_primary(request) else 0.001
    start = await one.begin()
    calling = asyncio.ensure_future(one.commit(start, [write(b"bob", b"1")]))
    await asyncio.sleep(0.5)
    calling.cancel()
    await asyncio.wait([calling])
    assert one.commits.in_progress == 1
    again = await asyncio.gather(*(one.commit(start, [write(b"bob", b"1")]) for _ in range(5)))
    assert len(set(again)) == 1
    assert one.commits.joined == 5
    assert +one.commits.outcomes == {"committed": 1}


async def test_commits_that_are_given_up_at_the_end_are_given_up_in_the_order_they_began(
    cluster: Cluster, one: Gateway
) -> None:
    cluster.delay = lambda _: 30.0
    starts = [await one.begin() for _ in range(30)]
    told = []

    async def commit(start: int) -> None:
        try:
            await one.commit(start, [write(b"%d" % start, b"1")])
        except OutcomeUnknown as unknown:
            told.append(unknown.start_timestamp)

    callers = [asyncio.ensure_future(commit(start)) for start in starts]
    await asyncio.sleep(0.5)
    await one.commits.close(1.0)
    await asyncio.wait(callers)
    assert told == starts


async def test_aborted_is_reported_only_when_no_prewrite_can_still_arrive() -> None:
    """The marker could not be written: the outcome is unknown, and a repeat may still commit it."""
    async with gateways(2, commit_seconds=1.0) as (cluster, (one, other)):
        loser, winner = await one.begin(), await one.begin()
        await one.commit(winner, [write(b"zoe", b"w")])
        cluster.loses_answer = _rolls_back
        writes = [write(b"bob", b"l"), write(b"zoe", b"l")]
        with pytest.raises(OutcomeUnknown):
            await one.commit(loser, writes)
        cluster.loses_answer = lambda _: False
        with pytest.raises(ConflictError):
            await other.commit(loser, writes)


def _rolls_back(request: MutateRequest) -> bool:
    return any(
        len(mutation.changes) == 3 and len(mutation.conditions) <= 2
        for batch in request.batches
        for mutation in written_out(batch)
    )


async def test_resolving_a_transaction_that_never_committed_rules_it_out_for_ever(
    one: Gateway, other: Gateway, start: int
) -> None:
    assert (await other.resolve(start, b"bob", b"zoe")).fate == ABORTED
    for gateway in (one, other):
        with pytest.raises(ConflictError):
            await gateway.commit(start, [write(b"bob", b"1"), write(b"zoe", b"1")])
    assert await one.read(b"bob", b"zoe") == [None, None]


async def test_resolving_at_a_cell_that_is_not_the_primary_removes_no_lock(
    cluster: Cluster, one: Gateway, other: Gateway
) -> None:
    """Otherwise the transaction would be committed without that cell."""
    cluster.delay = lambda request: 1.0 if commits_primary(request) else 0.001
    start = await one.begin()
    committing = asyncio.ensure_future(
        one.commit(start, [write(b"bob", b"1"), write(b"zoe", b"1")])
    )
    await asyncio.sleep(0.5)
    with pytest.raises(InvalidArgument, match=r"cells: .* is decided at row 'bob'"):
        await other.resolve(start, b"zoe")
    await committing
    assert await other.read(b"bob", b"zoe") == [b"1", b"1"]


async def test_a_lock_that_arrives_while_another_cell_is_asked_about_is_left_alone(
    cluster: Cluster, one: Gateway, other: Gateway, start: int
) -> None:
    cluster.delay = lambda request: 0.5 if _rolls_back(request) else 0.001
    asking = asyncio.ensure_future(other.resolve(start, b"zoe"))
    await asyncio.sleep(0.1)  # nothing was found there, and the marker has been sent
    cluster.delay = lambda request: 2.0 if commits_primary(request) else 0.001
    committing = asyncio.ensure_future(
        one.commit(start, [write(b"bob", b"1"), write(b"zoe", b"1")])
    )
    with pytest.raises(InvalidArgument, match="is decided at"):
        await asking
    await committing
    assert await one.read(b"bob", b"zoe") == [b"1", b"1"]


OTHER_WRITES = {
    "another value": [write(b"bob", b"2"), write(b"zoe", b"1")],
    "another kind": [write(b"bob", b"1"), write(b"zoe", kind=DELETE)],
    "one cell more": [write(b"bob", b"1"), write(b"yan", b"1"), write(b"zoe", b"1")],
    "another primary": [write(b"ann", b"1"), write(b"bob", b"1"), write(b"zoe", b"1")],
}


@pytest.mark.parametrize("case", OTHER_WRITES)
@pytest.mark.parametrize("elsewhere", [False, True])
async def test_other_writes_under_the_same_start_timestamp_are_refused_and_change_nothing(
    case: str, elsewhere: bool, one: Gateway, other: Gateway, start: int
) -> None:
    writes = [write(b"bob", b"1"), write(b"zoe", b"1")]
    commit = await one.commit(start, writes)
    asked = other if elsewhere else one
    with pytest.raises(InvalidArgument, match=f"another write set .* {start}"):
        await asked.commit(start, OTHER_WRITES[case])
    assert await asked.commit(start, writes) == commit, "the true one is answered as before"
    assert await other.read(b"ann", b"bob", b"yan", b"zoe") == [None, b"1", None, b"1"]


# Only a finished commit that lacks a cell shows the difference of one cell more.
@pytest.mark.parametrize("case", sorted(OTHER_WRITES.keys() - {"one cell more"}))
async def test_other_writes_while_the_first_are_being_committed_are_refused(
    case: str, cluster: Cluster, one: Gateway, other: Gateway
) -> None:
    cluster.delay = lambda request: 1.0 if commits_primary(request) else 0.001
    start = await one.begin()
    committing = asyncio.ensure_future(
        one.commit(start, [write(b"bob", b"1"), write(b"zoe", b"1")])
    )
    await asyncio.sleep(0.5)
    with pytest.raises(InvalidArgument, match="another write set"):
        await other.commit(start, OTHER_WRITES[case])
    await committing
    assert await other.read(b"ann", b"bob", b"yan", b"zoe") == [None, b"1", None, b"1"]


async def test_two_different_write_sets_committed_at_once_are_not_mixed() -> None:
    """Neither knows of the other when it begins, and each has a different primary."""
    met = 0
    for seed in range(40):
        async with gateways(2) as (cluster, (one, other)):
            chance = random.Random(seed)
            cluster.delay = lambda _, chance=chance: 0.02 * chance.random()  # type: ignore[misc]
            start = await one.begin()
            answers = await asyncio.gather(
                one.commit(start, [write(b"ann", b"1"), write(b"bob", b"1")]),
                other.commit(start, [write(b"bob", b"1"), write(b"zoe", b"1")]),
                return_exceptions=True,
            )
            await asyncio.sleep(60.0)  # every lock that was left behind has expired
            met += any(isinstance(answer, InvalidArgument) for answer in answers)
            ann, bob, zoe = await one.read(b"ann", b"bob", b"zoe")
            if isinstance(answers[0], int):
                assert (ann, bob) == (b"1", b"1")
            if isinstance(answers[1], int):
                assert (bob, zoe) == (b"1", b"1")
    assert met > 20


async def test_a_transaction_without_writes_is_committed_with_nothing_sent(
    cluster: Cluster, one: Gateway, start: int
) -> None:
    before = cluster.mutations
    assert await one.commit(start, []) == 0
    assert cluster.mutations == before


async def test_too_many_commits_at_once_are_refused_and_may_come_again() -> None:
    async with gateways(1, commits_max=2) as (cluster, (one,)):
        cluster.delay = lambda _: 0.1
        starts = [await one.begin() for _ in range(3)]
        answers = await asyncio.gather(
            *(one.commit(start, [write(b"%d" % start, b"1")]) for start in starts),
            return_exceptions=True,
        )
        assert [type(answer) for answer in answers] == [int, int, Overloaded]
        assert await one.commit(starts[2], [write(b"%d" % starts[2], b"1")]) > 0


async def test_a_first_commit_looks_at_no_cells_and_any_other_looks_first(
    one: Gateway, other: Gateway, start: int
) -> None:
    await one.commit(start, [write(b"bob", b"1")])
    assert one.commits.looked_up == 0
    await other.commit(start, [write(b"bob", b"1")])
    assert other.commits.looked_up == 1


async def test_increments_by_many_callers_all_count() -> None:
    async with gateways(3) as (_, all_gateways):
        await _increments(all_gateways)
        total = await all_gateways[0].read(b"counter")
        assert total == [b"30"]


async def _increments(all_gateways: list[Gateway]) -> None:
    async def increment(number: int) -> None:
        for turn in range(1_000):
            gateway = all_gateways[(number + turn) % len(all_gateways)]
            start = await gateway.begin()
            (value,) = await gateway.get(start, b"counter")
            new = write(b"counter", b"%d" % (int(value or b"0") + 1), column=COLUMN)
            try:
                await gateway.commit(start, [new])
            except ConflictError:
                await asyncio.sleep(0.01 * number)
            else:
                return
        raise PercolatorError("never succeeded")

    await asyncio.gather(*(increment(number) for number in range(30)))


balance = Table(TABLE).column(COLUMN, codecs.raw, indexed=True)


async def _create_again(cluster: Cluster) -> None:
    await cluster.delete_table(master_pb2.DeleteTableRequest(name=TABLE))
    await cluster.create_table(master_pb2.CreateTableRequest(name=TABLE))


async def _scan(gateway: Gateway, start: int) -> object:
    return await gateway.scan(pb.ScanTableRequest(start_timestamp=start, table=TABLE))


async def _find(gateway: Gateway, start: int) -> object:
    asked = pb.FindRowsRequest(start_timestamp=start, table=TABLE, index="balance", values=[b"1"])
    return [page async for page in gateway.handler.find_rows(asked)]


async def _commit(gateway: Gateway, start: int) -> object:
    return await gateway.commit(start, [write(b"bob", b"2")])


CALLS: dict[str, Callable[[Gateway, int], Awaitable[object]]] = {
    "Get": lambda gateway, start: gateway.get(start, b"bob"),
    "ScanTable": _scan,
    "FindRows": _find,
    "Commit": _commit,
    "Resolve": lambda gateway, start: gateway.resolve(start, b"bob"),
}


@pytest.mark.parametrize("call", CALLS)
async def test_a_gateway_that_has_never_heard_of_the_first_table_refuses_the_next(
    call: str, cluster: Cluster, one: Gateway, other: Gateway
) -> None:
    await one.commit(await one.begin(), [write(b"bob", b"1")])
    start = await one.begin()
    assert await one.get(start, b"bob") == [b"1"]
    await _create_again(cluster)
    with pytest.raises(SchemaError, match="'accounts' is younger than the snapshot"):
        await CALLS[call](other, start)
    assert await other.read(b"bob") == [None], "nothing was written into the new table"


@pytest.mark.parametrize("call", ["Get", "ScanTable", "FindRows"])
async def test_a_gateway_that_knows_the_first_table_says_that_it_was_dropped(
    call: str, cluster: Cluster, one: Gateway, other: Gateway
) -> None:
    await one.database.create_index(balance)
    start = await one.begin()
    await CALLS[call](one, start)
    await _create_again(cluster)
    with pytest.raises(SchemaError, match="'accounts' was dropped"):
        await CALLS[call](one, start)
    # By now it knows the next table.
    assert await one.read(b"bob") == [None]
    with pytest.raises(SchemaError, match="'accounts' is younger than the snapshot"):
        await _commit(one, start)
    assert await other.read(b"bob") == [None]


async def test_a_commit_that_is_sent_again_does_not_commit_into_the_next_table(
    cluster: Cluster, one: Gateway, other: Gateway
) -> None:
    start, writes = await one.begin(), [write(b"bob", b"1")]
    await one.commit(start, writes)
    await _create_again(cluster)
    with pytest.raises(SchemaError, match="younger"):
        await other.commit(start, writes)
    assert await other.read(b"bob") == [None]


@pytest.mark.parametrize("call", ["Get", "ScanTable", "FindRows"])
async def test_it_is_late_and_may_be_repeated_and_nothing_is_said_to_be_rolled_back(
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    one: Gateway,
    other: Gateway,
) -> None:
    await one.database.create_index(balance)

    async def dies(*_: Any) -> int:
        raise KeyboardInterrupt

    async def resolves_nothing(*_: Any, **__: Any) -> set[int]:
        return set()

    with monkeypatch.context() as patch:
        patch.setattr(Commit, "commit_primary", dies)
        patch.setattr(commit, "roll_back_all", resolves_nothing)
        transaction = one.database.transaction()
        transaction.internal.writes.put(await _address(one), b"1")
        with pytest.raises(KeyboardInterrupt):
            await transaction.commit()
    monkeypatch.setattr(Cleanup, "resolve", resolves_nothing)
    token = rpc._remaining.set(lambda: 1.0)
    try:
        with pytest.raises(DeadlineExceeded, match="is locked by transaction") as caught:
            await CALLS[call](other, await other.begin())
    finally:
        rpc._remaining.reset(token)
    assert caught.value.retry is Retry.SAFE


async def _address(gateway: Gateway) -> CellAddress:
    engine = gateway.database.internal.engine
    info = await engine.catalog.table(TABLE, engine.now() + 1)
    return CellAddress(info.table_id, b"bob", write(b"bob").column)


KIND_OF_THE_FUTURE: Any = 9


def _read_lock(row: bytes) -> pb.CellWrite:
    return write(row, kind=READ_LOCK)


async def _resolved(gateway: Gateway, start: int, *writes: pb.CellWrite) -> ResolveResponse.Fate:
    request = pb.ResolveRequest(start_timestamp=start, writes=writes)
    return (await gateway.handler.resolve(request)).fate


async def test_callers_share_a_cell_and_exclude_its_writers(one: Gateway, other: Gateway) -> None:
    starts = [await gateway.begin() for gateway in (one, other, one, other)]
    await one.commit(starts[0], [_read_lock(b"hub"), write(b"a", b"1")])
    await other.commit(starts[1], [_read_lock(b"hub"), write(b"z", b"1")])
    for start, kind in zip(starts[2:], (DELETE, LOCK), strict=True):
        with pytest.raises(ConflictError, match="was read-locked") as caught:
            await one.commit(start, [write(b"hub", kind=kind)])
        assert caught.value.cell is not None
        assert caught.value.cell.column == COLUMN


async def test_one_gateway_commits_in_one_round_and_another_in_two_phases() -> None:
    for seed in range(20):
        async with a_site() as site:
            chance = random.Random(seed)
            site.cluster.delay = lambda _, chance=chance: 0.02 * chance.random()  # type: ignore[misc]
            both = [await site.start(), await site.start(limits=Limits())]
            start = await both[0].begin()
            writes = [_read_lock(b"bob"), write(b"al", b"2"), _read_lock(b"hal")]
            commits = await asyncio.gather(*(one.commit(start, writes) for one in both))
            assert len(set(commits)) == 1


async def test_a_read_lock_decides_in_a_table_with_an_index_too(
    cluster: Cluster, one: Gateway, other: Gateway
) -> None:
    columns = [master_pb2.ColumnCodec(column=name, codec="raw") for name in (COLUMN, b"other")]
    index = master_pb2.Index(name="both", columns=columns)
    await cluster.change_indexes(master_pb2.ChangeIndexesRequest(table=TABLE, add=[index]))
    start = await one.begin()
    writes = [_read_lock(b"bob"), write(b"bob", b"1", column=b"other")]
    await one.commit(start, writes)
    assert await _resolved(other, start, *writes) == COMMITTED


async def test_a_transaction_that_was_never_committed_is_resolved_and_stays_aborted(
    one: Gateway, other: Gateway, start: int
) -> None:
    writes = [_read_lock(b"bob"), write(b"zoe", b"2")]
    assert await _resolved(other, start, *writes) == ABORTED
    with pytest.raises(ConflictError) as caught:
        await one.commit(start, writes)
    assert caught.value.cell is not None
    assert caught.value.cell.column == COLUMN, "the hidden one means nothing to callers"


async def test_the_hidden_primary_that_an_error_names_can_be_asked_about() -> None:
    async with gateways() as (_, (one, _)):
        start = await one.begin()
        commit = await one.commit(start, [_read_lock(b"bob")])
        known = one.commits._known[start].primary
        assert known is not None
        primary = WireAddress(table_id=known.table_id, row=known.row, column=known.column)
        request = pb.ResolveRequest(start_timestamp=start, primary=primary)
        assert (await one.handler.resolve(request)).commit_timestamp == commit
        primary.column = b"\0ack\0"
        with pytest.raises(InvalidArgument, match=r"primary\.column: .*reserved"):
            await one.handler.resolve(pb.ResolveRequest(start_timestamp=start, primary=primary))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "primary: give either"),
        (
            {
                "cells": [pb.CellName(table=TABLE, row=b"a", column=COLUMN)],
                "writes": [_read_lock(b"a")],
            },
            "primary: give either",
        ),
        ({"writes": [write(b"a", kind=pb.CellWrite.KIND_NOTIFY)]}, "writes: has nothing but"),
        ({"writes": [_read_lock(b"a"), write(b"b", column=b"\0c")]}, r"writes\[1\]\.column"),
        # Without its kind, the cell itself would be asked, instead of the hidden one that decides.
        (
            {"writes": [pb.CellWrite(table=TABLE, row=b"a", column=COLUMN)]},
            r"writes\[0\]\.kind: 0 is not a kind",
        ),
        ({"writes": [write(b"a", kind=KIND_OF_THE_FUTURE)]}, r"writes\[0\]\.kind: 9 is not"),
    ],
)
async def test_what_cannot_be_resolved_is_refused_by_name(
    fields: dict[str, Any], said: str, one: Gateway
) -> None:
    request = pb.ResolveRequest(start_timestamp=await one.begin(), **fields)
    with pytest.raises(InvalidArgument, match=said):
        await one.handler.resolve(request)


async def test_a_read_lock_has_no_value_and_is_the_only_write_of_its_cell(
    one: Gateway, start: int
) -> None:
    with pytest.raises(InvalidArgument, match=r"writes\[0\]\.value: is allowed in a put"):
        await one.commit(start, [write(b"a", b"v", READ_LOCK)])
    with pytest.raises(InvalidArgument, match=r"writes\[1\]: names the same cell"):
        await one.commit(start, [_read_lock(b"a"), write(b"a", b"v")])


# The changes of a table through a gateway.


@pytest.fixture
@asynccontextmanager
async def after(cluster: Cluster, one: Gateway) -> AsyncIterator[int]:
    """A timestamp since which the table has a feed."""
    await cluster.set_change_feed(master_pb2.SetChangeFeedRequest(table=TABLE, change_feed=True))
    yield await one.begin()


async def follow(gateway: Gateway, **fields: object) -> list[pb.FollowChangesResponse]:
    request = pb.FollowChangesRequest(table=TABLE, **fields)  # type: ignore[arg-type]
    return [one async for one in gateway.handler.follow_changes(request)]


async def test_changes_are_streamed_in_the_order_of_commits(
    after: int, one: Gateway, other: Gateway
) -> None:
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


async def test_an_endless_stream_tells_how_far_it_is_while_nothing_changes(
    after: int, one: Gateway
) -> None:
    stream = one.handler.follow_changes(pb.FollowChangesRequest(table=TABLE, after=after))
    idle = await anext(stream)
    assert not idle.changes
    assert idle.reached > after
    oldest = one.database.internal.engine.open_starts.oldest
    commit = await one.commit(await one.begin(), [write(b"a", b"1")])
    found = await anext(stream)
    assert [change.commit_timestamp for change in found.changes] == [commit]
    assert found.reached >= commit
    assert oldest() > after
    await cast(AsyncGenerator[Any, None], stream).aclose()
    assert oldest() == 0


async def test_a_gateway_that_shuts_down_ends_the_streams_that_never_end_by_themselves(
    after: int, one: Gateway
) -> None:
    commit = await one.commit(await one.begin(), [write(b"a", b"1")])
    stream = one.handler.follow_changes(pb.FollowChangesRequest(table=TABLE, after=after))
    assert [change.commit_timestamp for change in (await anext(stream)).changes] == [commit]
    waiting = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0.5)
    began = one.database.internal.engine.now()
    await one.handler.end_streams()
    with pytest.raises(NotReady, match="shutting down") as caught:
        await waiting
    assert caught.value.retry is Retry.SAFE
    assert one.database.internal.engine.now() == began, "at once"
    assert one.database.internal.engine.open_starts.oldest() == 0
    with pytest.raises(NotReady):
        await follow(one, after=after)
    assert (await follow(one, after=after, until=commit))[-1].reached == commit


async def test_bad_requests_are_refused(one: Gateway) -> None:
    now = await one.begin()
    without_feed = f"^table: '{TABLE}' has no change feed"
    for after, until, said in (
        (0, 0, "after: is missing"),
        (now, now << 1, r"until: .* in the future"),
        (now, now - 1, r"until: .* is below after"),
        (now, now, without_feed),
        (now, await one.begin(), without_feed),
        (now, 0, without_feed),
    ):
        with pytest.raises(InvalidArgument, match=said):
            await follow(one, after=after, until=until)
    request = pb.FollowChangesRequest(table="nothing", after=now)
    with pytest.raises(SchemaError):
        await anext(one.handler.follow_changes(request))


async def test_the_more_followers_a_client_has_the_less_often_each_looks_for_changes(
    cluster: Cluster, one: Gateway, after: int
) -> None:

    async def looks(followers: int, caller: CallerIdentity) -> int:
        """In a minute."""
        request = pb.FollowChangesRequest(table=TABLE, after=after)
        token = rpc._caller.set(caller)
        try:
            reading = [
                asyncio.create_task(_read_all(one.handler.follow_changes(request)))
                for _ in range(followers)
            ]
        finally:
            rpc._caller.reset(token)
        await asyncio.sleep(30)
        before = cluster.looks
        await asyncio.sleep(60)
        counted = cluster.looks - before
        for task in reading:
            task.cancel()
        await asyncio.wait(reading)
        return counted

    client = CallerIdentity(Role.CLIENT, (b"a token", "192.0.2.1"))
    alone = await looks(1, client)
    assert alone > 100
    many = await looks(250, client)
    assert many <= 25 * alone * 1.1
    assert await looks(25, client) >= 20 * alone, "so few are not slowed down"
    assert not one.handler._followers


async def _read_all(stream: AsyncIterator[pb.FollowChangesResponse]) -> None:
    async for _ in stream:
        pass


# Gateways die, answers are lost, callers ask twice: every transaction still has one outcome.
#
# Each seed is a bank whose tellers send every commit to random gateways, repeatedly and to several
# at once, until they learn its outcome. Other callers ask about the outcome meanwhile.

SEEDS = 15
FAULTS = {
    "killed gateway", "left", "lost answer", "lost request", "question", "slow", "unknown",
}  # fmt: skip
ACCOUNTS = [b"ann", b"bob", b"max", b"tom", b"zoe"]
OPENING_BALANCE = 100
TELLERS = 4
TRANSFERS = 8
GATEWAYS = 3
COMMIT_SECONDS = 3.0
NO_COMMIT = 0


class Bank:
    """One seed."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._chance = random.Random(seed)
        self._gateways: list[Gateway] = []
        self.told: dict[int, set[int]] = defaultdict(set)
        """By start timestamp: every outcome that a caller was told."""
        self.occurred: Counter[str] = Counter()

    async def run(self) -> int:
        """Returns the sum of all accounts at the end."""
        self._gateways = [await self._started() for _ in range(GATEWAYS)]
        opening = [write(row, b"%d" % OPENING_BALANCE) for row in ACCOUNTS]
        await self._gateways[0].commit(await self._gateways[0].begin(), opening)
        cluster = self._site.cluster
        cluster.delay = self._delay
        cluster.loses_answer = lambda _: self._occurs("lost answer", 0.04)
        cluster.loses_request = lambda: self._occurs("lost request", 0.03)
        killing = asyncio.ensure_future(self._kill_now_and_then())
        await asyncio.gather(*(self._teller() for _ in range(TELLERS)))
        killing.cancel()
        cluster.loses_answer, cluster.loses_request = lambda _: False, lambda: False
        last = await self._started()
        return sum(int(value or b"0") for value in await last.read(*ACCOUNTS))

    async def _started(self) -> Gateway:
        return await self._site.start(commit_seconds=COMMIT_SECONDS)

    def _delay(self, _: MutateRequest) -> float:
        if self._occurs("slow", 0.02):
            return self._chance.uniform(0.5, 6.0)
        return self._chance.uniform(0.001, 0.02)

    def _occurs(self, name: str, share: float) -> bool:
        if self._chance.random() >= share:
            return False
        self.occurred[name] += 1
        return True

    async def _kill_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0.1, 1.5))
            place = self._chance.randrange(GATEWAYS)
            killed, self._gateways[place] = self._gateways[place], await self._started()
            self._site.kill(killed)
            self.occurred["killed gateway"] += 1

    async def _teller(self) -> None:
        for _ in range(TRANSFERS):
            await self._transfer()
            await asyncio.sleep(self._chance.uniform(0, 0.2))

    async def _transfer(self) -> None:
        source, target = self._chance.sample(ACCOUNTS, 2)
        gateway = self._chance.choice(self._gateways)
        try:
            start = await gateway.begin()
            has, gets = (int(value or b"") for value in await gateway.get(start, source, target))
        except (ExecutionUnknown, NotExecuted):
            return  # the gateway was killed meanwhile
        writes = [write(source, b"%d" % (has - 1)), write(target, b"%d" % (gets + 1))]
        while not self.told[start]:
            asked = [self._commit(start, writes) for _ in range(self._chance.choice((1, 1, 2, 3)))]
            if self._occurs("question", 0.1):
                asked.append(self._resolve(start, source, target))
            patience = self._chance.choice((0.01, 0.1, 1.0, 5.0))
            pending = [asyncio.ensure_future(one) for one in asked]
            await asyncio.wait(pending, timeout=patience)
            for one in pending:
                if one.done():
                    one.result()
                else:
                    self.occurred["left"] += 1
                    one.cancel()

    async def _commit(self, start: int, writes: list[pb.CellWrite]) -> None:
        try:
            commit = await self._chance.choice(self._gateways).commit(start, writes)
        except ConflictError:
            self.told[start].add(NO_COMMIT)
        except (OutcomeUnknown, ExecutionUnknown, NotExecuted):
            self.occurred["unknown"] += 1
        else:
            self.told[start].add(commit)

    async def _resolve(self, start: int, *rows: bytes) -> None:
        try:
            told = await self._chance.choice(self._gateways).resolve(start, *rows)
        except (OutcomeUnknown, ExecutionUnknown, NotExecuted):
            return
        committed = told.fate == ResolveResponse.FATE_COMMITTED
        self.told[start].add(told.commit_timestamp if committed else NO_COMMIT)


async def test_every_caller_is_told_the_same_outcome_and_no_money_is_made_or_lost() -> None:
    occurred: Counter[str] = Counter()
    for seed in range(SEEDS):
        async with a_site() as site:
            bank = Bank(site, seed)
            total = await bank.run()
        contradictions = {start: told for start, told in bank.told.items() if len(told) != 1}
        assert contradictions == {}, f"seed {seed}"
        assert total == OPENING_BALANCE * len(ACCOUNTS), f"seed {seed}"
        occurred += bank.occurred
    assert set(occurred) == FAULTS, "a fault never occurred"


# Reads for update through gateways: in turn, whichever gateway commits.


async def _get_for_update(
    gateway: Gateway, start: int, *, first_start: int = 0, rows: int = 1
) -> list[bytes]:
    request = pb.GetRequest(start_timestamp=start, for_update=True)
    request.first_start_timestamp = first_start
    for _ in range(rows):
        request.rows.add(table=TABLE, row=b"a", columns=[COLUMN])
    answer = await gateway.handler.get(request)
    return [cell.value for row in answer.rows for cell in row.cells]


async def test_callers_of_gateways_that_read_for_update_go_in_turn(
    one: Gateway, other: Gateway
) -> None:
    conflicts = 0

    async def add(gateway: Gateway, committing: Gateway) -> None:
        nonlocal conflicts
        first = start = await gateway.begin()
        while True:
            try:
                found = await _get_for_update(gateway, start, first_start=first)
            except ConflictError:
                conflicts += 1
                start = await gateway.begin()
                continue
            number = int(found[0]) if found else 0
            await committing.commit(start, [write(b"a", b"%d" % (number + 1))])
            return

    await asyncio.gather(*(add(one, other) for _ in range(5)))
    assert await one.read(b"a") == [b"5"]
    assert conflicts == 4  # all but the first had begun before their turn came


async def test_bad_reads_for_update_are_refused(one: Gateway) -> None:
    start = await one.begin()
    with pytest.raises(InvalidArgument, match="expected one row with one column"):
        await _get_for_update(one, start, rows=2)
    with pytest.raises(InvalidArgument, match=r"first_start_timestamp: .* is above"):
        await _get_for_update(one, start, first_start=start + 1)
