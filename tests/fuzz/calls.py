"""Draws calls, sends them to a real cluster, and has every answer judged.

Each call begins with a valid request, with one that a client has really sent, or with nothing but
the descriptor; its kind says what is done to it. The same seed draws the same kinds and mutations;
the ids and timestamps in them are those of the cluster.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import DecodeError, Message

from percolator.errors import InvariantViolation
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.channels import SERVER_METADATA, GrpcNetwork
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.roles import REQUIRED, Role
from percolator.wire.status import DETAILS_TRAILER, from_detail, from_rpc_error
from percolator.world import Random
from tests.fuzz.findings import Input, Record
from tests.fuzz.messages import (
    MAY_WAIT,
    METHODS,
    Method,
    damaged,
    dials_only,
    generated,
    grow,
    mutate,
    places,
)
from tests.fuzz.scene import Scene, forbidden_for_canary
from tests.fuzz.valid_requests import VALID, Recorded

KINDS = {
    "valid": 20,
    "recorded": 10,
    "one change": 25,
    "several changes": 15,
    "generated": 15,
    "grown": 5,
    "damaged bytes": 10,
    "metadata": 5,
    "role": 5,
    "other server": 4,
    "through a gateway": 4,
    "abandoned": 4,
    "unknown method": 1,
    "above the limit": 0.4,
}
"""How calls are made, and how often each kind is drawn."""

CALL_SECONDS = 10.0
WAIT_SECONDS = 0.7
"""For methods that may wait for something that never comes."""
_DECIDE_THE_ROLE = (AUTHORIZATION, SERVER_METADATA)
"""With one of these, the certificate of the cluster proves nothing."""
_FORWARDED = "/percolator.v1.MasterService/"
_ABANDONED_SECONDS = (0.0005, 0.002, 0.01, 0.05)
_MESSAGES_MAX = 50
_LIMIT_BYTES = 16 << 20
_SMALL_LIMIT_BYTES = 1 << 20
_SMALL = {"oracle", "lockservice"}
"""Servers with the smaller limit. gRPC itself refuses what is more than twice as large, and has no
typed error: so the smaller limit counts for each method that such a server has too."""


@dataclass(frozen=True)
class Tokens:
    """The tokens that the cluster knows."""

    client: str
    admin: str


class Calls:
    """The fuzzing of one cluster's methods."""

    def __init__(
        self,
        scene: Scene,
        recorded: Recorded,
        record: Record,
        client: GrpcNetwork,
        tokens: Tokens,
        seed: int,
    ) -> None:
        """`client` has a certificate that is not the cluster's, and no token of its own."""
        self._scene = scene
        self._recorded = recorded
        self._record = record
        self._client = client
        self._tokens = tokens
        self._seed = seed
        self._paths = sorted(METHODS)
        self.drawn = 0

    async def go_on(self, deadline: float) -> None:
        """One caller: calls one method after another until the deadline of the loop's clock."""
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            number, self.drawn = self.drawn, self.drawn + 1
            chance = Random(f"{self._seed} {number}")
            # In turn, so that a short run calls every method too.
            path = self._paths[number % len(self._paths)]
            one = self._input(METHODS[path], self._kind(number, chance), chance)
            if one is not None:
                await self.send(one, chance)

    # ------------------------------------------------------------------------------ drawing

    def _kind(self, number: int, chance: Random) -> str:
        """At first each method gets a valid request, and each kind is drawn once."""
        kinds, beyond = list(KINDS), number - len(self._paths)
        if beyond < 0:
            return "valid"
        if beyond < len(kinds):
            return kinds[beyond]
        return chance.choices(kinds, list(KINDS.values()))[0]

    def _input(self, method: Method, kind: str, chance: Random) -> Input | None:
        """None if the call would, quite legitimately, destroy the canary, or leave this machine."""
        if kind == "recorded" and self._recorded.of(method.path, chance) is None:
            kind = "valid"
        message = self._message(method, kind, chance)
        data = message.SerializeToString()
        metadata: list[tuple[str, str | bytes]] = []
        if kind == "damaged bytes":
            data = damaged(data, chance)
        elif kind == "above the limit":
            limit = _LIMIT_BYTES if _SMALL.isdisjoint(method.served_by) else _SMALL_LIMIT_BYTES
            data = bytes(limit + chance.choice((1, 1 << 10, 1 << 20)))
        elif kind == "metadata":
            metadata = self._metadata(chance)
        elif kind == "through a gateway":
            server = chance.choice(self._scene.living)
            metadata = [(SERVER_METADATA, chance.choice((server.server_id, "no such server")))]
        path = method.path
        if kind == "unknown method":
            path += "s"
        elif forbidden_for_canary(method, data) or not self._stays_here(method, data):
            return None
        return Input("calls", kind, data, path, tuple(metadata))

    def _stays_here(self, method: Method, data: bytes) -> bool:
        """True if the request names no machine but this one: one damaged digit may name another."""
        try:
            request = method.request.FromString(data)
        except DecodeError:
            return True
        return dials_only(request, self._scene.vocabulary)

    def _message(self, method: Method, kind: str, chance: Random) -> Message:
        words = self._scene.vocabulary
        if kind == "generated":
            return generated(method.request.DESCRIPTOR, chance, words)
        recorded = self._recorded.of(method.path, chance)
        if recorded is not None and (kind == "recorded" or chance.random() < 0.3):
            message: Message = method.request.FromString(recorded)
        else:
            message = VALID[method.path](self._scene, chance)
        changes = {"one change": 1, "several changes": chance.randrange(2, 7)}.get(kind, 0)
        for _ in range(changes):
            mutate(message, chance, words)
        if kind == "grown":
            grow(message, chance)
        return message

    def _metadata(self, chance: Random) -> list[tuple[str, str | bytes]]:
        token = chance.choice(
            ("", self._tokens.client, self._tokens.client[:-1], "x" * 3_000, "a b", "%00")
        )
        return chance.choice(
            [
                [(AUTHORIZATION, SCHEME + token)],
                [(AUTHORIZATION, token), (AUTHORIZATION, SCHEME + self._tokens.client)],
                [(SERVER_METADATA, "")],
                [(SERVER_METADATA, "x" * 2_000)],
                [(f"{AUTHORIZATION}-bin", chance.randbytes(40))],
                [("x-long", "y" * chance.choice((100, 7_000, 9_000, 20_000)))],
                [("grpc-previous-rpc-attempts", "99999999999999999999")],
            ]
        )

    # ------------------------------------------------------------------------------ sending

    async def send(self, one: Input, chance: Random) -> None:
        """Sends the call, and records what became of it."""
        self._record.latest.append(one)
        method = METHODS.get(one.method) or METHODS[one.method.removesuffix("s")]
        network, metadata = self._scene.network, list(one.metadata)
        if one.kind in ("role", "through a gateway"):
            metadata.append((AUTHORIZATION, SCHEME + self._tokens.client))
        if one.kind == "role":
            network = self._client
        address = self._address(method, one, chance)
        known_by_certificate = {key for key, _ in metadata}.isdisjoint(_DECIDE_THE_ROLE)
        role = Role.SERVER if known_by_certificate else Role.CLIENT
        if (
            known_by_certificate
            and method.path.startswith(_FORWARDED)
            and self._is_gateway(address)
        ):
            # A gateway passes these on, and not with the rights of its certificate.
            metadata.append((AUTHORIZATION, SCHEME + self._tokens.admin))
            role = Role.ADMIN
        seconds = WAIT_SECONDS if method.path in MAY_WAIT else CALL_SECONDS
        if one.kind == "abandoned":
            seconds = chance.choice(_ABANDONED_SECONDS)
        try:
            answers = await self._sent(network, address, method, one, metadata, seconds)
            outcome = judge_success(method, one.kind, answers, role)
        except grpc.aio.AioRpcError as error:
            try:
                outcome = judge_failure(method, one.kind, error, role)
            except Wrong as wrong:
                outcome = "wrong"
                self._record.wrong(str(wrong), one)
        except Wrong as wrong:
            outcome = "wrong"
            self._record.wrong(str(wrong), one)
        self._record.count(method.path, one.kind, outcome)

    def _is_gateway(self, address: str) -> bool:
        return self._scene.cluster.gateway_address == address

    def _address(self, method: Method, one: Input, chance: Random) -> str:
        scene = self._scene
        if one.kind == "through a gateway":
            return scene.address("gateway", chance)
        if one.kind == "other server":
            kinds = ("master", "oracle", "lockservice", "tabletserver", "gateway", "worker")
            return scene.address(chance.choice(kinds), chance)
        if method.served_by == ("tabletserver",):
            owner = _owner(method, one.data, scene.owners)
            if owner:
                return owner
        return scene.address(chance.choice(method.served_by), chance)

    async def _sent(
        self,
        network: GrpcNetwork,
        address: str,
        method: Method,
        one: Input,
        metadata: list[tuple[str, str | bytes]],
        seconds: float,
    ) -> list[bytes]:
        channel = network.line(address).channel
        given: dict[str, Any] = {"timeout": seconds, "metadata": metadata or None}
        if method.client_streaming:
            stream = channel.stream_stream(one.method)(_only(one.data), **given)
        elif method.server_streaming:
            stream = channel.unary_stream(one.method)(one.data, **given)
        else:
            return [await channel.unary_unary(one.method)(one.data, **given)]
        answers = []
        async for answer in stream:
            answers.append(answer)
            if len(answers) == _MESSAGES_MAX or method.path in MAY_WAIT:
                stream.cancel()
                break
        return answers


async def _only(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _owner(method: Method, data: bytes, owners: dict[int, str]) -> str:
    """The address of the server of the tablet that the request names first, or nothing."""
    try:
        request = method.request.FromString(data)
    except DecodeError:
        return ""
    found = _first_tablet(request)
    return owners.get(found, "")


def _first_tablet(message: Message) -> int:
    for field, value in message.ListFields():
        if field.name == "tablet_id" and isinstance(value, int):
            return value
        inner = [value] if isinstance(value, Message) else value
        if field.message_type is not None:
            for one in inner:
                if found := _first_tablet(one):
                    return found
    return 0


# Judges one answer: accepted, refused with a typed error, or wrong.

_REFUSALS = (
    "ReadResponse",
    "MutateResponse",
    "CommitTransactionsResponse",
    "MutateTogetherResponse",
    "ScanResponse",
    "ScanCellsResponse",
    "ScanNotificationsResponse",
    "RaiseSafePointsResponse",
)
"""Answers in which an error refuses a part of the request. In others it describes a tablet."""

_UNTYPED = {
    ("unknown method", grpc.StatusCode.UNIMPLEMENTED): "gRPC answers for methods that do not exist",
    ("other server", grpc.StatusCode.UNIMPLEMENTED): "that server has no such method",
    ("through a gateway", grpc.StatusCode.UNIMPLEMENTED): "that server has no such method",
    ("through a gateway", grpc.StatusCode.UNAVAILABLE): "nothing listens where a server registered",
    ("metadata", grpc.StatusCode.RESOURCE_EXHAUSTED): "gRPC limits the size of metadata",
    ("abandoned", grpc.StatusCode.DEADLINE_EXCEEDED): "the caller's own deadline",
    ("abandoned", grpc.StatusCode.CANCELLED): "the caller's own doing",
}
"""Statuses without our detail that are right, by the kind of input, with the reason."""

_BY_LIBRARY = {
    ("damaged bytes", grpc.StatusCode.UNKNOWN): "the library of the service decodes it",
}
"""Statuses of gRPC's own services that are neither ours to choose nor harmful, with the reason."""

_NOT_TO_BE = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Wrong(Exception):
    """An answer that must not be."""


_STREAM_HAD_ENDED = "Internal error from Core"
"""The words of gRPC's client when a call ended before it could send all requests of a stream."""


def judge_success(method: Method, kind: str, answers: list[bytes], role: Role) -> str:
    """The outcome of a call that succeeded: "accepted", or the error of its refused part."""
    required = REQUIRED.get(method.path)
    if method.own and (required is None or role < required):
        raise Wrong(f"{method.path} was executed for the role {role.name}")
    outcome = "accepted"
    for raw in answers:
        try:
            answer = method.response.FromString(raw)
        except DecodeError as error:
            raise Wrong(f"{method.path} answers what is no {method.response.__name__}") from error
        for detail in _details(answer):
            error_name = _judge_detail(method, detail)
            if type(answer).__name__ in _REFUSALS:
                outcome = error_name
    return outcome


def judge_failure(method: Method, kind: str, error: grpc.aio.AioRpcError, role: Role) -> str:
    """The name of the typed error with which a call failed, or of its status."""
    code = error.code()
    trailers = {key for key, _ in error.trailing_metadata() or ()}
    if method.own and DETAILS_TRAILER in trailers:
        typed = from_rpc_error(error, method.path)
        return (
            _judge_typed(method, typed.message, isinstance(typed, InvariantViolation))
            or type(typed).__name__
        )
    if (kind, code) in _UNTYPED:
        return str(code.name)
    if method.client_streaming and error.details() == _STREAM_HAD_ENDED:
        return "ended"
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        if method.path in MAY_WAIT:
            return str(code.name)
        raise Wrong(f"{method.path} hangs: no answer before the deadline")
    if not method.own and (code not in _NOT_TO_BE or (kind, code) in _BY_LIBRARY):
        return str(code.name)
    if code is grpc.StatusCode.UNAVAILABLE:
        raise Wrong(f"a server of {method.path.split('/')[1]} is gone: {error.details()}")
    raise Wrong(f"{method.path} ({kind}): {code.name} without detail: {error.details()}")


def _details(answer: Message) -> Iterator[ErrorDetail]:
    for place in places(answer):
        if isinstance(place, ErrorDetail):
            yield place


def _judge_detail(method: Method, detail: ErrorDetail) -> str:
    typed = from_detail(detail)
    _judge_typed(method, typed.message, isinstance(typed, InvariantViolation))
    return type(typed).__name__


def _judge_typed(method: Method, message: str, violation: bool) -> str:
    """An error that no check has foreseen is wrong, whatever was sent."""
    if violation:
        raise Wrong(f"{method.path}: {message}")
    return ""
