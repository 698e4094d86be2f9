"""`percolator sessions`: which clients and workers are alive, and what holds history back."""

from __future__ import annotations

from collections.abc import Callable

import typer
from rich.table import Column, Table

from percolator.cli.connection import Connection, connection, errors_console, plain
from percolator.errors import PercolatorError, Unavailable
from percolator.timestamps import Timestamp, in_json
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
    services that do not answer, so that a part is not mistaken for the whole."""
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


def _as_table(listed: list[Session]) -> Table | str:
    if not listed:
        return "no sessions"
    table = Table(
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
