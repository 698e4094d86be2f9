"""How far history may have been collected: durable before any tablet is told.

Safe points are never lowered: a tablet that has heard of one refuses everything below it forever.
So a pin, which holds history back, reads the safe points *after* its session is known to the lock
service, and the leader looks at the sessions again after it has written the safe points. Otherwise
each could miss the other, and history that a pin relies on would be collected.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from percolator.services.chassis.coordinator.interface import Leadership
from percolator.v1 import master_records_pb2

KEY = "safe-points"


@dataclass(frozen=True)
class ClusterSafePoints:
    """The safe points of all tables."""

    reads: Mapping[int, int] = field(default_factory=dict)
    """By table: no snapshot below it is answered."""
    transactions: int = 0
    """No transaction below it prewrites or commits, in any table."""

    def raised(self, reads: Mapping[int, int]) -> ClusterSafePoints:
        """Raised to `reads` where those are higher. Tables that are not in `reads` are dropped."""
        joined = {table: max(at, self.reads.get(table, 0)) for table, at in reads.items()}
        return ClusterSafePoints(joined, max([self.transactions, *joined.values()]))

    def allowed_by(self, oldest: int) -> ClusterSafePoints:
        """Only those that keep history from `oldest` on; all of them if `oldest` is 0.

        Transactions that began at `oldest` can continue in all tables. Tablets that were told of a
        higher safe point before keep it.
        """
        if not oldest:
            return self
        reads = {table: at for table, at in self.reads.items() if at <= oldest}
        return ClusterSafePoints(reads, max(reads.values(), default=0))


async def load(leadership: Leadership) -> ClusterSafePoints:
    """The safe points that the previous leader left."""
    record = master_records_pb2.SafePointsRecord.FromString(await leadership.get(KEY) or b"")
    return ClusterSafePoints(
        {one.table_id: one.reads for one in record.tables}, record.transactions
    )


async def store(leadership: Leadership, safe_points: ClusterSafePoints) -> None:
    """Returns when they are durable, so that a successor finds them."""
    record = master_records_pb2.SafePointsRecord(
        tables=[
            master_records_pb2.SafePointsRecord.OfTable(table_id=table_id, reads=reads)
            for table_id, reads in sorted(safe_points.reads.items())
        ],
        transactions=safe_points.transactions,
    )
    await leadership.put(KEY, record.SerializeToString(deterministic=True))
