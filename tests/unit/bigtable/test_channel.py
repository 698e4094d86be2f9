"""The driver over real TLS, at a server that checks who calls."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.lanes import STREAMS_MAX
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tokens import Tokens
from percolator.errors import InvalidArgument, Retry, Unauthenticated, Unavailable, UsageError
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import Selection
from tests.doubles.bigtable_service import Refusal
from tests.unit.bigtable.connected import SECONDS, TABLE, connected

pytestmark = pytest.mark.real_time


async def test_every_call_carries_the_token_and_says_whose_it_is() -> None:
    async with connected() as over:
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
        assert over.account.asked == 1


async def test_a_refused_token_is_replaced_once_and_the_call_repeated() -> None:
    async with connected() as over:
        over.service.tokens = {"second"}
        over.account.tokens = ["second"]
        assert await over.put(b"row")
        assert over.account.asked == 2
        over.service.tokens = {"third"}
        over.account.tokens = ["third"]
        assert await over.rows() == [b"row"]
        assert over.account.asked == 3


async def test_an_account_that_is_refused_twice_is_reported() -> None:
    async with connected() as over:
        over.service.tokens = set()
        for call in (over.put(b"row"), over.rows()):
            with pytest.raises(Unauthenticated, match="does not accept the access token") as caught:
                await call
            assert caught.value.retry is Retry.USELESS
        assert [name for name, _ in over.service.calls[1:]] == ["CheckAndMutateRow"] * 2 + [
            "ReadRows"
        ] * 2


async def test_only_a_trusted_server_is_given_a_token() -> None:
    async with connected() as over:
        network = BigtableNetwork(Tokens(over.account))
        store = BigtableStore(network, over.place)
        with pytest.raises(Unavailable):
            await store.read(TABLE, [b"row"], (Selection(WRITES),), 5.0)
        await network.close()
        assert len(over.service.calls) == 1


async def test_plain_text_does_not_pass_for_tls() -> None:
    async with connected() as over:
        network = BigtableNetwork()
        store = BigtableStore(network, over.place)
        with pytest.raises(Unavailable):
            await store.read(TABLE, [b"row"], (Selection(WRITES),), 5.0)
        await network.close()


async def test_another_connection_is_opened_when_one_is_full_and_not_before() -> None:
    async with connected() as over:
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


async def test_a_call_that_a_close_cuts_off_is_an_error_and_no_cancellation() -> None:
    async with connected() as over:
        over.service.seconds = 30.0
        putting, reading = asyncio.create_task(over.put(b"row")), asyncio.create_task(over.rows())
        await over.service.busy(2)
        await over.network.close()
        for task in (putting, reading):
            with pytest.raises(Unavailable, match="connection was closed"):
                await task
        with pytest.raises(UsageError, match="closed"):
            await over.put(b"row")


async def test_a_cancelled_call_stays_cancelled() -> None:
    async with connected() as over:
        over.service.seconds = 30.0
        putting = asyncio.create_task(over.put(b"row"))
        await over.service.busy(1)
        putting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await putting


async def test_what_the_service_says_reaches_the_caller() -> None:
    async with connected() as over:
        denied = Refusal(grpc.StatusCode.PERMISSION_DENIED, "Missing IAM permission: x.")
        over.service.refusals.append(denied)
        with pytest.raises(
            Exception, match=r"Missing IAM permission: x: grant .*bigtable\.user"
        ) as it:
            await over.put(b"row")
        assert "percolator-7" in str(it.value)


async def test_what_is_too_long_for_the_service_is_refused_before_it_is_sent() -> None:
    async with connected() as over:
        with pytest.raises(InvalidArgument, match=r"row: has 4,097 bytes.* at most 4,096"):
            await over.put(b"r" * 4097)
        with pytest.raises(InvalidArgument, match="row: has 4,097 bytes"):
            await over.store.read(TABLE, [b"r" * 4097], (Selection(WRITES),), SECONDS)
        with pytest.raises(InvalidArgument, match="value: has 104,857,601 bytes"):
            await over.put(b"row", bytes(100 * 1024 * 1024 + 1))
        assert [name for name, _ in over.service.calls] == ["CreateTable"]
        assert await over.put(b"r" * 4096)
