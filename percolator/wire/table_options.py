"""The name of a table, where its tablets begin, and its options: those that exist, compared with
those that a creation asks for, and the times to live of its columns.

With `exist_ok`, an existing table stays as it is. Taken for what was asked for, it would lose
history that its reader needs, or keep far more than its owner wants, and nothing would say so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from percolator.codecs.names import COLUMN_BYTES_MAX
from percolator.codecs.readable import quoted
from percolator.errors import InvalidArgument
from percolator.schema import INTERNAL_PREFIX, INTERNAL_TABLES, TABLE_BYTES_MAX
from percolator.v1.master_pb2 import TableOptions
from percolator.v1.tabletserver_pb2 import ColumnTtl

RETENTION_MILLISECONDS_MAX = 100 * 365 * 86_400_000
TTL_MILLISECONDS_MAX = 100 * 365 * 86_400_000
TTLS_MAX = 1_000
SPLIT_ROW_BYTES_MAX = 4_096
"""The longest row at which a tablet may begin."""
REQUEST_ID_BYTES = 16
"""Random, so that no two requests to create or delete a table have the same id."""


def require_table_name(field: str, name: str) -> None:
    """Raises `InvalidArgument` unless a new table may have the name."""
    if not 0 < len(name.encode()) <= TABLE_BYTES_MAX:
        raise InvalidArgument(field, f"expected 1 to {TABLE_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip():
        raise InvalidArgument(
            field, f"{name!r} has unprintable characters, or a space at either end"
        )
    if name.startswith(INTERNAL_PREFIX) and name not in INTERNAL_TABLES:
        raise InvalidArgument(
            field, f"{INTERNAL_PREFIX!r} begins the names of internal tables only"
        )


def table_exists(name: str) -> InvalidArgument:
    """The error about a table that is to be created, and exists."""
    return InvalidArgument("name", f"table {name!r} exists; pass exist_ok=True to use it")


def require_splits(field: str, splits: Sequence[bytes]) -> None:
    """Raises `InvalidArgument` unless the tablets of a new table can begin at these rows."""
    before = b""
    for index, row in enumerate(splits):
        where = f"{field}[{index}]"
        if not row:
            raise InvalidArgument(
                where, "is empty; the first tablet starts at the empty row anyway"
            )
        if len(row) > SPLIT_ROW_BYTES_MAX:
            raise InvalidArgument(where, f"is longer than {SPLIT_ROW_BYTES_MAX} bytes")
        if row <= before:
            raise InvalidArgument(
                where, f"{quoted(row)} is not above {quoted(before)}: expected ascending rows"
            )
        before = row


def require_retention(options: TableOptions) -> None:
    """Raises `InvalidArgument` if versions were to be kept for longer than is possible."""
    retention = options.retention_milliseconds
    if retention > RETENTION_MILLISECONDS_MAX:
        raise InvalidArgument(
            "options.retention_milliseconds",
            f"is {retention}; expected at most {RETENTION_MILLISECONDS_MAX}, 100 years",
        )


def require_options(name: str, found: TableOptions, wanted: TableOptions) -> None:
    """Raises `InvalidArgument` unless the table has all the options that were asked for. What is
    left at 0 asks for nothing."""
    if wanted.change_feed and not found.change_feed:
        raise InvalidArgument(
            "options.change_feed",
            f"table {name!r} exists without a change feed: SetChangeFeed gives it one "
            "(set_change_feed, or percolator tables change-feed)",
        )
    for option, unit in (("retention_milliseconds", "ms"), ("split_bytes", "bytes")):
        is_set, asked_for = getattr(found, option), getattr(wanted, option)
        if asked_for and asked_for != is_set:
            has = f"{is_set} {unit}" if is_set else "the cluster's default"
            raise InvalidArgument(
                f"options.{option}",
                f"table {name!r} exists with {has}, not {asked_for} {unit}; ask for none to use it "
                "as it is",
            )
    if wanted.ttls and by_column(wanted.ttls) != by_column(found.ttls):
        has = _described(found.ttls)
        raise InvalidArgument(
            "options.ttls",
            f"table {name!r} exists with {has}, not {_described(wanted.ttls)}; ask for none to use "
            "it as it is, or change them (set_ttl, or percolator tables alter --ttl)",
        )


def by_column(ttls: Iterable[ColumnTtl]) -> dict[bytes, int]:
    """Milliseconds by column."""
    return {one.column: one.ttl_milliseconds for one in ttls}


def changed_ttls(found: Iterable[ColumnTtl], changes: Sequence[ColumnTtl]) -> list[ColumnTtl]:
    """Times to live of a table after changes, of which 0 removes one. Raises `InvalidArgument`."""
    require_ttls("ttls", changes, may_be_zero=True)
    changed = {**by_column(found), **by_column(changes)}
    if sum(ttl > 0 for ttl in changed.values()) > TTLS_MAX:
        raise InvalidArgument("ttls", f"the table would have more than {TTLS_MAX}")
    return [
        ColumnTtl(column=column, ttl_milliseconds=ttl)
        for column, ttl in sorted(changed.items())
        if ttl
    ]


def require_ttls(field: str, ttls: Sequence[ColumnTtl], *, may_be_zero: bool = False) -> None:
    """Raises `InvalidArgument` unless these are times to live of different columns."""
    if len(ttls) > TTLS_MAX:
        raise InvalidArgument(field, f"{len(ttls)} entries, at most {TTLS_MAX} allowed")
    seen: set[bytes] = set()
    for index, one in enumerate(ttls):
        where = f"{field}[{index}]"
        if not 1 <= len(one.column) <= COLUMN_BYTES_MAX or one.column[0] == 0:
            raise InvalidArgument(
                f"{where}.column", f"expected 1 to {COLUMN_BYTES_MAX} bytes, the first not 00"
            )
        if one.column in seen:
            raise InvalidArgument(f"{where}.column", f"{quoted(one.column)} is named twice")
        seen.add(one.column)
        if not int(not may_be_zero) <= one.ttl_milliseconds <= TTL_MILLISECONDS_MAX:
            raise InvalidArgument(
                f"{where}.ttl_milliseconds",
                f"is {one.ttl_milliseconds}; expected {int(not may_be_zero)} to "
                f"{TTL_MILLISECONDS_MAX}, 100 years",
            )


def _described(ttls: Iterable[ColumnTtl]) -> str:
    listed = [
        f"{one.column.decode(errors='backslashreplace')} {one.ttl_milliseconds} ms" for one in ttls
    ]
    return f"times to live {', '.join(listed)}" if listed else "no times to live"
