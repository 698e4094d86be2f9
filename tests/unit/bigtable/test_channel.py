"""The driver over real TLS, at a server that checks who calls."""

from __future__ import annotations

import asyncio
import base64
import socket
from collections.abc import Callable

import grpc
import pytest

from percolator.bigtable.channel import STREAMS_MAX, BigtableNetwork
from percolator.bigtable.methods import GET_TABLE, READ_ROWS
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tables import create_table
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
from percolator.v1.bigtable_pb2 import (
    BigtableGetTableRequest,
    BigtableReadRowsRequest,
    BigtableReadRowsResponse,
)
from tests.doubles.bigtable_service import ELSEWHERE, BigtableService, Refusal, served
from tests.unit.bigtable.connected import SECONDS, TABLE, Account, connected
from tests.unit.bigtable.peer import Peer

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
        # The service tells how far a scan has come, and how long to pause, only if it knows that
        # it will be understood: fields 1, 4 and 7 of `google.bigtable.v2.FeatureFlags`.
        for _, metadata in over.service.calls[1:]:
            features = base64.urlsafe_b64decode(metadata["bigtable-features"])
            assert features == b"\x08\x01\x20\x01\x38\x01"
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


async def test_nothing_is_dialled_after_the_close() -> None:
    async with connected() as over:
        await over.network.close()
        for address in (over.place.address, "127.0.0.1:1"):
            with pytest.raises(UsageError, match="the network of this client is closed"):
                await over.network.unary(address, GET_TABLE)(
                    BigtableGetTableRequest(name=over.place.table(TABLE)), SECONDS
                )


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


async def test_large_requests_and_answers_arrive_whole() -> None:
    async with connected() as over:
        values = [bytes((number,)) * (3 * 1024 * 1024 + number) for number in range(4)]
        rows = [b"row-%d" % number for number in range(4)]
        written = zip(rows, values, strict=True)
        assert await asyncio.gather(*(over.put(row, value) for row, value in written)) == [True] * 4
        found = await over.store.read(TABLE, rows, (Selection(WRITES),), SECONDS)
        assert [row.cells[0].value for row in found] == values


async def test_a_deadline_ends_a_call_on_both_sides() -> None:
    async with connected() as over:
        over.service.seconds = 30.0
        with pytest.raises(DeadlineExceeded):
            await over.store.read(TABLE, [b"row"], (Selection(WRITES),), 0.2)
        await over.service.idle()


async def test_a_service_that_comes_back_is_found_again() -> None:
    network = BigtableNetwork()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    address = f"127.0.0.1:{port}"
    read = network.stream(address, READ_ROWS)
    request = BigtableReadRowsRequest(table_name="t")
    for _ in range(3):
        with pytest.raises(Unavailable, match="connect"):
            await anext(read(request, SECONDS))
    peer = Peer(lambda peer, stream: peer.answer(stream, BigtableReadRowsResponse()))
    async with peer.listening(port), asyncio.timeout(SECONDS):
        while True:
            try:
                assert [one async for one in read(request, SECONDS)] == [BigtableReadRowsResponse()]
                break
            except Unavailable:
                await asyncio.sleep(0.01)
    await network.close()


class Proxy:
    """Connects whoever asks for `there` to `address`."""

    def __init__(self, there: str, address: str) -> None:
        self.asked: list[str] = []
        self._there = there
        self._host, _, self._port = address.rpartition(":")

    async def meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.asked.append(head.splitlines()[0])
        assert self.asked[-1] == f"CONNECT {self._there} HTTP/1.1"
        answers, requests = await asyncio.open_connection(self._host, int(self._port))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(_copy(reader, requests), _copy(answers, writer))


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        target.write(data)
        await target.drain()
    target.close()


@pytest.fixture(name="proxies")
def _proxies(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the variables that name a proxy."""

    def set_variables(**named: str) -> None:
        for kind in ("grpc", "https", "http", "no", "no_grpc"):
            for name in (f"{kind}_proxy", f"{kind}_proxy".upper()):
                monkeypatch.delenv(name, raising=False)
        for name, value in named.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize("variable", ["https_proxy", "grpc_proxy", "http_proxy"])
async def test_the_service_is_called_through_the_proxy_that_the_environment_names(
    variable: str, proxies: Callable[..., None]
) -> None:
    service, account = BigtableService(), Account()
    async with served(service) as (address, certificate):
        proxy = Proxy(ELSEWHERE, address)
        async with await asyncio.start_server(proxy.meet, "127.0.0.1", 0) as server:
            host, port = server.sockets[0].getsockname()
            proxies(**{variable: f"http://{host}:{port}"})
            network = BigtableNetwork(Tokens(account), certificate)
            place = Place(ELSEWHERE, "my-project", "my-instance")
            await create_table(network, place, TABLE, SECONDS)
            assert len(proxy.asked) == 1
            await network.close()


async def test_an_emulator_on_this_machine_is_called_without_the_proxy(
    proxies: Callable[..., None],
) -> None:
    proxies(http_proxy="http://127.0.0.1:1")
    async with connected() as over:
        assert await over.put(b"row")
