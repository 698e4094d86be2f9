"""Noise on the ports themselves: no TLS, half a handshake, no HTTP, requests without an end."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

from percolator.services.local.authority import files_in
from percolator.services.local.cluster import LocalCluster
from percolator.v1.frames_pb2 import FramesHello
from percolator.wire.credentials import SCHEME
from percolator.wire.frames import CALL_HEAD, HEADER, PREAMBLE, Kind, frame
from percolator.world import Random
from tests.fuzz.findings import Record
from tests.fuzz.methods import METHODS
from tests.unfinished import Unfinished

_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 0.2
_FRAMES_SECURE = 0.9
"""The share of what the port for frames gets that passes the handshake, or the hello."""
_UNFINISHED_SHARE = 0.1
_STREAMS_MAX = 40
_REQUEST_BYTES = (1, 100_000, 1 << 20, 16 << 20, 31 << 20)
_OPEN = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
_NOISE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /metrics?name[]=%00 HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
)


class Sockets:
    """Connects to the ports of all processes, and writes what they do not expect."""

    def __init__(
        self, cluster: LocalCluster, certificates: Path, record: Record, seed: int
    ) -> None:
        self._token = (certificates / "client" / "client.token").read_text().strip()
        self._admin = (certificates / "client" / "admin.token").read_text().strip()
        self._cluster = cluster
        self._record = record
        self._chance = Random(f"sockets {seed}")
        files = files_in(certificates / "client")
        self._tls = ssl.create_default_context(cafile=files.ca)
        self._tls.load_cert_chain(files.certificate, files.key)
        self._tls.check_hostname = False
        self._tls.set_alpn_protocols(["h2"])

    async def go_on(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            process = self._chance.choice(
                [one for one in self._cluster.processes.values() if one.ready is not None]
            )
            ready = process.wait_ready(_ANSWER_SECONDS)
            if self._chance.random() < _UNFINISHED_SHARE:
                await self._unfinished(ready.address)
                continue
            ports = {"calls": ready.address, "metrics": ready.metrics_address}
            if ready.frames_address:
                ports["frames"] = ready.frames_address
            port = self._chance.choice(list(ports))
            address = ports[port]
            secure = self._chance.random() < (_FRAMES_SECURE if port == "frames" else 0.5)
            kind = f"{'TLS' if secure else 'plain'} to the port of {port}"
            noise = self._chance.choice((*_NOISE, self._chance.randbytes(300)))
            if port == "frames" and self._chance.random() < _FRAMES_SECURE:
                noise = hostile(self._chance, ready.server_id, self._token)
            try:
                outcome = await self._connect(address, noise, secure=secure)
            except ConnectionRefusedError:
                outcome = "wrong"
                self._record.wrong(f"{process.name} no longer listens on {address}")
            self._record.count("sockets", kind, outcome)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _unfinished(self, address: str) -> None:
        """Begins requests, of all kinds of callers, and leaves without their ends."""
        token = self._chance.choice(("", "unknown", self._token, self._admin))
        metadata = [("authorization", f"{SCHEME}{token}")] if token else []
        path = self._chance.choice((*METHODS, *_OPEN))
        paths = [path] * self._chance.randrange(1, _STREAMS_MAX)
        try:
            async with Unfinished(address, self._tls) as caller:
                await caller.begin(paths, self._chance.choice(_REQUEST_BYTES), metadata)
                outcome = "answered" if caller.answers else "no answer"
        except (OSError, ssl.SSLError):
            outcome = "closed"
        self._record.count("sockets", "unfinished requests", outcome)

    async def _connect(self, address: str, noise: bytes, *, secure: bool) -> str:
        host, _, port = address.rpartition(":")
        context = self._tls if secure else None
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        except ConnectionRefusedError:
            raise
        except (ssl.SSLError, ConnectionError):
            # A server that was busy for long ends a handshake that has taken too long.
            return "no handshake"
        try:
            writer.write(noise)
            async with asyncio.timeout(_ANSWER_SECONDS):
                await writer.drain()
                answer = await reader.read(1024)
        except (TimeoutError, OSError):
            return "no answer"
        finally:
            writer.transport.abort()
        return "accepted" if answer else "closed"


# Hostile bytes for the port for frames: what is nearly a hello, and then what is nearly a call.

_FRAMES_MAX = 40
_NUMBERS = 4
"""Few, so that calls collide and cancel each other."""


def hostile(chance: Random, server_id: str, token: str) -> bytes:
    """A connection's worth of bytes, most of which get past the hello."""
    sent = PREAMBLE + frame(Kind.HELLO, 0, _hello(chance, server_id, token))
    sent += b"".join(_frame(chance) for _ in range(chance.randrange(_FRAMES_MAX)))
    if chance.random() < 0.3:
        sent = sent[: chance.randrange(len(sent))]
    if chance.random() < 0.2:
        at = chance.randrange(len(sent) + 1)
        sent = sent[:at] + chance.randbytes(chance.randrange(1, 9)) + sent[at:]
    return sent


def _hello(chance: Random, server_id: str, token: str) -> bytes:
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(50))
    authorization = chance.choice(
        (SCHEME + token, SCHEME + token, SCHEME + "x", "", "\x00" * 2_000)
    )
    return FramesHello(server_id=server_id, authorization=authorization).SerializeToString()


def _frame(chance: Random) -> bytes:
    number = chance.randrange(_NUMBERS)
    match chance.choice(("call", "call", "call", "cancel", "ping", "kind", "size")):
        case "call":
            head = CALL_HEAD.pack(
                chance.choice((0, 0, 1, 2, 3, 255)), chance.choice((0, 1, 100, 2**32 - 1))
            )
            return frame(Kind.CALL, number, head + chance.randbytes(chance.randrange(60)))
        case "cancel":
            return frame(Kind.CANCEL, number)
        case "ping":
            return frame(Kind.PING, number, chance.randbytes(chance.randrange(9)))
        case "kind":
            return HEADER.pack(0, chance.randrange(256), number)
    return HEADER.pack(chance.choice((2**32 - 1, 2**24 + 6, 5, 1)), Kind.CALL, number)
