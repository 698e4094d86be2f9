"""What every command needs: the addresses, a time-out, a way to print, a way to fail."""

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

from percolator.errors import InvalidArgument, PercolatorError, UsageError
from percolator.v1.cluster_pb2 import DescribeResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import default_addresses, describe, parse_addresses

T = TypeVar("T")

# Piped into a file or a pager, nothing is cut to a width that nobody looks at.
console = Console(width=None if sys.stdout.isatty() else 1_000)
errors_console = Console(stderr=True)


@dataclass(frozen=True)
class Connection:
    """The global options of one invocation."""

    addresses: list[str]
    timeout_seconds: float
    as_json: bool

    async def describe(self, network: GrpcNetwork) -> DescribeResponse:
        return await describe(network, self.addresses, self.timeout_seconds)

    def run(self, work: Callable[[GrpcNetwork], Awaitable[T]]) -> T:
        """Runs one piece of asynchronous work on a network that is closed afterwards."""

        async def with_network() -> T:
            network = GrpcNetwork()
            try:
                return await work(network)
            finally:
                await network.close()

        try:
            return asyncio.run(with_network())
        except PercolatorError as error:
            fail(error)

    def show(self, as_data: Any, as_text: object) -> None:  # noqa: ANN401 (anything JSON can hold)
        """Prints for a program or for a person, whichever asked."""
        if self.as_json:
            typer.echo(json.dumps(as_data, indent=2))
        else:
            console.print(as_text)


def connection(context: typer.Context) -> Connection:
    """The connection that the top-level options describe."""
    found = context.find_object(Connection)
    if found is None:
        raise UsageError("a command was called outside of the percolator command")
    return found


def make_connection(address: str | None, timeout_seconds: float, as_json: bool) -> Connection:
    """Checks the global options."""
    try:
        if address is None:
            addresses = default_addresses()
        else:
            addresses = parse_addresses(address, field="--address")
    except InvalidArgument as error:
        fail(error)
    return Connection(addresses, timeout_seconds, as_json)


def plain(text: str) -> Text:
    """What others wrote: neither markup, nor control of the terminal, nor more than one line."""
    shown = [c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text]
    return Text("".join(shown))


def fail(error: PercolatorError) -> NoReturn:
    """One line on standard error, and the exit code."""
    errors_console.print(plain(f"error: {error}"), highlight=False, soft_wrap=True)
    raise typer.Exit(2 if isinstance(error, InvalidArgument | UsageError) else 1)
