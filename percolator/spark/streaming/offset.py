"""A position in the stream: what Spark keeps in its checkpoint for each batch, as JSON.

    {"timestamp": 0}                                      nothing was delivered yet
    {"timestamp": 71, "table_id": 5, "snapshot": true}    the batch is the table as it was at 71
    {"timestamp": 98, "table_id": 5}                      the batch has the changes up to 98
    {"timestamp": 98, "table_id": 5, "after": 71}         as before, and it is the first batch

The first batch says where it begins, because Spark keeps no other offset before it: if it asked
again after a restart, "now" would be later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from percolator.errors import InvalidArgument

_MEMBERS: dict[str, type] = {"timestamp": int, "table_id": int, "snapshot": bool, "after": int}


@dataclass(frozen=True)
class Offset:
    """The end of a batch, and the start of the next one."""

    timestamp: int = 0
    """Everything up to here was delivered; 0: nothing yet."""
    table_id: int = 0
    """The table that it belongs to: a later table may have the same name."""
    snapshot: bool = False
    """Whether the batch that ends here is the whole table at `timestamp`."""
    after: int = 0
    """Where the batch that ends here begins, if it is the first one and not a snapshot."""

    @classmethod
    def parse(cls, found: object) -> Offset:
        """Raises `InvalidArgument` if the checkpoint was not written by this source."""
        members = found if isinstance(found, dict) else {}
        wrong = [name for name, value in members.items() if type(value) is not _MEMBERS.get(name)]
        if wrong or "timestamp" not in members:
            raise InvalidArgument(
                "checkpointLocation", f"{found!r} is not an offset of a stream from percolator"
            )
        return cls(**members)

    def json(self) -> dict[str, Any]:
        """The same position always has the same JSON: Spark compares its text."""
        found = {name: getattr(self, name) for name in _MEMBERS}
        return {name: value for name, value in found.items() if value or name == "timestamp"}
