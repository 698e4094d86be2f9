"""The right to serve a tablet, as the tablet checks it.

It is checked after the work and before the response is sent. If it still stands then, no later
owner had read or written anything when the work was done.
"""

from __future__ import annotations

from typing import Protocol


class Ownership(Protocol):
    """One server's ownership of a tablet: once lost, it never comes back."""

    def look(self) -> bool:
        """Whether it stands. Blocks, so call it from a thread that waits for the disk anyway."""
        ...

    async def stands(self) -> bool:
        """The same without blocking. One look answers every call made before it began."""
        ...
