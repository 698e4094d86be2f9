"""`percolator pins`: holding history for a while, and releasing pins."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from typing import Annotated

import typer
from rich.table import Column, Table

from percolator import aio
from percolator.cli.cells import At, PinTtl, moment_of
from percolator.cli.connection import Connection, connection, errors_console, fail, plain
from percolator.cli.durations import duration_seconds
from percolator.cli.given import not_empty
from percolator.cli.sessions import as_data, list_sessions
from percolator.codecs import stored
from percolator.errors import InvalidArgument, PercolatorError, Unavailable
from percolator.schema import Table as Schema
from percolator.timestamps import Timestamp, in_json
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.lockservice_pb2 import EndSessionRequest, Session
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of
from percolator.wire.liveness import SESSION_ID_BYTES
from percolator.wire.lock_service import LockServiceCalls

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
    """Keep history from a moment on [default: now], for as long as this command runs.

    It prints the pin, renews it, and releases it at the end: after --for, on an interrupt, or when
    the command after -- has ended. That command finds the timestamp in PERCOLATOR_PIN_AT, and its
    exit code becomes this one's.
    """
    here = connection(context)
    moment = moment_of(at)
    lasting = duration_seconds("--for", seconds) if seconds else None
    what = description or f"percolator pins create on {socket.gethostname()}"
    tables = [Schema(name, key=stored) for name in table or ()]

    async def hold(database: aio.Database) -> int:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with database.pin(moment, tables=tables, description=what, ttl=ttl) as pin:
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


def _as_table(pins: list[Session]) -> Table | str:
    if not pins:
        return "no pins"
    table = Table(
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
