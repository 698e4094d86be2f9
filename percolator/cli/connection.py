"""The connection of a command: addresses, time-out, calls to the leading master, output and errors.

Commands that show something again and again use `keep_showing`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from percolator import aio
from percolator.aio.connecting import connect_to, this_process
from percolator.errors import (
    DeadlineExceeded,
    InvalidArgument,
    NotReady,
    PercolatorError,
    Unavailable,
    UsageError,
)
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.timestamps import utc_text
from percolator.v1 import master_pb2 as pb
from percolator.v1.cluster_pb2 import DescribeResponse, ServiceKind
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of, default_addresses, described_by, parse_addresses
from percolator.wire.credentials import PLAIN_TEXT, Credentials, client_credentials
from percolator.wire.through import routed
from percolator.world import (
    MachineClock,
    Network,
    RequestT,
    ResponseT,
    UnaryMethod,
    World,
    machine_random,
)

T = TypeVar("T")

# Output that is piped into a file or a pager is not cut to the width of a terminal. If standard
# output is closed, there is none.
console = Console(width=None if sys.stdout is None or sys.stdout.isatty() else 1_000)
errors_console = Console(stderr=True)


@dataclass(frozen=True)
class Connection:
    """How one invocation of the command reaches the cluster, and prints: its global options."""

    addresses: list[str]
    timeout_seconds: float
    as_json: bool
    credentials: Credentials = PLAIN_TEXT

    async def reach(self, network: GrpcNetwork) -> tuple[DescribeResponse, Network]:
        """The cluster, and the network to its servers by way of the address that answered."""
        address, cluster = await described_by(network, self.addresses, self.timeout_seconds)
        others = [other for other in self.addresses if other != address]
        return cluster, routed(network, [address, *others], cluster)

    def run(self, work: Callable[[GrpcNetwork], Awaitable[T]]) -> T:
        """Runs one piece of asynchronous work on a network that is closed afterwards."""

        done = self.attempt(work)
        if isinstance(done, PercolatorError):
            fail(done)
        return done

    def attempt(self, work: Callable[[GrpcNetwork], Awaitable[T]]) -> T | PercolatorError:
        """As `run`, but returns the error, for a command that continues after a failure."""

        async def with_network() -> T:
            network = GrpcNetwork(self.credentials)
            try:
                return await work(network)
            finally:
                await network.close()

        try:
            return asyncio.run(with_network())
        except PercolatorError as error:
            return error

    def run_with_database(
        self, work: Callable[[aio.Database], Awaitable[T]], *, description: str = ""
    ) -> T:
        """Runs one piece of asynchronous work on a client of the cluster, closed afterwards.

        `description` is what others see of it.
        """
        return self.run(lambda _: self.on_database(work, description=description))

    async def on_database(
        self, work: Callable[[aio.Database], Awaitable[T]], *, description: str = ""
    ) -> T:
        """`run_with_database`, within asynchronous work."""
        async with await self.database(description=description) as database:
            return await work(database)

    async def database(self, *, description: str = "") -> aio.Database:
        """A client of the cluster, for the caller to close."""
        world = World(
            clock=MachineClock(), network=GrpcNetwork(self.credentials), random=machine_random()
        )
        try:
            return await connect_to(
                world,
                self.addresses,
                Limits(call_seconds=self.timeout_seconds),
                RetryPolicy(),
                description=description or this_process("percolator command"),
                timeout_seconds=self.timeout_seconds,
            )
        except BaseException:
            await world.network.close()
            raise

    def show(self, as_data: Any, as_text: object) -> None:  # noqa: ANN401 (anything JSON can hold)
        """Prints JSON if `--json` was given, otherwise text."""
        if self.as_json:
            typer.echo(json.dumps(as_data, indent=2, allow_nan=False))
        else:
            console.print(as_text)


def tell_of_limit(limit: int, what: str) -> None:
    """Says that more may exist, so that the list is not mistaken for all."""
    text = f"only the first {limit:,} {what}; --limit shows more"
    errors_console.print(Text(text), highlight=False, soft_wrap=True)


def connection(context: typer.Context) -> Connection:
    """The connection that the top-level options describe."""
    found = context.find_object(Connection)
    if found is None:
        raise UsageError("a subcommand was called outside of the percolator command")
    return found


def make_connection(address: str | None, timeout_seconds: float, as_json: bool) -> Connection:
    """Checks the global options, and exits with an error if one is invalid."""
    try:
        if address is None:
            addresses = default_addresses()
        else:
            addresses = parse_addresses(address, field="--address")
        credentials = client_credentials()
    except InvalidArgument as error:
        fail(error)
    return Connection(addresses, timeout_seconds, as_json, credentials)


def plain(text: str) -> Text:
    """Text that others wrote, on one line: without markup and without terminal control codes."""
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text]
    return Text("".join(shown))


def confirm(question: str) -> None:
    """Asks at the terminal, and ends the command unless the answer is yes."""
    try:
        typer.confirm(question, abort=True)
    except typer.Abort:
        if sys.stdin.isatty():
            raise
        fail(UsageError(f"not confirmed: {question} Without a terminal, answer with --yes"))


def fail(error: PercolatorError) -> NoReturn:
    """Prints the error as one line on standard error, and exits with its code."""
    errors_console.print(plain(f"error: {error}"), highlight=False, soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, InvalidArgument | UsageError) else 1)


_QUERIES = (methods.LIST_TABLES, methods.LIST_TABLETS, methods.LIST_SERVERS, methods.DESCRIBE_TABLE)
"""Calls that change nothing, and so may be sent to another master if one is silent."""


def ask_master(
    here: Connection, method: UnaryMethod[RequestT, ResponseT], request: RequestT
) -> ResponseT:
    """Calls the leading master, and returns its response."""
    return here.run(lambda network: answer_of_leader(here, network, method, request))


async def answer_of_leader(
    here: Connection,
    network: GrpcNetwork,
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
) -> ResponseT:
    """The leading master's response: from the given addresses, or from masters that these know."""
    try:
        return await _first_answer(network, here.addresses, here.timeout_seconds, method, request)
    except NotReady:
        # From a master that stands by, or from none that can answer now.
        cluster, reached = await here.reach(network)
    masters = addresses_of(cluster, ServiceKind.SERVICE_KIND_MASTER)
    return await _first_answer(reached, masters, here.timeout_seconds, method, request)


async def _first_answer(
    network: Network,
    addresses: Sequence[str],
    timeout_seconds: float,
    method: UnaryMethod[RequestT, ResponseT],
    request: RequestT,
) -> ResponseT:
    """The first answer. Raises `NotReady` if there is none, but a master that could name others."""
    passed_over: tuple[type[PercolatorError], ...] = (NotReady, Unavailable)
    seconds = timeout_seconds
    if method in _QUERIES:  # any other may have been executed by a master that is silent
        passed_over = (*passed_over, DeadlineExceeded)
        seconds = timeout_seconds / max(len(addresses), 1)
    problem: PercolatorError = Unavailable("no address was given")
    for address in addresses:
        try:
            return await network.unary(address, method)(request, seconds)
        except passed_over as error:
            # The last one is reported: the leader's own reason says more than a standby's.
            if isinstance(error, NotReady) or not isinstance(problem, NotReady):
                problem = error
    raise problem


async def all_tablets(
    here: Connection, network: GrpcNetwork, table: str = ""
) -> list[pb.TabletInfo]:
    """The tablets of one table, or of all, in order of their ids."""
    found: list[pb.TabletInfo] = []
    more = True
    while more:
        after = found[-1].location.tablet_id if found else 0
        request = pb.ListTabletsRequest(table=table, after_tablet_id=after)
        page = await answer_of_leader(here, network, methods.LIST_TABLETS, request)
        found += page.tablets
        more = page.more
    return found


def keep_showing(
    here: Connection,
    fetch: Callable[[GrpcNetwork], Awaitable[T]],
    as_text: Callable[[T], RenderableType],
    as_data: Callable[[T], object],
    *,
    every: float,
    times: int | None = None,
) -> None:
    """Shows what `fetch` returns; after a failure, the error, and continues.

    Output that is redirected gets one block after another, each with its time; with --json, one
    line of JSON for each. `times` is how often; None means until Ctrl-C. If the last of them
    failed, so has the command.
    """

    def text(found: T | PercolatorError) -> RenderableType:
        return plain(f"error: {found}") if isinstance(found, PercolatorError) else as_text(found)

    def data(found: T | PercolatorError) -> object:
        return {"error": str(found)} if isinstance(found, PercolatorError) else as_data(found)

    found: T | PercolatorError | None = None
    with suppress(KeyboardInterrupt):
        if here.as_json:
            for found in _samples(here, fetch, every, times):
                typer.echo(json.dumps(data(found)))
                sys.stdout.flush()
        elif not console.is_terminal:
            for found in _samples(here, fetch, every, times):
                console.print(utc_text(datetime.now(UTC)), highlight=False)
                console.print(text(found), "")
                sys.stdout.flush()
        else:
            with Live(Text("..."), console=console, auto_refresh=False, screen=True) as live:
                for found in _samples(here, fetch, every, times):
                    live.update(text(found), refresh=True)
        if isinstance(found, PercolatorError):
            raise typer.Exit(1)


def _samples(
    here: Connection, fetch: Callable[[GrpcNetwork], Awaitable[T]], every: float, times: int | None
) -> Iterator[T | PercolatorError]:
    shown = 0
    while True:
        yield here.attempt(fetch)
        shown += 1
        if shown == times:
            return
        time.sleep(every)
