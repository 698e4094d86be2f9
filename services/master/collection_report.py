"""How the leader describes history: how much there is, and what holds back its collection."""

from __future__ import annotations

from percolator.v1 import master_pb2 as wire
from percolator.v1 import tabletserver_pb2
from percolator.wire.status import to_detail
from services.master.leader import Leader
from services.master.map.cluster_map import Table


def describe(leader: Leader, now: float) -> wire.DescribeCollectionResponse:
    """Describes history. `now` is monotonic time. `NotReady` until the safe points are known."""
    collection = leader.collection
    tables = sorted(leader.store.current.tables.values(), key=lambda table: table.name)
    answer = wire.DescribeCollectionResponse(
        tables=[_history(leader, table) for table in tables if not table.deleting],
        transactions_safe_point=collection.safe_points.transactions,
    )
    if collection.held:
        needs = collection.needs
        answer.held_by = needs.description or "a session"
        answer.held_by_session_id = needs.session_id
        answer.held_at = needs.oldest
    if collection.error is not None:
        answer.error.CopyFrom(to_detail(collection.error))
    if collection.finished_at is not None:
        answer.age_milliseconds = round((now - collection.finished_at) * 1000)
    return answer


def _history(leader: Leader, table: Table) -> wire.TableHistory:
    collection = leader.collection
    default = round(collection.times.retention_seconds * 1000)
    nothing = tabletserver_pb2.RaisedSafePoint()
    said = [
        collection.tablets.get(tablet.tablet_id, nothing)
        for tablet in leader.store.current.of_tables[table.table_id]
    ]
    return wire.TableHistory(
        table=table.name,
        table_id=table.table_id,
        retention_milliseconds=table.retention_milliseconds or default,
        safe_point=collection.safe_points.reads.get(table.table_id, 0),
        collected_below=min(one.collected_below for one in said),
        history_bytes=sum(one.history_bytes for one in said),
        cells_collected=sum(one.cells_collected for one in said),
        bytes_collected=sum(one.bytes_collected for one in said),
    )
