"""The coordinator: roles that one process leads at a time, values of the leader, sessions.

Contract:
- At most one leader of a role can write. Whoever leads finds what all former leaders wrote: it is
  made leader first, and reads second.
- A value is durable before `put` returns. A `put` that fails may or may not be found later: its
  caller tells nobody of it.
- Leadership is lost without notice: to a process that was paused, it is lost while it stood still.
  So `check` is asked after everything that was done, and before the answer of it leaves.
- Sessions are hints about who is alive, and no more than that.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from percolator.errors import InvalidArgument

VALUE_BYTES_MAX = 64 << 20
_NAME = re.compile(r"[a-z][a-z0-9-]{0,99}")


@dataclass(frozen=True)
class Leader:
    """Who leads a role."""

    epoch: int
    holder: str
    """As it named itself: its address."""


def nobody() -> str:
    """Is lost, as far as the candidate knows from elsewhere."""
    return ""


class Leadership(Protocol):
    """Of one role, by this process, for as long as `stands` says so."""

    @property
    def epoch(self) -> int:
        """Above that of every leader before."""
        ...

    def stands(self) -> bool:
        """No later leader had read anything when this was asked."""
        ...

    def check(self) -> None:
        """Raises `NotReady` unless it stands; once it has, always."""
        ...

    async def get(self, key: str) -> bytes | None:
        """What this leader, or one before it, wrote last. `StoreUnusable` when it is damaged."""
        ...

    async def put(self, key: str, value: bytes) -> None:
        """Durable, and this process still leads; `NotReady` or `StoreUnusable` if not."""
        ...

    async def resign(self) -> None:
        """Lets the next candidate lead at once."""
        ...


class Session(Protocol):
    """Tells the others that this process is alive, until it ends."""

    async def close(self) -> None: ...


class Coordinator(Protocol):
    """What all processes of a cluster agree on."""

    async def campaign(
        self, role: str, holder: str, lost: Callable[[], str] = nobody
    ) -> Leadership:
        """Returns when this process leads: at once, or after every leader before is gone or has
        been silent for too long, or is the `lost` one, by its holder's name, as the candidate
        knows from elsewhere."""
        ...

    async def leader(self, role: str) -> Leader | None:
        """Who leads at the moment, as far as anybody can tell from outside."""
        ...

    async def read(self, role: str, key: str) -> bytes | None:
        """What a leader of the role wrote last, perhaps a moment ago. For everybody."""
        ...

    def watch(self, role: str, key: str) -> AsyncIterator[bytes | None]:
        """The value now, and again whenever it was seen to be another one. Never ends."""
        ...

    async def open_session(self, name: str, value: bytes) -> Session:
        """One per name and process."""
        ...

    async def sessions(self, prefix: str) -> Mapping[str, bytes]:
        """The live ones by name. To be asked often: it tells who is silent by what has changed."""
        ...

    async def close(self) -> None:
        """Resigns, and ends sessions."""
        ...


def check_name(field: str, name: str) -> None:
    """Roles, keys and sessions are called something that every back end can store."""
    if not _NAME.fullmatch(name):
        raise InvalidArgument(
            field, f"expected 1 to 100 of a-z, 0-9 and '-', from a letter on, found {name[:100]!r}"
        )
