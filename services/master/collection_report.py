"""How the leader describes history: how much there is, and what holds back its collection."""

from __future__ import annotations

from collections.abc import Iterable

from percolator.services.master.history.collection import Collection
from percolator.services.master.map.catalogue import Table
from percolator.v1 import master_pb2 as pb
from percolator.wire.status import to_detail


def describe(
    collection: Collection, tables: Iterable[Table], now: float, *, tells_id: bool
) -> pb.DescribeCollectionResponse:
    """Describes history. `now` is monotonic time. `NotReady` until the safe points are known.

    `tells_id`: whether the caller may know the id of the session that holds collection back.
    """
    by_name = sorted(tables, key=lambda table: table.name)
    answer = pb.DescribeCollectionResponse(
        tables=[_history(collection, table) for table in by_name if table.is_used],
        transactions_safe_point=collection.safe_points.transactions,
    )
    if collection.held:
        needs = collection.needs
        answer.held_by = needs.description or "a session"
        if tells_id:
            answer.held_by_session_id = needs.session_id
        answer.held_at = needs.oldest
        answer.held_milliseconds = round(collection.held_seconds * 1000)
    if collection.error is not None:
        answer.error.CopyFrom(to_detail(collection.error))
    if collection.finished_at is not None:
        answer.age_milliseconds = round((now - collection.finished_at) * 1000)
    return answer


def _history(collection: Collection, table: Table) -> pb.TableHistory:
    default = round(collection.times.retention_seconds * 1000)
    collected = collection.collected(table.table_id)
    return pb.TableHistory(
        table=table.name,
        table_id=table.table_id,
        retention_milliseconds=table.retention_milliseconds or default,
        safe_point=collection.safe_points.reads.get(table.table_id, 0),
        collected_below=collected.below,
        history_bytes=collected.history_bytes,
        cells_collected=collected.cells,
        bytes_collected=collected.bytes,
    )
