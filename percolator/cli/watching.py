"""Showing something again and again, until Ctrl-C: in place on a terminal, else line by line."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TypeVar

import typer
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text

from percolator.cli.connection import Connection, console, plain
from percolator.errors import PercolatorError
from percolator.timestamps import utc_text
from percolator.wire.channels import GrpcNetwork

T = TypeVar("T")


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
            for found in _moments(here, fetch, every, times):
                typer.echo(json.dumps(data(found)))
                sys.stdout.flush()
        elif not console.is_terminal:
            for found in _moments(here, fetch, every, times):
                console.print(utc_text(datetime.now(UTC)), highlight=False)
                console.print(text(found), "")
                sys.stdout.flush()
        else:
            with Live(Text("..."), console=console, auto_refresh=False, screen=True) as live:
                for found in _moments(here, fetch, every, times):
                    live.update(text(found), refresh=True)
        if isinstance(found, PercolatorError):
            raise typer.Exit(1)


def _moments(
    here: Connection, fetch: Callable[[GrpcNetwork], Awaitable[T]], every: float, times: int | None
) -> Iterator[T | PercolatorError]:
    shown = 0
    while True:
        yield here.attempt(fetch)
        shown += 1
        if shown == times:
            return
        time.sleep(every)
