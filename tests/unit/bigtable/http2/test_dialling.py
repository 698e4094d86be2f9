"""Connections over real sockets: TLS, names, and servers that are something else."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from percolator.bigtable.http2 import dialling
from percolator.bigtable.http2.dialling import NoConnection, dial, secure
from percolator.bigtable.http2.frames import SETTINGS, frame
from percolator.bigtable.http2.lane import HttpLane
from percolator.bigtable.http2.messages import prefixed
from percolator.bigtable.http2.status import CallFailed, Code
from tests.doubles.bigtable_service import BigtableService, self_signed, served

pytestmark = pytest.mark.real_time

OURS = frame(SETTINGS, 0, 0)


class Saying(asyncio.Protocol):
    """A server that says one thing to whoever connects."""

    def __init__(self, words: bytes) -> None:
        self._words = words

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self._words)  # type: ignore[attr-defined]  # a transport of sockets


@asynccontextmanager
async def saying(words: bytes, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Yields the address of such a server."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Saying(words), "127.0.0.1", 0, ssl=tls)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


def server_tls(directory: Path, protocols: list[str]) -> tuple[ssl.SSLContext, bytes]:
    """What a server needs, and the certificate by which it is trusted."""
    key, certificate = self_signed()
    file = directory / "server.pem"
    file.write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    if protocols:
        context.set_alpn_protocols(protocols)
    return context, certificate


async def refused(address: str, tls: ssl.SSLContext | None = None) -> str:
    with pytest.raises(NoConnection) as caught:
        await dial(address, tls)
    return str(caught.value)


async def test_a_server_has_to_speak_http_2_and_says_so_in_tls(tmp_path: Path) -> None:
    for protocols, said in ((["http/1.1"], "no ALPN"), ([], "no ALPN")):
        context, certificate = server_tls(tmp_path, protocols)
        async with saying(OURS, context) as address:
            assert f"does not speak HTTP/2 ({said})" in await refused(address, secure(certificate))
    context, certificate = server_tls(tmp_path, ["h2"])
    async with saying(OURS, context) as address:
        connection = await dial(address, secure(certificate))
        assert connection.takes_calls
        await connection.close()


async def test_a_server_is_only_trusted_with_a_certificate_for_its_name(tmp_path: Path) -> None:
    context, certificate = server_tls(tmp_path, ["h2"])
    async with saying(OURS, context) as address:
        named = f"localhost:{address.rpartition(':')[2]}"
        assert "localhost" in await refused(named, secure(certificate))
        assert "certificate verify failed" in await refused(address, secure(environment={}))


async def test_authorities_may_come_from_the_file_that_the_variable_of_grpc_names(
    tmp_path: Path,
) -> None:
    context, certificate = server_tls(tmp_path, ["h2"])
    roots = tmp_path / "roots.pem"
    roots.write_bytes(certificate)
    tls = secure(environment={"GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(roots)})
    async with saying(OURS, context) as address:
        await (await dial(address, tls)).close()


async def test_what_is_no_server_of_http_2_is_refused_with_the_reason() -> None:
    async with saying(b"HTTP/1.1 400 Bad Request\r\n\r\n") as address:
        assert "the server breaks HTTP/2" in await refused(address)
    async with saying(b"") as address:
        closed = address
    assert "Connect call failed" in await refused(closed)
    assert await refused("nobody.invalid:1")


async def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "CONNECT_SECONDS", 0.2)
    async with saying(b"") as address:
        assert await refused(address) == "no connection within 0.2 s"


async def test_a_server_that_ends_the_connection_at_once_is_no_server() -> None:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        said = await refused(f"127.0.0.1:{port}")
        # What of the client's was not read makes the difference.
        assert said.endswith(("the server has closed the connection", "reset by peer"))


async def calls_of_both_kinds() -> None:
    """At a real server of gRPC, which knows no such method."""
    async with served(BigtableService()) as (address, certificate):
        lane = HttpLane(address, secure(certificate))
        for _ in range(3):
            with pytest.raises(CallFailed) as caught:
                await lane.unary("/no.Service/Method", prefixed(b""), 5.0, ())
            assert caught.value.code is Code.UNIMPLEMENTED
            with pytest.raises(CallFailed) as caught:
                await anext(lane.stream("/no.Service/Method", prefixed(b""), 5.0, ()))
            assert caught.value.code is Code.UNIMPLEMENTED
        await lane.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_it_runs_on_either_event_loop(loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(calls_of_both_kinds())
