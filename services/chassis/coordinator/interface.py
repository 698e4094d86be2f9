"""The coordinator: roles that one process leads at a time, values of the leader, sessions.

Contract:
- At most one leader of a role can write. A leader finds what all former leaders wrote: it becomes
  leader first, and reads second.
- A value is durable before `put` returns. If a `put` fails, its value may or may not be found
  later, so the caller must not report it.
- Leadership is lost without notice: a paused process loses it during the pause. So `check` is
  called after all work, and before its response leaves.
- Sessions are hints about who is alive, and nothing more.
"""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from percolator.errors import InvalidArgument

VALUE_BYTES_MAX = 64 << 20
_NAME = re.compile(r"[a-z][a-z0-9-]{0,99}")


@dataclass(frozen=True)
class KnownLeader:
    """The leader of a role."""

    epoch: int
    holder: str
    """The name that it gave itself: its address."""


def no_lost_leader() -> str:
    """The default for `lost`: the candidate knows of no lost leader."""
    return ""


class Leadership(Protocol):
    """The leadership of one role by this process, while `stands` says so."""

    @property
    def epoch(self) -> int:
        """Higher than that of every former leader."""
        ...

    async def stands(self) -> bool:
        """Whether no later leader had read anything when this was called. Raises `StoreUnusable` if
        the store does not say."""
        ...

    async def check(self) -> None:
        """Raises `NotReady` unless it stands; after the first time, always raises it."""
        ...

    async def get(self, key: str) -> bytes | None:
        """The last value that this or a former leader wrote. `StoreUnusable` if it is damaged."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Returns when the value is durable and this process still leads; raises `NotReady` or
        `StoreUnusable` otherwise, and `InvalidArgument` for a value that is too large."""
        ...

    async def resign(self) -> None:
        """Lets the next candidate lead at once."""
        ...


class Session(Protocol):
    """Shows other processes that this one is alive, until it is closed."""

    async def close(self) -> None: ...


class Coordinator(Protocol):
    """What all processes of a cluster agree on."""

    async def campaign(
        self, role: str, holder: str, lost: Callable[[], str] = no_lost_leader
    ) -> Leadership:
        """Returns when this process leads: at once, or when the former leader is gone, has been
        silent for too long, or is known to be lost: `lost` returns the holder of a leader that the
        candidate knows, from elsewhere, to be lost."""
        ...

    async def leader(self, role: str) -> KnownLeader | None:
        """The present leader, as far as can be told from outside."""
        ...

    async def read(self, role: str, key: str) -> bytes | None:
        """The last value that a leader of the role wrote; it may be slightly out of date. Any
        process may read it."""
        ...

    def watch(self, role: str, key: str) -> AsyncGenerator[bytes | None, None]:
        """Yields the present value, and then every new value that it sees. Never ends."""
        ...

    async def open_session(self, name: str, value: bytes) -> Session:
        """Opens a session, one per name and process."""
        ...

    async def sessions(self, prefix: str) -> Mapping[str, bytes]:
        """The live sessions by name. Call it often: it sees who is silent by what has changed."""
        ...

    async def close(self) -> None:
        """Resigns, and ends sessions."""
        ...


def check_name(field: str, name: str) -> None:
    """Refuses names of roles, keys and sessions that some back end could not store."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            field, f"expected a letter, then up to 99 of a-z, 0-9 and '-'; found {name[:100]!r}"
        )
