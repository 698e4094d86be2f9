"""Looking at all that waits in a range of a table, tablet by tablet, to the end."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace
from math import inf

from percolator.observers.client import Client
from percolator.wire.notifications import FoundWork, WorkQuestion, find_work


async def survey(
    client: Client, question: WorkQuestion, deadline: float = inf
) -> AsyncGenerator[FoundWork, None]:
    """Answers until nothing of the range remains; those of one tablet come in order of its rows.

    Each is waited for as long as any call, but not beyond the deadline. Raises why a tablet did not
    answer.
    """
    places = [question]
    while places:
        until = min(client.deadline(), deadline)
        found = await find_work(client.world, client.tablets, places, until)
        places = []
        for answer in found:
            if answer.problem is not None:
                raise answer.problem
            if answer.rest is not None:
                start, end = answer.rest
                places.append(replace(answer.question, start=start, end=end))
            yield answer
