"""Removing an observer, and what was notified to it.

Notifications that are left when an observer goes would wait for ever, and be found by every scan.
So an observer with work left is not removed, unless that is to be thrown away. Acknowledgements
stay: an observer that comes back under the same name does not answer again what it has answered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from percolator.errors import PercolatorError, SchemaError, UsageError
from percolator.observers.client import Client
from percolator.observers.survey import survey
from percolator.protocol import steps
from percolator.v1 import master_pb2
from percolator.wire.notifications import FoundWork, WorkQuestion
from percolator.wire.questions import Step


@dataclass(frozen=True)
class Removed:
    """What became of an observer."""

    was_registered: bool
    purged: int
    """Cells whose notifications were deleted."""
    left: int
    """Cells that were notified in the very moment of removal, and are still to be purged."""


async def remove_observer(
    client: Client,
    table: str,
    observer: str,
    *,
    purge: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Removed:
    """Raises `UsageError` when it has work left that is not to be purged, `SchemaError` when there
    is no such table, or no such observer and nothing that was notified to it."""
    described = await client.describe(table)
    registered = any(one.name == observer for one in described.observers)
    question = WorkQuestion(described.table_id, observers=(observer.encode(),))
    if not purge:
        if not registered:
            raise SchemaError(f"table {table!r} has no observer {observer!r}", table=table)
        if await _has_work(client, question):
            raise UsageError(
                f"observer {observer!r} of table {table!r} has notifications left: run it until "
                "they are done, or purge them"
            )
    if registered:
        # From its return on, no commit notifies it.
        request = master_pb2.ChangeObserversRequest(table=table, remove=[observer])
        await client.catalog.change_observers(request, client.deadline())
    purged = await _purge(client, question, on_progress) if purge else 0
    if purge and not registered and not purged:
        raise SchemaError(f"table {table!r} has no observer {observer!r}", table=table)
    left = 0 if purge else await _count(client, question)
    return Removed(registered, purged, left)


async def _has_work(client: Client, question: WorkQuestion) -> bool:
    async with aclosing(survey(client, question)) as answers:
        async for answer in answers:
            if answer.waiting:
                return True
    return False


async def _count(client: Client, question: WorkQuestion) -> int:
    async with aclosing(survey(client, question)) as answers:
        return sum([len(answer.waiting) async for answer in answers])


async def _purge(client: Client, question: WorkQuestion, on_progress: Callable[[int], None]) -> int:
    """Deletes until none is found: of very many of one cell, a look tells only some."""
    purged = 0
    while True:
        found = False
        async with aclosing(survey(client, question)) as answers:
            async for answer in answers:
                if answer.waiting:
                    found = True
                    await _delete(client, answer)
                    purged += len(answer.waiting)
                    on_progress(purged)
        if not found:
            return purged


async def _delete(client: Client, answer: FoundWork) -> None:
    sent = [
        Step(
            one.table_id,
            steps.forget_notifications(one.row, one.column, one.observer, one.timestamps),
        )
        for one in answer.waiting
    ]
    for outcome in await client.around.cells.mutate(sent, client.deadline()):
        if isinstance(outcome, PercolatorError):
            raise outcome
