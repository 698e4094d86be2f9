"""Errors of Bigtable: above all, whether a call was executed, and what to do.

Only the service can say that it made no change: not a lost answer, nor one that is not gRPC's.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as Packed
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from hypothesis import given
from hypothesis import strategies as st

from percolator import errors
from percolator.bigtable.connection import BigtableNetwork, Connection
from percolator.bigtable.errors import FamilyMissing, from_rpc_error
from percolator.bigtable.messages import CHECK_AND_MUTATE_ROW, READ_ROWS, Rows, checking, selecting
from percolator.bigtable.place import ADMIN_ADDRESS, DATA_ADDRESS, Place, parse_place
from percolator.errors import ExecutionUnknown, InvalidArgument, Retry
from percolator.rowstore.port import Check, Selection, StoredCell, StoredRow
from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableCheckAndMutateRowResponse,
    BigtableReadRowsRequest,
    BigtableReadRowsResponse,
    BigtableRowFilter,
)
from tests.unit.bigtable.servers import DONE, HEADERS, Peer, PeerConnection
from tests.unit.refusals import refused

pytestmark = pytest.mark.real_time

DATA = "/google.bigtable.v2.Bigtable/CheckAndMutateRow of projects/p/instances/i/tables/t"
READ = "/google.bigtable.v2.Bigtable/ReadRows of projects/p/instances/i/tables/t"
ADMIN = "/google.bigtable.admin.v2.BigtableTableAdmin/CreateTable of projects/p/instances/i"

MEANINGS = {
    grpc.StatusCode.NOT_FOUND: (errors.SchemaError, Retry.USELESS),
    grpc.StatusCode.INVALID_ARGUMENT: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.FAILED_PRECONDITION: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.ALREADY_EXISTS: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.OUT_OF_RANGE: (errors.InvalidArgument, Retry.USELESS),
    grpc.StatusCode.PERMISSION_DENIED: (errors.PermissionDenied, Retry.USELESS),
    grpc.StatusCode.UNAUTHENTICATED: (errors.Unauthenticated, Retry.USELESS),
    grpc.StatusCode.UNIMPLEMENTED: (errors.UsageError, Retry.USELESS),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (errors.Overloaded, Retry.SAFE),
    grpc.StatusCode.UNAVAILABLE: (errors.Unavailable, Retry.UNKNOWN),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineExceeded, Retry.UNKNOWN),
}


def failed(code: grpc.StatusCode, said: str, details: bytes = b"") -> grpc.aio.AioRpcError:
    trailer = [("grpc-status-details-bin", details)] if details else []
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(*trailer), said)


@pytest.mark.parametrize("code", list(grpc.StatusCode), ids=lambda code: code.name)
def test_only_codes_of_immediate_refusals_mean_not_executed(code: grpc.StatusCode) -> None:
    kind, retry = MEANINGS.get(code, (errors.ExecutionUnknown, Retry.UNKNOWN))
    found = from_rpc_error(failed(code, "what it says"), DATA)
    assert (type(found), found.retry, found.where) == (kind, retry, DATA)


SAID = [
    # Code and message of the service, the call, and the error with a part of its text.
    (
        grpc.StatusCode.PERMISSION_DENIED,
        "Access denied. Missing IAM permission: bigtable.tables.mutateRows.",
        DATA,
        errors.PermissionDenied,
        "Missing IAM permission: bigtable.tables.mutateRows: grant the account roles/bigtable.user",
    ),
    (
        grpc.StatusCode.PERMISSION_DENIED,
        "Access denied. Missing IAM permission: bigtable.tables.create.",
        ADMIN,
        errors.PermissionDenied,
        "grant the account roles/bigtable.admin",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Instance not found: projects/p/instances/i",
        DATA,
        errors.InvalidArgument,
        "store: Instance not found: projects/p/instances/i: check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Project not found: p",
        ADMIN,
        errors.InvalidArgument,
        "check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "App profile not found: projects/p/instances/i/appProfiles/a",
        DATA,
        errors.InvalidArgument,
        "check the profile in the address",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Table not found: projects/p/instances/i/tables/t",
        DATA,
        errors.SchemaError,
        "Table not found",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        'table "projects/p/instances/user-profiles/tables/t" not found',
        DATA,
        errors.SchemaError,
        "user-profiles",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Instance not found: projects/tables/instances/tables",
        DATA,
        errors.InvalidArgument,
        "check bigtable://PROJECT/INSTANCE",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Error while mutating the row 'profile 1' (projects/p/instances/i/tables/t) : Requested "
        "column family not found.",
        DATA,
        FamilyMissing,
        "the table t lacks a family that it needs: somebody has removed it in the store itself",
    ),
    (
        grpc.StatusCode.UNKNOWN,
        'unknown family "w"',
        DATA,
        FamilyMissing,
        "the table t lacks the family w: somebody has removed it in the store itself",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Requested column family not found.",
        DATA.replace("tables/t", "tables/percolator-intents"),
        FamilyMissing,
        "create the family again there; changes that waited for observers are forgotten",
    ),
    (
        grpc.StatusCode.NOT_FOUND,
        "Requested column family not found.",
        DATA.replace("tables/t", "tables/percolator-0"),
        FamilyMissing,
        "restore it from a backup of the instance",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Table projects/p/instances/i/tables/t is being created",
        DATA,
        errors.NotReady,
        "is being created",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "The table is either creating or deleting, please try again",
        DATA,
        errors.NotReady,
        "please try again",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Error while mutating the row 'creating' (projects/p/instances/creating/tables/t) : "
        "Single-row transactions are not allowed by this app profile",
        DATA,
        errors.UsageError,
        "routes to a single cluster",
    ),
    (
        grpc.StatusCode.FAILED_PRECONDITION,
        "Single-row transactions are not allowed by this app profile",
        DATA,
        errors.UsageError,
        "routes to a single cluster",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Quota exceeded for quota metric 'Read requests'",
        DATA,
        errors.Overloaded,
        "add nodes, or ask for a higher quota",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "CLIENT: Sent message larger than max (300 vs. 200)",
        DATA,
        errors.InvalidArgument,
        "send less in one call",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (300 vs. 200))",
        READ,
        errors.InvalidArgument,
        "a row is too large",
    ),
    (
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "Stream removed (CLIENT: Received message larger than max (300 vs. 200))",
        DATA,
        errors.ExecutionUnknown,
        "larger than max",
    ),
    (
        grpc.StatusCode.UNAUTHENTICATED,
        "Request had invalid authentication credentials.",
        DATA,
        errors.Unauthenticated,
        "GOOGLE_APPLICATION_CREDENTIALS",
    ),
]


@pytest.mark.parametrize(("code", "said", "where", "kind", "told"), SAID)
def test_an_error_comes_with_advice(
    code: grpc.StatusCode, said: str, where: str, kind: type[errors.PercolatorError], told: str
) -> None:
    found = from_rpc_error(failed(code, said), where)
    assert type(found) is kind
    assert told in found.message


def _asking(seconds: int, nanos: int) -> bytes:
    packed = Packed()
    packed.Pack(RetryInfo(retry_delay=Duration(seconds=seconds, nanos=nanos)))
    encoded: bytes = Status(code=8, details=[packed]).SerializeToString()
    return encoded


@pytest.mark.parametrize(
    ("trailer", "seconds"),
    [
        (_asking(2, 500_000_000), 2.5),
        (_asking(-1, 0), 0.0),
        (b"\xff damaged", 0.1),
        (Status(code=8).SerializeToString(), 0.1),
        (b"", 0.1),
    ],
)
def test_the_error_has_the_pause_that_the_service_asks_for(trailer: bytes, seconds: float) -> None:
    found = from_rpc_error(failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", trailer), DATA)
    assert isinstance(found, errors.Overloaded)
    assert found.retry_after_seconds == seconds


@pytest.mark.parametrize(
    ("code", "seconds"),
    [
        (grpc.StatusCode.UNAVAILABLE, 2.5),
        (grpc.StatusCode.ABORTED, 2.5),
        (grpc.StatusCode.INTERNAL, 2.5),
        (grpc.StatusCode.DEADLINE_EXCEEDED, 2.5),
        (grpc.StatusCode.NOT_FOUND, 0.0),
        (grpc.StatusCode.INVALID_ARGUMENT, 0.0),
    ],
    ids=lambda given: str(given),
)
def test_every_error_after_which_a_call_may_be_repeated_has_the_pause(
    code: grpc.StatusCode, seconds: float
) -> None:
    found = from_rpc_error(failed(code, "later", _asking(2, 500_000_000)), DATA)
    assert found.retry_after_seconds == seconds
    assert from_rpc_error(failed(code, "later", b""), DATA).retry_after_seconds == 0.0


SECONDS = 10.0
CHANGE = BigtableCheckAndMutateRowRequest(table_name="projects/p/instances/i/tables/t")
READING = BigtableReadRowsRequest(table_name=CHANGE.table_name)
MADE = BigtableCheckAndMutateRowResponse(predicate_matched=True)

CANCEL = 8

Answering = Callable[[PeerConnection, int], None]


def resetting(code: int, *messages: bytes, begins: bool = False) -> Answering:
    def answer(peer: PeerConnection, stream: int) -> None:
        if begins:
            peer.begin(stream, *messages)
        peer.h2.reset_stream(stream, code)

    return answer


def only_headers(*headers: tuple[str, str]) -> Answering:
    return lambda peer, stream: peer.h2.send_headers(stream, list(headers), end_stream=True)


def cut_off(data: bytes) -> Answering:
    def answer(peer: PeerConnection, stream: int) -> None:
        peer.h2.send_headers(stream, HEADERS)
        peer.h2.send_data(stream, data, end_stream=True)

    return answer


def dropping(peer: PeerConnection, _: int) -> None:
    peer.transport.abort()


def ending(peer: PeerConnection, stream: int) -> None:
    peer.leave(stream)
    peer.transport.close()


def without_message(peer: PeerConnection, stream: int) -> None:
    peer.begin(stream)
    peer.h2.send_headers(stream, DONE, end_stream=True)


def of_another_type(peer: PeerConnection, stream: int) -> None:
    peer.begin(stream, b"\xff")
    peer.h2.send_headers(stream, DONE, end_stream=True)


def above_the_limit(peer: PeerConnection, stream: int) -> None:
    peer.h2.send_headers(stream, HEADERS)
    peer.h2.send_data(stream, b"\0\xff\xff\xff\xff")


def with_endless_trailers(peer: PeerConnection, stream: int) -> None:
    peer.begin(stream, MADE.SerializeToString())
    endless = [(f"endless-{number}", "x" * 10_000) for number in range(8)]
    peer.h2.send_headers(stream, [*DONE, *endless], end_stream=True)


def http(status: int) -> Answering:
    return only_headers((":status", str(status)), ("content-type", "text/html"))


PERHAPS: dict[str, Answering] = {
    **{f"reset with {code}": resetting(code) for code in range(14)},
    **{f"begun and reset with {code}": resetting(code, begins=True) for code in (0, 7, 8, 11, 12)},
    "made and reset with 11": resetting(11, MADE.SerializeToString(), begins=True),
    **{f"HTTP status {status}": http(status) for status in (200, 400, 429, 431, 500, 502, 503)},
    "an unknown status": only_headers(*HEADERS, ("grpc-status", "99")),
    "a cut off message": cut_off(b"\0\0\0\0\5x"),
    "no status": cut_off(b"\0\0\0\0\0"),
    "a lost connection": dropping,
    "no message": without_message,
    "a message of another type": of_another_type,
    "a message above the limit": above_the_limit,
    "endless trailers": with_endless_trailers,
}


_LOST_AT_MOST = 10
"""The most calls that are lost with a connection."""


async def error_of(answer: Answering) -> tuple[errors.PercolatorError, Peer]:
    """The error of a change, after which the next one is answered.

    gRPC may fail the call of a lost connection before it gives the connection up: until it does,
    further calls are begun on it, and are lost with it.
    """
    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        change = network.unary(address, CHECK_AND_MUTATE_ROW)
        with pytest.raises(errors.PercolatorError) as caught:
            await change(CHANGE, SECONDS)
        calls = peer.calls
        peer.answer_call = lambda peer, stream: peer.answer(stream, MADE)
        made = None
        for _ in range(_LOST_AT_MOST if answer is dropping else 0):
            with suppress(errors.Unavailable):
                made = await change(CHANGE, SECONDS)
                break
        assert (made or await change(CHANGE, SECONDS)) == MADE
        peer.calls = calls
        await network.close()
    return caught.value, peer


@pytest.mark.parametrize("answer", PERHAPS.values(), ids=PERHAPS)
async def test_a_change_whose_answer_is_lost_may_have_been_made_and_is_not_repeated(
    answer: Answering,
) -> None:
    error, peer = await error_of(answer)
    assert isinstance(error, errors.ExecutionUnknown)
    assert error.retry is Retry.UNKNOWN
    assert peer.calls == 1


@pytest.mark.parametrize(
    ("status", "kind"),
    [(401, errors.Unauthenticated), (403, errors.PermissionDenied), (404, errors.UsageError)],
)
async def test_a_server_in_front_of_the_service_may_refuse_calls(
    status: int, kind: type[errors.PercolatorError]
) -> None:
    error, _ = await error_of(http(status))
    assert (type(error), error.retry) == (kind, Retry.USELESS)


async def test_a_call_that_a_leaving_server_has_not_begun_is_made_once_elsewhere() -> None:
    def answer(connection: PeerConnection, stream: int) -> None:
        if connection is peer.connections[0]:
            connection.leave(0)
        else:
            connection.answer(stream, MADE)

    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        assert await network.unary(address, CHECK_AND_MUTATE_ROW)(CHANGE, SECONDS) == MADE
        assert peer.calls == 2
        await network.close()


async def test_a_leaving_server_answers_the_calls_that_it_has_begun() -> None:
    def answer(peer: PeerConnection, stream: int) -> None:
        peer.leave(stream)
        peer.answer(stream, MADE)

    peer = Peer(answer)
    network = BigtableNetwork()
    async with peer.listening() as address:
        change = network.unary(address, CHECK_AND_MUTATE_ROW)
        for calls in (1, 2):
            assert await change(CHANGE, SECONDS) == MADE
            assert peer.calls == calls
        peer.answer_call = ending
        with pytest.raises(errors.Unavailable):
            await change(CHANGE, SECONDS)
        assert peer.calls == 3
        await network.close()


async def test_a_row_above_the_limit_is_named_as_the_reason() -> None:
    network = BigtableNetwork()
    async with Peer(above_the_limit).listening() as address:
        with pytest.raises(errors.InvalidArgument, match=r"response: .*a row is too large"):
            await anext(network.stream(address, READ_ROWS)(READING, SECONDS))
        await network.close()


async def test_an_error_with_long_details_keeps_its_status() -> None:
    status = Status(code=14)
    delay = RetryInfo()
    delay.retry_delay.seconds = 3
    status.details.add().Pack(delay)
    status.details.add(value=bytes(20_000))
    details = base64.b64encode(status.SerializeToString()).decode()
    error, _ = await error_of(
        only_headers(*HEADERS, ("grpc-status", "14"), ("grpc-status-details-bin", details))
    )
    assert type(error) is errors.Unavailable
    assert error.retry_after_seconds == 3.0


async def test_a_scan_that_is_abandoned_is_cancelled_at_the_server() -> None:
    peer = Peer(lambda peer, stream: peer.begin(stream, b""))
    network = BigtableNetwork()
    async with peer.listening() as address, asyncio.timeout(SECONDS):
        async with aclosing(network.stream(address, READ_ROWS)(READING, SECONDS)) as responses:
            assert await anext(responses) == BigtableReadRowsResponse()
        assert await peer.resets.get() == CANCEL
        await network.close()


# Filters encoded part by part equal their messages, and rows are put together from chunks.

_NAMES = st.binary(max_size=300)
_TIMES = st.integers(0, 2**63 - 1)
SELECTIONS = st.builds(
    Selection,
    st.sampled_from("lwodr"),
    _NAMES,
    _NAMES,
    st.one_of(st.just(0), _TIMES),
    st.one_of(st.just(0), _TIMES),
    st.one_of(st.just(b""), _NAMES),
    st.one_of(st.just(b""), _NAMES),
    st.booleans(),
    st.lists(st.tuples(_NAMES, _NAMES), max_size=3).map(tuple),
)


def _one(selection: Selection) -> BigtableRowFilter:
    """The filter of a selection, field by field."""
    filters = [BigtableRowFilter()]
    columns = filters[0].column_range_filter
    columns.family_name = selection.family
    if selection.first_column:
        columns.start_qualifier_closed = selection.first_column
    if selection.end_column:
        columns.end_qualifier_open = selection.end_column
    if selection.from_time or selection.until_time:
        times = BigtableRowFilter()
        times.timestamp_range_filter.start_timestamp_micros = selection.from_time
        times.timestamp_range_filter.end_timestamp_micros = selection.until_time
        filters.append(times)
    if selection.first_value or selection.end_value:
        filters.append(_values(selection.first_value, selection.end_value))
    if selection.any_of:
        filters.append(_any_of([_values(first, end) for first, end in selection.any_of]))
    if selection.newest:
        filters.append(BigtableRowFilter(cells_per_column_limit_filter=1))
    if len(filters) == 1:
        return filters[0]
    return BigtableRowFilter(chain=BigtableRowFilter.Chain(filters=filters))


def _values(first: bytes, end: bytes) -> BigtableRowFilter:
    values = BigtableRowFilter()
    values.value_range_filter.SetInParent()
    if first:
        values.value_range_filter.start_value_closed = first
    if end:
        values.value_range_filter.end_value_open = end
    return values


def _any_of(filters: list[BigtableRowFilter]) -> BigtableRowFilter:
    if len(filters) == 1:
        return filters[0]
    return BigtableRowFilter(interleave=BigtableRowFilter.Interleave(filters=filters))


def _all(selections: list[Selection]) -> BigtableRowFilter:
    return _any_of(list(map(_one, selections)))


@given(st.lists(SELECTIONS, min_size=1, max_size=9))
def test_an_encoded_filter_equals_its_message(selections: list[Selection]) -> None:
    assert selecting(selections) == _all(selections).SerializeToString(deterministic=True)


@given(st.lists(SELECTIONS, min_size=1, max_size=3), st.integers(1, 1_000))
def test_a_check_that_counts_skips_the_cells_that_may_exist(
    selections: list[Selection], more_than: int
) -> None:
    check = Check(tuple(selections), found=True, more_than=more_than)
    offset = BigtableRowFilter(cells_per_row_offset_filter=more_than)
    chain = BigtableRowFilter.Chain(filters=[_all(selections), offset])
    expected = BigtableRowFilter(chain=chain)
    assert checking(check) == expected.SerializeToString(deterministic=True)


Chunk = BigtableReadRowsResponse.CellChunk


def chunk(
    row: bytes = b"", family: str | None = None, column: bytes | None = None, **fields: Any
) -> Chunk:
    made = Chunk(row_key=row, **fields)
    if family is not None:
        made.family_name.value = family
    if column is not None:
        made.qualifier.value = column
    return made


def rows_of(*chunks: Chunk, reverse: bool = False) -> list[StoredRow]:
    """The rows of these chunks, of which each comes in its own message."""
    rows = Rows(reverse=reverse)
    found = [row for one in chunks for row in rows.take([one])]
    rows.end()
    return found


def test_fields_that_a_chunk_omits_keep_their_values() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"new"),
        chunk(timestamp_micros=1_000, value=b"old"),
        chunk(column=b"", timestamp_micros=1_000, value=b""),
        chunk(family="l", column=b"c", timestamp_micros=3_000, value=b"x", commit_row=True),
        chunk(b"s", "w", b"c", timestamp_micros=1_000, value=b"y", commit_row=True),
    )
    assert found == [
        StoredRow(
            b"r",
            [
                StoredCell("w", b"c", 2_000, b"new"),
                StoredCell("w", b"c", 1_000, b"old"),
                StoredCell("w", b"", 1_000, b""),
                StoredCell("l", b"c", 3_000, b"x"),
            ],
        ),
        StoredRow(b"s", [StoredCell("w", b"c", 1_000, b"y")]),
    ]


def test_a_long_value_is_put_together_from_its_parts() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"a", value_size=3),
        chunk(value=b"b", value_size=3),
        chunk(value=b"c"),
        chunk(column=b"d", timestamp_micros=1_000, value=b"z", commit_row=True),
    )
    values = [(cell.column, cell.time, cell.value) for cell in found[0].cells]
    assert values == [(b"c", 2_000, b"abc"), (b"d", 1_000, b"z")]


def test_a_row_that_is_reset_begins_again() -> None:
    found = rows_of(
        chunk(b"r", "w", b"c", timestamp_micros=2_000, value=b"half", value_size=8),
        chunk(reset_row=True),
        chunk(b"r", "w", b"c", timestamp_micros=1_000, value=b"whole", commit_row=True),
    )
    assert found == [StoredRow(b"r", [StoredCell("w", b"c", 1_000, b"whole")])]


@pytest.mark.parametrize("keys", [b"aa", b"ba", b"aba"])
@pytest.mark.parametrize("reverse", [False, True])
def test_rows_out_of_order_are_an_error(keys: bytes, reverse: bool) -> None:
    """A call that was duplicated on its way may be answered twice."""
    names = [bytes([key]) for key in (keys[::-1] if reverse else keys)]
    chunks = [chunk(name, "w", b"c", value=b"x", commit_row=True) for name in names]
    with pytest.raises(ExecutionUnknown, match="rows are not in order"):
        rows_of(*chunks, reverse=reverse)
    in_order = sorted(set(names), reverse=reverse)
    chunks = [chunk(name, "w", b"c", value=b"x", commit_row=True) for name in in_order]
    assert [row.key for row in rows_of(*chunks, reverse=reverse)] == in_order


@pytest.mark.parametrize(
    "chunks",
    [
        [chunk(b"r", "w", b"c", value=b"x")],
        [chunk(b"r", "w", b"c", value=b"x", value_size=2, commit_row=True)],
        [chunk(b"r", "w", b"c", value=b"x"), chunk(b"s", "w", b"c", commit_row=True)],
        [chunk(b"r", value=b"x", commit_row=True)],
        [chunk(family="w", column=b"c", value=b"x", commit_row=True)],
    ],
    ids=["cut off", "within a value", "two rows", "no family", "no row"],
)
def test_malformed_chunks_are_an_error_and_never_a_row(chunks: list[Chunk]) -> None:
    with pytest.raises(ExecutionUnknown, match="malformed"):
        rows_of(*chunks)


def _passing(*keys: bytes, reverse: bool = False) -> Rows:
    rows = Rows(reverse=reverse)
    for key in keys:
        rows.pass_over(key)
    return rows


def test_a_scan_continues_after_the_key_that_it_has_reported() -> None:
    rows = _passing(b"a", b"b", b"b")
    one = chunk(b"c", "w", b"c", timestamp_micros=1_000, value=b"", commit_row=True)
    assert [row.key for row in rows.take([one])] == [b"c"]
    rows.pass_over(b"c")
    _passing(b"b", b"a", reverse=True).end()


def test_a_scan_that_reports_an_earlier_key_is_an_error() -> None:
    for rows, key in ((_passing(b"b"), b"a"), (_passing(b"a", reverse=True), b"b")):
        with pytest.raises(ExecutionUnknown, match="malformed: a scan goes back"):
            rows.pass_over(key)
    rows = _passing(b"b")
    with pytest.raises(ExecutionUnknown, match="malformed: its rows are not in order"):
        list(rows.take([chunk(b"a", "w", b"c", value=b"", commit_row=True)]))
    rows = Rows()
    list(rows.take([chunk(b"a", "w", b"c", value=b"")]))
    with pytest.raises(ExecutionUnknown, match="malformed: a scan goes on within a row"):
        rows.pass_over(b"b")


# The address of an instance of Bigtable, and errors of malformed ones.

GIVEN = "bigtable://my-project/my-instance?profile=one_cluster"


def test_the_address_of_an_instance_names_project_instance_and_profile() -> None:
    place = parse_place(GIVEN, environment={})
    assert (place.project, place.instance, place.app_profile) == (
        "my-project",
        "my-instance",
        "one_cluster",
    )
    assert (place.address, place.tables_address) == (DATA_ADDRESS, ADMIN_ADDRESS)
    assert not place.is_emulated
    assert place.scans_backwards
    assert place.table(7) == "projects/my-project/instances/my-instance/tables/percolator-7"


@pytest.mark.parametrize("text", [GIVEN, "bigtable://my-project/my-instance"])
def test_a_place_is_written_as_its_address(text: str) -> None:
    assert str(parse_place(text, environment={})) == text


@pytest.mark.parametrize("project", ["123456789012", "example.com:my-project", "abcdef"])
def test_projects_may_have_a_number_or_a_domain(project: str) -> None:
    assert parse_place(f"bigtable://{project}/my-instance", environment={}).project == project


def test_an_emulator_replaces_the_service_for_data_and_tables() -> None:
    place = parse_place(GIVEN, environment={"BIGTABLE_EMULATOR_HOST": "localhost:8086"})
    assert (place.address, place.tables_address) == ("localhost:8086", "localhost:8086")
    assert place.is_emulated
    assert not place.scans_backwards


MALFORMED = {
    "": "expected bigtable://PROJECT/INSTANCE",
    "bigtable:/my-project/my-instance": "expected bigtable://PROJECT/INSTANCE",
    "/var/data": "expected bigtable://PROJECT/INSTANCE",
    "bigtable://": "the instance is missing",
    "bigtable://my-project": "the instance is missing",
    "bigtable://my-project/": "the instance is missing",
    "bigtable:///my-instance": "project: expected 6 to 30",
    "bigtable://My-Project/my-instance": "project: expected 6 to 30",
    "bigtable://short/my-instance": "project: expected 6 to 30",
    "bigtable://user@my-project/my-instance": "project: expected 6 to 30",
    "bigtable://my-project-/my-instance": "project: expected 6 to 30",
    "bigtable://my-project/inst": "instance: expected 6 to 33",
    "bigtable://my-project/1instance": "instance: expected 6 to 33",
    "bigtable://my-project/my-instance\n": "instance: expected 6 to 33",
    "bigtable://my-project/my-instance/table": "nothing after the instance",
    "bigtable://my-project/my-instance#part": "without a fragment",
    "bigtable://my-project/my-instance?": "nothing follows",
    "bigtable://my-project/my-instance?profile": "found",
    "bigtable://my-project/my-instance?profile=": "profile is empty",
    "bigtable://my-project/my-instance?profile=a&profile=b": "profile is given twice",
    "bigtable://my-project/my-instance?profile=-a": "profile: expected 1 to 50",
    "bigtable://my-project/my-instance?profile=a/b": "profile: expected 1 to 50",
    "bigtable://my-project/my-instance?app_profile=a": "'app_profile' is not known",
    "bigtable://my-project/my-instance?profile=a&zone=b": "the only setting is profile",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_address_is_refused_with_the_part_that_is_wrong(text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse_place(text, field="--store", environment={})
    assert caught.value.field == "--store"
    assert MALFORMED[text] in caught.value.reason
    assert repr(text) in caught.value.reason


@pytest.mark.parametrize("emulator", ["localhost", "localhost:0", "http://localhost:8086", ":8086"])
def test_a_malformed_emulator_is_refused_by_the_name_of_its_variable(emulator: str) -> None:
    with refused("BIGTABLE_EMULATOR_HOST"):
        parse_place(GIVEN, environment={"BIGTABLE_EMULATOR_HOST": emulator})


@pytest.mark.parametrize(
    ("project", "instance", "profile", "field"),
    [
        ("Project", "my-instance", "", "project"),
        ("my-project", "i", "", "instance"),
        ("my-project", "my-instance", "a b", "profile"),
    ],
)
def test_a_place_with_a_malformed_part_is_refused(
    project: str, instance: str, profile: str, field: str
) -> None:
    with refused(field):
        Place("bigtable:1", project, instance, profile)


@pytest.mark.real_time
async def test_a_connection_to_an_emulator_has_its_network_and_store() -> None:
    place = parse_place(GIVEN, environment={"BIGTABLE_EMULATOR_HOST": "localhost:1"})
    connection = Connection(place)
    assert connection.place is place
    assert connection.store.scans_backwards is place.scans_backwards
    await connection.close()
