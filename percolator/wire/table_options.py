"""The options of a table that exists, compared with those that a creation asks for.

With `exist_ok`, an existing table stays as it is. Taken for what was asked for, it would lose
history that its reader needs, or keep far more than its owner wants, and nothing would say so.
"""

from __future__ import annotations

from percolator.errors import InvalidArgument
from percolator.v1.master_pb2 import TableOptions


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
