"""Tables and tablets: what the master decides, as an immutable value.

Invariants:
- The tablets of a table cover every row exactly once.
- Each epoch of a tablet is given to one server, and epochs only grow.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType

from percolator.codec_names import CodecNames
from percolator.errors import InvariantViolation
from percolator.services.master.map.catalogue import Catalogue, Table


@dataclass(frozen=True)
class Tablet:
    """A range of rows, and the server that it was given to."""

    tablet_id: int
    table_id: int
    start: bytes
    end: bytes
    """Excluded. Empty means to the last row."""
    epoch: int = 0
    """The last epoch given to a server; 0 if it was never assigned."""
    server_id: str = ""
    """The server that this epoch was given to; empty if it is still to be assigned."""
    address: str = ""
    exists: bool = False
    """Whether an owner has reported that it serves it: from then on it may hold data."""
    origin_tablet_id: int = 0
    origin_epoch: int = 0
    """The tablet that the first owner clones; 0 for none, or when that is done."""
    served_epoch: int = 0
    """The last epoch at which an owner has reported that it serves it; 0 if none is known."""

    def given_to(self, server_id: str, address: str, used_up: int = 0) -> Tablet:
        """At the next epoch, since the current one may have been used already. `used_up` is an
        epoch that is known to have been used, whatever this map says."""
        epoch = max(self.epoch, used_up) + 1
        return replace(self, epoch=epoch, server_id=server_id, address=address)

    def holds(self, row: bytes) -> bool:
        return self.start <= row and (not self.end or row < self.end)


@dataclass(frozen=True)
class ClusterMap(Catalogue):
    """Everything that the master decides. Each change makes a new map."""

    tablets: Mapping[int, Tablet] = field(default_factory=lambda: MappingProxyType({}))
    draining: frozenset[str] = frozenset()
    """Ids of servers that get no more tablets."""
    retired: tuple[tuple[int, int], ...] = ()
    """(table, tablet) of directories that are no longer needed."""

    def __post_init__(self) -> None:
        for table_id, tablets in self.of_tables.items():
            if table_id not in self.tables:
                raise InvariantViolation(
                    f"there are tablets of table {table_id}, which does not exist"
                )
            end: bytes | None = b""
            for tablet in tablets:
                if tablet.start != end or tablet.tablet_id >= self.next_id:
                    raise InvariantViolation(f"tablet {tablet.tablet_id} overlaps or leaves a gap")
                end = tablet.end or None
            if end is not None:
                raise InvariantViolation(f"the last rows of table {table_id} are in no tablet")

    @cached_property
    def of_tables(self) -> Mapping[int, Sequence[Tablet]]:
        """The tablets of each table, in order of their rows."""
        found: dict[int, list[Tablet]] = {table_id: [] for table_id in self.tables}
        for tablet in self.tablets.values():
            found.setdefault(tablet.table_id, []).append(tablet)
        for tablets in found.values():
            tablets.sort(key=lambda tablet: tablet.start)
        return found

    @cached_property
    def _starts(self) -> Mapping[int, list[bytes]]:
        return {table: [one.start for one in found] for table, found in self.of_tables.items()}

    def overlapping(self, table_id: int, start: bytes, end: bytes) -> Sequence[Tablet]:
        """The tablets of a table that hold rows of [start, end), in order."""
        tablets = self.of_tables[table_id]
        first = bisect_right(self._starts[table_id], start) - 1
        last = first
        while last < len(tablets) and (not end or tablets[last].start < end):
            last += 1
        return tablets[first : max(last, first + 1)]

    def tablets_of(self, table: Table) -> int:
        # None of a table that was dropped while a call waited until it could be used.
        return len(self.of_tables.get(table.table_id, ()))

    # ------------------------------------------------------------------------- changes

    def with_tablets(self, tablets: Iterable[Tablet]) -> ClusterMap:
        changed = {tablet.tablet_id: tablet for tablet in tablets}
        return replace(self, tablets={**self.tablets, **changed})

    def with_new_table(
        self,
        name: str,
        splits: Sequence[bytes],
        retention_milliseconds: int,
        split_bytes: int,
        created_at: int = 0,
        *,
        change_feed: bool = False,
        ttls: tuple[tuple[bytes, int], ...] = (),
        codecs: CodecNames | None = None,
    ) -> tuple[ClusterMap, Table]:
        """A table whose tablets are to be assigned."""
        table = Table(
            self.next_id,
            name,
            retention_milliseconds=retention_milliseconds,
            split_bytes=split_bytes,
            created_at=created_at,
            change_feed=change_feed,
            ttls=ttls,
            codecs=codecs or CodecNames(),
        )
        bounds = [b"", *splits, b""]
        made = {
            self.next_id + number: Tablet(
                self.next_id + number, table.table_id, bounds[number - 1], bounds[number]
            )
            for number in range(1, len(bounds))
        }
        changed = replace(
            self,
            next_id=self.next_id + len(bounds),
            tables={**self.tables, table.table_id: table},
            tablets={**self.tablets, **made},
        )
        return changed, table

    def with_split(self, parent: Tablet, row: bytes) -> tuple[ClusterMap, Tablet, Tablet]:
        """The parent's range in two tablets, which begin as clones of it, on the same server."""
        lower, upper = (
            Tablet(
                self.next_id + number,
                parent.table_id,
                start,
                end,
                epoch=1,
                server_id=parent.server_id,
                address=parent.address,
                origin_tablet_id=parent.tablet_id,
                origin_epoch=parent.epoch,
            )
            for number, (start, end) in enumerate([(parent.start, row), (row, parent.end)])
        )
        rest = {key: tablet for key, tablet in self.tablets.items() if key != parent.tablet_id}
        children = {lower.tablet_id: lower, upper.tablet_id: upper}
        changed = replace(self, next_id=self.next_id + 2, tablets={**rest, **children})
        return changed, lower, upper

    def with_existing(self, served: Iterable[Tablet]) -> ClusterMap:
        """After these were served: their own directories hold all of their data from now on."""
        settled = [
            replace(
                tablet,
                exists=True,
                origin_tablet_id=0,
                origin_epoch=0,
                served_epoch=tablet.epoch,
            )
            for tablet in served
        ]
        changed = self.with_tablets(settled)
        needed = {tablet.origin_tablet_id for tablet in changed.tablets.values()}
        parents = {
            (tablet.table_id, tablet.origin_tablet_id)
            for tablet in served
            if tablet.origin_tablet_id and tablet.origin_tablet_id not in needed
        }
        return replace(changed, retired=(*changed.retired, *sorted(parents)))

    def without_table(self, table_id: int) -> ClusterMap:
        """Without the table, whose directories are no longer needed."""
        gone = [tablet for tablet in self.tablets.values() if tablet.table_id == table_id]
        origins = {tablet.origin_tablet_id for tablet in gone if tablet.origin_tablet_id}
        retired = sorted({tablet.tablet_id for tablet in gone} | origins)
        return replace(
            self,
            tables={key: table for key, table in self.tables.items() if key != table_id},
            tablets={key: one for key, one in self.tablets.items() if one.table_id != table_id},
            retired=(*self.retired, *((table_id, tablet_id) for tablet_id in retired)),
        )
