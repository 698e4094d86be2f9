"""What is needed of the past: the oldest timestamp that any session or pin has said it works at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from percolator.errors import NotReady
from percolator.v1 import lockservice_pb2 as wire
from percolator.wire import methods
from percolator.world import Network

_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class HistoryNeeds:
    """Of all sessions together."""

    oldest: int = 0
    """0 when nobody needs anything."""
    session_id: bytes = b""
    description: str = ""
    """Of the session that needs the oldest."""
    ttl_seconds_max: float = 0.0
    """The longest that any session lives without being heard of."""


async def history_needs(network: Network, lock_services: Sequence[str]) -> HistoryNeeds:
    """Asks all of them, one after the other.

    Raises `NotReady` when none is there, or one has restarted so lately that sessions may still
    report, and whatever else keeps one from answering: without an answer nothing may be collected.
    """
    if not lock_services:
        raise NotReady("no lock service is known: who needs history cannot be asked")
    needs, ttl_milliseconds_max = HistoryNeeds(), 0
    for address in lock_services:
        list_sessions = network.unary(address, methods.LIST_SESSIONS)
        page_token: bytes | None = b""
        while page_token is not None:
            page = await list_sessions(
                wire.ListSessionsRequest(page_token=page_token), _CALL_SECONDS
            )
            if page.settling:
                raise NotReady(f"the lock service at {address} has just begun to hear of sessions")
            ttl_milliseconds_max = max(ttl_milliseconds_max, page.ttl_milliseconds_max)
            for session in page.sessions:
                oldest = session.info.oldest_start_timestamp
                if oldest and (not needs.oldest or oldest < needs.oldest):
                    needs = HistoryNeeds(oldest, session.session_id, session.info.description)
            page_token = page.next_page_token or None
    return replace(needs, ttl_seconds_max=ttl_milliseconds_max / 1000)
