"""Which history is needed: the oldest timestamp at which a session or pin says it works."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from percolator.errors import NotReady
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire import methods
from percolator.world import Network

_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class HistoryNeeds:
    """What all sessions together need."""

    oldest: int = 0
    """0 if no session needs history."""
    session_id: bytes = b""
    description: str = ""
    """The description of the session that needs the oldest history."""
    ttl_seconds_max: float = 0.0
    """The longest that a session may live without a renewal."""


async def history_needs(
    network: Network, lock_services: Sequence[str], limits: pb.HistoryLimits | None = None
) -> HistoryNeeds:
    """Asks all lock services, one after another. Pins beyond the limits are ended, and sessions
    beyond them get no history.

    Raises `NotReady` if there is none, or if one has restarted so recently that sessions may still
    report to it. Any other error is raised too: nothing may be collected unless all have answered.
    """
    if not lock_services:
        raise NotReady("no lock service is known that could say which history is needed")
    needs, ttl_milliseconds_max = HistoryNeeds(), 0
    for address in lock_services:
        list_sessions = network.unary(address, methods.LIST_SESSIONS)
        page_token: bytes | None = b""
        while page_token is not None:
            request = pb.ListSessionsRequest(page_token=page_token, limits=limits)
            page = await list_sessions(request, _CALL_SECONDS)
            if page.settling:
                raise NotReady(
                    f"the lock service at {address} restarted; sessions may still report"
                )
            ttl_milliseconds_max = max(ttl_milliseconds_max, page.ttl_milliseconds_max)
            for session in page.sessions:
                if session.too_old:
                    continue
                oldest = session.info.oldest_start_timestamp
                if oldest and (not needs.oldest or oldest < needs.oldest):
                    needs = HistoryNeeds(oldest, session.session_id, session.info.description)
            page_token = page.next_page_token or None
    return replace(needs, ttl_seconds_max=ttl_milliseconds_max / 1000)
