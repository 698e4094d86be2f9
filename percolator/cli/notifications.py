"""`percolator notifications`: changes that wait for observers, and changes as they happen."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Annotated, NamedTuple

import typer
from rich.table import Table as Screen
from rich.text import Text

from percolator import aio
from percolator.aio.engine import Engine
from percolator.aio.observing import worker_context
from percolator.cli.connection import Connection, connection, console, fail, plain, tell_of_limit
from percolator.cli.given import ObserverOption, TableOption
from percolator.cli.registered import no_observer, require_observer
from percolator.cli.values import Forms, named_tables
from percolator.codec_names import CodecNames
from percolator.errors import InvalidArgument, SchemaError
from percolator.observers.port import WorkRequest
from percolator.timestamps import Timestamp, in_json

Count = tuple[str, str]
"""A table and an observer."""


class Shown(NamedTuple):
    """One cell, and the observer that it notifies."""

    table: str
    observer: str
    column: str
    row: bytes
    forms: Forms
    timestamps: tuple[int, ...]
    """Newest first."""

    def as_data(self) -> dict[str, object]:
        return {
            "table": self.table,
            "observer": self.observer,
            "column": self.column,
            "row": self.forms.row_data(self.row),
            "timestamps": list(map(in_json, self.timestamps)),
        }

    def as_text(self) -> list[Text | str]:
        oldest = Timestamp(self.timestamps[-1])
        return [
            plain(self.table),
            plain(self.observer),
            plain(self.column),
            plain(self.forms.row_text(self.row)),
            oldest.time_text(),
        ]


def notifications(
    context: typer.Context,
    table: TableOption = "",
    observer: ObserverOption = "",
    limit: Annotated[int, typer.Option(help="List at most this many cells.", min=1)] = 100,
    count: Annotated[
        bool, typer.Option("--count", help="Count all, by observer, instead of listing some.")
    ] = False,
    follow: Annotated[
        bool,
        typer.Option("--follow", help="Show notifications as they are written, until interrupted."),
    ] = False,
) -> None:
    """List the changes that wait for observers, in row order."""
    here = connection(context)
    if follow and count:
        fail(InvalidArgument("--count", "cannot be combined with --follow"))
    if follow:
        here.run_with_database(
            lambda database: _follow(here, database.internal.engine, table, observer)
        )
    elif count:
        _show_counts(here, here.run_with_database(lambda db: _count(db, table, observer)))
    else:
        _show(here, here.run_with_database(lambda db: _list(db, table, observer, limit)), limit)


# -------------------------------------------------------------------------- waiting


async def waiting(engine: Engine, table: str, observer: str) -> AsyncIterator[Shown]:
    """Yields the cells that wait for observers, table by table; empty names mean all."""
    observing = worker_context(engine)
    wanted = (observer.encode(),) if observer else ()
    for one in await observing.catalog.describe_all(observing.deadline()):
        if one.deleting or (table and one.name != table):
            continue
        forms = Forms(CodecNames.of(one.codecs))
        async with aclosing(
            observing.notifications.survey(WorkRequest(one.table_id, observers=wanted))
        ) as found:
            async for answer in found:
                for waiting in answer.waiting:
                    yield Shown(
                        one.name,
                        _text(waiting.observer),
                        _text(waiting.column),
                        waiting.row,
                        forms,
                        waiting.timestamps,
                    )


async def _list(database: aio.Database, table: str, observer: str, limit: int) -> list[Shown]:
    """Lists one more than `limit` if there are more."""
    await _require(database.internal.engine, table)
    listed: list[Shown] = []
    async for one in waiting(database.internal.engine, table, observer):
        listed.append(one)
        if len(listed) > limit:
            break
    if not listed:
        await require_observer(database.internal.engine, table, observer)
    return listed


async def _count(database: aio.Database, table: str, observer: str) -> Counter[Count]:
    await _require(database.internal.engine, table)
    counts: Counter[Count] = Counter()
    async for one in waiting(database.internal.engine, table, observer):
        counts[one.table, one.observer] += 1
    if not counts:
        await require_observer(database.internal.engine, table, observer)
    return counts


async def _require(engine: Engine, table: str) -> None:
    if table:
        await engine.catalog.describe(table, engine.now() + engine.limits.call_seconds)


def _show(here: Connection, listed: list[Shown], limit: int) -> None:
    screen = Screen("table", "observer", "column", "row", "since", box=None)
    for one in listed[:limit]:
        screen.add_row(*one.as_text())
    if len(listed) > limit:
        tell_of_limit(limit, "cells")
    here.show([one.as_data() for one in listed[:limit]], screen if listed else "no notifications")


def _show_counts(here: Connection, counts: Counter[Count]) -> None:
    screen = Screen("table", "observer", "cells", box=None)
    for (table, observer), cells in sorted(counts.items()):
        screen.add_row(plain(table), plain(observer), f"{cells:,}")
    here.show(
        [
            {"table": table, "observer": observer, "cells": cells}
            for (table, observer), cells in sorted(counts.items())
        ],
        screen if counts else "no notifications",
    )


# -------------------------------------------------------------------------- following


async def _follow(here: Connection, engine: Engine, table: str, observer: str) -> None:
    """Prints notifications as they arrive. It only listens, so it takes no work from workers."""
    deadline = engine.now() + engine.limits.call_seconds
    watched: dict[int, list[bytes]] = {}
    described = await engine.catalog.describe_all(deadline)
    tables = named_tables(described)
    for one in described:
        wanted = [o.name for o in one.observers if not observer or o.name == observer]
        if one.deleting or not wanted or (table and one.name != table):
            continue
        watched[one.table_id] = [name.encode() for name in wanted]
    if not watched:
        if table or observer:
            raise no_observer(table, observer)
        raise SchemaError("no observers are registered")
    async with aclosing(
        worker_context(engine).notifications.hints(watched, listen_only=True)
    ) as hints:
        async for batch in hints:
            for hint in batch.notifications:
                shown = Shown(
                    tables[hint.table_id].name,
                    _text(hint.observer),
                    _text(hint.column),
                    hint.row,
                    tables[hint.table_id].forms,
                    (hint.timestamp,),
                )
                _print(here, shown)
            if batch.left_out:
                _print_left_out(here, batch.left_out)
            await asyncio.sleep(0)


def _print(here: Connection, shown: Shown) -> None:
    """One line for each, so that a reader need not wait for the end."""
    if here.as_json:
        typer.echo(json.dumps(shown.as_data()))
        return
    moment = Timestamp(shown.timestamps[0]).time_text()
    row = shown.forms.row_text(shown.row)
    line = f"{moment}  {shown.table}  {shown.observer}  {shown.column}  {row}"
    console.print(plain(line), soft_wrap=True)


def _print_left_out(here: Connection, left_out: int) -> None:
    if here.as_json:
        typer.echo(json.dumps({"left_out": left_out}))
    else:
        console.print(f"({left_out} more are not shown: they came too quickly)")


def _text(name: bytes) -> str:
    return name.decode(errors="backslashreplace")
