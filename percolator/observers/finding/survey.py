"""Lists everything that waits in a range of a table, tablet by tablet."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from math import inf

from percolator.observers.context import WorkerContext
from percolator.observers.finding.notifications import FoundWork, WorkRequest, find_work


async def survey(
    context: WorkerContext, request: WorkRequest, deadline: float = inf
) -> AsyncGenerator[FoundWork, None]:
    """Yields answers until the whole range is covered; those of one tablet come in row order.

    Each call has the usual time limit, and ends at the deadline at the latest. Raises the error of
    a tablet that did not answer.
    """
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
