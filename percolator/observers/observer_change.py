"""Applies a change to a table's observers: for masters, and for their doubles in tests.

A bad request changes nothing, and its error names the field. A registered observer keeps its
columns unless the request says `replace`: otherwise two programs that mean different things by one
name would change it back and forth, and each would lose notifications because of the other.

An observer that wants a backfill is owed one from the change on that registers it, in the same
record: whoever registers it may die right after, and any worker sees what is left to do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from percolator.codecs.names import COLUMN_BYTES_MAX
from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument
from percolator.schema import OBSERVER_BYTES_MAX
from percolator.v1 import master_pb2 as pb

OBSERVERS_MAX = 1_000
"""The most observers of one table."""
OBSERVERS_PER_COLUMN_MAX = 64
"""The most observers of one column: a commit writes a notification for each, in one mutation."""


class ChangedObservers(NamedTuple):
    """The observers of a table after a change, by name."""

    observers: list[pb.Observer]
    raises_version: bool
    """Commits notify different observers than before, and clients that commit must know it."""


def changed_observers(table: pb.Table, request: pb.ChangeObserversRequest) -> ChangedObservers:
    """The observers of a table after a change. Raises `InvalidArgument` for a bad request."""
    return _changed(table.name, table.observers, request, owed_version=table.schema_version + 1)


def awaited_observers(
    table: str, known: Iterable[pb.Observer], request: pb.ChangeObserversRequest
) -> list[pb.Observer]:
    """The observers of a table that does not exist yet. They owe nothing, since the table is
    created with them. Raises `InvalidArgument` for a bad request."""
    if request.pause or request.resume:
        field = "pause" if request.pause else "resume"
        raise InvalidArgument(field, f"there is no table {table!r} yet")
    return _changed(table, known, request, owed_version=0).observers


def _changed(
    table: str,
    observers: Iterable[pb.Observer],
    request: pb.ChangeObserversRequest,
    *,
    owed_version: int,
) -> ChangedObservers:
    """`owed_version` is that of the backfills that become owed; 0 if there are no cells."""
    before = {one.name: one for one in observers}
    after = {name: _copy(one) for name, one in before.items()}
    for name in request.remove:
        if after.pop(name, None) is None:
            raise InvalidArgument("remove", f"{table!r} has no observer {name!r}")
    for index, one in enumerate(_checked(request.add)):
        known = after.get(one.name)
        # A request in advance replaces nothing once the table exists: it may have been created
        # meanwhile, with the observer of another worker, whose notifications would be lost.
        may_replace = request.replace and not (request.awaited and owed_version)
        if known is not None and not notified_alike(known, one) and not may_replace:
            raise InvalidArgument(
                f"add[{index}]",
                f"table {table!r} already has another observer {one.name!r}, for "
                f"{_described(known)}; remove it, or choose another name",
            )
        if known is not None and notified_alike(known, one):
            continue  # the first registration decides on the backfill, too
        one.paused = known is not None and known.paused
        if owed_version:
            _owe(one, known, owed_version)
        after[one.name] = one
    _pause(table, after, request)
    if len(after) > OBSERVERS_MAX:
        raise InvalidArgument("add", f"{table!r} would have more than {OBSERVERS_MAX} observers")
    for column, count in Counter(c for one in after.values() for c in one.columns).items():
        if count > OBSERVERS_PER_COLUMN_MAX:
            raise InvalidArgument(
                "add",
                f"column {quoted(column)} would have more than "
                f"{OBSERVERS_PER_COLUMN_MAX} observers",
            )
    # The version is also what tells the backfills of two registrations apart.
    raises_version = before.keys() != after.keys() or any(
        not notified_alike(before[name], after[name]) or before[name].owed != after[name].owed
        for name in after
    )
    return ChangedObservers([after[name] for name in sorted(after)], raises_version)


def _owe(added: pb.Observer, known: pb.Observer | None, version: int) -> None:
    """Notes the columns of whose cells it has to be notified: those that are new to it, and those
    of a backfill that is not finished."""
    new = set(added.columns) if added.backfill else set()
    unfinished = set[bytes]()
    if known is not None and not known.weak:
        new -= set(known.columns)
        unfinished = set(known.owed.columns).intersection(added.columns)
    columns = new | unfinished
    if columns and not added.weak:
        added.owed.CopyFrom(pb.OwedBackfill(version=version, columns=sorted(columns)))


def with_report(
    observers: Iterable[pb.Observer], request: pb.ReportBackfillRequest
) -> list[pb.Observer]:
    """The observers of a table after a worker has told how far a backfill has come. A report of
    another registration changes nothing, and neither does an older one that comes late."""
    after = [_copy(one) for one in observers]
    for one in after:
        owed = one.owed
        if one.name == request.observer and owed.version == request.version and owed.columns:
            if request.done:
                one.ClearField("owed")
            elif request.row > owed.row:
                owed.row, owed.cells = request.row, request.cells
    return after


def report_backfill(
    table: pb.Table, request: pb.ReportBackfillRequest
) -> pb.ReportBackfillResponse:
    """Takes a report in, for doubles of a master, which keep tables as messages."""
    reported = with_report(table.observers, request)
    del table.observers[:]
    table.observers.extend(reported)
    return pb.ReportBackfillResponse(table=table)


def _pause(
    table: str, observers: dict[str, pb.Observer], request: pb.ChangeObserversRequest
) -> None:
    for field, names, paused in (
        ("pause", request.pause, True),
        ("resume", request.resume, False),
    ):
        for name in names:
            if name not in observers:
                raise InvalidArgument(field, f"{table!r} has no observer {name!r}")
            observers[name].paused = paused
    both = set(request.pause) & set(request.resume)
    if both:
        raise InvalidArgument(
            "resume", f"{min(both)!r} is also in pause; name it in only one of them"
        )


def _checked(observers: Sequence[pb.Observer]) -> list[pb.Observer]:
    found: dict[str, pb.Observer] = {}
    for index, observer in enumerate(observers):
        field = f"add[{index}]"
        _check_name(f"{field}.name", observer.name)
        if observer.name in found:
            raise InvalidArgument(f"{field}.name", f"{observer.name!r} appears twice")
        if not observer.columns:
            raise InvalidArgument(f"{field}.columns", "expected at least one column")
        for column in observer.columns:
            if not 0 < len(column) <= COLUMN_BYTES_MAX:
                raise InvalidArgument(
                    f"{field}.columns", f"expected 1 to {COLUMN_BYTES_MAX} bytes each"
                )
            if column[0] == 0:
                raise InvalidArgument(
                    f"{field}.columns", f"{quoted(column)} is reserved: it begins with a zero byte"
                )
        if observer.weak and observer.backfill:
            raise InvalidArgument(
                f"{field}.backfill", "a weak observer runs only when it is notified explicitly"
            )
        found[observer.name] = pb.Observer(
            name=observer.name,
            columns=sorted(set(observer.columns)),
            weak=observer.weak,
            backfill=observer.backfill,
        )
    return list(found.values())


def _check_name(field: str, name: str) -> None:
    if not 0 < len(name.encode()) <= OBSERVER_BYTES_MAX:
        raise InvalidArgument(field, f"expected 1 to {OBSERVER_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument(
            field,
            f"{name!r} has invisible characters; use printable ones, without spaces at the ends",
        )


def notified_alike(one: pb.Observer, other: pb.Observer) -> bool:
    """Both are notified of the same changes, and so may have one name."""
    return sorted(one.columns) == sorted(other.columns) and one.weak == other.weak


def _described(observer: pb.Observer) -> str:
    columns = ", ".join(quoted(column) for column in sorted(observer.columns))
    return f"{columns} (weak)" if observer.weak else columns


def _copy(observer: pb.Observer) -> pb.Observer:
    copied = pb.Observer()
    copied.CopyFrom(observer)
    return copied
