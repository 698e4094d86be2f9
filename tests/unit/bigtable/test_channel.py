"""The driver over real TLS, at a server that checks who calls."""

from __future__ import annotations

import asyncio
import base64

import grpc
import pytest

from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.filters import selecting
from percolator.bigtable.grpc_lane import GrpcLane
from percolator.bigtable.http2.lane import HttpLane
from percolator.bigtable.http2.status import CallFailed
from percolator.bigtable.lanes import STREAMS_MAX
from percolator.bigtable.methods import GET_TABLE, READ_ROWS
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tokens import Tokens
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    Retry,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import Selection
from percolator.v1.bigtable_pb2 import BigtableGetTableRequest, BigtableReadRowsRequest
from tests.doubles.bigtable_service import Refusal
from tests.unit.bigtable.connected import SECONDS, TABLE, connected

pytestmark = pytest.mark.real_time

CLIENTS = pytest.mark.parametrize("by_grpc", [False, True], ids=["our client", "gRPC's client"])


@CLIENTS
async def test_every_call_carries_the_token_and_says_whose_it_is(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        assert await over.put(b"row")
        assert await over.rows() == [b"row"]
        table = "projects%2Fmy-project%2Finstances%2Fmy-instance%2Ftables%2Fpercolator-7"
        routed = f"table_name={table}&app_profile_id=one_cluster"
        found = [(name, metadata["x-goog-request-params"]) for name, metadata in over.service.calls]
        assert found == [
            ("CreateTable", "parent=projects%2Fmy-project%2Finstances%2Fmy-instance"),
            ("CheckAndMutateRow", routed),
            ("ReadRows", routed),
        ]
        assert {metadata["authorization"] for _, metadata in over.service.calls} == {"Bearer valid"}
        # The service tells how far a scan has come, and how long to pause, only if it knows that
        # it will be understood: fields 1, 4 and 7 of `google.bigtable.v2.FeatureFlags`.
        for _, metadata in over.service.calls[1:]:
            features = base64.urlsafe_b64decode(metadata["bigtable-features"])
            assert features == b"\x08\x01\x20\x01\x38\x01"
        assert over.account.asked == 1


@CLIENTS
async def test_a_refused_token_is_replaced_once_and_the_call_repeated(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        over.service.tokens = {"second"}
        over.account.tokens = ["second"]
        assert await over.put(b"row")
        assert over.account.asked == 2
        over.service.tokens = {"third"}
        over.account.tokens = ["third"]
        assert await over.rows() == [b"row"]
        assert over.account.asked == 3


@CLIENTS
async def test_an_account_that_is_refused_twice_is_reported(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        over.service.tokens = set()
        for call in (over.put(b"row"), over.rows()):
            with pytest.raises(Unauthenticated, match="does not accept the access token") as caught:
                await call
            assert caught.value.retry is Retry.USELESS
        assert [name for name, _ in over.service.calls[1:]] == ["CheckAndMutateRow"] * 2 + [
            "ReadRows"
        ] * 2


@CLIENTS
async def test_only_a_trusted_server_is_given_a_token(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        network = BigtableNetwork(Tokens(over.account), by_grpc=by_grpc)
        store = BigtableStore(network, over.place)
        with pytest.raises(Unavailable):
            await store.read(TABLE, [b"row"], (Selection(WRITES),), 5.0)
        await network.close()
        assert len(over.service.calls) == 1


@CLIENTS
async def test_plain_text_does_not_pass_for_tls(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        network = BigtableNetwork(by_grpc=by_grpc)
        store = BigtableStore(network, over.place)
        with pytest.raises(Unavailable):
            await store.read(TABLE, [b"row"], (Selection(WRITES),), 5.0)
        await network.close()


@CLIENTS
async def test_another_connection_is_opened_when_one_is_full_and_not_before(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        for number in range(3):
            await over.put(b"lone-%d" % number)
        assert len(over.service.peers) == 1
        over.service.seconds = 0.3
        selections = (Selection(WRITES),)
        reads = [
            over.store.read(TABLE, [b"row"], selections, SECONDS) for _ in range(STREAMS_MAX + 20)
        ]
        await asyncio.gather(*reads)
        assert len(over.service.peers) == 2


@CLIENTS
async def test_a_call_that_a_close_cuts_off_is_an_error_and_no_cancellation(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        over.service.seconds = 30.0
        putting, reading = asyncio.create_task(over.put(b"row")), asyncio.create_task(over.rows())
        await over.service.busy(2)
        await over.network.close()
        for task in (putting, reading):
            with pytest.raises(Unavailable, match="connection was closed"):
                await task
        with pytest.raises(UsageError, match="closed"):
            await over.put(b"row")


@CLIENTS
async def test_nothing_is_dialled_after_the_close(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        await over.network.close()
        for address in (over.place.address, "127.0.0.1:1"):
            with pytest.raises(UsageError, match="the network of this client is closed"):
                await over.network.unary(address, GET_TABLE)(
                    BigtableGetTableRequest(name=over.place.table(TABLE)), SECONDS
                )


@CLIENTS
async def test_a_cancelled_call_stays_cancelled(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        over.service.seconds = 30.0
        putting = asyncio.create_task(over.put(b"row"))
        await over.service.busy(1)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting


@CLIENTS
async def test_what_the_service_says_reaches_the_caller(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        denied = Refusal(grpc.StatusCode.PERMISSION_DENIED, "Missing IAM permission: x.")
        over.service.refusals.append(denied)
        with pytest.raises(
            Exception, match=r"Missing IAM permission: x: grant .*bigtable\.user"
        ) as it:
            await over.put(b"row")
        assert "percolator-7" in str(it.value)


@CLIENTS
async def test_what_is_too_long_for_the_service_is_refused_before_it_is_sent(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        with pytest.raises(InvalidArgument, match=r"row: has 4,097 bytes.* at most 4,096"):
            await over.put(b"r" * 4097)
        with pytest.raises(InvalidArgument, match="row: has 4,097 bytes"):
            await over.store.read(TABLE, [b"r" * 4097], (Selection(WRITES),), SECONDS)
        with pytest.raises(InvalidArgument, match="value: has 104,857,601 bytes"):
            await over.put(b"row", bytes(100 * 1024 * 1024 + 1))
        assert [name for name, _ in over.service.calls] == ["CreateTable"]
        assert await over.put(b"r" * 4096)


@CLIENTS
async def test_large_requests_and_answers_arrive_whole(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        values = [bytes((number,)) * (3 * 1024 * 1024 + number) for number in range(4)]
        rows = [b"row-%d" % number for number in range(4)]
        written = zip(rows, values, strict=True)
        assert await asyncio.gather(*(over.put(row, value) for row, value in written)) == [True] * 4
        found = await over.store.read(TABLE, rows, (Selection(WRITES),), SECONDS)
        assert [row.cells[0].value for row in found] == values


@CLIENTS
async def test_an_answer_without_a_message_is_an_error(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        lane = over.network._lanes_to(over.place.address).lane()
        nothing = BigtableReadRowsRequest(table_name=over.place.table(TABLE))
        nothing.filter.MergeFromString(selecting((Selection(WRITES),)))
        metadata = (("authorization", "Bearer valid"),)
        with pytest.raises(CallFailed, match="an answer without a message") as caught:
            await lane.unary(READ_ROWS.path, nothing.SerializeToString(), SECONDS, metadata)
        assert caught.value.code is grpc.StatusCode.INTERNAL


@CLIENTS
async def test_a_deadline_ends_a_call_on_both_sides(by_grpc: bool) -> None:
    async with connected(by_grpc=by_grpc) as over:
        over.service.seconds = 30.0
        with pytest.raises(DeadlineExceeded):
            await over.store.read(TABLE, [b"row"], (Selection(WRITES),), 0.2)
        await over.service.idle()


@pytest.mark.parametrize(
    ("variables", "proxied"),
    [
        ({}, False),
        ({"https_proxy": "http://127.0.0.1:1"}, True),
        ({"grpc_proxy": "http://127.0.0.1:1", "no_proxy": "example.com"}, True),
        ({"https_proxy": "http://127.0.0.1:1", "no_proxy": "127.0.0.1"}, False),
    ],
)
async def test_grpc_is_used_where_a_proxy_is_in_between(
    variables: dict[str, str], proxied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kind in ("grpc", "https", "http", "no", "no_grpc"):
        for name in (f"{kind}_proxy", f"{kind}_proxy".upper()):
            monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    network = BigtableNetwork()
    lane = network._lanes_to("127.0.0.1:1").lane()
    assert type(lane) is (GrpcLane if proxied else HttpLane)
    await network.close()
