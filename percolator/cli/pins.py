"""Timestamps, and the history kept for them: `percolator pins`, `gc status` and `timestamp`."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.table import Column
from rich.table import Table as Screen

from percolator import aio
from percolator.cli.connection import Connection, connection, errors_console, fail, plain
from percolator.cli.options import At, PinTtl, duration_seconds, not_empty, timestamp_of
from percolator.cli.sessions import as_data, list_sessions
from percolator.codecs import stored
from percolator.errors import InvalidArgument, PercolatorError, Unavailable
from percolator.schema import Table as Schema
from percolator.timestamps import TIMESTAMPS_PER_REQUEST_MAX, Timestamp, in_json
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.lockservice_pb2 import EndSessionRequest, Session
from percolator.v1.master_pb2 import DescribeCollectionResponse
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of
from percolator.wire.liveness import SESSION_ID_BYTES
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.status import from_detail
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, World, machine_random

_CHECK_SECONDS = 1.0
_KILLED = 143
"""The exit code that a shell reports for a process that SIGTERM has ended."""

app = typer.Typer(help="Keep old versions readable: list [the default], create and release pins.")


@app.callback(invoke_without_command=True)
def pins(context: typer.Context) -> None:
    """List the pins, or create or release one with a subcommand."""
    if context.invoked_subcommand is None:
        list_pins(context)


@app.command("list")
def list_pins(context: typer.Context) -> None:
    """List the pins, the one that holds the most history first."""
    here = connection(context)
    found = here.run(lambda network: _pins(here, network))
    here.show([as_data(pin) for pin in found], _as_table(found))


@app.command("create")
def create(
    context: typer.Context,
    command: Annotated[
        list[str] | None, typer.Argument(help="A command to run meanwhile, after --.")
    ] = None,
    at: At = "",
    seconds: Annotated[
        str,
        typer.Option(
            "--for",
            help="How long: 90s, 15m, 2h [default: until interrupted].",
            callback=not_empty,
        ),
    ] = "",
    description: Annotated[str, typer.Option(help="The purpose, shown to others.")] = "",
    ttl: PinTtl = None,
    table: Annotated[
        list[str] | None,
        typer.Option(
            help="A table that will be read; repeatable [default: all].", callback=not_empty
        ),
    ] = None,
) -> None:
    """Keep history from a timestamp on [default: now], for as long as this command runs.

    It prints the pin, renews it, and releases it at the end: after --for, on an interrupt, or when
    the command after -- has ended. That command finds the timestamp in PERCOLATOR_PIN_AT, and its
    exit code becomes this one's.
    """
    here = connection(context)
    timestamp = timestamp_of(at)
    lasting = duration_seconds("--for", seconds) if seconds else None
    what = description or f"percolator pins create on {socket.gethostname()}"
    tables = [Schema(name, key=stored) for name in table or ()]

    async def hold(database: aio.Database) -> int:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with database.pin(timestamp, tables=tables, description=what, ttl=ttl) as pin:
            here.show(
                {"session_id": pin.session_id.hex(), "timestamp": in_json(pin.at)},
                plain(f"pin {pin.session_id.hex()} at {pin.at.describe()}"),
            )
            if command:
                return await _run(command, pin, stop)
            await _wait(pin, stop, lasting)
        return 0

    raise typer.Exit(here.run_with_database(hold))


@app.command("release")
def release(
    context: typer.Context,
    session_id: Annotated[str, typer.Argument(help="As shown by `pins list`.", show_default=False)],
) -> None:
    """End a pin. Its owner gets an error; the past that it still reads may be collected."""
    here = connection(context)
    try:
        wanted = bytes.fromhex(session_id)
    except ValueError:
        wanted = b""
    if len(wanted) != SESSION_ID_BYTES:
        fail(InvalidArgument("session_id", f"expected {2 * SESSION_ID_BYTES} hexadecimal digits"))

    async def end(network: GrpcNetwork) -> None:
        cluster, reached = await here.reach(network)
        addresses = addresses_of(cluster, ServiceKind.SERVICE_KIND_LOCK_SERVICE)
        if not addresses:
            raise Unavailable("no lock service is registered with the cluster")
        await released(LockServiceCalls(reached, addresses), wanted, here.timeout_seconds)

    here.run(end)
    here.show({"released": session_id}, plain(f"released {session_id}"))


async def released(calls: LockServiceCalls, wanted: bytes, timeout_seconds: float) -> None:
    """Ends a pin at the lock service that knows it. Raises `InvalidArgument` if none does."""
    listed = await calls.sessions_of_each(timeout_seconds)
    holders = [
        address
        for address, sessions in listed.items()
        if not isinstance(sessions, PercolatorError)
        and any(one.info.pin and one.session_id == wanted for one in sessions)
    ]
    for sessions in listed.values():
        if isinstance(sessions, PercolatorError) and not holders:
            raise sessions  # it may know the pin
    if not holders:
        raise InvalidArgument("session_id", f"there is no pin {wanted.hex()}")
    request = EndSessionRequest(session_id=wanted)
    for address in holders:
        await calls.call_at(address, lambda stub: stub.end_session, request, timeout_seconds)


async def _pins(here: Connection, network: GrpcNetwork) -> list[Session]:
    listed = [one for one in await list_sessions(here, network) if one.info.pin]
    return sorted(listed, key=lambda one: one.info.oldest_start_timestamp)


async def _wait(pin: aio.Pin, stop: asyncio.Event, seconds: float | None) -> None:
    """Waits until interrupted, or for `seconds`. Raises `SessionExpired` if the pin is lost."""
    loop = asyncio.get_running_loop()
    end = None if seconds is None else loop.time() + seconds
    while not stop.is_set() and (end is None or loop.time() < end):
        left = _CHECK_SECONDS if end is None else min(_CHECK_SECONDS, end - loop.time())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), left)
        pin.check()


async def _run(command: list[str], pin: aio.Pin, stop: asyncio.Event) -> int:
    """Runs the command, and returns its exit code. If the pin is lost it warns, and continues."""
    process = await asyncio.create_subprocess_exec(
        "/usr/bin/env", f"PERCOLATOR_PIN_AT={int(pin.at)}", *command
    )
    ended = asyncio.create_task(process.wait())
    stopped = asyncio.create_task(stop.wait())
    lost = False
    while not ended.done() and not stopped.done():
        await asyncio.wait(
            [ended, stopped], timeout=_CHECK_SECONDS, return_when=asyncio.FIRST_COMPLETED
        )
        if pin.is_lost and not lost:
            lost = True
            errors_console.print(plain(f"history may be collected: {pin.lost_because}"))
    if not ended.done():
        process.terminate()
    stopped.cancel()
    code = await ended
    return code if code >= 0 else _KILLED


def _as_table(pins: list[Session]) -> Screen | str:
    if not pins:
        return "no pins"
    table = Screen(
        Column("pin", no_wrap=True), "at", "who", "age", "ends, if not renewed, in", box=None
    )
    for pin in pins:
        table.add_row(
            pin.session_id.hex(),
            Timestamp(pin.info.oldest_start_timestamp).describe(),
            plain(pin.info.description),
            f"{pin.age_milliseconds / 1000:.1f} s",
            f"{pin.remaining_milliseconds / 1000:.1f} s",
        )
    return table


gc_app = typer.Typer(no_args_is_help=True, help="Show how much history is kept.")


@gc_app.callback()
def gc() -> None:
    """Show how much history is kept."""


@gc_app.command("status")
def status(context: typer.Context) -> None:
    """Show the safe point of each table, what holds it back, and how much history there is."""
    here = connection(context)
    described = here.run_with_database(
        lambda database: database.internal.engine.catalog.describe_collection(
            database.internal.engine.now() + here.timeout_seconds
        )
    )
    here.show(_as_data(described), _as_text(described))


def time_or_none(timestamp: int) -> str | None:
    """The time of a timestamp, for programs; None for timestamp 0."""
    return Timestamp(timestamp).time_text() if timestamp else None


def _as_data(described: DescribeCollectionResponse) -> dict[str, object]:
    return {
        "tables": [
            {
                "table": table.table,
                "retention_seconds": table.retention_milliseconds / 1000,
                "safe_point": in_json(table.safe_point),
                "safe_point_time": time_or_none(table.safe_point),
                "collected_below": in_json(table.collected_below),
                "history_bytes": table.history_bytes,
                "cells_collected": table.cells_collected,
                "bytes_collected": table.bytes_collected,
            }
            for table in described.tables
        ],
        "transactions_safe_point": in_json(described.transactions_safe_point),
        "held_by": described.held_by or None,
        "held_by_session": described.held_by_session_id.hex() or None,
        "held_at": in_json(described.held_at) if described.held_at else None,
        "held_at_time": time_or_none(described.held_at),
        "held_seconds": described.held_milliseconds / 1000,
        "error": str(from_detail(described.error)) if described.HasField("error") else None,
        "age_seconds": described.age_milliseconds / 1000
        if described.HasField("age_milliseconds")
        else None,
    }


def _as_text(described: DescribeCollectionResponse) -> Group:
    screen = Screen(
        Column("table"),
        Column("keeps", justify="right"),
        Column("readable since"),
        Column("history", justify="right"),
        Column("collected", justify="right"),
        box=None,
    )
    for table in described.tables:
        since = Timestamp(table.safe_point).describe() if table.safe_point else "its creation"
        screen.add_row(
            plain(table.table),
            f"{table.retention_milliseconds / 1000:,.0f} s",
            since,
            f"{table.history_bytes:,} bytes",
            f"{table.cells_collected:,} cells",
        )
    lines: list[RenderableType] = [screen]
    if described.HasField("age_milliseconds"):
        lines.append(f"the last round ended {described.age_milliseconds / 1000:,.1f} s ago")
    else:
        lines.append("no round has completed since this master began to lead")
    if described.held_by:
        at = Timestamp(described.held_at).describe()
        # Only admins are told the session: who knows it can end it.
        told = described.held_by_session_id.hex()
        who = f"{described.held_by} (session {told})" if told else described.held_by
        lines.append(plain(f"held back by {who}, which needs history since {at}"))
    if described.HasField("error"):
        lines.append(plain(f"the last round failed: {from_detail(described.error)}"))
    return Group(*lines)


timestamp_app = typer.Typer(
    rich_markup_mode=None, help="Get timestamps from the oracle, or decode one."
)


@timestamp_app.callback(invoke_without_command=True)
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


@timestamp_app.command()
def decode(
    context: typer.Context,
    value: Annotated[str, typer.Argument(help="A timestamp, or an ISO 8601 time with its zone.")],
) -> None:
    """Explain a timestamp, or show the first timestamp of a time."""
    try:
        found = Timestamp.parse(value)
    except InvalidArgument as error:
        fail(error)
    table = Screen(show_header=False, box=None)
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
