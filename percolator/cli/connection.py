"""What every command needs: addresses, a time-out, and functions that print and that fail."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from percolator import aio
from percolator.aio.connecting import connect_to, this_process
from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import default_addresses, described_by, parse_addresses
from percolator.wire.credentials import PLAIN_TEXT, Credentials, client_credentials
from percolator.wire.through import routed
from percolator.world import MachineClock, Network, World, machine_random

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
        """The same, within asynchronous work."""
        world = World(
            clock=MachineClock(), network=GrpcNetwork(self.credentials), random=machine_random()
        )
        try:
            database = await connect_to(
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
        async with database:
            return await work(database)

    def show(self, as_data: Any, as_text: object) -> None:  # noqa: ANN401 (anything JSON can hold)
        """Prints JSON if `--json` was given, otherwise text."""
        if self.as_json:
            typer.echo(json.dumps(as_data, indent=2, allow_nan=False))
        else:
            console.print(as_text)


def tell_of_limit(limit: int, what: str) -> None:
    """Says that more may exist, so that a part is not mistaken for the whole."""
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
