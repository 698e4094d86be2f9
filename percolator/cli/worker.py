"""`percolator worker`: runs observers with the library alone, without the worker service."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from percolator import aio
from percolator.aio.connecting import this_process
from percolator.cli.connection import connection, errors_console, fail, plain
from percolator.errors import InvalidArgument
from percolator.observers.registry.loading import load
from percolator.observers.running.trace import trace_to
from percolator.observers.starting import start_when_ready
from percolator.observers.worker import DRAIN_SECONDS, WorkerLimits

_LEAVE_SECONDS = 5.0
"""Time to disconnect and to end the interpreter, after the runs."""


def worker(
    context: typer.Context,
    observers: Annotated[
        list[str],
        typer.Option(help="module:name of a list of observers; repeatable."),
    ],
    concurrency: Annotated[
        int, typer.Option(help="Maximum number of runs at a time.", min=1)
    ] = WorkerLimits.concurrency_max,
    threads: Annotated[
        int, typer.Option(help="Threads for blocking observers.", min=1)
    ] = WorkerLimits.threads_max,
    drain_seconds: Annotated[
        float, typer.Option(help="Seconds for runs to finish when it is stopped.", min=0.001)
    ] = DRAIN_SECONDS,
    trace: Annotated[
        Path | None,
        typer.Option(help="Append a line for each run to this file, for `observers trace`."),
    ] = None,
) -> None:
    """Run observers until Ctrl-C or SIGTERM.

    It waits for tables that do not exist yet. Runs in progress are finished first; a second signal
    ends the program at once. Neither loses any work.
    """
    here = connection(context)
    try:
        chosen = [one for reference in observers for one in load(reference)]
        if trace is not None:
            trace_to(trace)
    except InvalidArgument as error:
        fail(error)
    except OSError as error:
        fail(InvalidArgument("--trace", str(error)))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    limits = WorkerLimits(concurrency_max=concurrency, threads_max=threads)

    async def run(database: aio.Database) -> bool:
        stop = _set_by_signals()
        running = database.run_observers(chosen, limits=limits, drain_seconds=drain_seconds)
        starting = asyncio.create_task(
            start_when_ready(running, database.internal.engine.world.clock, _say_waiting)
        )
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
            return True
        await starting  # raises what no waiting mends
        names = ", ".join(f"{one.name} of {one.table.name}" for one in chosen)
        errors_console.print(plain(f"running {names}"), highlight=False, soft_wrap=True)
        await stop.wait()
        errors_console.print("stopping", highlight=False)
        ended = await running.stop()
        if not ended:
            errors_console.print(
                "some runs were abandoned; a worker will run them again", highlight=False
            )
        _end_in_time(0 if ended else 1)
        return ended

    if not here.run_with_database(run, description=this_process("percolator worker")):
        raise typer.Exit(1)


def _set_by_signals() -> asyncio.Event:
    """Is set by SIGINT and SIGTERM."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(number: signal.Signals) -> None:
        loop.remove_signal_handler(number)  # a second signal has its usual effect
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    return stop


def _end_in_time(exit_code: int) -> None:
    """Ends the process even if a run never does: one that ignores cancellation, or hangs in a
    thread of the event loop's executor, for which the interpreter would wait."""
    watchdog = threading.Timer(_LEAVE_SECONDS, os._exit, (exit_code,))
    watchdog.daemon = True
    watchdog.start()


def _say_waiting(reason: str) -> None:
    errors_console.print(plain(f"waiting: {reason}"), highlight=False, soft_wrap=True)
