"""What a request to the lock service may contain, and how much the service remembers in total.

Every check here comes before any change, so a refused request has changed nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from percolator.errors import InvalidArgument
from percolator.wire.liveness import SESSION_ID_BYTES
from percolator.wire.sessions import ACTIVITY_BYTES_MAX


@dataclass(frozen=True)
class LockServiceLimits:
    """The bounds of one lock service. Together they bound its memory."""

    ttl_milliseconds_min: int = 500
    ttl_milliseconds_max: int = 60_000
    sessions_max: int = 100_000
    buried_max: int = 100_000
    """Ids that ended in the grace period after a restart: they must not be revived."""
    locks_max: int = 1_000_000
    lock_name_bytes_total_max: int = 256 * 1024 * 1024
    lock_name_bytes_max: int = 1_024
    description_bytes_max: int = 256
    request_items_max: int = 4_096
    """Lock names or session ids in one request."""
    page_sessions_max: int = 1_000
    activity_bytes_max: int = ACTIVITY_BYTES_MAX
    activity_bytes_total_max: int = 64 * 1024 * 1024
    """When it is reached, activities are left out; sessions are not refused."""
    page_activities_max: int = 100
    """Sessions on a page that shows what they do."""

    def check_ttl(self, field: str, milliseconds: int) -> None:
        """Too short, and it ends before a renewal can arrive; too long, and it outlives a crash."""
        if not self.ttl_milliseconds_min <= milliseconds <= self.ttl_milliseconds_max:
            raise InvalidArgument(
                field,
                f"{milliseconds} ms is outside {self.ttl_milliseconds_min} to "
                f"{self.ttl_milliseconds_max} ms",
            )

    def check_description(self, field: str, description: str) -> None:
        size = len(description.encode())
        if size > self.description_bytes_max:
            raise InvalidArgument(
                field, f"has {size} bytes; at most {self.description_bytes_max} are allowed"
            )

    def check_activity(self, field: str, size: int) -> None:
        if size > self.activity_bytes_max:
            raise InvalidArgument(
                field, f"has {size} bytes; at most {self.activity_bytes_max} are allowed"
            )

    def check_names(self, names: Sequence[bytes]) -> None:
        """Lock names: at least one, not too many, none empty, too long or repeated."""
        self._check_count("names", len(names))
        for index, name in enumerate(names):
            if not 0 < len(name) <= self.lock_name_bytes_max:
                raise InvalidArgument(
                    f"names[{index}]",
                    f"has {len(name)} bytes; expected 1 to {self.lock_name_bytes_max}",
                )
        if len(set(names)) != len(names):
            raise InvalidArgument(f"names[{_first_repetition(names)}]", "appears twice")

    def check_session_ids(self, session_ids: Sequence[bytes]) -> None:
        """Ids to ask about. A repeated id is harmless, so it is allowed."""
        self._check_count("session_ids", len(session_ids))
        for index, session_id in enumerate(session_ids):
            check_session_id(f"session_ids[{index}]", session_id)

    def _check_count(self, field: str, count: int) -> None:
        if not 0 < count <= self.request_items_max:
            raise InvalidArgument(
                field, f"has {count} entries; expected 1 to {self.request_items_max}"
            )


def check_session_id(field: str, session_id: bytes) -> None:
    if len(session_id) != SESSION_ID_BYTES:
        raise InvalidArgument(field, f"has {len(session_id)} bytes; expected {SESSION_ID_BYTES}")


def _first_repetition(names: Sequence[bytes]) -> int:
    seen: set[bytes] = set()
    for index, name in enumerate(names):
        if name in seen:
            return index
        seen.add(name)
    return len(names)
