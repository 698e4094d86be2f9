"""Models of tablet servers, as the masters see them.

They show what the epoch directories guarantee, which have tests of their own: the server that opens
a tablet at the highest epoch has all acknowledged writes, and from then on no other server
acknowledges any.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from percolator.errors import (
    StoreFault,
    StoreUnusable,
    TabletMoved,
)
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire.status import to_detail

_UNREADABLE = StoreUnusable("unreadable", fault=StoreFault.DAMAGED)


@dataclass
class Stored:
    """The contents of one tablet's directory."""

    highest: int = 0
    rows: dict[bytes, bytes] = field(default_factory=dict)
    existed: bool = False
    sealed: bool = False
    damaged: bool = False
    unreadable: bool = False
    """Whether it can be taken over, but not opened."""


class ModelStore:
    """All tablets' directories."""

    def __init__(self) -> None:
        self.tablets: dict[int, Stored] = {}
        self.told: dict[tuple[int, int], str] = {}

    def take_over(self, order: tablets.OpenTabletRequest, server_id: str) -> None:
        first = self.told.setdefault((order.tablet_id, order.epoch), server_id)
        assert first == server_id, f"epoch {order.epoch} of {order.tablet_id} given to two servers"
        stored = self.tablets.setdefault(order.tablet_id, Stored())
        if order.epoch <= stored.highest or stored.sealed:
            raise TabletMoved(
                "used",
                tablet_id=order.tablet_id,
                epoch=order.epoch,
                highest_epoch=stored.highest,
            )
        if stored.damaged or (order.must_exist and not stored.existed):
            raise StoreUnusable("nothing there", fault=StoreFault.DAMAGED)
        if stored.highest < order.served_epoch:
            raise StoreUnusable("only older epochs are there", fault=StoreFault.DAMAGED)
        if order.origin_tablet_id and not stored.existed:
            origin = self.tablets[order.origin_tablet_id]
            assert origin.highest == order.origin_epoch, "cloned from a tablet that went on"
            origin.sealed = True
            stored.rows = dict(origin.rows)
        stored.highest, stored.existed = order.epoch, True

    def stands(self, tablet_id: int, epoch: int) -> bool:
        stored = self.tablets[tablet_id]
        return stored.highest == epoch and not stored.sealed


class ModelServer:
    """A tablet server as the masters see it."""

    def __init__(self, store: ModelStore, server_id: str) -> None:
        self.server_id = server_id
        self.open: dict[int, tablets.OpenTabletRequest] = {}
        self.opens_nothing = False
        self._store = store

    async def report(self, request: tablets.ReportRequest) -> tablets.ReportResponse:
        reported = [
            tablets.ReportedTablet(
                tablet_id=one.tablet_id,
                epoch=one.epoch,
                schema_version=one.schema_version,
                error=to_detail(_UNREADABLE) if self._is_unreadable(one) else None,
            )
            for one in self.open.values()
        ]
        return tablets.ReportResponse(server_id=self.server_id, tablets=reported)

    async def open_tablet(self, request: tablets.OpenTabletRequest) -> tablets.OpenTabletResponse:
        present = self.open.get(request.tablet_id)
        if present is None or present.epoch < request.epoch:
            await asyncio.sleep(0.005)
            self._store.take_over(request, self.server_id)
            self.open[request.tablet_id] = request
        elif present.epoch > request.epoch:
            raise TabletMoved("old", tablet_id=request.tablet_id, epoch=request.epoch)
        elif present.schema_version < request.schema_version:
            present.schema_version = request.schema_version
            present.change_feed = request.change_feed
            del present.ttls[:]
            present.ttls.extend(request.ttls)
        now = self.open[request.tablet_id]
        if self._is_unreadable(now):
            raise _UNREADABLE
        return tablets.OpenTabletResponse(
            tablet=tablets.TabletDescription(
                tablet_id=now.tablet_id, epoch=now.epoch, schema_version=now.schema_version
            )
        )

    async def close_tablet(
        self, request: tablets.CloseTabletRequest
    ) -> tablets.CloseTabletResponse:
        present = self.open.get(request.tablet_id)
        if present is not None and present.epoch == request.epoch:
            del self.open[request.tablet_id]
        return tablets.CloseTabletResponse()

    async def describe_tablets(
        self, request: tablets.DescribeTabletsRequest
    ) -> tablets.DescribeTabletsResponse:
        described = [
            tablets.TabletDescription(
                tablet_id=key,
                epoch=one.epoch,
                statistics=tablets.TabletStatistics(bytes=sum(map(len, self._rows(one).values()))),
            )
            for key, one in self.open.items()
        ]
        return tablets.DescribeTabletsResponse(tablets=described)

    async def propose_split(
        self, request: tablets.ProposeSplitRequest
    ) -> tablets.ProposeSplitResponse:
        rows = sorted(self._rows(self.open[request.target.tablet_id]))
        return tablets.ProposeSplitResponse(row=rows[len(rows) // 2] if len(rows) > 1 else None)

    def write(self, location: TabletLocation, row: bytes, value: bytes) -> None:
        """Returns when the write is acknowledged."""
        self._serving(location)
        self._store.tablets[location.tablet_id].rows[row] = value

    def read(self, location: TabletLocation, row: bytes) -> bytes | None:
        self._serving(location)
        return self._store.tablets[location.tablet_id].rows.get(row)

    def _is_unreadable(self, order: tablets.OpenTabletRequest) -> bool:
        return self.opens_nothing or self._store.tablets[order.tablet_id].unreadable

    def _rows(self, order: tablets.OpenTabletRequest) -> dict[bytes, bytes]:
        rows, bounds = self._store.tablets[order.tablet_id].rows, order.range
        return {
            row: value
            for row, value in rows.items()
            if bounds.start <= row and (not bounds.end or row < bounds.end)
        }

    def _serving(self, location: TabletLocation) -> None:
        present = self.open.get(location.tablet_id)
        if (
            present is None
            or present.epoch != location.epoch
            or not self._store.stands(location.tablet_id, location.epoch)
        ):
            raise TabletMoved("moved", tablet_id=location.tablet_id, epoch=location.epoch)
