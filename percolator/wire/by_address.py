"""What a process keeps for each server that it calls, as long as it calls it.

A tablet server that is replaced usually comes back at another address. A process that lives for
months among such servers would otherwise keep a queue, a connection and a socket for each that it
has ever called.

What was unused for ten minutes is dropped when another address is first used, and made again if
its own address is used again. So there is no timer, and a process whose servers stay drops nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

UNUSED_SECONDS = 600.0
"""Much longer than the pauses of a program that calls its servers now and then."""


class Used(Protocol):
    """What is kept for one address."""

    def unused_since(self) -> float | None:
        """By the event loop's clock; None while a call is in progress or waits."""
        ...


UsedT = TypeVar("UsedT", bound=Used)


class ByAddress(Generic[UsedT]):
    """One thing of a kind for each address. Belongs to one event loop.

    What was dropped must not be used any more: ask for it with each use, or mark it in `drop`.
    """

    def __init__(
        self, make: Callable[[str], UsedT], drop: Callable[[UsedT], None] | None = None
    ) -> None:
        """`drop` gets each that is kept no longer."""
        self._make = make
        self._drop = drop
        self._kept: dict[str, UsedT] = {}

    def get(self, address: str) -> UsedT:
        """What is kept for this address; makes it if there is none."""
        kept = self._kept.get(address)
        if kept is None:
            self._drop_unused()
            kept = self._kept[address] = self._make(address)
        return kept

    def __iter__(self) -> Iterator[UsedT]:
        return iter(self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def take_all(self) -> list[UsedT]:
        """Empties the collection, without dropping anything; returns what was in it."""
        taken, self._kept = list(self._kept.values()), {}
        return taken

    def _drop_unused(self) -> None:
        earliest = asyncio.get_running_loop().time() - UNUSED_SECONDS
        for address, kept in list(self._kept.items()):
            since = kept.unused_since()
            if since is not None and since <= earliest:
                del self._kept[address]
                if self._drop is not None:
                    self._drop(kept)
