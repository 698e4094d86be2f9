"""Notifications in tablets: found by scans and streams, deleted as ordinary mutations."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import replace
from math import inf

from percolator.errors import PercolatorError
from percolator.observers.finding.notification_watch import watch_work
from percolator.observers.finding.tablet_pass import TabletContext, TabletPass
from percolator.observers.finding.tablet_search import find_work
from percolator.observers.port import Admission, FoundWork, Waiting, WorkHints, WorkRequest
from percolator.protocol import steps
from percolator.routing.cells import CellMutation


class TabletNotifications:
    """`percolator.observers.port.Notifications` of tablet servers."""

    pause_seconds_max = inf
    """Streams announce what is written."""

    def __init__(self, context: TabletContext) -> None:
        self._context = context

    async def look(self, admission: Admission, *, everything: bool) -> int:
        return await TabletPass(self._context, admission).run(everything=everything)

    def hints(
        self, watched: Mapping[int, Sequence[bytes]], *, listen_only: bool = False
    ) -> AsyncGenerator[WorkHints, None]:
        context = self._context
        return watch_work(
            context.world,
            context.tablets,
            context.catalog.all_tablets,
            watched,
            listen_only=listen_only,
        )

    async def survey(
        self, request: WorkRequest, deadline: float = inf
    ) -> AsyncGenerator[FoundWork, None]:
        """Tablet by tablet; the answers of one tablet come in row order. Each call has the usual
        time limit."""
        context = self._context
        places = [request]
        while places:
            until = min(context.deadline(), deadline)
            found = await find_work(context.world, context.tablets, places, until)
            places = []
            for answer in found:
                if answer.problem is not None:
                    raise answer.problem
                if answer.rest is not None:
                    start, end = answer.rest
                    places.append(replace(answer.request, start=start, end=end))
                yield answer

    async def forget(self, handled: Sequence[Waiting], deadline: float) -> PercolatorError | None:
        sent = [
            CellMutation(
                one.table_id,
                steps.forget_notifications(one.row, one.column, one.observer, one.timestamps),
            )
            for one in handled
        ]
        answers = await self._context.env.cells.mutate(sent, deadline)
        return next((one for one in answers if isinstance(one, PercolatorError)), None)
