"""Safe points raised, and history collected, as the master orders.

One tablet is collected at a time, whatever was ordered: the share of the time that collection may
take is that of one tablet. An order that is repeated while it waits or runs is the same order; one
that failed is left to the master to repeat.
"""

from __future__ import annotations

import asyncio
from typing import Any

from structlog.stdlib import BoundLogger

from percolator.errors import InvalidArgument, PercolatorError, TabletMoved
from percolator.tablet.tablet import SafePoints, Tablet
from percolator.v1 import tabletserver_pb2 as wire
from percolator.wire.status import to_detail
from services.tabletserver.served_tablet import Background
from services.tabletserver.tablets import Tablets


class Collecting:
    """Of one tablet server."""

    def __init__(self, tablets: Tablets, background: Background, log: BoundLogger) -> None:
        self._tablets = tablets
        self._background = background
        self._log = log
        self._wanted: dict[tuple[int, int], int] = {}
        """By tablet and epoch: below what to collect, in the order in which it was ordered."""
        self._running: asyncio.Task[Any] | None = None
        self.passes = 0
        self.cells = 0
        self.bytes = 0
        """Collected by this process."""

    async def raise_all(
        self, safe_points: wire.RaiseSafePointsRequest
    ) -> wire.RaiseSafePointsResponse:
        """Each on its own: one tablet that is not here says nothing about the others."""
        raised = await asyncio.gather(*map(self._raised, safe_points.safe_points))
        return wire.RaiseSafePointsResponse(safe_points=raised)

    async def _raised(self, order: wire.SafePoint) -> wire.RaisedSafePoint:
        try:
            if order.collect_below > order.reads:
                raise InvalidArgument("collect_below", "is above the safe point of reads")
            tablet = self._tablet(order.tablet_id, order.epoch)
            await tablet.raise_safe_points(SafePoints(order.reads, order.transactions))
        except PercolatorError as error:
            return wire.RaisedSafePoint(error=to_detail(error))
        if order.collect_below:
            self._want((order.tablet_id, order.epoch), order.collect_below)
        collected = tablet.collected
        return wire.RaisedSafePoint(
            reads=tablet.safe_points.reads,
            transactions=tablet.safe_points.transactions,
            collected_below=collected.below,
            history_bytes=collected.history_bytes,
            cells_collected=tablet.cells_collected,
            bytes_collected=tablet.bytes_collected,
        )

    def _tablet(self, tablet_id: int, epoch: int) -> Tablet:
        tablet = self._tablets.serving(wire.TabletTarget(tablet_id=tablet_id, epoch=epoch))
        if tablet.identity.epoch != epoch:
            raise TabletMoved(
                f"tablet {tablet_id} is served at epoch {tablet.identity.epoch}, not {epoch}",
                tablet_id=tablet_id,
                epoch=epoch,
            )
        return tablet

    def _want(self, tablet: tuple[int, int], below: int) -> None:
        self._wanted[tablet] = max(below, self._wanted.get(tablet, 0))
        if self._running is None:
            self._running = self._background("collect history", self._collect())

    async def _collect(self) -> None:
        try:
            while self._wanted:
                key = next(iter(self._wanted))
                below = self._wanted.pop(key)
                await self._collect_one(key, below)
        finally:
            self._running = None

    async def _collect_one(self, key: tuple[int, int], below: int) -> None:
        log = self._log.bind(tablet=key[0], epoch=key[1])
        try:
            done = await self._tablet(*key).collect(below)
        except PercolatorError as error:
            log.info("history not collected", error=str(error))
            return
        self.passes += 1
        self.cells += done.cells
        self.bytes += done.bytes
        if done.cells:
            log.info("history collected", cells=done.cells, bytes=done.bytes)
