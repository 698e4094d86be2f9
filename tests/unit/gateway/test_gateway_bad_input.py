"""Bad requests are refused with the name of the field, and nothing is written.

Reads of columns by their prefix, through a gateway.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from percolator.errors import InvalidArgument, SchemaError
from percolator.limits import Limits
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.cells_pb2 import RowFilter, RowRange
from percolator.v1.errors_pb2 import CellAddress as WireAddress
from tests.unit.gateway.gateways import (
    COLUMN,
    DELETE,
    LOCK,
    NOTIFY,
    PUT,
    TABLE,
    Cluster,
    Gateway,
    gateways,
    write,
)

LIMITS = Limits()
KIND_OF_THE_FUTURE: Any = 9

BAD_WRITES: dict[str, tuple[Sequence[pb.CellWrite], str]] = {
    "no kind": ([write(b"a", kind=pb.CellWrite.KIND_UNSPECIFIED)], r"writes\[0\]\.kind"),
    "a kind of the future": (
        [pb.CellWrite(kind=KIND_OF_THE_FUTURE, table=TABLE, column=b"c", value=b"v")],
        r"writes\[0\]\.kind",
    ),
    "no table": ([pb.CellWrite(kind=PUT, row=b"a", column=COLUMN)], r"writes\[0\]\.table"),
    "no column": ([write(b"a", column=b"")], r"writes\[0\]\.column: is empty"),
    "a reserved column": ([write(b"a", column=b"\0ack")], r"writes\[0\]\.column: .*reserved"),
    "a long column": ([write(b"a", column=b"c" * 256)], r"writes\[0\]\.column: has 256 bytes"),
    "a long row": ([write(b"a"), write(b"r" * 4097)], r"writes\[1\]\.row: has 4097 bytes"),
    "a long value": (
        [write(b"a", b"v" * (LIMITS.value_bytes_max + 1))],
        r"writes\[0\]\.value: has 4194305 bytes",
    ),
    "a value to delete": ([write(b"a", b"v", DELETE)], r"writes\[0\]\.value: is allowed in a put"),
    "a value to lock": ([write(b"a", b"v", LOCK)], r"writes\[0\]\.value: is allowed in a put"),
    "a cell twice": ([write(b"a"), write(b"b"), write(b"a")], r"writes\[2\]: .*writes\[0\]"),
    "a cell put and locked": ([write(b"a"), write(b"a", kind=LOCK)], r"writes\[1\]"),
    "no observer to notify": ([write(b"a", kind=NOTIFY)], r"writes\[0\]: .*no weak observer"),
}


@pytest.mark.parametrize("case", BAD_WRITES)
async def test_bad_writes_are_refused_whole(case: str, cluster: Cluster, one: Gateway) -> None:
    writes, field = BAD_WRITES[case]
    start = await one.begin()
    before = cluster.mutations
    with pytest.raises(InvalidArgument, match=field):
        await one.commit(start, writes)
    assert cluster.mutations == before
    assert await one.commit(start, [write(b"z", b"1")]) > start, "it may be put right"


async def test_more_than_a_transaction_holds_is_refused(
    cluster: Cluster, one: Gateway, start: int
) -> None:
    large = b"v" * LIMITS.value_bytes_max
    with pytest.raises(InvalidArgument, match=r"writes\[15\]: .* at most 67108864 bytes"):
        await one.commit(start, [write(b"%d" % number, large) for number in range(20)])
    assert cluster.mutations == 0


@pytest.mark.parametrize(("start", "reason"), [(0, "missing"), (2**64 - 1, "future")])
async def test_impossible_timestamps_are_refused_by_every_call(
    start: int, reason: str, cluster: Cluster, one: Gateway
) -> None:
    for call in (
        one.get(start, b"a"),
        one.scan(pb.ScanTableRequest(start_timestamp=start, table=TABLE)),
        anext(one.handler.find_rows(pb.FindRowsRequest(start_timestamp=start, table=TABLE))),
        one.commit(start, [write(b"a")]),
        one.commit(start, []),
        one.resolve(start, b"a"),
    ):
        with pytest.raises(InvalidArgument, match=f"start_timestamp: .*{reason}"):
            await call
    assert cluster.mutations == 0


async def test_a_timestamp_of_another_gateway_is_accepted_even_if_this_one_knows_none(
    one: Gateway, other: Gateway, start: int
) -> None:
    assert await other.get(start, b"a") == [None]


async def test_a_transaction_of_long_ago_commits_if_its_cells_were_not_written_since(
    one: Gateway, other: Gateway
) -> None:
    """However old it is, others give its locks the usual time to live, counted from now."""
    start, late = await one.begin(), await one.begin()
    await asyncio.sleep(1_000.0)
    assert await other.commit(start, [write(b"a", b"1"), write(b"z", b"1")]) > start
    with pytest.raises(Exception, match="was committed by transaction"):
        await other.commit(late, [write(b"a", b"2")])


async def test_unknown_tables_are_named(one: Gateway, start: int) -> None:
    nowhere = pb.CellWrite(kind=PUT, table="nowhere", row=b"a", column=COLUMN)
    with pytest.raises(SchemaError, match="nowhere"):
        await one.commit(start, [write(b"a"), nowhere])
    with pytest.raises(SchemaError, match="nowhere"):
        await one.scan(pb.ScanTableRequest(start_timestamp=start, table="nowhere"))
    query = pb.RowQuery(table="nowhere", row=b"a")
    with pytest.raises(SchemaError, match="nowhere"):
        await one.handler.get(pb.GetRequest(start_timestamp=start, rows=[query]))
    assert await one.read(b"a") == [None]


BAD_ROWS = {
    "no table": (pb.RowQuery(row=b"a"), r"rows\[0\]\.table: is missing"),
    "a long row": (pb.RowQuery(table=TABLE, row=b"r" * 4097), r"rows\[0\]\.row"),
    "an empty column": (pb.RowQuery(table=TABLE, columns=[b"c", b""]), r"columns\[1\]"),
    "a reserved one": (pb.RowQuery(table=TABLE, columns=[b"\0x"]), r"columns\[0\]"),
    "a column twice": (pb.RowQuery(table=TABLE, columns=[b"c", b"c"]), "names a column twice"),
    "an empty prefix": (
        pb.RowQuery(table=TABLE, column_prefixes=[b"c", b""]),
        r"rows\[0\]\.column_prefixes\[1\]: is empty",
    ),
    "a reserved prefix": (
        pb.RowQuery(table=TABLE, column_prefixes=[b"\0"]),
        r"rows\[0\]\.column_prefixes\[0\]: begins with 00",
    ),
    "very many prefixes": (
        pb.RowQuery(table=TABLE, column_prefixes=[b"%d" % n for n in range(101)]),
        r"rows\[0\]\.column_prefixes: expected at most 100",
    ),
}


@pytest.mark.parametrize("case", BAD_ROWS)
async def test_bad_reads_are_refused(case: str, one: Gateway) -> None:
    query, field = BAD_ROWS[case]
    request = pb.GetRequest(start_timestamp=await one.begin(), rows=[query])
    with pytest.raises(InvalidArgument, match=field):
        await one.handler.get(request)


async def test_reading_ends_when_the_answer_is_too_large(cluster: Cluster, one: Gateway) -> None:
    """A short request may name gigabytes."""
    await one.commit(await one.begin(), [write(b"a", b"v" * LIMITS.value_bytes_max)])
    before, start = cluster.reads, await one.begin()
    with pytest.raises(InvalidArgument, match=r"^rows: .* more than 1048576 bytes"):
        await one.get(start, *[b"a"] * 100)
    assert cluster.reads - before < 5


async def test_what_a_tablet_refuses_to_read_is_named_as_it_was_asked_for(one: Gateway) -> None:
    columns = [b"%d" % number for number in range(10_001)]
    query = pb.RowQuery(table=TABLE, row=b"a", columns=columns)
    request = pb.GetRequest(start_timestamp=await one.begin(), rows=[query])
    with pytest.raises(InvalidArgument, match=r"^rows\[\]\.columns: of one row: 10001 entries"):
        await one.handler.get(request)
    large = b"v" * LIMITS.value_bytes_max
    for number in range(8):
        column = b"c%d" % number
        await one.commit(await one.begin(), [write(b"a", large, column=column)])
    query = pb.RowQuery(table=TABLE, row=b"a")
    request = pb.GetRequest(start_timestamp=await one.begin(), rows=[query])
    with pytest.raises(InvalidArgument, match=r"^rows: of one row: .* read fewer columns"):
        await one.handler.get(request)


async def test_a_scan_of_bad_prefixes_is_refused(one: Gateway, start: int) -> None:
    for prefixes, columns, field in (
        ([b""], [], r"^column_prefixes\[0\]: is empty"),
        ([b"c"], [b""], r"^columns\[0\]: is empty"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            await one.scan(
                pb.ScanTableRequest(
                    start_timestamp=start,
                    table=TABLE,
                    columns=columns,
                    column_prefixes=prefixes,
                )
            )


def _filter(kind: RowFilter.Kind, column: bytes, *operands: bytes, codec: str = "raw") -> RowFilter:
    return RowFilter(kind=kind, column=column, codec=codec, operands=operands)


async def test_a_scan_keeps_or_counts_the_rows_that_match(one: Gateway) -> None:
    writes = [
        write(row, row, column=column) for row in (b"a", b"b", b"z") for column in (b"c", b"d")
    ]
    await one.commit(await one.begin(), writes)
    start = await one.begin()
    asked = pb.ScanTableRequest(
        start_timestamp=start,
        table=TABLE,
        columns=[b"d"],
        filter=_filter(RowFilter.KIND_AT_LEAST, b"c", b"b"),
        row_limit=1,
    )
    (page,) = [page async for page in one.handler.scan_table(asked)]
    assert [(row.row, [cell.column for cell in row.cells]) for row in page.rows] == [(b"b", [b"d"])]
    asked.row_limit, asked.count = 0, True
    (page,) = [page async for page in one.handler.scan_table(asked)]
    assert (page.counted, len(page.rows)) == (2, 0)


async def test_bad_filters_are_refused(one: Gateway) -> None:
    await one.commit(await one.begin(), [write(b"a", b"?")])
    start = await one.begin()
    number = b"\0" * 8
    for message, reason in (
        (_filter(RowFilter.KIND_LESS, b"", b""), r"^filter: kind 7: expected a column"),
        (_filter(RowFilter.KIND_LESS, b"\0x", b""), r"^filter\.column: begins with 00"),
        (_filter(RowFilter.KIND_LESS, b"c", codec="json"), r"^filter\.codec: 'json' cannot be"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            await one.scan(pb.ScanTableRequest(start_timestamp=start, table=TABLE, filter=message))
    unreadable = _filter(RowFilter.KIND_LESS, COLUMN, number, codec="integer")
    with pytest.raises(SchemaError, match="in row 'a'"):
        await one.scan(pb.ScanTableRequest(start_timestamp=start, table=TABLE, filter=unreadable))


async def test_an_answer_that_is_too_large_is_not_sent(one: Gateway) -> None:
    rows = [b"%d" % number for number in range(3)]
    writes = [write(row, b"v" * 400_000) for row in rows]
    await one.commit(await one.begin(), writes)
    assert len(await one.read(rows[0])) == 1
    with pytest.raises(InvalidArgument, match="ask for fewer rows at once"):
        await one.read(*rows)
    with pytest.raises(InvalidArgument, match="more than 100000 cells"):
        await one.read(*[b"x"] * 100_001)


async def test_a_range_that_ends_before_it_begins_is_empty(one: Gateway) -> None:
    await one.commit(await one.begin(), [write(b"b", b"1")])
    request = pb.ScanTableRequest(
        start_timestamp=await one.begin(), table=TABLE, range=RowRange(start=b"c", end=b"a")
    )
    assert await one.scan(request) == []


async def test_a_scan_may_begin_and_end_behind_the_longest_row(one: Gateway) -> None:
    """The key behind a row is a byte longer: a scan that broke off there is continued from it."""
    longest = b"r" * LIMITS.row_bytes_max
    await one.commit(await one.begin(), [write(longest, b"1"), write(b"s", b"2")])
    request = pb.ScanTableRequest(start_timestamp=await one.begin(), table=TABLE)
    request.range.start = longest + b"\0"
    assert await one.scan(request) == [b"s"]
    request.range.CopyFrom(RowRange(end=longest + b"\0"))
    assert await one.scan(request) == [longest]
    request.reverse = True
    assert await one.scan(request) == [longest]
    for bound in ("start", "end"):
        request.range.CopyFrom(RowRange(**{bound: longest + b"a"}))
        with pytest.raises(InvalidArgument, match=rf"^range\.{bound}: .* at most 4096"):
            await one.scan(request)


async def test_a_question_about_an_outcome_names_either_the_primary_or_the_cells(
    one: Gateway, start: int
) -> None:
    cell = pb.CellName(table=TABLE, row=b"a", column=COLUMN)
    primary = WireAddress(table_id=1, row=b"a", column=COLUMN)
    for request, field in (
        (pb.ResolveRequest(), "primary: give"),
        (pb.ResolveRequest(primary=primary, cells=[cell]), "primary: give"),
        (pb.ResolveRequest(cells=[cell, pb.CellName(table=TABLE)]), r"cells\[1\]\.column"),
        (pb.ResolveRequest(primary=WireAddress(table_id=1)), r"primary\.column"),
    ):
        request.start_timestamp = start
        with pytest.raises(InvalidArgument, match=field):
            await one.handler.resolve(request)
    told = await one.handler.resolve(pb.ResolveRequest(start_timestamp=start, primary=primary))
    assert told.fate == pb.ResolveResponse.FATE_ABORTED


async def test_a_primary_in_a_deleted_table_is_an_error_that_is_not_retried(one: Gateway) -> None:
    """The error is not `OutcomeUnknown`, which would mean: ask again."""
    gone = WireAddress(table_id=999, row=b"a", column=COLUMN)
    request = pb.ResolveRequest(start_timestamp=await one.begin(), primary=gone)
    with pytest.raises(SchemaError, match="999"):
        await one.handler.resolve(request)


async def test_get_and_scan_return_the_columns_with_a_prefix_and_no_others() -> None:
    async with gateways(2) as (_, all_gateways):
        one = all_gateways[0]
        await one.commit(
            await one.begin(),
            [
                write(b"hub", b"1", column=b"edge:ann"),
                write(b"hub", b"2", column=b"edge:zoe"),
                write(b"hub", b"3", column=b"edge"),
                write(b"hub", b"4", column=b"name"),
                write(b"joe", b"5", column=b"name"),
            ],
        )
        start = await one.begin()
        asked = pb.ScanTableRequest(start_timestamp=start, table=TABLE, column_prefixes=[b"edge:"])
        query = pb.RowQuery(table=TABLE, row=b"hub", column_prefixes=[b"edge:", b"na"])
        for gateway in (*all_gateways, one):
            pages = [page async for page in gateway.handler.scan_table(asked)]
            rows = [row for page in pages for row in page.rows]
            assert [(row.row, _shown(row)) for row in rows] == [
                (b"hub", {b"edge:ann": b"1", b"edge:zoe": b"2"})
            ]
            got = await gateway.handler.get(pb.GetRequest(start_timestamp=start, rows=[query]))
            (row,) = got.rows
            assert _shown(row) == {b"edge:ann": b"1", b"edge:zoe": b"2", b"name": b"4"}
            both = pb.RowQuery(
                table=TABLE, row=b"hub", columns=[b"name"], column_prefixes=[b"edge:z"]
            )
            got = await gateway.handler.get(pb.GetRequest(start_timestamp=start, rows=[both]))
            assert _shown(got.rows[0]) == {b"edge:zoe": b"2", b"name": b"4"}


def _shown(row: pb.FoundRow) -> dict[bytes, bytes]:
    return {cell.column: cell.value for cell in row.cells}
