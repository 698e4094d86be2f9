"""Applies a change to a table's observers: for masters, and for their doubles in tests.

A bad request changes nothing, and its error names the field. A registered observer keeps its
columns unless the request says `replace`: otherwise two programs that mean different things by one
name would change it back and forth, and each would lose notifications because of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from percolator.errors import InvalidArgument
from percolator.row_text import quoted
from percolator.schema import COLUMN_BYTES_MAX, OBSERVER_BYTES_MAX
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


def changed_observers(
    table: str, observers: Iterable[pb.Observer], request: pb.ChangeObserversRequest
) -> ChangedObservers:
    """The observers of a table after a change. Raises `InvalidArgument` for a bad request."""
    before = {one.name: one for one in observers}
    after = {name: _copy(one) for name, one in before.items()}
    for name in request.remove:
        if after.pop(name, None) is None:
            raise InvalidArgument("remove", f"{table!r} has no observer {name!r}")
    for index, one in enumerate(_checked(request.add)):
        known = after.get(one.name)
        if known is not None and not notified_alike(known, one) and not request.replace:
            raise InvalidArgument(
                f"add[{index}]",
                f"{table!r} already has another observer {one.name!r}, for {_described(known)}",
            )
        one.paused = known is not None and known.paused
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
    raises_version = before.keys() != after.keys() or any(
        not notified_alike(before[name], after[name]) for name in after
    )
    return ChangedObservers([after[name] for name in sorted(after)], raises_version)


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
        columns = sorted(set(observer.columns))
        found[observer.name] = pb.Observer(name=observer.name, columns=columns, weak=observer.weak)
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
    """Whether both are notified of the same things, and so may have the same name."""
    return sorted(one.columns) == sorted(other.columns) and one.weak == other.weak


def _described(observer: pb.Observer) -> str:
    columns = ", ".join(repr(column) for column in sorted(observer.columns))
    return f"{columns} (weak)" if observer.weak else columns


def _copy(observer: pb.Observer) -> pb.Observer:
    copied = pb.Observer()
    copied.CopyFrom(observer)
    return copied
