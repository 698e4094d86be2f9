"""What a tablet reports about itself."""

from __future__ import annotations

from percolator.tablet.memory.state import TabletState
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb


def statistics(state: TabletState, queue_bytes: int) -> pb.TabletStatistics:
    counters = state.counters
    return pb.TabletStatistics(
        cells=max(0, counters.cells - counters.foreign_cells),
        bytes=max(0, counters.bytes - counters.foreign_bytes),
        locks=len(state.mirror),
        notifications=len(state.index),
        mutations_applied=counters.mutations_applied,
        mutations_refused=counters.mutations_refused,
        reads=counters.reads,
        rows_scanned=counters.rows_scanned,
        versions_skipped=counters.versions_skipped,
        batches_synced=counters.batches_synced,
        mutations_per_second=counters.mutation_rate.per_second(),
        reads_per_second=counters.read_rate.per_second(),
        queue_bytes=queue_bytes,
        notifications_written=counters.notifications_written,
        locks_written=counters.locks_written,
    )


def describe(state: TabletState, queue_bytes: int) -> pb.TabletDescription:
    identity = state.identity
    return pb.TabletDescription(
        table_id=identity.table_id,
        tablet_id=identity.tablet_id,
        epoch=identity.epoch,
        schema_version=state.schema_version,
        range=cells_pb2.RowRange(start=identity.start, end=identity.end),
        statistics=statistics(state, queue_bytes),
    )
