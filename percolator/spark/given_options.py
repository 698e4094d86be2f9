"""Options as they were given: which names there are, and what their texts mean.

options.py says what each option is for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from difflib import get_close_matches
from typing import TypeVar

from percolator.errors import InvalidArgument
from percolator.spark.catalog.frame_catalog import FrameCatalog
from percolator.spark.choosing.chosen_rows import KEY_OPTIONS, rows_between
from percolator.spark.choosing.key_syntax import KeySyntax
from percolator.spark.choosing.row_ranges import RowsBetween
from percolator.timestamps import Timestamp

T = TypeVar("T")

COMMON = frozenset(("address", "catalog", "table", "timeout_seconds"))
READ = frozenset(
    ("as_of", "columns", "partition_bytes", "pin_seconds", "snapshot_ts", *KEY_OPTIONS)
)
STREAM = frozenset(("failondataloss", "rows_per_batch", "starting_from"))
READ_BY_STREAMS = frozenset(("columns", "partition_bytes", *KEY_OPTIONS))
WRITE = frozenset(
    (
        "atomic",
        "columns",
        "delete_field",
        "if_unchanged_since",
        "keep_seconds",
        "load_from",
        "load_name",
        "load_to",
        "matched",
        "not_matched",
        "notify",
        "nulls",
        "operation",
        "retry_seconds",
        "skip_equal",
        "together",
        "transaction_rows",
        "transactions_in_flight",
    )
)
KEEP_SECONDS_MIN = 15.0
"""Shared transactions keep their locks for no less (percolator/aio/shared.py)."""
KEEP_SECONDS_MAX = 86_400.0

SPARK_PATH = "path"
"""The argument of `load(...)` and `save(...)`."""
SPARK_CHECKPOINT = "checkpointlocation"
"""Spark's own option of a query that writes a stream."""
_SPARK_TABLE_OPTION = "option."
"""Spark puts this before the names of the options of a CREATE TABLE."""

_TIME_TRAVEL = {
    "versionasof": "snapshot_ts, a timestamp",
    "timestampasof": "as_of, a time in ISO 8601",
}
"""Delta Lake and Iceberg have these names for it."""

NO_CREATE_TABLE = (
    "Spark does not pass the options of a table in its catalog, made by CREATE TABLE, saveAsTable "
    "or create(), to a Python data source; use load(), save() or CREATE TEMPORARY VIEW"
)


def check_names(options: Mapping[str, str]) -> None:
    """Refuses unknown options."""
    known = COMMON | READ | STREAM | WRITE
    for name in sorted(name.lower() for name in options):
        if name == SPARK_PATH + "s":
            raise InvalidArgument("table", "load() takes one table, and was given several")
        if name.startswith(_SPARK_TABLE_OPTION):
            raise InvalidArgument("table", f"is missing: {NO_CREATE_TABLE}")
        if name not in known and name not in (SPARK_PATH, SPARK_CHECKPOINT):
            raise InvalidArgument(name, f"is not an option of percolator; {_hint(name, known)}")


def _hint(name: str, known: Set[str]) -> str:
    """What was probably meant."""
    if name in _TIME_TRAVEL:
        return f"to read the past, give {_TIME_TRAVEL[name]}"
    near = get_close_matches(name, sorted(known), n=1)
    return f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(known))}"


class Given:
    """The options that were given, by their names in lower case."""

    def __init__(self, options: Mapping[str, str], allowed: frozenset[str], use: str) -> None:
        self.values = {name.lower(): str(value) for name, value in options.items()}
        check_names(self.values)
        for name in sorted(self.values):
            if name not in allowed and name != SPARK_PATH:
                raise InvalidArgument(name, f"is not an option of {use}")

    def get(self, name: str) -> str | None:
        return self.values.get(name)

    def names(self, name: str) -> tuple[str, ...] | None:
        """Names separated by commas."""
        text = self.values.get(name)
        if text is None:
            return None
        names = tuple(part.strip() for part in text.split(","))
        if not all(names) or len(set(names)) < len(names):
            raise InvalidArgument(
                name, f"expected different names, separated by commas, found {text!r}"
            )
        return names

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """One of the choices; the first is the default."""
        text = self.values.get(name, choices[0]).lower()
        if text not in choices:
            raise InvalidArgument(name, f"expected one of {', '.join(choices)}, found {text!r}")
        return text

    def boolean(self, name: str) -> bool:
        return self.one_of(name, ("false", "true")) == "true"

    def number(
        self, name: str, kind: Callable[[str], T], default: T, *, least: float, most: float
    ) -> T:
        text = self.values.get(name)
        if text is None:
            return default
        what = "a whole number" if kind is int else "a number"
        try:
            value = kind(text)
        except ValueError:
            value = None
        if not isinstance(value, int | float) or not least <= value <= most:
            raise InvalidArgument(
                name, f"expected {what} from {least:.15g} to {most:.15g}, found {text!r}"
            )
        return value

    def rows(self, first: str, last: str, catalogue: FrameCatalog | None) -> RowsBetween:
        """The range between two options that are keys; all rows without them."""
        syntax = KeySyntax(catalogue)
        given = {name: self.values[name] for name in (first, last) if name in self.values}
        values = {name: syntax.parsed(name, text) for name, text in given.items()}
        return rows_between(syntax, first, last, values)

    def catalog(self) -> FrameCatalog | None:
        text = self.values.get("catalog")
        return None if text is None else FrameCatalog.parse(text)


def timestamp_of(name: str, text: str) -> Timestamp:
    is_number = text.strip().isdigit()
    if is_number != (name != "as_of"):
        expected = "a timestamp" if name != "as_of" else "a date and time with its time zone"
        raise InvalidArgument(name, f"expected {expected}, found {text!r}")
    return instant_of(name, text)


def instant_of(name: str, text: str) -> Timestamp:
    try:
        timestamp = Timestamp.parse_to_read(text)
    except InvalidArgument as error:
        raise InvalidArgument(name, error.reason) from None
    if not timestamp:
        raise InvalidArgument(name, "0 is before every commit: there is nothing to read")
    return timestamp
