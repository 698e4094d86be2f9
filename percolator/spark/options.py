"""What can be told to the data source, and what is wrong with what was told.

| option | for | meaning |
|---|---|---|
| `address` | all | `host:port` of masters; else PERCOLATOR_ADDRESS (the driver's), or localhost |
| `table` | all | the table; also the argument of `load(...)` |
| `catalog` | all | JSON: key and columns with their types (catalogue.py); without it, raw cells |
| `timeout_seconds` | all | how long one call to the cluster may take (10) |
| `columns` | read, delete | of the catalogue's columns only these; of raw cells, these columns |
| `snapshot_ts` | read | reads at this timestamp |
| `as_of` | read | reads as it was at this time: ISO 8601, with its time zone |
| `partition_bytes` | read | larger tablets are read in several tasks (128 MiB) |
| `pin_seconds` | read | for how long the snapshot is kept from being collected (3600; 0: not) |
| `operation` | write | `upsert` (the default), `delete`, or `bulk_load` |
| `nulls` | write | a null is `refuse`d (the default), its cell is `skip`ped, or `delete`d |
| `skip_equal` | write | reads first, and writes only what is not there already (false) |
| `transaction_rows` | write | rows of one transaction (1000) |
| `transactions_in_flight` | write | of one task (4) |
| `retry_seconds` | write | how long one transaction is tried again after conflicts (120) |
| `load_name` | bulk load | a second load of that name takes over from one that did not end |
| `load_from`, `load_to` | bulk load | the row keys to load: from the first, to before the second |
| `notify` | bulk load | whether observers are notified of what is loaded (false) |

Names and values that cannot be are refused before Spark starts any task.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, TypeVar

from percolator.codecs import ordered_integer
from percolator.errors import InvalidArgument, SchemaError
from percolator.timestamps import Timestamp

if TYPE_CHECKING:
    from percolator.spark.catalogue import Catalogue

T = TypeVar("T")

_COMMON = frozenset(("address", "catalog", "table", "timeout_seconds"))
_READ = frozenset(("as_of", "columns", "partition_bytes", "pin_seconds", "snapshot_ts"))
_WRITE = frozenset(
    (
        "columns",
        "load_from",
        "load_name",
        "load_to",
        "notify",
        "nulls",
        "operation",
        "retry_seconds",
        "skip_equal",
        "transaction_rows",
        "transactions_in_flight",
    )
)
_SPARK_PATH = "path"
"""What `load(...)` and `save(...)` were given."""
_SPARK_CHECKPOINT = "checkpointlocation"
"""Of streams, which are refused as such, not for this option."""
_SPARK_TABLE_OPTION = "option."
"""Before the names of those that a CREATE TABLE has."""

_ONLY_WITH = {
    "columns": "delete",
    "load_from": "bulk_load",
    "load_name": "bulk_load",
    "load_to": "bulk_load",
    "notify": "bulk_load",
}

_NO_CREATE_TABLE = (
    "Spark does not hand the options of a CREATE TABLE to a Python data source; "
    "use CREATE TEMPORARY VIEW"
)

BULK_LOAD = "bulk_load"
OPERATIONS = ("upsert", "delete", BULK_LOAD)
NULLS = ("refuse", "skip", "delete")
TRANSACTION_ROWS_MAX = 100_000
MEBIBYTE = 1 << 20


def check_names(options: Mapping[str, str]) -> None:
    """Refuses what is no option at all."""
    known = _COMMON | _READ | _WRITE
    for name in sorted(name.lower() for name in options):
        if name == _SPARK_PATH + "s":
            raise InvalidArgument("table", "load() takes one, and was given several")
        if name.startswith(_SPARK_TABLE_OPTION):
            raise InvalidArgument("table", f"is missing: {_NO_CREATE_TABLE}")
        if name not in known and name not in (_SPARK_PATH, _SPARK_CHECKPOINT):
            near = get_close_matches(name, sorted(known), n=1, cutoff=0.0)
            raise InvalidArgument(name, f"is no option of percolator; is {near[0]!r} meant?")


@dataclass(frozen=True)
class Target:
    """Which table of which cluster."""

    address: str
    table: str
    timeout_seconds: float

    @classmethod
    def of(cls, given: _Given) -> Target:
        from percolator.wire.cluster import default_addresses, parse_addresses

        # The driver's environment decides: that of an executor may be another one, or none.
        address = given.get("address")
        addresses = default_addresses() if address is None else parse_addresses(address)
        path, table = given.get(_SPARK_PATH), given.get("table")
        if path and table and path != table:
            raise InvalidArgument("table", f"is {table!r}, and load() was given {path!r}")
        name = table or path
        if not name:
            raise InvalidArgument("table", f"is missing: which table? {_NO_CREATE_TABLE}")
        seconds = given.number("timeout_seconds", float, 10.0, least=0.1, most=600.0)
        return cls(",".join(addresses), name, seconds)


@dataclass(frozen=True)
class ReadOptions:
    """Of `spark.read`."""

    target: Target
    catalog: Catalogue | None
    columns: tuple[str, ...] | None
    at: Timestamp | None
    at_option: str
    """Which option said so."""
    partition_bytes: int
    pin_seconds: float

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> ReadOptions:
        given = _Given(options, _COMMON | _READ, "reading")
        snapshot, as_of = given.get("snapshot_ts"), given.get("as_of")
        if snapshot is not None and as_of is not None:
            raise InvalidArgument("as_of", "cannot be given together with snapshot_ts")
        at_option = "snapshot_ts" if snapshot is not None else "as_of"
        text = snapshot if snapshot is not None else as_of
        return cls(
            target=Target.of(given),
            catalog=given.catalog(),
            columns=given.names("columns"),
            at=None if text is None else _timestamp(at_option, text),
            at_option=at_option,
            partition_bytes=given.number(
                "partition_bytes", int, 128 * MEBIBYTE, least=MEBIBYTE, most=1 << 40
            ),
            pin_seconds=given.number("pin_seconds", float, 3600.0, least=0.0, most=604_800.0),
        )


@dataclass(frozen=True)
class WriteOptions:
    """Of `df.write`."""

    target: Target
    catalog: Catalogue | None
    columns: tuple[str, ...] | None
    operation: str
    nulls: str
    skip_equal: bool
    transaction_rows: int
    transactions_in_flight: int
    retry_seconds: float
    load_name: str
    load_from: bytes
    load_to: bytes
    notify: bool

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        given = _Given(options, _COMMON | _WRITE, "writing")
        operation = given.one_of("operation", OPERATIONS)
        for name, only in _ONLY_WITH.items():
            if given.get(name) is not None and operation != only:
                raise InvalidArgument(name, f"only makes sense with operation {only!r}")
        load_from, load_to = given.row("load_from"), given.row("load_to")
        if load_to and load_from >= load_to:
            raise InvalidArgument("load_to", "is not above load_from")
        return cls(
            target=Target.of(given),
            catalog=given.catalog(),
            columns=given.names("columns"),
            operation=operation,
            nulls=given.one_of("nulls", NULLS),
            skip_equal=given.boolean("skip_equal"),
            transaction_rows=given.number(
                "transaction_rows", int, 1000, least=1, most=TRANSACTION_ROWS_MAX
            ),
            transactions_in_flight=given.number("transactions_in_flight", int, 4, least=1, most=64),
            retry_seconds=given.number("retry_seconds", float, 120.0, least=0.1, most=86_400.0),
            load_name=given.get("load_name") or "",
            load_from=load_from,
            load_to=load_to,
            notify=given.boolean("notify"),
        )


class _Given:
    """The options of one use, by their names in lower case."""

    def __init__(self, options: Mapping[str, str], allowed: frozenset[str], use: str) -> None:
        self._values = {name.lower(): str(value) for name, value in options.items()}
        check_names(self._values)
        for name in sorted(self._values):
            if name not in allowed and name != _SPARK_PATH:
                raise InvalidArgument(name, f"is no option of {use}")

    def get(self, name: str) -> str | None:
        return self._values.get(name)

    def names(self, name: str) -> tuple[str, ...] | None:
        """A list with commas."""
        text = self._values.get(name)
        if text is None:
            return None
        names = tuple(part.strip() for part in text.split(","))
        if not all(names) or len(set(names)) < len(names):
            raise InvalidArgument(name, f"expected names with commas, each once, found {text!r}")
        return names

    def one_of(self, name: str, choices: tuple[str, ...]) -> str:
        """The first choice when nothing was said."""
        text = self._values.get(name, choices[0]).lower()
        if text not in choices:
            raise InvalidArgument(name, f"expected one of {', '.join(choices)}, found {text!r}")
        return text

    def boolean(self, name: str) -> bool:
        return self.one_of(name, ("false", "true")) == "true"

    def number(
        self, name: str, kind: Callable[[str], T], default: T, *, least: float, most: float
    ) -> T:
        text = self._values.get(name)
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

    def row(self, name: str) -> bytes:
        """A row key; no bytes when nothing was said."""
        text = self._values.get(name)
        if text is None:
            return b""
        catalogue = self.catalog()
        kinds = ["raw"] if catalogue is None else [field.type for field in catalogue.key]
        if kinds == ["ordered_integer"]:
            try:
                return ordered_integer.encode(int(text))
            except (ValueError, SchemaError):
                raise InvalidArgument(name, f"expected an integer key, found {text!r}") from None
        if len(kinds) > 1:
            raise InvalidArgument(name, "cannot be given for keys of several parts")
        return text.encode()

    def catalog(self) -> Catalogue | None:
        from percolator.spark.catalogue import Catalogue

        text = self._values.get("catalog")
        return None if text is None else Catalogue.parse(text)


def _timestamp(name: str, text: str) -> Timestamp:
    is_number = text.strip().isdigit()
    if is_number != (name == "snapshot_ts"):
        expected = "a timestamp" if name == "snapshot_ts" else "a date and time with its time zone"
        raise InvalidArgument(name, f"expected {expected}, found {text!r}")
    try:
        timestamp = Timestamp.parse(text)
    except InvalidArgument as error:
        raise InvalidArgument(name, error.reason) from None
    if not timestamp:
        raise InvalidArgument(name, "0 is before every commit: there is nothing to see")
    return timestamp
