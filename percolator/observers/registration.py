"""Registers a worker's observers with the cluster, finds out which to run, and removes them.

A worker that starts adds its observers to the schemas of their tables; once that returns, every
commit notifies them. What was committed before is left to the backfill that the same change owes
them. If a table does not exist yet, it registers them in advance, and the table is created with
them: no commit comes before the registration. It never removes or changes a registered
observer: two workers with different code each run the observers that they have, but a name has only
one definition.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    SchemaError,
    UsageError,
)
from percolator.observers.context import WorkerContext, WorkRequest
from percolator.observers.dead_letters import dead_letters_table
from percolator.observers.definition import Observer
from percolator.observers.observer_change import notified_alike
from percolator.observers.watched import Watched
from percolator.routing.catalog import with_remedy
from percolator.v1 import master_pb2
from percolator.v1 import master_pb2 as pb

_log = logging.getLogger(__name__)

_REFRESH_SECONDS = 2.0
"""How often a worker checks whether observers were paused, resumed or removed."""


async def register(
    context: WorkerContext,
    observers: Sequence[Observer],
    *,
    in_advance: dict[str, None] | None = None,
) -> list[Watched]:
    """Registers observers, and creates what any worker needs to run them.

    Raises `SchemaError` if a table does not exist, and `InvalidArgument` if a name is registered
    with another definition. With `in_advance`, which names the tables for which this was done
    before, first registers the observers of such tables, for when they are created.
    """
    # All are checked first: what a refused program had registered would wait for a worker forever.
    by_table = _by_table(observers)
    found: dict[str, pb.Table] = {}
    absent: SchemaError | None = None
    for table, own in by_table.items():
        try:
            found[table] = await context.describe(table)
        except SchemaError as error:
            absent = absent or with_remedy(error, table)
        else:
            _missing(found[table], own)
    if absent is not None:
        if in_advance is None:
            raise absent
        for table in [one for one in by_table if one not in found]:
            await _register_in_advance(context, table, by_table[table], in_advance)
    watched: list[Watched] = []
    for table, described in found.items():
        own = by_table[table]
        missing = _missing(described, own)
        # The master keeps observers in advance until it hears of them with their table: it may be
        # dropped and created again before the worker has seen it.
        confirmed = in_advance is not None and table in in_advance
        if missing or confirmed:
            added = [_registered_as(one) for one in own] if confirmed else missing
            request = pb.ChangeObserversRequest(table=table, add=added)
            described = await context.catalog.change_observers(request, context.env.deadline())
            _missing(described, own)  # another worker may have been first, with another definition
            _tell_of_registration(described, missing)
            if in_advance is not None:
                in_advance.pop(table, None)
        watched += [Watched(observer, described.table_id) for observer in own]
        _note(described, [one for one in watched if one.table_id == described.table_id])
        found[table] = described
    if absent is not None:
        raise absent
    for table, own in by_table.items():
        _tell_of_ignored_choices(found[table], own)
    # A worker may have a client's token, with which it could not create the table.
    await dead_letters_table(context)
    return watched


async def _register_in_advance(
    context: WorkerContext, table: str, own: Sequence[Observer], before: dict[str, None]
) -> None:
    """Makes sure that a table that does not exist yet is created with these observers.

    The first time, it replaces what an earlier version of the program may have left: nothing was
    notified yet. After that, another worker that means something else is refused, or refuses this
    one, as with a table that exists.
    """
    added = [_registered_as(one) for one in own]
    request = pb.ChangeObserversRequest(
        table=table, add=added, awaited=True, replace=table not in before
    )
    try:
        exists = await context.catalog.await_table(request, context.env.deadline())
    except InvalidArgument as error:
        # The program knows its list of observers, not the fields of the request.
        raise InvalidArgument("observers", error.reason) from None
    except PermissionDenied:
        # A client's token: whoever may register observers does it when the table exists.
        _log.debug("the observers of table %s are not registered in advance", table)
        return
    if not exists and table not in before:
        names = ", ".join(one.name for one in own)
        _log.info("table %s will be created with the observers %s", table, names)
        before[table] = None


def _by_table(observers: Sequence[Observer]) -> Mapping[str, list[Observer]]:
    found: dict[str, list[Observer]] = {}
    for observer in observers:
        found.setdefault(observer.table.name, []).append(observer)
    return found


def _missing(table: pb.Table, observers: Sequence[Observer]) -> list[pb.Observer]:
    known = {one.name: one for one in table.observers}
    missing = []
    for observer in observers:
        own = _registered_as(observer)
        there = known.get(observer.name)
        if there is None:
            missing.append(own)
        elif not notified_alike(there, own):
            raise InvalidArgument(
                "observers",
                f"table {table.name!r} has another observer {observer.name!r}: it is registered "
                f"for {_described(there)}, but this program's is for {_described(own)}; remove it, "
                "or choose another name",
            )
    return missing


def _registered_as(observer: Observer) -> pb.Observer:
    columns = sorted(column.name for column in observer.columns)
    return pb.Observer(
        name=observer.name, columns=columns, weak=observer.weak, backfill=observer.backfill
    )


def _described(observer: pb.Observer) -> str:
    names = [column.decode(errors="backslashreplace") for column in sorted(observer.columns)]
    return f"{', '.join(names)}{' (weak)' if observer.weak else ''}"


def _tell_of_registration(table: pb.Table, added: Sequence[pb.Observer]) -> None:
    names = {one.name for one in added}
    for one in table.observers:
        if one.name in names:
            _log.info(
                "observer %s of table %s was registered: %s",
                one.name,
                table.name,
                "it is weak, and runs only when it is notified"
                if one.weak
                else "it also handles the cells that are there already (backfill)"
                if one.backfill
                else "it handles only what is written from now on (backfill=False)",
            )


def _tell_of_ignored_choices(table: pb.Table, observers: Sequence[Observer]) -> None:
    """The first registration decides on the backfill: a changed `backfill=` has no effect."""
    for observer in observers:
        for there in table.observers:
            if there.name == observer.name and there.backfill != observer.backfill:
                _log.warning(
                    "observer %s of table %s was registered with backfill=%s, and stays so; "
                    "backfill=%s has no effect%s",
                    observer.name,
                    table.name,
                    there.backfill,
                    observer.backfill,
                    ": `percolator observers backfill` notifies it of the cells that are there"
                    if observer.backfill
                    else "",
                )


def _note(table: pb.Table, watched: Sequence[Watched]) -> bool:
    """Notes which of them to run. Returns whether one is to be run that was not run before."""
    known = {one.name: one for one in table.observers}
    resumed = False
    for one in watched:
        # A table that was dropped and created again has the same name, but is another table.
        there = known.get(one.observer.name) if one.table_id == table.table_id else None
        # It may have been removed and registered anew, by a program that means something else.
        is_ours = there is not None and notified_alike(there, _registered_as(one.observer))
        is_active = there is not None and is_ours and not there.paused
        if is_active != one.is_active:
            if one.table_id != table.table_id:
                _tell_of_drop(one)
            elif there is not None and not is_ours:
                _tell_of_namesake(one, there)
            else:
                state = "is running" if is_active else "is paused" if there else "was removed"
                _log.info("observer %s of table %s %s", one.observer.name, table.name, state)
        one.owed = there.owed if is_ours and there is not None and there.HasField("owed") else None
        resumed = resumed or (is_active and not one.is_active)
        one.is_active, one.is_gone = is_active, not is_ours
    return resumed


def _tell_of_drop(watched: Watched) -> None:
    _log.warning(
        "observer %s of table %s has stopped: the table was dropped. For another table of this "
        "name, restart the worker",
        watched.observer.name,
        watched.observer.table.name,
    )


def _tell_of_namesake(watched: Watched, there: pb.Observer) -> None:
    _log.warning(
        "observer %s of table %s has stopped: it was removed and registered anew, for %s, but this "
        "worker's is for %s. Restart the worker with the new one",
        watched.observer.name,
        watched.observer.table.name,
        _described(there),
        _described(_registered_as(watched.observer)),
    )


class Registrations:
    """Watches whether the observers of one worker are paused, resumed or removed."""

    def __init__(
        self,
        context: WorkerContext,
        watched: Sequence[Watched],
        on_refreshed: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_refreshed` is called whenever they were looked at."""
        self._context = context
        self._on_refreshed = on_refreshed
        self.watched = watched
        self.changed = asyncio.Event()
        """Set when an observer was resumed, paused or removed."""

    @property
    def active(self) -> list[Watched]:
        return [one for one in self.watched if one.is_active]

    async def keep_forever(self) -> None:
        while True:
            await self._context.world.clock.sleep(_REFRESH_SECONDS)
            await self.refresh()

    async def refresh(self) -> None:
        """Asks the master once. If none answers, everything stays as it is."""
        for table in sorted({one.observer.table.name for one in self.watched}):
            before = [one.is_active for one in self.watched]
            own = [one for one in self.watched if one.observer.table.name == table]
            try:
                _note(await self._context.describe(table), own)
            except SchemaError:
                for one in own:  # the table was dropped, with all its notifications
                    if one.is_active:
                        _tell_of_drop(one)
                    one.is_active, one.is_gone = False, True
            except PercolatorError as error:
                _log.debug("cannot find out whether observers of %s are paused: %s", table, error)
            if before != [one.is_active for one in self.watched]:
                self.changed.set()
        self._on_refreshed()


@dataclass(frozen=True)
class Removed:
    """The result of a removal."""

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

    Notifications left behind by a removed observer would stay forever, and every scan would find
    them. So an observer with pending work is not removed unless the caller has that work thrown
    away. Acknowledgements stay: if the observer is registered again under the same name, it does
    not run again for changes that it has handled. A backfill that is not finished ends: another
    registration owes another one.
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
        if await _count(context, request):
            raise UsageError(
                f"observer {observer!r} of table {table!r} has pending notifications: run it until "
                "they are done, or purge them"
            )
    if registered:
        # Once this returns, no commit notifies it.
        change = master_pb2.ChangeObserversRequest(table=table, remove=[observer])
        await context.catalog.change_observers(change, context.env.deadline())
    purged = await _purge(context, request, on_progress) if purge else 0
    if purge and not registered and not purged:
        raise SchemaError(f"table {table!r} has no observer {observer!r}", table=table)
    left = 0 if purge else await _count(context, request)
    return Removed(registered, purged, left)


async def _removed_in_advance(context: WorkerContext, table: str, observer: str) -> bool:
    """Removes an observer that was registered for a table that does not exist yet. False if there
    is none."""
    for one in await context.catalog.awaited(context.env.deadline()):
        if one.name == table and any(known.name == observer for known in one.observers):
            change = master_pb2.ChangeObserversRequest(table=table, remove=[observer], awaited=True)
            await context.catalog.await_table(change, context.env.deadline())
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
                    problem = await context.notifications.forget(
                        answer.waiting, context.env.deadline()
                    )
                    if problem is not None:
                        raise problem
                    purged += len(answer.waiting)
                    on_progress(purged)
        if not found:
            return purged
