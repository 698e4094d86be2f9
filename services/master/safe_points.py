"""How far history may have been collected: decided by the leader, durable before anybody is told.

Never lowered: a tablet that has heard of a safe point refuses what lies below it for ever. Whoever
wants to hold history back (a pin) therefore looks here *after* its session is known to the lock
service, and the leader looks at the sessions again after it has written here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from percolator.v1 import master_records_pb2
from services.chassis.coordinator.interface import Leadership

KEY = "safe-points"


@dataclass(frozen=True)
class ClusterSafePoints:
    """Of all tables."""

    reads: Mapping[int, int] = field(default_factory=dict)
    """By table: below it no snapshot is answered."""
    transactions: int = 0
    """Below it no transaction prewrites or commits, in any table."""

    def raised(self, reads: Mapping[int, int]) -> ClusterSafePoints:
        """With these, where they are higher; what is no longer there is forgotten."""
        joined = {table: max(at, self.reads.get(table, 0)) for table, at in reads.items()}
        return ClusterSafePoints(joined, max([self.transactions, *joined.values()]))

    def allowed_by(self, oldest: int) -> ClusterSafePoints:
        """Those of the tables in which history from `oldest` on stays; 0: nobody needs any.

        Transactions that began at `oldest` go on in all tables. Tablets that were told of something
        higher before keep that.
        """
        if not oldest:
            return self
        reads = {table: at for table, at in self.reads.items() if at <= oldest}
        return ClusterSafePoints(reads, max(reads.values(), default=0))


async def load(leadership: Leadership) -> ClusterSafePoints:
    """What the leader before left."""
    record = master_records_pb2.SafePointsRecord.FromString(await leadership.get(KEY) or b"")
    return ClusterSafePoints(
        {one.table_id: one.reads for one in record.tables}, record.transactions
    )


async def store(leadership: Leadership, safe_points: ClusterSafePoints) -> None:
    """Returns when a successor would find them."""
    record = master_records_pb2.SafePointsRecord(
        tables=[
            master_records_pb2.SafePointsRecord.OfTable(table_id=table_id, reads=reads)
            for table_id, reads in sorted(safe_points.reads.items())
        ],
        transactions=safe_points.transactions,
    )
    await leadership.put(KEY, record.SerializeToString(deterministic=True))
