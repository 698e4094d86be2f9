"""The model of Bigtable behind gRPC with TLS, which checks who calls, as the service does."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from percolator.bigtable import messages
from percolator.bigtable.errors import FamilyMissing
from percolator.errors import InvalidArgument, SchemaError
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.world import StreamMethod, UnaryMethod

_CODES = {
    InvalidArgument: grpc.StatusCode.INVALID_ARGUMENT,
    SchemaError: grpc.StatusCode.NOT_FOUND,
}
ELSEWHERE = "192.0.2.1:443"
"""An address that no machine has; the service proves by its certificate that it is the one there,
for callers whom a proxy connects."""
_NO_FAMILY = "Requested column family not found."


class Refusal(NamedTuple):
    """How a call fails."""

    code: grpc.StatusCode
    details: str = ""
    trailer: bytes | None = None
    """Value of `grpc-status-details-bin`."""


class BigtableService:
    """Accepts some tokens, and refuses some calls."""

    def __init__(self) -> None:
        self.model = BigtableInMemory()
        self.tokens = {"valid"}
        self.refusals: deque[Refusal | None] = deque()
        """Answers to the next calls; None for one that is executed."""
        self.seconds = 0.0
        """How long each call takes."""
        self.calls: list[tuple[str, dict[str, Any]]] = []
        """The name of each method that was called, with the metadata of the call."""
        self.in_flight = self.in_flight_max = 0
        self.peers: set[str] = set()
        self._changed = asyncio.Condition()

    async def busy(self, calls: int) -> None:
        """Returns when that many calls are in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_flight >= calls)

    async def idle(self) -> None:
        """Returns when no call is in flight."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.in_flight == 0)

    async def _admit(self, name: str, context: Any) -> None:
        metadata = dict(context.invocation_metadata())
        self.calls.append((name, metadata))
        self.peers.add(context.peer())
        token = metadata.get("authorization", "").removeprefix("Bearer ")
        if token not in self.tokens:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "Invalid credentials.")
        if self.seconds:
            await asyncio.sleep(self.seconds)
        refusal = self.refusals.popleft() if self.refusals else None
        if refusal is not None:
            trailing = (("grpc-status-details-bin", refusal.trailer),) if refusal.trailer else ()
            await context.abort(refusal.code, refusal.details, trailing)

    def handlers(self) -> list[Any]:
        """A handler for each method that the model has."""
        found: dict[str, dict[str, Any]] = {}
        for method in vars(messages).values():
            if isinstance(method, UnaryMethod | StreamMethod):
                _, service, name = method.path.split("/")
                answer = getattr(self.model, _snake(name))
                found.setdefault(service, {})[name] = self._handler(method, name, answer)
        return [
            grpc.method_handlers_generic_handler(service, handlers)
            for service, handlers in found.items()
        ]

    def _handler(self, method: Any, name: str, answer: Callable[[Any], Any]) -> Any:
        async def unary(request: Any, context: Any) -> Any:
            async with self._counted(name, context):
                return await answer(request)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            async with self._counted(name, context):
                async for response in answer(request):
                    yield response

        make, behaviour = (
            (grpc.unary_stream_rpc_method_handler, stream)
            if isinstance(method, StreamMethod)
            else (grpc.unary_unary_rpc_method_handler, unary)
        )
        return make(
            behaviour,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )

    async def _note(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    @asynccontextmanager
    async def _counted(self, name: str, context: Any) -> AsyncIterator[None]:
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        async with self._changed:
            self._changed.notify_all()
        try:
            await self._admit(name, context)
            yield
        except (InvalidArgument, SchemaError) as error:
            await context.abort(_CODES[type(error)], error.message)
        except FamilyMissing as error:
            said = f"Error while mutating the row 'a' ({error.table}) : {_NO_FAMILY}"
            await context.abort(grpc.StatusCode.NOT_FOUND, said)
        finally:
            self.in_flight -= 1
            # Not awaited as it is: a call that is cancelled has no time left for that.
            self._noted = asyncio.create_task(self._note())


@asynccontextmanager
async def served(service: BigtableService) -> AsyncIterator[tuple[str, bytes]]:
    """Serves it, and yields its address and the certificate by which it is trusted."""
    key, certificate = self_signed()
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(service.handlers())
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    await server.start()
    try:
        yield f"127.0.0.1:{port}", certificate
    finally:
        await server.stop(None)


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


def self_signed() -> tuple[bytes, bytes]:
    """A key and a certificate for this machine, in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "bigtable of a test")])
    now = datetime.datetime.now(datetime.UTC)
    hosts = [
        x509.IPAddress(ipaddress.ip_address(host))
        for host in ("127.0.0.1", ELSEWHERE.partition(":")[0])
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(key, hashes.SHA256())
    )
    return (
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        certificate.public_bytes(serialization.Encoding.PEM),
    )
