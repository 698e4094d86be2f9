"""Finds the servers of a cluster, and connects to them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine, Generator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from percolator.aio.activity import ProcessActivity
from percolator.aio.database import Database
from percolator.aio.engine import Closes, Engine, Rows
from percolator.aio.row_store import ClusterRows
from percolator.arguments import require_seconds, require_text
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    Unavailable,
    UsageError,
)
from percolator.limits import Limits
from percolator.protocol.environment import OpenStarts
from percolator.retries import RetryPolicy, require_policy
from percolator.v1.cluster_pb2 import (
    SERVICE_KIND_LOCK_SERVICE,
    SERVICE_KIND_MASTER,
    SERVICE_KIND_ORACLE,
    DescribeResponse,
)
from percolator.wire.advisory_locks import AdvisoryLocks
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, default_addresses, describe, parse_addresses
from percolator.wire.credentials import client_credentials
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.wire.through import routed_world
from percolator.wire.timestamp_source import TimestampSource
from percolator.wire.tls import Tls
from percolator.world import MachineClock, World, machine_random

_WATCH_SECONDS = 5.0
"""How often a master is asked for the cluster's servers."""
_TROUBLE_SECONDS = 0.5
"""How often while one of these does not answer."""
_MASTER_SECONDS = 1.0
"""How long to wait for a master before asking the next one."""
LOCK_SECONDS = 10.0
"""How long an advisory lock outlives its last extension. It ends with its session, at once."""
_NOT_CONNECTED = (
    "aio.connect() has not connected yet: write `async with aio.connect(...) as db:` or "
    "`db = await aio.connect(...)`"
)
_PROGRAM_CHARACTERS = 32
"""The longest part of a program's name that keeps a description within its limit in any script."""
_NO_ORACLE_SECONDS = 0.1
"""How often the cluster is asked while it has no oracle."""


def connect(
    address: str | None = None,
    *,
    limits: Limits | None = None,
    retry: RetryPolicy | None = None,
    description: str = "",
    timeout: float = 10.0,
    tls: Tls | None = None,
    token: str | None = None,
) -> Connecting:
    """Connects to a cluster by the `host:port` of any master or gateway (or several, with commas).

    The default address is $PERCOLATOR_ADDRESS, or localhost:7100. `description` tells others what
    this process is, for instance when it holds a lock; by default, program, host and process id.
    `tls` and `token` identify it to a cluster that requires them; the defaults come from
    PERCOLATOR_TLS_CA, PERCOLATOR_TLS_CERTIFICATE, PERCOLATOR_TLS_KEY and PERCOLATOR_TOKEN_FILE.

    >>> async with percolator.aio.connect("localhost:7100") as db: ...
    >>> db = await percolator.aio.connect("localhost:7100")
    """
    require_seconds(timeout)
    require_policy(retry)
    if limits is not None and not isinstance(limits, Limits):
        raise InvalidArgument("limits", f"expected Limits, got {type(limits).__name__}")
    if address is not None:
        require_text(address, "address")
    require_text(description, "description")
    addresses = default_addresses() if address is None else parse_addresses(address)
    credentials = client_credentials(tls, token)

    async def start() -> Database:
        network = GrpcNetwork(credentials)
        world = World(clock=MachineClock(), network=network, random=machine_random())
        try:
            return await connect_to(
                world,
                addresses,
                limits or Limits(),
                retry or RetryPolicy(),
                description=description or this_process(os.path.basename(sys.argv[0]) or "python"),
                timeout_seconds=timeout,
            )
        except BaseException:
            await network.close()
            raise

    return Connecting(start)


def this_process(program: str) -> str:
    """Description of a client that does not describe itself: "shop.py on host-7, pid 312"."""
    name = "".join(c if c.isprintable() and not "\ud800" <= c <= "\udfff" else "?" for c in program)
    return f"{name[:_PROGRAM_CHARACTERS]} on {socket.gethostname()[:64]}, pid {os.getpid()}"


class Connecting:
    """Can be awaited, or entered as a block, at whose end the database is closed."""

    def __init__(self, start: Callable[[], Coroutine[Any, Any, Database]]) -> None:
        self._start = start
        self._database: Database | None = None

    def __await__(self) -> Generator[Any, None, Database]:
        return self._start().__await__()

    if not TYPE_CHECKING:  # a type checker says the same, in its own words

        def __getattr__(self, name: str) -> NoReturn:
            """Called for what only a database has: `db = aio.connect()` was meant to be one."""
            raise AttributeError(f"{name!r} of a database: {_NOT_CONNECTED}", name=name, obj=self)

        def __enter__(self) -> NoReturn:
            raise UsageError(_NOT_CONNECTED)

        def __exit__(self, *_: object) -> None:
            """Python looks for it before it calls `__enter__`."""

    async def __aenter__(self) -> Database:
        self._database = await self._start()
        return self._database

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._database is not None:
            await self._database.close()


async def connect_to(
    world: World,
    addresses: Sequence[str],
    limits: Limits,
    retry: RetryPolicy,
    *,
    description: str = "",
    timeout_seconds: float = 10.0,
    rows: Rows | None = None,
) -> Database:
    """As `connect`, but in any world, such as a simulated one. The database closes the network.

    With `rows`, its cells are there, whatever the cluster says.
    """
    cluster = await _described(world, addresses, timeout_seconds)
    if cluster.restricted and cluster.HasField("row_store"):
        raise PermissionDenied(
            "the token has rights to some tables only, and the cells of this cluster are in a row "
            "store, which does not know them: such a token can use GatewayService only"
        )
    world = routed_world(world, addresses, cluster)
    closing: list[Closes] = []
    if rows is None and cluster.HasField("row_store"):
        found = ClusterRows(cluster, world.network)
        closing, rows = [found], found.rows
        try:
            await found.require(timeout_seconds)
        except BaseException:
            await found.close()
            raise
    parts = ClusterParts(world, addresses, cluster)
    timestamps = TimestampSource(
        world,
        parts.oracles,
        timeout_seconds=limits.call_seconds,
        on_trouble=parts.ask_soon,
        owner="database",
    )
    open_starts, activity = OpenStarts(), ProcessActivity()
    sessions = Sessions(
        world,
        parts.lock_services,
        SessionSettings(description=description),
        oldest_start=open_starts.oldest,
        activity=activity.report,
    )
    activity.lock_services = sessions.calls
    locks = AdvisoryLocks(sessions, ttl_seconds=LOCK_SECONDS)
    if parts.lock_services:
        try:
            await sessions.current()
        except BaseException:
            # A caller that gives up must not leave behind a session that is renewed forever.
            for one in (sessions, *closing):
                await one.close()
            raise
    watch = asyncio.create_task(parts.watch(sessions.begin))
    engine = Engine(
        world,
        parts.masters,
        timestamps,
        sessions,
        locks,
        limits,
        open_starts,
        activity,
        [*closing, _Cancelled(watch), sessions, timestamps, world.network],
        rows,
        is_restricted=cluster.restricted,
    )
    return Database(engine, retry)


async def _described(
    world: World, addresses: Sequence[str], timeout_seconds: float
) -> DescribeResponse:
    """The cluster, once it has an oracle: a standby master learns of servers only after a while."""
    clock = world.clock
    deadline = clock.monotonic_seconds() + timeout_seconds
    while True:
        left = deadline - clock.monotonic_seconds()
        cluster = await describe(world.network, addresses, left)
        if addresses_of(cluster, SERVICE_KIND_ORACLE):
            return cluster
        if clock.monotonic_seconds() + _NO_ORACLE_SECONDS >= deadline:
            raise Unavailable("the cluster has no oracle yet", where=addresses[0])
        await clock.sleep(_NO_ORACLE_SECONDS)


class ClusterParts:
    """The servers of the cluster. The lists are updated in place when it changes."""

    def __init__(self, world: World, addresses: Sequence[str], cluster: DescribeResponse) -> None:
        self._world = world
        self._addresses = addresses
        self._cluster_id = cluster.cluster_id
        self.masters: list[str] = []
        self.oracles: list[str] = []
        self.lock_services: list[str] = []
        self._trouble = asyncio.Event()
        self._learn(cluster)

    def _learn(self, cluster: DescribeResponse) -> None:
        given = list(self._addresses)
        masters = addresses_of(cluster, SERVICE_KIND_MASTER)
        self.masters[:] = given + [address for address in masters if address not in given]
        # A master that has just begun to lead may list none at first: a session that was not
        # renewed until this client asks again would be over.
        for known, kind in (
            (self.oracles, SERVICE_KIND_ORACLE),
            (self.lock_services, SERVICE_KIND_LOCK_SERVICE),
        ):
            known[:] = addresses_of(cluster, kind) or known

    def ask_soon(self) -> None:
        """Called when a server does not answer: another may have taken its place."""
        self._trouble.set()

    async def watch(self, on_lock_services: Callable[[], None]) -> None:
        """Asks a master regularly, for as long as the client lives.

        `on_lock_services` is called, again and again, while there are any: a master that had just
        begun to lead may have known none when the client connected.
        """
        while True:
            await self._world.clock.sleep(_TROUBLE_SECONDS)
            with suppress(TimeoutError):
                async with asyncio.timeout(_WATCH_SECONDS - _TROUBLE_SECONDS):
                    await self._trouble.wait()
            self._trouble.clear()
            seconds = _MASTER_SECONDS * len(self.masters)
            try:
                cluster = await describe(self._world.network, self.masters, seconds)
            except PercolatorError:
                # Keep what is known: while the other servers are there, no master is needed.
                continue
            if cluster.cluster_id == self._cluster_id:
                self._learn(cluster)
            if self.lock_services:
                on_lock_services()


class _Cancelled:
    """A task that is cancelled when the client is closed."""

    def __init__(self, task: asyncio.Task[None]) -> None:
        self._task = task

    async def close(self) -> None:
        self._task.cancel()
        await asyncio.wait([self._task])
