"""Checks the arguments of public calls at once, so that an error names the argument at fault.

Types are checked, too, for programs without a type checker: a wrong argument must neither be taken
for something else nor cause an error deep inside the library.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, TypeVar

from percolator.errors import InvalidArgument, SchemaError, UsageError
from percolator.schema import INTERNAL_PREFIX, Column, Family, Table
from percolator.timestamps import Timestamp
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire.table_options import TTL_MILLISECONDS_MAX

K = TypeVar("K")
R = TypeVar("R")

_MILLISECOND = timedelta(milliseconds=1)

SECONDS_MAX = 1e9
"""Thirty years: as good as no time-out, and not too large for any clock."""

WHOLE_MAX = 2**31 - 1
"""The most that a limit in rows, cells, bytes or attempts may be: no message counts further."""
_DIGITS_SHOWN_MAX = 12

TABLES_MAX = 1_000
"""The most tables that one call creates."""

COLUMNS_MAX = 10_000
"""The most columns in one read: as many as a tablet server accepts."""
FAMILIES_MAX = 100
"""The most families in one read: as many as a tablet server accepts."""


def require_seconds(seconds: object, field: str = "timeout") -> None:
    """Refuses a time-out that is not a number in range; NaN is in no range."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise InvalidArgument(field, f"expected a number, got {type(seconds).__name__}")
    if not 0 < seconds <= SECONDS_MAX:
        raise InvalidArgument(
            field, f"expected a positive number, at most {SECONDS_MAX:.0f}, got {_shown(seconds)}"
        )


def require_drain_seconds(seconds: object) -> None:
    """Refuses what is no time to wait for the end of something. 0: it is not waited for."""
    if isinstance(seconds, bool) or seconds != 0:
        require_seconds(seconds, "drain_seconds")


def require_whole(number: object, field: str, least: int, most: int | None = None) -> None:
    if isinstance(number, bool) or not isinstance(number, int):
        raise InvalidArgument(field, f"expected a whole number, got {type(number).__name__}")
    if number < least:
        raise InvalidArgument(field, f"expected at least {least}, got {_shown(number)}")
    if most is not None and number > most:
        raise InvalidArgument(field, f"expected at most {most}, got {_shown(number)}")


def _shown(number: float) -> str:
    """A number for an error. Python shows none with more than 4,300 digits."""
    if isinstance(number, int) and abs(number) >= 10**_DIGITS_SHOWN_MAX:
        return f"one with more than {_DIGITS_SHOWN_MAX} digits"
    return str(number)


def require_bool(value: object, field: str) -> None:
    """Refuses None and numbers: a setting that was left out must not switch anything off."""
    if not isinstance(value, bool):
        raise InvalidArgument(field, f"expected a bool, got {type(value).__name__}")


def require_text(value: object, field: str) -> None:
    if not isinstance(value, str):
        raise InvalidArgument(field, f"expected a str, got {type(value).__name__}")


def require_function(function: object, field: str = "function") -> None:
    """Refuses what cannot be called."""
    if not callable(function):
        raise InvalidArgument(field, f"expected a function, got {type(function).__name__}")


def as_timestamp(moment: object, field: str) -> Timestamp:
    """The timestamp for a moment of the past that a program names.

    A datetime stands for the last timestamp before its millisecond: commits before that millisecond
    are seen, and commits in it are not.
    """
    if isinstance(moment, datetime):
        try:
            return Timestamp.before(moment)
        except InvalidArgument as error:
            raise InvalidArgument(field, error.reason) from None
    if isinstance(moment, Timestamp):
        if moment == 0:
            raise InvalidArgument(field, "0 is before every commit, so there is nothing to read")
        return moment
    if isinstance(moment, int) and not isinstance(moment, bool):
        # It may as well be the seconds or milliseconds of a clock, which are far in the past.
        raise InvalidArgument(
            field,
            f"{moment} is a bare int: write percolator.Timestamp({moment}) if it is a timestamp of "
            "the oracle, and pass a datetime for a time",
        )
    raise UsageError(f"{field}: expected a Timestamp or a datetime, got {type(moment).__name__}")


def require_table(table: object) -> None:
    if not isinstance(table, Table):
        raise UsageError(f"expected a Table, got {type(table).__name__}")


def listed_tables(tables: object) -> list[Table[Any]]:
    """The given tables as a list, each of them once, and none of Percolator's own."""
    if isinstance(tables, str) or not isinstance(tables, Iterable):
        raise InvalidArgument("tables", f"expected a list of tables, got {type(tables).__name__}")
    found = list(islice(tables, TABLES_MAX + 1))
    if len(found) > TABLES_MAX:
        raise InvalidArgument("tables", f"expected at most {TABLES_MAX}")
    for place, table in enumerate(found):
        if not isinstance(table, Table):
            raise InvalidArgument(
                f"tables[{place}]", f"expected a Table, got {type(table).__name__}"
            )
        if table in found[:place]:
            raise InvalidArgument(f"tables[{place}]", f"{table.name!r} is named twice")
        require_no_internal_name(table.name)
    return found


def listed_columns(columns: object) -> list[Column[Any] | Family[Any]]:
    """The given columns and families as a list, since a generator can be consumed only once."""
    if isinstance(columns, str | bytes) or not isinstance(columns, Iterable):
        raise InvalidArgument(
            "columns", f"expected a list of columns, got {type(columns).__name__}"
        )
    found = list(islice(columns, COLUMNS_MAX + 1))
    for column in found:
        if not isinstance(column, Column | Family):
            raise InvalidArgument("columns", f"expected columns, found {type(column).__name__}")
    if len(found) > COLUMNS_MAX:
        raise InvalidArgument(
            "columns", f"expected at most {COLUMNS_MAX}; omit it to read all columns"
        )
    if sum(isinstance(column, Family) for column in found) > FAMILIES_MAX:
        raise InvalidArgument("columns", f"expected at most {FAMILIES_MAX} families")
    return found


def listed(rows: Iterable[K] | None, field: str, most: int) -> list[K]:
    """The given rows as a list, cut at one more than allowed, since an iterator may be endless."""
    if isinstance(rows, str | bytes | bytearray) or not isinstance(rows, Iterable):
        raise InvalidArgument(field, f"expected a list of row keys, got {type(rows).__name__}")
    return list(islice(rows, most + 1))


_PAIR = 2


def listed_cells(cells: object, most: int) -> list[tuple[object, Column[Any]]]:
    """Pairs of a row and a column as a list."""
    if isinstance(cells, str | bytes | bytearray) or not isinstance(cells, Iterable):
        raise InvalidArgument(
            "cells", f"expected pairs of a row and a column, or a Table, got {type(cells).__name__}"
        )
    found = list(islice(cells, most + 1))
    if len(found) > most:
        raise InvalidArgument("cells", f"more than {most} cells at once")
    for place, cell in enumerate(found):
        if not (isinstance(cell, tuple) and len(cell) == _PAIR and isinstance(cell[1], Column)):
            raise InvalidArgument(f"cells[{place}]", f"{cell!r:.80} is not a row and a column")
    return found


def require_no_internal_name(name: str) -> None:
    if name.startswith(INTERNAL_PREFIX):
        raise InvalidArgument(
            "table",
            f"{name!r} is internal: only Percolator creates and drops tables whose names begin "
            f"with {INTERNAL_PREFIX!r}",
        )


def retention_milliseconds(retention: object) -> int:
    return _milliseconds("retention", retention)


def _milliseconds(field: str, given: object) -> int:
    if not isinstance(given, timedelta):
        raise InvalidArgument(field, f"expected a timedelta, got {type(given).__name__}")
    if given < _MILLISECOND:
        raise InvalidArgument(field, f"expected at least a millisecond, got {given}")
    return given // _MILLISECOND


def as_option(error: InvalidArgument, table: Table[Any]) -> InvalidArgument:
    """Error of a master about the options of a table, with the names of `create_table`."""
    reason, option = error.reason, error.field.partition("[")[0]
    if option == "options.change_feed":
        reason = f"table {table.name!r} exists without one: switch it on with set_change_feed"
    names = {
        "options.change_feed": "change_feed",
        "options.retention_milliseconds": "retention",
        "options.ttls": "ttl",
    }
    return InvalidArgument(names.get(option, error.field), reason, where=error.where)


def column_ttl(column: object, ttl: object) -> ColumnTtl:
    """The time to live of a column; None: its values never expire."""
    if isinstance(column, Family):
        raise InvalidArgument("ttl", f"{column!r} is a family; only single columns have a ttl")
    if not isinstance(column, Column):
        raise InvalidArgument("ttl", f"expected a column, got {type(column).__name__}")
    milliseconds = 0 if ttl is None else _milliseconds("ttl", ttl)
    if milliseconds > TTL_MILLISECONDS_MAX:
        raise InvalidArgument("ttl", f"expected at most 100 years, got {ttl}")
    return ColumnTtl(column=column.name, ttl_milliseconds=milliseconds)


def column_ttls(table: Table[Any], ttl: object) -> list[ColumnTtl]:
    """The times to live of a new table's columns."""
    if ttl is None:
        return []
    if not isinstance(ttl, Mapping):
        raise InvalidArgument(
            "ttl", f"expected a timedelta for each of some columns, got {type(ttl).__name__}"
        )
    found = []
    for column, one in ttl.items():
        message = column_ttl(column, one)
        if column.table != table:
            raise SchemaError(f"{column!r} is not a column of table {table.name!r}")
        if one is None:
            raise InvalidArgument("ttl", f"expected a timedelta for {column!r}, got None")
        found.append(message)
    return sorted(found, key=lambda one: one.column)
