"""`percolator worker`: runs observers with the library alone, without the worker service."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from percolator import aio
from percolator.aio.connecting import this_process
from percolator.cli.connection import Connection, connection, errors_console, fail, plain
from percolator.errors import ExecutionUnknown, InvalidArgument, NotExecuted
from percolator.observers.definition import Observer, load
from percolator.observers.trace import trace_to
from percolator.observers.worker import DRAIN_SECONDS, WorkerLimits, start_when_ready

_AGAIN_SECONDS = 0.25
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

    While no master answers, or a table does not exist yet, it waits, and runs no observers. Runs in
    progress are finished first; a second signal ends the program at once. Neither loses any work.
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
    _log_in_utc()
    limits = WorkerLimits(concurrency_max=concurrency, threads_max=threads)

    try:
        ended = here.run(lambda _: _run(here, chosen, limits, drain_seconds))
    except SystemExit:
        # It has stopped the event loop. Its code would say that all is well, or the options wrong.
        errors_console.print("error: an observer called sys.exit in a task", highlight=False)
        ended = False
    if not ended:
        raise typer.Exit(1)


def _log_in_utc() -> None:
    """Times in logs have the form that the other commands print."""
    lines = logging.Formatter(
        "%(asctime)s.%(msecs)03dZ %(levelname)s %(name)s: %(message)s", "%Y-%m-%dT%H:%M:%S"
    )
    lines.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(lines)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


async def _run(
    here: Connection, observers: Sequence[Observer], limits: WorkerLimits, drain_seconds: float
) -> bool:
    """Runs the observers until a signal. Returns whether all runs have finished."""
    stop = _set_by_signals()
    connecting = asyncio.create_task(connected(here))
    if not await _ends_before(connecting, stop):
        return True
    async with connecting.result() as database:
        return await _run_on(database, observers, limits, drain_seconds, stop)


async def connected(here: Connection) -> aio.Database:
    """A client of the cluster, once a master answers. Says why it waits, each reason once."""
    said = ""
    while True:
        try:
            return await here.database(description=this_process("percolator worker"))
        except (NotExecuted, ExecutionUnknown) as error:
            if str(error) != said:
                said = str(error)
                _say_waiting(said)
            await asyncio.sleep(_AGAIN_SECONDS)


async def _run_on(
    database: aio.Database,
    observers: Sequence[Observer],
    limits: WorkerLimits,
    drain_seconds: float,
    stop: asyncio.Event,
) -> bool:
    running = database.run_observers(observers, limits=limits, drain_seconds=drain_seconds)
    starting = asyncio.create_task(
        start_when_ready(running, database.internal.engine.world.clock, _say_waiting)
    )
    if not await _ends_before(starting, stop):
        return True
    names = ", ".join(f"{one.name} of {one.table.name}" for one in observers)
    errors_console.print(plain(f"running {names}"), highlight=False, soft_wrap=True)
    try:
        # If one of its tasks fails, work would be found late or never: the process ends instead.
        await _ends_before(asyncio.create_task(running.wait()), stop)
        errors_console.print("stopping", highlight=False)
        ended = await running.stop()
    except BaseException:
        _end_in_time(1)
        raise
    if not ended:
        errors_console.print(
            "some runs were abandoned; a worker will run them again", highlight=False
        )
    _end_in_time(0 if ended else 1)
    return ended


async def _ends_before(task: asyncio.Task[Any], stop: asyncio.Event) -> bool:
    """False if `stop` was set before the task ended: it is cancelled. Raises the task's error."""
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([task, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if task.done():
        await task
        return True
    task.cancel()
    return False


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
