"""Raises safe points and collects history, as the master orders.

Only one tablet is collected at a time: the share of time that collection may take is the share of
one tablet. Repeating an order that is waiting or running has no effect. If an order fails, the
master repeats it.
"""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument, PercolatorError, TabletMoved
from percolator.services.tabletserver.tablets import Background, Tablets
from percolator.tablet.state import SafePoints
from percolator.tablet.tablet import Tablet
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.status import to_detail


class HistoryCollector:
    """Raises the safe points and collects the history of one tablet server."""

    def __init__(self, tablets: Tablets, background: Background, log: BoundLogger) -> None:
        self._tablets = tablets
        self._background = background
        self._log = log
        self._wanted: dict[tuple[int, int], tuple[int, int]] = {}
        """Orders by tablet and epoch, oldest first: the timestamp below which to collect, and the
        one below which no transaction continues."""
        self._running: asyncio.Task[Any] | None = None
        self.passes = 0
        self.cells = 0
        self.bytes = 0
        """Passes, cells and bytes are those of this process."""

    async def raise_all(self, safe_points: pb.RaiseSafePointsRequest) -> pb.RaiseSafePointsResponse:
        """Raises each independently: a tablet that is not here does not affect the others."""
        named: set[int] = set()
        for index, order in enumerate(safe_points.safe_points):
            if order.tablet_id in named:
                # Each costs a durable write, one after another: thousands would take seconds.
                raise InvalidArgument(
                    f"safe_points[{index}].tablet_id", f"{order.tablet_id} is named twice"
                )
            named.add(order.tablet_id)
        raised = await asyncio.gather(*map(self._raised, safe_points.safe_points))
        return pb.RaiseSafePointsResponse(safe_points=raised)

    async def _raised(self, order: pb.SafePoint) -> pb.RaisedSafePoint:
        try:
            if order.collect_below > order.reads:
                raise InvalidArgument("collect_below", "is above the safe point of reads")
            tablet = await self._tablet(order.tablet_id, order.epoch)
            await tablet.raise_safe_points(SafePoints(order.reads, order.transactions))
        except PercolatorError as error:
            return pb.RaisedSafePoint(error=to_detail(error))
        if order.collect_below:
            wanted = order.collect_below, order.transactions
            self._want((order.tablet_id, order.epoch), *wanted)
        collected = tablet.collected
        return pb.RaisedSafePoint(
            reads=tablet.safe_points.reads,
            transactions=tablet.safe_points.transactions,
            collected_below=collected.below,
            history_bytes=collected.history_bytes,
            cells_collected=tablet.cells_collected,
            bytes_collected=tablet.bytes_collected,
        )

    async def _tablet(self, tablet_id: int, epoch: int) -> Tablet:
        tablet = await self._tablets.serving(pb.TabletTarget(tablet_id=tablet_id, epoch=epoch))
        if tablet.identity.epoch != epoch:
            raise TabletMoved(
                f"tablet {tablet_id} is served at epoch {tablet.identity.epoch}, not {epoch}",
                tablet_id=tablet_id,
                epoch=epoch,
            )
        return tablet

    def _want(self, tablet: tuple[int, int], below: int, ended_below: int) -> None:
        before, ended_before = self._wanted.get(tablet, (0, 0))
        self._wanted[tablet] = max(below, before), max(ended_below, ended_before)
        if self._running is None:
            self._running = self._background("collect history", self._collect())

    async def _collect(self) -> None:
        try:
            while self._wanted:
                key = next(iter(self._wanted))
                await self._collect_one(key, *self._wanted.pop(key))
        finally:
            self._running = None

    async def _collect_one(self, key: tuple[int, int], below: int, ended_below: int) -> None:
        log = self._log.bind(tablet=key[0], epoch=key[1])
        try:
            tablet = await self._tablet(*key)
            done = await tablet.collect(below, ended_below)
        except PercolatorError as error:
            log.info("history not collected", error=str(error))
            return
        self.passes += 1
        self.cells += done.cells
        self.bytes += done.bytes
        if done.cells:
            log.info("history collected", cells=done.cells, bytes=done.bytes)
