"""The options of the data source, parsed and checked.

| option | for | meaning |
|---|---|---|
| `address` | all | `host:port` of masters; else PERCOLATOR_ADDRESS (the driver's), or localhost |
| `table` | all | the table; also the argument of `load(...)` |
| `catalog` | all | JSON with key and columns (catalog.py), or `stored`; else raw cells |
| `timeout_seconds` | all | how long one call to the cluster may take (10) |
| `columns` | read, delete | only these columns: fields of the catalogue, or columns of raw cells |
| `key` | read | only the row with this key (chosen_rows.py has the forms of keys) |
| `keys` | read | only the rows with these keys: a JSON list |
| `key_from`, `key_to` | read | only rows from the first key to before the second |
| `key_prefix` | read | only rows whose keys begin like this |
| `key_ranges` | read | only rows in these ranges: a JSON list |
| `index` | read | only rows to which this index leads (found_rows.py) |
| `index_values` | read | values of its first columns: a JSON list |
| `index_from`, `index_to` | read | from the first value of the next column to before the second |
| `index_prefix` | read | only values of the next column that begin like this |
| `snapshot_ts` | read | reads at this timestamp |
| `as_of` | read | reads the table as it was at this time: ISO 8601, with a time zone |
| `partition_bytes` | read | larger tablets are read by several tasks (128 MiB) |
| `pin_seconds` | read | how long the snapshot is kept from being collected (3600; 0: not at all) |
| `starting_from` | stream | where a new query begins: `snapshot`, `now`, a timestamp or a time |
| `rows_per_batch` | stream | rows of a batch at most, but always whole commits (no limit) |
| `failOnDataLoss` | stream | `false`: begin with a snapshot again if history is gone (true) |
| `operation` | write | `upsert` (the default), `delete`, `merge` or `bulk_load` |
| `atomic` | write | all rows of the job appear at once, or none (false) |
| `keep_seconds` | atomic | how long its locks outlive the last task that keeps them (60) |
| `together` | atomic | the job of several writes that this one belongs to |
| `if_unchanged_since` | write | refuses rows that were written after this timestamp |
| `matched` | merge | what happens to rows that exist: `update` (the default) or `skip` |
| `not_matched` | merge | what happens to other rows: `insert` (the default) or `skip` |
| `delete_field` | merge | a boolean field of the frame: true deletes the row, if it exists |
| `nulls` | write | what to do with a null: `refuse` it (the default), `skip` or `delete` its cell |
| `skip_equal` | write | reads first, and writes only what differs or expires (false) |
| `transaction_rows` | write | rows per transaction at most (1000, fewer if wide) |
| `transactions_in_flight` | write | per task (4) |
| `retry_seconds` | write | how long one transaction is retried after conflicts (120) |
| `load_name` | bulk load | a second load with this name takes over from one that did not end |
| `load_from`, `load_to` | bulk load | the range to load: from the first key to before the second |
| `notify` | bulk load | whether observers are notified of the rows (false) |
| `notify` | atomic | of which cells: `all` that are written (the default), or `changed` ones |

A stream that is read also takes `columns`, the options that choose rows by their keys, and
`partition_bytes`. A stream that is written takes the options of an atomic write, and so does
`mode("overwrite")`, which is one.
Unknown names and impossible values are refused before Spark starts any task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypeVar

from percolator.errors import InvalidArgument
from percolator.spark.catalog import FrameCatalog
from percolator.spark.chosen_rows import (
    KEY_OPTIONS,
    NOW,
    SNAPSHOT,
    KeySyntax,
    RowRanges,
    RowsBetween,
    Wanted,
    chosen_rows,
    rows_between,
)
from percolator.spark.found_rows import INDEX_OPTIONS, Lookup
from percolator.timestamps import Timestamp

_ONLY_WITH = {
    "columns": "delete",
    "delete_field": "merge",
    "matched": "merge",
    "not_matched": "merge",
    "load_from": "bulk_load",
    "load_name": "bulk_load",
    "load_to": "bulk_load",
}

_NOT_ATOMIC = {
    "if_unchanged_since": "looks at rows in transactions of its own",
    "skip_equal": "looks at rows in transactions of its own",
    "transaction_rows": "is for jobs of many transactions",
    "transactions_in_flight": "is for jobs of many transactions",
}
"""Options that an atomic job cannot have, and why."""

BULK_LOAD = "bulk_load"
MERGE = "merge"
OPERATIONS = ("upsert", "delete", MERGE, BULK_LOAD)
NULLS = ("refuse", "skip", "delete")
ALL, CHANGED, NONE = "all", "changed", "none"
"""The cells of which an atomic job notifies observers."""
TRANSACTION_ROWS_MAX = 100_000
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Target:
    """A table of a cluster."""

    address: str
    table: str
    timeout_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Target:
        """The target of a read or of a write, whose other options are not looked at."""
        return cls.of(Given(options, COMMON | READ | STREAM | WRITE, "reading or writing"))

    @classmethod
    def of(cls, given: Given) -> Target:
        from percolator.wire.cluster import default_addresses, parse_addresses

        # The environment of the driver decides: an executor may have another one, or none.
        address = given.get("address")
        addresses = default_addresses() if address is None else parse_addresses(address)
        path, table = given.get(SPARK_PATH), given.get("table")
        if path and table and path != table:
            raise InvalidArgument("table", f"is {table!r}, but load() was given {path!r}")
        name = table or path
        if not name:
            raise InvalidArgument("table", f"is missing: name the table. {NO_CREATE_TABLE}")
        seconds = given.number("timeout_seconds", float, 10.0, least=0.1, most=600.0)
        return cls(",".join(addresses), name, seconds)


@dataclass(frozen=True)
class ReadOptions:
    """The options of `spark.read`."""

    target: Target
    catalog: FrameCatalog | None
    columns: tuple[str, ...] | None
    at: Timestamp | None
    at_option: str
    """The option that `at` comes from."""
    rows: RowRanges
    lookup: Lookup | None
    """Limits these rows to the ones that an index finds."""
    partition_bytes: int
    pin_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        given = Given(options, COMMON | READ, "reading")
        catalogue = given.catalog()
        snapshot, as_of = given.get("snapshot_ts"), given.get("as_of")
        if snapshot is not None and as_of is not None:
            raise InvalidArgument("as_of", "cannot be given together with snapshot_ts")
        at_option = "snapshot_ts" if snapshot is not None else "as_of"
        text = snapshot if snapshot is not None else as_of
        return cls(
            target=Target.of(given),
            catalog=catalogue,
            columns=given.names("columns"),
            at=None if text is None else timestamp_of(at_option, text),
            at_option=at_option,
            rows=chosen_rows(given.values, catalogue),
            lookup=Lookup.parse(given.values),
            partition_bytes=given.number(
                "partition_bytes", int, 128 * MEBIBYTE, least=MEBIBYTE, most=1 << 40
            ),
            pin_seconds=given.number("pin_seconds", float, 3600.0, least=0.0, most=604_800.0),
        )


ROWS_PER_BATCH_MAX = 1_000_000_000


def is_stream(options: Mapping[str, str]) -> bool:
    """The options are those of a stream: Spark does not say while it asks for a schema."""
    return any(name.lower() == "starting_from" for name in options)


def is_sink(options: Mapping[str, str]) -> bool:
    """The options are those of a sink: Spark does not say while it pickles a source."""
    return any(name.lower() == SPARK_CHECKPOINT for name in options)


@dataclass(frozen=True)
class StreamOptions:
    """The options of `spark.readStream`."""

    read: ReadOptions
    """The options of the read, as for a batch."""
    starting_from: str | Timestamp
    """`SNAPSHOT`, `NOW`, or the timestamp above which a new query begins."""
    rows_per_batch: int
    """0 for no limit."""
    fail_on_data_loss: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        given = Given(options, COMMON | READ_BY_STREAMS | STREAM, "streams")
        text = given.get("starting_from")
        if text is None:
            raise InvalidArgument(
                "starting_from", "is missing: say where the stream begins: snapshot, now, or a time"
            )
        word = text.strip().lower()
        return cls(
            read=ReadOptions.parse({n: v for n, v in given.values.items() if n not in STREAM}),
            starting_from=word if word in (SNAPSHOT, NOW) else instant_of("starting_from", text),
            rows_per_batch=given.number("rows_per_batch", int, 0, least=1, most=ROWS_PER_BATCH_MAX),
            fail_on_data_loss=given.one_of("failondataloss", ("true", "false")) == "true",
        )

    def wanted(self, columns: tuple[bytes, ...] | None) -> Wanted:
        """The changes to deliver. The columns are those of its rows; None for raw cells."""
        return Wanted(
            self.read.target.table,
            self.starting_from,
            self.read.rows,
            None if columns is None else frozenset(columns),
            self.fail_on_data_loss,
            self.read.target.timeout_seconds,
        )


@dataclass(frozen=True)
class WriteOptions:
    """The options of `df.write`."""

    target: Target
    catalog: FrameCatalog | None
    columns: tuple[str, ...] | None
    operation: str
    nulls: str
    skip_equal: bool
    if_unchanged_since: Timestamp | None
    update_existing: bool
    insert_missing: bool
    delete_field: str | None
    transaction_rows: int
    """0 if the option was not given."""
    transactions_in_flight: int
    retry_seconds: float
    atomic: bool
    overwrite: bool
    """Everything else in the catalogue's columns, or in the table, is deleted."""
    keep_seconds: float
    together: str | None
    load_name: str
    load_rows: RowsBetween
    notify: bool
    """A bulk load notifies observers."""
    only_changes: bool
    """An atomic job leaves cells as they are that have their values already."""

    @classmethod
    def of_sink(cls, options: Mapping[str, str]) -> WriteOptions:
        """The options of `writeStream`: those of an atomic write, for each batch of a stream."""
        if not is_sink(options):
            raise InvalidArgument(
                "checkpointLocation",
                "is missing: give it as an option of the query, and not in the session's settings",
            )
        given = {n.lower(): v for n, v in options.items() if n.lower() != SPARK_CHECKPOINT}
        if "together" in given:
            raise InvalidArgument("together", "a stream commits each batch by itself: leave it out")
        if given.get("atomic", "true").lower() != "true":
            raise InvalidArgument("atomic", "each batch of a stream is atomic: leave it out")
        return cls.parse(given | {"atomic": "true"})

    @classmethod
    def parse(cls, options: Mapping[str, str], *, overwrite: bool = False) -> WriteOptions:
        """`overwrite`: the mode of the write, which replaces the whole table at once."""
        given = Given(options, COMMON | WRITE, "writing")
        operation = given.one_of("operation", OPERATIONS)
        for name, only in _ONLY_WITH.items():
            if given.get(name) is not None and operation != only:
                raise InvalidArgument(name, f"needs operation {only!r}")
        since = given.get("if_unchanged_since")
        if since is not None and operation == BULK_LOAD:
            raise InvalidArgument(
                "if_unchanged_since", "a bulk load creates rows that do not exist yet: leave it out"
            )
        catalogue = given.catalog()
        if operation == MERGE and catalogue is None:
            raise InvalidArgument("operation", "merge needs a catalog: a raw cell is not a row")
        if overwrite:
            _check_overwrite(given, operation)
        atomic = overwrite or given.boolean("atomic")
        if atomic:
            _check_atomic(given, operation)
        for name in ("keep_seconds", "together"):
            if not atomic and given.get(name) is not None:
                raise InvalidArgument(name, "needs atomic=true")
        if not atomic and operation != BULK_LOAD and given.get("notify") is not None:
            raise InvalidArgument(
                "notify",
                'needs operation=bulk_load, atomic=true, or mode("overwrite"): plain transactions '
                "notify of what they write, and skip_equal=true writes only what differs",
            )
        if given.get("together") and given.get("keep_seconds"):
            raise InvalidArgument("keep_seconds", "belongs to the whole job: pass it to together()")
        return cls(
            target=Target.of(given),
            catalog=catalogue,
            columns=given.names("columns"),
            operation=operation,
            nulls=given.one_of("nulls", NULLS),
            skip_equal=given.boolean("skip_equal"),
            if_unchanged_since=None if since is None else timestamp_of("if_unchanged_since", since),
            update_existing=given.one_of("matched", ("update", "skip")) == "update",
            insert_missing=given.one_of("not_matched", ("insert", "skip")) == "insert",
            delete_field=given.get("delete_field"),
            transaction_rows=given.number(
                "transaction_rows", int, 0, least=1, most=TRANSACTION_ROWS_MAX
            ),
            transactions_in_flight=given.number("transactions_in_flight", int, 4, least=1, most=64),
            retry_seconds=given.number("retry_seconds", float, 120.0, least=0.1, most=86_400.0),
            atomic=atomic,
            overwrite=overwrite,
            keep_seconds=given.number(
                "keep_seconds", float, 60.0, least=KEEP_SECONDS_MIN, most=KEEP_SECONDS_MAX
            ),
            together=given.get("together"),
            load_name=given.get("load_name") or "",
            load_rows=given.rows("load_from", "load_to", catalogue),
            notify=operation == BULK_LOAD and given.boolean("notify"),
            only_changes=atomic and _notified(given) == CHANGED,
        )


def _check_overwrite(given: Given, operation: str) -> None:
    """Refuses what would not replace a table."""
    if operation != OPERATIONS[0]:
        raise InvalidArgument("mode", f'operation={operation} needs mode("append")')
    if given.get("atomic") is not None and not given.boolean("atomic"):
        raise InvalidArgument("atomic", 'mode("overwrite") is always atomic: leave it out')


def _check_atomic(given: Given, operation: str) -> None:
    """Refuses what an atomic job cannot do."""
    if operation == BULK_LOAD:
        raise InvalidArgument("atomic", "a bulk load appears at once anyway: leave it out")
    if operation == MERGE:
        raise InvalidArgument("atomic", "is for upsert and delete: a merge looks at rows first")
    for name, why in _NOT_ATOMIC.items():
        if (given.get(name) or "false").lower() != "false":
            raise InvalidArgument(
                name, f'{why}: leave it out, or atomic=true and mode("overwrite")'
            )


def _notified(given: Given) -> str:
    """The cells of which the atomic job notifies observers."""
    choice = given.one_of("notify", (ALL, CHANGED, NONE))
    if choice == NONE:
        raise InvalidArgument(
            "notify",
            "none is not possible: after the commit, whoever meets a lock of the job writes the "
            "notification. Bulk load the rows into a new table, or register the observers after "
            "the job, without a backfill",
        )
    return choice


T = TypeVar("T")

COMMON = frozenset(("address", "catalog", "table", "timeout_seconds"))
READ = frozenset(
    (
        "as_of",
        "columns",
        "partition_bytes",
        "pin_seconds",
        "snapshot_ts",
        *KEY_OPTIONS,
        *INDEX_OPTIONS,
    )
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
    """The option that was probably meant."""
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
