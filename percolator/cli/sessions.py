"""Clients and workers that are alive, and their locks: `percolator sessions` and `locks`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.table import Column
from rich.table import Table as Screen
from rich.text import Text

from percolator import aio
from percolator.cli.connection import Connection, connection, errors_console, plain, tell_of_limit
from percolator.cli.options import bytes_of
from percolator.cli.values import (
    Forms,
    column_text,
    kind_of,
    primary_text,
    shown_column,
    stored_cells,
)
from percolator.codecs.readable import row_text
from percolator.errors import PercolatorError, SchemaError, Unavailable
from percolator.formats.records import LockRecord
from percolator.timestamps import Timestamp, in_json
from percolator.v1.cells_pb2 import Space
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.lockservice_pb2 import Session
from percolator.wire.channels import GrpcNetwork
from percolator.wire.cluster import addresses_of
from percolator.wire.lock_service import LockServiceCalls


def sessions(context: typer.Context) -> None:
    """List the sessions of clients and workers, and pins."""
    here = connection(context)

    listed = here.run(lambda network: list_sessions(here, network))
    here.show([as_data(session) for session in listed], _as_table(listed))


def _tell(missing: str) -> None:
    errors_console.print(plain(missing), highlight=False, soft_wrap=True)


async def list_sessions(
    here: Connection,
    network: GrpcNetwork,
    *,
    activity: bool = False,
    tell: Callable[[str], None] = _tell,
) -> list[Session]:
    """All sessions, oldest first; with what their processes do, if wanted. `tell` is told of lock
    services that do not answer, so that the list is not mistaken for all."""
    cluster, reached = await here.reach(network)
    found = addresses_of(cluster, ServiceKind.SERVICE_KIND_LOCK_SERVICE)
    if not found:
        raise Unavailable("no lock service is registered with the cluster")

    def missing(address: str, problem: PercolatorError) -> None:
        tell(f"sessions of the lock service at {address} cannot be shown: {problem}")

    calls = LockServiceCalls(reached, found)
    return await calls.all_sessions(here.timeout_seconds, missing, activity=activity)


def as_data(session: Session) -> dict[str, object]:
    """The session as JSON, for programs."""
    oldest = session.info.oldest_start_timestamp
    return {
        "session_id": session.session_id.hex(),
        "description": session.info.description,
        "pin": session.info.pin,
        "oldest_start_timestamp": in_json(oldest) if oldest else None,
        "ttl_seconds": session.info.ttl_milliseconds / 1000,
        "age_seconds": session.age_milliseconds / 1000,
        "remaining_seconds": session.remaining_milliseconds / 1000,
        "locks": session.locks,
    }


def _as_table(listed: list[Session]) -> Screen | str:
    if not listed:
        return "no sessions"
    table = Screen(
        Column("session", no_wrap=True),
        "who",
        "age",
        "expires in",
        "locks",
        "oldest snapshot",
        box=None,
    )
    for session in listed:
        oldest = session.info.oldest_start_timestamp
        snapshot = Timestamp(oldest).time_text() if oldest else "-"
        table.add_row(
            session.session_id.hex(),
            plain(session.info.description),
            f"{session.age_milliseconds / 1000:.1f} s",
            f"{session.remaining_milliseconds / 1000:.1f} s",
            str(session.locks),
            f"{snapshot} (pin)" if session.info.pin else snapshot,
        )
    return table


@dataclass(frozen=True)
class Held:
    """One locked cell."""

    table: str
    forms: Forms
    """Shows the rows of its table."""
    row: bytes
    column: bytes
    lock: LockRecord
    age_seconds: float
    """Time since the transaction began, by the oracle's clock."""


def locks(
    context: typer.Context,
    table: Annotated[
        str | None, typer.Argument(help="Only this table [default: all].", show_default=False)
    ] = None,
    row: Annotated[
        str | None,
        typer.Argument(
            help="Only this row, as the table's keys are written: text, 17, "
            '["a", 17], or hex:00ff.'
        ),
    ] = None,
    limit: Annotated[int, typer.Option(help="At most this many locks.", min=1)] = 1_000,
) -> None:
    """Show locks and their owners, and whether these are alive."""
    here = connection(context)
    bytes_of("row", row)
    held = here.run_with_database(lambda database: _held(here, database, table, row, limit + 1))
    if len(held) > limit:
        tell_of_limit(limit, "locks")
        del held[limit:]
    sessions = {}
    if held:
        sessions = {one.session_id: one for one in here.run(lambda net: list_sessions(here, net))}
    here.show([_as_data(one, sessions) for one in held], _as_text(held, sessions))


async def _held(
    here: Connection, database: aio.Database, table: str | None, row: str | None, limit: int
) -> list[Held]:
    """The first locks, table by table and in row order."""
    catalog, deadline = database.internal.engine.catalog, here.timeout_seconds
    deadline += database.internal.engine.now()
    if table is None:
        tables = sorted(await catalog.tables(deadline), key=lambda info: info.name)
    else:
        tables = [await catalog.table(table, deadline)]
    now = await database.timestamp(timeout=here.timeout_seconds)
    found: list[Held] = []
    for info in tables:
        forms = Forms(info.codecs.names)
        start = forms.row("row", row) if row is not None else b""
        end = start + b"\0" if row is not None else b""
        try:
            async with aclosing(
                stored_cells(database, info, [Space.SPACE_LOCK], start, end, here.timeout_seconds)
            ) as cells:
                async for cell in cells:
                    lock = LockRecord.decode(cell.value)
                    began = Timestamp(lock.start_timestamp)
                    age = (now.physical_milliseconds - began.physical_milliseconds) / 1000
                    found.append(Held(info.name, forms, cell.row, cell.column, lock, max(age, 0.0)))
                    if len(found) >= limit:
                        return found
        except SchemaError:
            if table is not None:
                raise
            # It was dropped since the tables were listed, and its locks with it.
            found = [one for one in found if one.table != info.name]
    return found


def _state(one: Held, sessions: dict[bytes, Session]) -> str:
    """The state of the owner. Others wait if it is "alive" or "unknown", else remove the lock."""
    if one.lock.session:
        return "alive" if one.lock.session in sessions else "gone"
    left = one.lock.ttl_milliseconds / 1000 - one.age_seconds
    return "expired" if left <= 0 else "unknown"


def _as_data(one: Held, sessions: dict[bytes, Session]) -> dict[str, object]:
    session = sessions.get(one.lock.session)
    return {
        "table": one.table,
        "row": one.forms.row_data(one.row),
        "column": row_text(shown_column(one.column)),
        "kind": kind_of(one.column, one.lock.kind),
        "start_timestamp": in_json(one.lock.start_timestamp),
        "age_seconds": round(one.age_seconds, 3),
        "ttl_seconds": one.lock.ttl_milliseconds / 1000,
        "session": one.lock.session.hex() or None,
        "owner": session.info.description if session else None,
        "state": _state(one, sessions),
        "primary": {
            "table_id": one.lock.primary.table_id,
            "row": row_text(one.lock.primary.row),
            "column": row_text(shown_column(one.lock.primary.column)),
        },
    }


def _as_text(held: list[Held], sessions: dict[bytes, Session]) -> Screen | str:
    if not held:
        return "no locks"
    screen = Screen("table", "row", "column", "kind", "held for", "by", "", "primary", box=None)
    for one in held:
        session = sessions.get(one.lock.session)
        state = _state(one, sessions)
        owner = session.info.description if session else one.lock.session.hex() or "no session"
        is_primary = (one.lock.primary.row, one.lock.primary.column) == (one.row, one.column)
        screen.add_row(
            plain(one.table),
            plain(one.forms.row_text(one.row)),
            plain(column_text(one.column)),
            kind_of(one.column, one.lock.kind),
            f"{one.age_seconds:.1f} s",
            plain(owner),
            Text(state, style="" if state == "alive" else "red"),
            "this cell" if is_primary else plain(primary_text(one.lock)),
        )
    return screen
