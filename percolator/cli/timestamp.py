"""`percolator timestamp`: gets timestamps from the oracle, and explains them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from percolator.cli.connection import connection, fail
from percolator.errors import InvalidArgument, Unavailable
from percolator.timestamps import TIMESTAMPS_PER_REQUEST_MAX, Timestamp, in_json
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, World, machine_random

app = typer.Typer(rich_markup_mode=None, help="Get timestamps from the oracle, or decode one.")


@app.callback(invoke_without_command=True)
def timestamp(
    context: typer.Context,
    count: Annotated[int, typer.Option(help=f"How many, 1 to {TIMESTAMPS_PER_REQUEST_MAX}.")] = 1,
) -> None:
    """Get timestamps from the oracle."""
    if context.invoked_subcommand is not None:
        return
    if not 1 <= count <= TIMESTAMPS_PER_REQUEST_MAX:
        fail(InvalidArgument("--count", f"expected 1 to {TIMESTAMPS_PER_REQUEST_MAX}, got {count}"))
    here = connection(context)

    async def ask(network: GrpcNetwork) -> int:
        cluster, reached = await here.reach(network)
        oracles = addresses_of(cluster, ServiceKind.SERVICE_KIND_ORACLE)
        if not oracles:
            raise Unavailable("no oracle is registered with the cluster")
        world = World(MachineClock(), reached, machine_random())
        source = TimestampSource(world, oracles, timeout_seconds=here.timeout_seconds)
        try:
            return await source.get(count)
        finally:
            await source.close()

    first = here.run(ask)
    numbers = range(first, first + count)
    here.show(list(map(in_json, numbers)), "\n".join(map(str, numbers)))


@app.command()
def decode(
    context: typer.Context,
    value: Annotated[str, typer.Argument(help="A timestamp, or an ISO 8601 time with its zone.")],
) -> None:
    """Explain a timestamp, or show the first timestamp of a moment."""
    try:
        found = Timestamp.parse(value)
    except InvalidArgument as error:
        fail(error)
    table = Table(show_header=False, box=None)
    table.add_row("timestamp", str(int(found)))
    table.add_row("time", found.time_text())
    table.add_row("physical milliseconds", str(found.physical_milliseconds))
    table.add_row("sequence", str(found.sequence))
    connection(context).show(
        {
            "timestamp": in_json(found),
            "time": found.time_text(),
            "physical_milliseconds": found.physical_milliseconds,
            "sequence": found.sequence,
        },
        table,
    )
