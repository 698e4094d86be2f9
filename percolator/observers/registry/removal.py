"""Removes an observer and its notifications.

Notifications left behind by a removed observer would stay forever, and every scan would find them.
So an observer with pending work is not removed unless the caller has that work thrown away.
Acknowledgements stay: if the observer is registered again under the same name, it does not run
again for changes that it has handled. A backfill that is not finished ends: another registration
owes another one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

from percolator.errors import SchemaError, UsageError
from percolator.observers.context import WorkerContext
from percolator.observers.port import WorkRequest
from percolator.v1 import master_pb2


@dataclass(frozen=True)
class Removed:
    """What became of an observer."""

    was_registered: bool
    purged: int
    """Cells whose notifications were deleted."""
    left: int
    """Cells whose notifications arrived during the removal, and still have to be purged."""


async def remove_observer(
    context: WorkerContext,
    table: str,
    observer: str,
    *,
    purge: bool = False,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Removed:
    """Removes an observer, and with `purge` its pending notifications.

    Raises `UsageError` if it has pending work and `purge` is not given. Raises `SchemaError` if the
    table does not exist, or if the observer does not exist and has no notifications either.
    """
    try:
        described = await context.describe(table)
    except SchemaError:
        if not await _removed_in_advance(context, table, observer):
            raise
        return Removed(was_registered=True, purged=0, left=0)
    registered = any(one.name == observer for one in described.observers)
    request = WorkRequest(described.table_id, observers=(observer.encode(),))
    if not purge:
        if not registered:
            raise SchemaError(f"table {table!r} has no observer {observer!r}", table=table)
        if await _has_work(context, request):
            raise UsageError(
                f"observer {observer!r} of table {table!r} has pending notifications: run it until "
                "they are done, or purge them"
            )
    if registered:
        # Once this returns, no commit notifies it.
        change = master_pb2.ChangeObserversRequest(table=table, remove=[observer])
        await context.catalog.change_observers(change, context.deadline())
    purged = await _purge(context, request, on_progress) if purge else 0
    if purge and not registered and not purged:
        raise SchemaError(f"table {table!r} has no observer {observer!r}", table=table)
    left = 0 if purge else await _count(context, request)
    return Removed(registered, purged, left)


async def _removed_in_advance(context: WorkerContext, table: str, observer: str) -> bool:
    """Removes an observer that was registered for a table that does not exist yet. False if there
    is none."""
    for one in await context.catalog.awaited(context.deadline()):
        if one.name == table and any(known.name == observer for known in one.observers):
            change = master_pb2.ChangeObserversRequest(table=table, remove=[observer], awaited=True)
            await context.catalog.await_table(change, context.deadline())
            return True
    return False


async def _has_work(context: WorkerContext, request: WorkRequest) -> bool:
    async with aclosing(context.notifications.survey(request)) as answers:
        async for answer in answers:
            if answer.waiting:
                return True
    return False


async def _count(context: WorkerContext, request: WorkRequest) -> int:
    async with aclosing(context.notifications.survey(request)) as answers:
        return sum([len(answer.waiting) async for answer in answers])


async def _purge(
    context: WorkerContext, request: WorkRequest, on_progress: Callable[[int], None]
) -> int:
    """Deletes until none is found: if a cell has very many, one survey returns only some."""
    purged = 0
    while True:
        found = False
        async with aclosing(context.notifications.survey(request)) as answers:
            async for answer in answers:
                if answer.waiting:
                    found = True
                    problem = await context.notifications.forget(answer.waiting, context.deadline())
                    if problem is not None:
                        raise problem
                    purged += len(answer.waiting)
                    on_progress(purged)
        if not found:
            return purged
