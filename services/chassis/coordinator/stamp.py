"""The stamp of a role's row: which leader wrote it last, and how often that one has written."""

from __future__ import annotations

import re
from typing import NamedTuple

from percolator.errors import StoreFault, StoreUnusable

_FORMAT = re.compile(rb"([1-9][0-9]{0,17}) ([0-9a-f]{16}) ([0-9]{1,18})")


class Stamp(NamedTuple):
    """No two changes of a row leave the same one."""

    epoch: int
    """Grows by one with every leader."""
    token: str
    """Random, of one candidacy: it knows its own stamp, even if the answer was lost."""
    writes: int
    """Grows with every attempt to write, so that an earlier attempt that arrives late finds another
    stamp than it expects."""

    def encode(self) -> bytes:
        return b"%d %s %d" % (self.epoch, self.token.encode(), self.writes)

    @classmethod
    def decode(cls, data: bytes, role: str) -> Stamp:
        """Raises `StoreUnusable` for what `encode` cannot have written."""
        found = _FORMAT.fullmatch(data)
        if found is None:
            raise StoreUnusable(
                f"the stamp of the role {role!r} is damaged: {data[:64]!r}",
                fault=StoreFault.DAMAGED,
            )
        return cls(int(found[1]), found[2].decode(), int(found[3]))

    def is_of(self, other: Stamp) -> bool:
        """Whether the same leader wrote both."""
        return (self.epoch, self.token) == (other.epoch, other.token)
