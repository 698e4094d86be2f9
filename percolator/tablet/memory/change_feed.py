"""The change feed of a tablet: whether it has one, and since when it is complete.

    F   commit timestamp 8 | row | column    the start of a write record: start 8, kind 1, value
    M feed    schema version 8, on 1, complete_from 8, loads_before 8

Each put or deletion of a cell is also stored under F, where keys sort by commit timestamp, in the
same write as its write record. So the changes since some timestamp are one range of keys, however
large the tablet is. The record is a copy of the write record, so that reading changes need not look
up each cell. Only large values, which a write record leaves out as well, and those of bulk loads
are not stored twice: the kind is then PUT_IN_DATA, and the value is where the write record says.

What each rule prevents:

* The feed begins between two batches, and is complete from the newest commit of that moment on.
  Every commit that is stored later is above it or in the feed, since its own lock is judged later.
* A bulk load whose fence stands at that moment may have stored rows that the feed lacks. They have
  its commit timestamp, which is known when the fence is lifted; the feed is complete from then on.
* An order with an older version of the schema changes nothing: it may have arrived late.
* A tablet with a feed has format 2. A release that does not know the feed would commit without it,
  and readers would never learn what they missed. So that release has to refuse the tablet.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from percolator.errors import StoreFault, StoreUnusable
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT_IN_DATA,
    WRITE_HEADER,
    WRITE_KIND_OFFSET,
)
from percolator.tablet.keys import FEED_FENCE, FEED_KEY, FORMAT_KEY, change_key, is_reserved
from percolator.tablet.memory.read_locks import FORMAT_WITH_READ_LOCKS
from percolator.world import Storage, StorageBatch

FORMAT_WITH_FEED = b"2"

_RECORD = struct.Struct(">QBQQ")


@dataclass(frozen=True)
class ChangeFeed:
    """What a tablet notes about its feed."""

    schema_version: int = 0
    """The version of the schema that has switched it on or off."""
    on: bool = False
    complete_from: int = 0
    """Every change above this timestamp is in the feed."""
    loads_before: int = 0
    """Bulk loads of runs up to this one may have stored rows before the feed was on."""

    @classmethod
    def load(cls, storage: Storage[Any]) -> ChangeFeed:
        """Reads it from the storage. Raises `StoreUnusable`."""
        record = storage.get(FEED_KEY)
        if record is None:
            return cls()
        if len(record) != _RECORD.size:
            raise StoreUnusable(
                f"the note about the change feed has {len(record)} bytes, not {_RECORD.size}; "
                "see docs/formats.md",
                fault=StoreFault.DAMAGED,
            )
        schema_version, on, complete_from, loads_before = _RECORD.unpack(record)
        return cls(schema_version, bool(on), complete_from, loads_before)

    @property
    def ever_on(self) -> bool:
        """Whether anything may be stored under F."""
        return self.schema_version > 0

    def is_changed_by(self, schema_version: int, *, on: bool) -> bool:
        """Whether this version of the schema switches the feed on or off."""
        return on != self.on and schema_version > self.schema_version

    def note(self, batch: StorageBatch, *, beside_read_locks: bool) -> None:
        """Adds to a batch what is stored about the feed. A tablet with read locks keeps their
        format: under a lower one, its next owner would not look for them."""
        record = _RECORD.pack(self.schema_version, self.on, self.complete_from, self.loads_before)
        batch.put(FEED_KEY, record)
        batch.put(FEED_FENCE, b"")
        batch.put(FORMAT_KEY, FORMAT_WITH_READ_LOCKS if beside_read_locks else FORMAT_WITH_FEED)


def note_change(batch: StorageBatch, cell: bytes, timestamp: int, record: bytes) -> int:
    """Adds a commit to the feed, unless readers cannot see it. Returns the bytes added."""
    if record[WRITE_KIND_OFFSET] == KIND_LOCK_ONLY or is_reserved(cell):
        return 0
    key = change_key(cell, timestamp)
    batch.put(key, record)
    return len(key) + len(record)


def loaded_change(start_timestamp: int) -> bytes:
    """The record in the feed of a cell that was put by a bulk load."""
    return WRITE_HEADER.pack(start_timestamp, KIND_PUT_IN_DATA)
