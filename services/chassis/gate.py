"""Checks that every call passes before it is answered, in frames or over gRPC.

Tokens and access decide who calls; quotas, how much one caller may use; arrivals, how much memory
requests may take; the gate, how many calls run. Errors become trailers.
"""

from __future__ import annotations

import asyncio
import logging
import re
import tomllib
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote

import grpc
import structlog
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from percolator.errors import (
    InvalidArgument,
    Overloaded,
    PercolatorError,
    PermissionDenied,
    Unauthenticated,
)
from percolator.services.chassis.coordinator import Trouble
from percolator.services.chassis.settings import CLIENT_QUOTA_PERCENT, CLIENTS_QUOTA_PERCENT
from percolator.v1.errors_pb2 import ErrorDetail
from percolator.wire.channels import FORWARDED_METADATA, SERVER_METADATA
from percolator.wire.credentials import AUTHORIZATION, SCHEME
from percolator.wire.renewal import FileState, file_state
from percolator.wire.roles import NO_ROLE, REQUIRED, Role
from percolator.wire.status import DETAILS_TRAILER, status_code, to_detail, to_trailer
from percolator.wire.tls import CLUSTER_NAME
from percolator.wire.tokens import NAME, ROLES, token_hash
from percolator.world import Clock

_HASH = re.compile("[0-9a-f]{64}")

_LOOK_SECONDS = 2.0

_SHOWN_CHARACTERS_MAX = 20

_BEGINNING_CHARACTERS = 6
"""Of 43 characters of a token: the others cannot be guessed."""

_FIELD = "tokens"

_log = structlog.get_logger("percolator.tokens")


class Tokens:
    """The tokens that a cluster accepts: a TOML file of their hashes, so that reading it reveals
    none.

        [shop]                      # the owner, for people
        role = "client"             # or "admin"
        sha256 = "9f86d081884c..."  # of the token

    The file is read again when it changes: removing an entry shuts its owner out within seconds.
    While it is not valid, its last valid content counts.
    """

    def __init__(self, path: Path) -> None:
        """`InvalidArgument` names what is wrong with the file."""
        self._path = path
        self._seen: FileState | None = _state_of(path)
        self._roles = _read(path)

    def role_of(self, digest: bytes) -> Role | None:
        """The role of the token with this hash; None if it is unknown."""
        return self._roles.get(digest)

    async def follow(self, clock: Clock) -> None:
        """Follows the file until cancelled: a valid change takes effect within seconds; an invalid
        one never does."""
        trouble = Trouble(
            _log, "the tokens cannot be read; the former ones remain in force", level=logging.ERROR
        )
        while True:
            await clock.sleep(_LOOK_SECONDS)
            # None if it is gone: when it is back, it is read, whether it has changed or not.
            before, self._seen = self._seen, None
            try:
                self._seen = _state_of(self._path)
                if self._seen == before:
                    continue
                trouble.is_over()  # whoever has changed the file learns what is wrong with it now
                self._roles = _read(self._path)
            except InvalidArgument as error:
                trouble.lasts(error)
            else:
                _log.info("tokens read again", tokens=len(self._roles))


def _state_of(path: Path) -> FileState:
    try:
        return file_state(path)
    except OSError as error:
        raise InvalidArgument(_FIELD, f"{path}: {error.strerror}") from None


def _read(path: Path) -> dict[bytes, Role]:
    try:
        entries = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidArgument(_FIELD, f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError):
        # Leave out the reason, which may show a part of the file.
        raise InvalidArgument(_FIELD, f"{path}: not TOML") from None
    roles: dict[bytes, Role] = {}
    for name, entry in entries.items():
        where = f"{path}: [{_shown(name)}]" if NAME.fullmatch(name) else f"{path}: a name"
        if not NAME.fullmatch(name):
            raise InvalidArgument(_FIELD, f"{where}: expected letters, digits, - and _")
        if not isinstance(entry, dict) or entry.keys() != {"role", "sha256"}:
            raise InvalidArgument(_FIELD, f"{where}: expected role and sha256, and nothing else")
        if entry["role"] not in ROLES:
            raise InvalidArgument(_FIELD, f"{where}: role: expected client or admin")
        # Never show the value: it may be the token itself, put there by mistake.
        if not isinstance(entry["sha256"], str) or not _HASH.fullmatch(entry["sha256"]):
            raise InvalidArgument(_FIELD, f"{where}: sha256: expected 64 hexadecimal digits")
        digest = bytes.fromhex(entry["sha256"])
        if digest in roles:
            raise InvalidArgument(_FIELD, f"{where}: sha256: another token has the same")
        roles[digest] = ROLES[entry["role"]]
    return roles


def _shown(name: str) -> str:
    """The name, or its beginning: a long one may be the token itself, put there by mistake."""
    return name if len(name) <= _SHOWN_CHARACTERS_MAX else f"{name[:_BEGINNING_CHARACTERS]}..."


LOCAL = "localhost"
_IPV6_NETWORK_BITS = 64
_PEERS_REMEMBERED = 16_384


class CallerIdentity(NamedTuple):
    """The caller, as far as it decides what it may do, and how much at once."""

    role: Role
    client: tuple[bytes, str] | None = None
    """The hash of the token, if there is one, and the machine. None for administrators and servers,
    which are not limited as clients."""


OWN = CallerIdentity(Role.SERVER)
"""The process itself, such as a simulation that calls a handler."""


@lru_cache(_PEERS_REMEMBERED)
def machine_of(peer: str) -> str:
    """The machine at the other end of a connection, from an address as gRPC writes it.

    An IPv6 network of 64 bits counts as one machine, since a machine may take any of its addresses;
    so do all loopback addresses.
    """
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return LOCAL
    host = unquote(rest).rpartition(":")[0].strip("[]").partition("%")[0]
    try:
        address = ip_address(host)
    except ValueError:
        return host
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is None and not address.is_loopback:
            bits = 128 - _IPV6_NETWORK_BITS
            return f"{IPv6Address(int(address) >> bits << bits)}/{_IPV6_NETWORK_BITS}"
        address = address.ipv4_mapped or address
    return LOCAL if address.is_loopback else str(address)


def peer_name(host: str) -> str:
    """An address of a socket as gRPC writes it; no host means a socket of this machine."""
    if not host:
        return "unix:"
    return f"ipv6:[{host}]:0" if ":" in host else f"ipv4:{host}:0"


class Quota:
    """One limit of a server, and how much of it each client uses, so that none can exhaust it.

    Belongs to the event loop.

    A client is a token at an address (docs/decisions.md, 75):
    - One client may use `client_quota_percent` of each limit.
    - All clients together may use `clients_quota_percent`. Half of the rest is for administrators
      and servers, the other half for servers alone.
    """

    def __init__(
        self,
        what: str,
        setting: str,
        limit: int,
        *,
        client_percent: int = CLIENT_QUOTA_PERCENT,
        clients_percent: int = CLIENTS_QUOTA_PERCENT,
        retry_after_seconds: float = 1.0,
    ) -> None:
        """`what` is limited by a setting: "sessions" by "sessions_max"."""
        self.what = what
        self.used = 0
        self.used_by_clients = 0
        self.refused = {"client": 0, "clients": 0, "all": 0}
        """By the limit that was reached: that of one client, of all clients, or of all callers."""
        self._setting = setting
        self._limit = limit
        self._client_percent = client_percent
        self._clients_percent = clients_percent
        self._client_max = max(1, limit * client_percent // 100)
        self._clients_max = max(1, limit * clients_percent // 100)
        self._admins_max = limit - (limit - self._clients_max) // 2
        self._retry_after_seconds = retry_after_seconds
        self._by_client: dict[tuple[bytes, str], int] = {}

    @property
    def most_used(self) -> int:
        """How much the client uses that uses the most."""
        return max(tuple(self._by_client.values()), default=0)

    def reached(self, caller: CallerIdentity, amount: int = 1) -> str:
        """The limit that is in the way of so much more; empty if none is."""
        total = self.used + amount
        if caller.client is not None:
            if self._by_client.get(caller.client, 0) + amount > self._client_max:
                return "client"
            if self.used_by_clients + amount > self._clients_max:
                return "clients"
        elif caller.role == Role.ADMIN and total > self._admins_max:
            return "all"
        return "all" if total > self._limit else ""

    def take(self, caller: CallerIdentity, amount: int = 1) -> None:
        """Counts so much more for the caller, until it is given back. Raises `Overloaded`."""
        if limit := self.reached(caller, amount):
            self.refused[limit] += 1
            raise Overloaded(self._explained(limit), retry_after_seconds=self._retry_after_seconds)
        self.used += amount
        client = caller.client
        if client is not None and amount:
            self.used_by_clients += amount
            self._by_client[client] = self._by_client.get(client, 0) + amount

    def give_back(self, caller: CallerIdentity, amount: int = 1) -> None:
        self.used -= amount
        client = caller.client
        if client is not None and amount:
            self.used_by_clients -= amount
            left = self._by_client[client] - amount
            if left:
                self._by_client[client] = left
            else:
                del self._by_client[client]

    def _explained(self, limit: str) -> str:
        whole = f"{self._setting}, {self._limit}"
        if limit == "client":
            return (
                f"this client may have {self._client_max} {self.what} here at once: "
                f"{self._client_percent}% (client_quota_percent) of {whole}; programs with the "
                "same token at the same address count as one client"
            )
        if limit == "clients":
            return (
                f"all clients together may have {self._clients_max} {self.what} here at once: "
                f"{self._clients_percent}% (clients_quota_percent) of {whole}; the rest is for "
                "administrators and servers"
            )
        return f"{self.used} {self.what} are in use here, and the limit is {whole}"


class Quotas(Collector):
    """All quotas of one process, and their metrics."""

    def __init__(
        self,
        client_percent: int = CLIENT_QUOTA_PERCENT,
        clients_percent: int = CLIENTS_QUOTA_PERCENT,
    ) -> None:
        self._client_percent = client_percent
        self._clients_percent = clients_percent
        self._all: list[Quota] = []

    def of(self, what: str, setting: str, limit: int, *, retry_after_seconds: float = 1.0) -> Quota:
        """The quota of one more limit."""
        quota = Quota(
            what,
            setting,
            limit,
            client_percent=self._client_percent,
            clients_percent=self._clients_percent,
            retry_after_seconds=retry_after_seconds,
        )
        self._all.append(quota)
        return quota

    def collect(self) -> Iterator[Metric]:
        used = GaugeMetricFamily(
            "percolator_quota_used",
            "What callers use: all of them, all clients, or the client that uses the most.",
            labels=["what", "by"],
        )
        refused = CounterMetricFamily(
            "percolator_quota_refused",
            "Calls refused, by the limit that was reached: that of one client, of all clients, or "
            "of all callers.",
            labels=["what", "limit"],
        )
        for one in self._all:
            used.add_metric([one.what, "all"], one.used)
            used.add_metric([one.what, "clients"], one.used_by_clients)
            used.add_metric([one.what, "client"], one.most_used)
            for limit, count in one.refused.items():
                refused.add_metric([one.what, limit], count)
        yield from (used, refused)


_CLUSTER = CLUSTER_NAME.encode()

Check = Callable[[grpc.aio.ServicerContext], CallerIdentity]
"""Identifies the caller. Raises `Unauthenticated` or `PermissionDenied`."""


def by_address(context: grpc.aio.ServicerContext) -> CallerIdentity:
    """The check without TLS: callers have no names, and may do everything that an operator may. So
    each is limited as a client."""
    return CallerIdentity(Role.ADMIN, (b"", machine_of(context.peer())))


class Access:
    """Decides who is calling a server with TLS, and whether they may, before the call is decoded.

    `tokens` is None if none are required.

    If there is a token, the token decides. Without one, the certificate that the servers of a
    cluster share makes the caller one of them. It does not if a gateway forwarded the call for
    another caller, as `percolator-server` in its metadata shows: otherwise all callers of a gateway
    would be servers.
    """

    def __init__(self, tokens: Tokens | None) -> None:
        self._tokens = tokens

    def check_of(self, path: str) -> Check:
        """The check of one remote procedure."""
        required = REQUIRED.get(path)

        def check(context: grpc.aio.ServicerContext) -> CallerIdentity:
            metadata, names = context.invocation_metadata(), context.peer_identities
            return self.require(path, required, metadata, names, context.peer)

        return check

    def require(
        self,
        path: str,
        required: Role | None,
        metadata: Iterable[tuple[str, str | bytes]] | None,
        names: Callable[[], Iterable[bytes] | None],
        peer: Callable[[], str],
    ) -> CallerIdentity:
        """`names` returns the names in the caller's certificate, `peer` its address."""
        token: str | bytes | None = None
        forwarded = False
        machine = ""
        for key, value in metadata or ():
            if key == AUTHORIZATION and token is None:
                token = value
            elif key == SERVER_METADATA:
                forwarded = True
            elif key == FORWARDED_METADATA and _CLUSTER in (names() or ()):
                machine = _machine_before_gateway(value)
        role, digest = self._role(path, token, forwarded, names)
        if required is None or role < required:
            needed = NO_ROLE if required is None else f"it needs {required.name}"
            raise PermissionDenied(f"the caller has the role {role.name}, but {needed}", where=path)
        if role == Role.SERVER or (role == Role.ADMIN and self._tokens is not None):
            return CallerIdentity(role)
        return CallerIdentity(role, (digest, machine or machine_of(peer())))

    def _role(
        self,
        path: str,
        token: str | bytes | None,
        forwarded: bool,
        names: Callable[[], Iterable[bytes] | None],
    ) -> tuple[Role, bytes]:
        """With the hash of the token that proves it, if there is one."""
        if token is not None:
            return self._role_of_token(path, token)
        if not forwarded and _CLUSTER in (names() or ()):
            return Role.SERVER, b""
        if self._tokens is None:
            return Role.ADMIN, b""
        raise Unauthenticated("the call carries no token", where=path)

    def _role_of_token(self, path: str, value: str | bytes) -> tuple[Role, bytes]:
        if self._tokens is None:
            return Role.ADMIN, b""
        if isinstance(value, str) and value.startswith(SCHEME):
            digest = token_hash(value.removeprefix(SCHEME))
            role = self._tokens.role_of(digest)
            if role is not None:
                return role, digest
        # Does not show what was sent: a mistyped secret is nearly a secret.
        raise Unauthenticated("the cluster does not know the token of the call", where=path)


def _machine_before_gateway(value: str | bytes) -> str:
    """The machine whose call a gateway forwards; empty if the gateway does not name it."""
    return "" if isinstance(value, bytes) else value


LOOKAHEAD_BYTES = 16 * 1024
"""How much of its request a stream may send before a call receives it."""
CONNECTIONS_MIN = 4
"""A connection may use the budget divided by this number."""
CLIENTS_MIN = 2
"""A client may use the budget divided by this number."""
HASTY_MAX = 4
"""Requests above the budget that may arrive at a time, and how many of the largest ones may be in
memory above it when they have arrived."""
HASTY_SECONDS = 0.1
"""How long each of them may take."""
_SLACK_BYTES = 1024 * 1024
_RETRY_SECONDS = 0.1
_INT_MAX = 2**31 - 1
_ALL = "all callers"


def received_bytes_max(request_bytes_max: int) -> int:
    """gRPC's own limit of a request's size. It is above the limit that is documented, so that the
    gate refuses what is a little too large, with a typed error; gRPC has none. This one limits
    memory."""
    return min(request_bytes_max + min(request_bytes_max, _SLACK_BYTES), _INT_MAX)


class NoMoreRequests(InvalidArgument):
    """The caller has ended its stream of requests."""


class Arrivals:
    """The memory that requests of one kind of caller may take, from before they arrive until they
    are answered. Belongs to one event loop.

    gRPC hands over a request when it is complete. Until then its caller decides how long that
    takes, and the server holds what has come. So a call asks here before it receives; nothing of
    its request is received earlier, apart from the `LOOKAHEAD_BYTES` that every stream may send:
    - Until it has arrived, a request counts as the largest one, and afterwards as what it is.
    - The requests of one connection have a share, and so do those of one client, whose connections
      may be many. Above it they wait for each other, without loss: flow control stops their sender.
    - All requests together have a budget. Above it, a few may arrive at a time if they do so at
      once, as small ones do; one that does not is refused. Others wait: no client can make them
      wait alone, because its share is half.
    """

    def __init__(self, request_bytes_max: int, bytes_max: int, seconds: float) -> None:
        """One request fits, however small `bytes_max` is. A request may wait for its turn for so
        many seconds, and may then take as many to arrive."""
        self.largest = received_bytes_max(request_bytes_max)
        self.bytes_max = max(bytes_max, self.largest)
        self.connection_bytes_max = max(bytes_max // CONNECTIONS_MIN, self.largest)
        self.client_bytes_max = max(bytes_max // CLIENTS_MIN, self.largest)
        self.seconds = seconds
        self.shares: dict[object, _Share] = {}
        """By connection, and by client."""
        self.used = 0
        """Bytes of the budget in use."""
        self.hasty = 0
        """Requests that arrive above the budget, or are too large to be counted in it."""
        self.waiting: OrderedDict[Held, None] = OrderedDict()
        """Requests that wait for the budget, the oldest first."""
        self.refused: Counter[str] = Counter(dict.fromkeys(("budget", "late", "streams"), 0))
        """Refused requests, by reason."""

    async def receive(
        self, context: grpc.aio.ServicerContext, caller: CallerIdentity | None = None
    ) -> Held:
        """The request of a call, which nobody has received yet, in memory until it is released.
        Raises `Overloaded` and `InvalidArgument`."""
        held = Held(self, self._shares(context, caller))
        try:
            await held.turn()
            held.raw = await self._arrived(held, context)
        except BaseException:
            held.release()
            raise
        return held

    def hold(self, raw: bytes) -> Held:
        """A request that has arrived. Raises `Overloaded`."""
        if self.used + len(raw) > self.bytes_max:
            raise self.refusal("budget", "the requests in progress use all memory for requests")
        held = Held(self, [])
        held.raw = raw
        held.count()
        held.resize(len(raw))
        return held

    def refusal(self, reason: str, text: str) -> Overloaded:
        """The error of a request that was not executed; counts it."""
        self.refused[reason] += 1
        return Overloaded(text, retry_after_seconds=_RETRY_SECONDS)

    def admit(self, held: Held) -> bool:
        """Lets the request arrive, within the budget or above it, if it may now."""
        if self.used + self.largest <= self.bytes_max:
            held.count()
        elif self.hasty < HASTY_MAX:
            held.hurry()
        else:
            return False
        return True

    def admit_waiting(self) -> None:
        """To be called when there may be memory for more."""
        while self.waiting and self.admit(next(iter(self.waiting))):
            self.waiting.popitem(last=False)[0].grant()

    async def _arrived(self, held: Held, context: grpc.aio.ServicerContext) -> bytes:
        seconds = HASTY_SECONDS if held.is_hasty else self.seconds
        try:
            async with asyncio.timeout(seconds):
                raw: bytes = await context.read()
        except TimeoutError:
            if held.is_hasty:
                raise self.no_memory(_ALL) from None
            reason = f"the request has not arrived within {seconds:g} s (request_seconds_max)"
            raise self.refusal("late", reason) from None
        if raw is grpc.aio.EOF:
            raise NoMoreRequests("request", "is missing")
        held.resize(len(raw))
        # Otherwise a few long calls would keep all others from arriving.
        above = self.bytes_max + HASTY_MAX * self.largest
        if held.is_hasty and self.used + len(raw) <= above:
            held.count()
        return raw

    def _shares(
        self, context: grpc.aio.ServicerContext, caller: CallerIdentity | None
    ) -> list[_Share]:
        shares = []
        # A gateway has one connection for all its callers: they must not wait for each other.
        if _CLUSTER not in (context.peer_identities() or ()):
            peer = context.peer()
            shares.append(self._share(peer, "this connection", self.connection_bytes_max))
        if caller is not None and caller.client is not None:
            shares.append(self._share(caller.client, "this client", self.client_bytes_max))
        return shares

    def _share(self, owner: object, described: str, bytes_max: int) -> _Share:
        share = self.shares.get(owner)
        if share is None:
            share = self.shares[owner] = _Share(owner, described, bytes_max)
        return share

    def no_memory(self, whose: str) -> Overloaded:
        return self.refusal(
            "budget", f"the requests of {whose} use all memory for them (request_bytes_total_max)"
        )


class _Share:
    """The requests of one connection or client, while there are any."""

    __slots__ = ("bytes_max", "calls", "described", "owner", "used", "waiting")

    def __init__(self, owner: object, described: str, bytes_max: int) -> None:
        self.owner = owner
        self.described = described
        self.bytes_max = bytes_max
        self.calls = 0
        self.used = 0
        self.waiting: OrderedDict[Held, None] = OrderedDict()


class Held:
    """A request in memory, or the memory into which it arrives."""

    __slots__ = (
        "_arrivals",
        "_bytes",
        "_granted",
        "_is_counted",
        "_reserved",
        "_shares",
        "_wait_until",
        "is_hasty",
        "raw",
    )

    def __init__(self, arrivals: Arrivals, shares: list[_Share]) -> None:
        self.raw = b""
        self.is_hasty = False
        self._arrivals = arrivals
        self._shares = shares
        self._reserved = 0
        """In how many of the shares its bytes are counted."""
        self._bytes = 0
        self._is_counted = False
        """True while its bytes are part of the budget in use."""
        self._granted: asyncio.Future[None] | None = None
        self._wait_until: float | None = None
        for share in shares:
            share.calls += 1

    async def turn(self) -> None:
        """Returns when the largest request fits, and reserves it: in the share of the connection,
        then in that of the client, then in the budget. Raises `Overloaded`."""
        arrivals = self._arrivals
        self._bytes = arrivals.largest
        for share in self._shares:
            if share.waiting or share.used + arrivals.largest > share.bytes_max:
                await self._wait_in(share.waiting, share.described)
            else:
                self.reserve()
        if arrivals.waiting or not arrivals.admit(self):
            await self._wait_in(arrivals.waiting, _ALL)

    async def _wait_in(self, queue: OrderedDict[Held, None], whose: str) -> None:
        loop = asyncio.get_running_loop()
        self._granted = loop.create_future()
        if self._wait_until is None:
            self._wait_until = loop.time() + self._arrivals.seconds
        queue[self] = None
        try:
            async with asyncio.timeout_at(self._wait_until):
                await self._granted
        except TimeoutError:
            raise self._arrivals.no_memory(whose) from None
        finally:
            queue.pop(self, None)

    def grant(self) -> None:
        if self._granted is not None and not self._granted.done():
            self._granted.set_result(None)

    def reserve(self) -> None:
        """From now on its bytes are part of the next share."""
        self._shares[self._reserved].used += self._bytes
        self._reserved += 1

    def count(self) -> None:
        """From now on its bytes are part of the budget in use."""
        self._is_counted = True
        self._arrivals.used += self._bytes
        self._settle()

    def hurry(self) -> None:
        """It arrives above the budget."""
        self.is_hasty = True
        self._arrivals.hasty += 1

    def _settle(self) -> None:
        if self.is_hasty:
            self.is_hasty = False
            self._arrivals.hasty -= 1
            self._arrivals.admit_waiting()

    def resize(self, size: int) -> None:
        """It takes so many bytes now."""
        change, self._bytes = size - self._bytes, size
        for share in self._shares[: self._reserved]:
            share.used += change
            while share.waiting and share.used + self._arrivals.largest <= share.bytes_max:
                waiting, _ = share.waiting.popitem(last=False)
                waiting.reserve()
                waiting.grant()
        if self._is_counted:
            self._arrivals.used += change
            self._arrivals.admit_waiting()

    def release(self) -> None:
        """It is answered, or refused."""
        self._settle()
        self.resize(0)
        shares, self._shares, self._reserved = self._shares, [], 0
        for share in shares:
            share.calls -= 1
            if not share.calls:
                del self._arrivals.shares[share.owner]


_DETAILS_BYTES_MAX = 3 * 1024
_TEXT_CHARACTERS_MAX = 200
"""Each character takes up to 12 bytes in the status message, as percent-encoded UTF-8."""


def failure(error: PercolatorError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, bytes], ...]]:
    """The arguments for `grpc.aio.ServicerContext.abort`.

    Errors in trailers: gRPC limits them to 8 KiB, and a longer error loses its type on the way.

    Then the caller would not know whether its call may be sent again. So texts are cut. If that is
    not enough, everything but the plain fields of the cause is left out: the caller can ask again
    where a tablet is, but not what kind of error it was.
    """
    code, message, detail = status_code(error), _short(str(error)), to_detail(error)
    trailer = to_trailer(code, message, detail)
    if len(trailer) > _DETAILS_BYTES_MAX:
        _cut(detail)
        trailer = to_trailer(code, message, detail)
    return code, message, ((DETAILS_TRAILER, trailer),)


def _cut(detail: ErrorDetail) -> None:
    _shorten(detail)
    cause = detail.WhichOneof("cause")
    if cause is not None:
        _shorten(getattr(detail, cause))
        if detail.ByteSize() > _DETAILS_BYTES_MAX:
            _leave_out_messages(getattr(detail, cause))


def _shorten(message: Message) -> None:
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, _short(value))


def _leave_out_messages(message: Message) -> None:
    for field, _ in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            message.ClearField(field.name)


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[: _TEXT_CHARACTERS_MAX - 1] + "…"


STREAMS_MAX = 10_000
REQUEST_BYTES_TOTAL_MAX = 256 << 20
REQUEST_SECONDS_MAX = 60.0
FRAME_BYTES_MAX = 64 * 1024
"""The largest request in a frame. The library sends larger ones than 8 KiB over gRPC."""
_OPEN_SECONDS_MAX = 10.0
_OPEN_REQUESTS = 4
_CALLS_RETRY_SECONDS = 0.1
_STREAMS_RETRY_SECONDS = 1.0
"""Longer: a stream may last for as long as its caller wants."""


class Gate:
    """Admits calls: whether this server answers at all, the limits of concurrent
    calls and streams, and the memory that its request takes.

    Streams have a limit of their own, because an idle one may last for days: it must not take the
    place of a short call. Belongs to the event loop. `idle` is set while no admitted call is in
    progress.
    """

    def __init__(
        self,
        concurrency_max: int,
        request_bytes_max: int,
        request_bytes_total_max: int = REQUEST_BYTES_TOTAL_MAX,
        request_seconds_max: float = REQUEST_SECONDS_MAX,
        streams_max: int = STREAMS_MAX,
        quotas: Quotas | None = None,
    ) -> None:
        quotas = quotas or Quotas()
        self._calls = quotas.of(
            "calls", "concurrency_max", concurrency_max, retry_after_seconds=_CALLS_RETRY_SECONDS
        )
        self._streams = quotas.of(
            "streams", "streams_max", streams_max, retry_after_seconds=_STREAMS_RETRY_SECONDS
        )

        def arrivals(bytes_max: int, seconds: float = request_seconds_max) -> Arrivals:
            return Arrivals(request_bytes_max, bytes_max, seconds)

        self._usual = arrivals(request_bytes_total_max)
        self._trusted = arrivals(request_bytes_total_max)
        """For administrators and servers, which get through whatever clients do."""
        self.open = arrivals(
            _OPEN_REQUESTS * received_bytes_max(request_bytes_max),
            min(_OPEN_SECONDS_MAX, request_seconds_max),
        )
        """For requests that need no token, of health and reflection: one at a time of a connection,
        and half of them of a machine."""
        self.framed = arrivals(request_bytes_total_max // 4)
        """For what is complete, and small: what arrives slowly over gRPC does not stop it."""
        self.idle = asyncio.Event()
        self.idle.set()
        self._request_bytes_max = request_bytes_max
        self._refusal: PercolatorError | None = None
        self._closed = False

    def refuse(self, error: PercolatorError | None) -> None:
        """From now on every new call gets this error; None admits calls again."""
        if not self._closed:
            self._refusal = error

    def close(self, error: PercolatorError) -> None:
        """Refuses every new call for good."""
        self.refuse(error)
        self._closed = True

    @property
    def in_flight(self) -> int:
        """Calls and streams in progress."""
        return self._calls.used + self._streams.used

    def require_open(self) -> None:
        """Raises the error that every new call gets, if there is one."""
        if self._refusal is not None:
            # A copy for each call: raising an error adds to the traceback that it keeps.
            raise copy(self._refusal)

    def enter(self, caller: CallerIdentity, *, is_stream: bool = False) -> None:
        """Admits a call, or raises. A call that was admitted must `leave`."""
        (self._streams if is_stream else self._calls).take(caller)
        self.idle.clear()

    @property
    def arrivals(self) -> tuple[Arrivals, ...]:
        """All kinds, for the metrics."""
        return self._usual, self._trusted, self.open, self.framed

    async def receive(self, context: grpc.aio.ServicerContext, caller: CallerIdentity) -> Held:
        """The request of an admitted call over gRPC. To be released when it is answered."""
        # Not by the role: where no token proves it, clients have the role of administrators.
        arrivals = self._trusted if caller.client is None else self._usual
        held = await arrivals.receive(context, caller)
        try:
            self._require_size(held.raw)
        except BaseException:
            held.release()
            raise
        return held

    def hold(self, raw: bytes) -> Held:
        """The request of an admitted call in a frame. To be released when it is answered."""
        self._require_size(raw)
        return self.framed.hold(raw)

    def _require_size(self, raw: bytes) -> None:
        """Refuses a request above the limit. gRPC would do so too, but without any detail."""
        if len(raw) > self._request_bytes_max:
            raise InvalidArgument(
                "request",
                f"has {len(raw)} bytes, at most {self._request_bytes_max} are accepted "
                "(request_bytes_max); send less in one call",
            )

    def leave(self, caller: CallerIdentity, *, is_stream: bool = False) -> None:
        (self._streams if is_stream else self._calls).give_back(caller)
        if self.in_flight == 0:
            self.idle.set()
