"""`percolator tables` and `percolator index`: tables, and secondary indexes of their columns."""

from __future__ import annotations

import os
from math import ceil
from typing import Annotated, Any

import typer
from rich.table import Table as Screen
from rich.text import Text

from percolator import aio, codecs, recipes
from percolator.arguments import require_no_internal_name
from percolator.cli.connection import ask_master, confirm, connection, fail, plain
from percolator.cli.options import duration_seconds
from percolator.codecs import readable
from percolator.codecs.indexes import indexes_of, require_indexable
from percolator.codecs.names import CodecNames
from percolator.codecs.readable import counted, row_bytes, row_text
from percolator.errors import InvalidArgument, SchemaError
from percolator.observers.definition import named
from percolator.schema import Index, Table
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire import methods
from percolator.wire.table_indexes import described, no_index
from percolator.wire.table_options import REQUEST_ID_BYTES, TTL_MILLISECONDS_MAX

app = typer.Typer(no_args_is_help=True, help="Create, list, describe, alter and delete tables.")


Ttls = Annotated[
    list[str] | None,
    typer.Option(
        "--ttl",
        metavar="COLUMN=TIME",
        help="How long after its commit a value of a column is visible: 90s, 15m, 2h, 30d; "
        "repeatable.",
        show_default=False,
    ),
]


KeyCodec = Annotated[
    str | None,
    typer.Option("--key", help="The codec of the row keys, such as 'tuple_of(text, uuid)'."),
]
ColumnCodecs = Annotated[
    list[str] | None,
    typer.Option("--column", help="A column's codec, as NAME=CODEC; repeatable."),
]
_RETENTION_SECONDS_MAX = 100 * 366 * 86_400

Name = Annotated[str, typer.Argument(help="The table.", show_default=False)]


@app.command()
def create(
    context: typer.Context,
    name: Name,
    split: Annotated[
        list[str] | None,
        typer.Option(help="The first row of a further tablet; repeatable, in ascending order."),
    ] = None,
    retention: Annotated[
        float,
        typer.Option(
            help="Seconds that old versions are kept; 0: the cluster's default.",
            min=0,
            max=_RETENTION_SECONDS_MAX,
        ),
    ] = 0.0,
    split_mib: Annotated[
        int,
        typer.Option(
            help="Size in MiB above which tablets are split; 0: the cluster's default.",
            min=0,
            max=1 << 30,
        ),
    ] = 0,
    change_feed: Annotated[
        bool, typer.Option("--change-feed", help="Let its changes be followed.")
    ] = False,
    key: KeyCodec = None,
    column: ColumnCodecs = None,
    ttl: Ttls = None,
    exist_ok: Annotated[
        bool, typer.Option("--exist-ok", help="Succeed if the table exists and has these options.")
    ] = False,
) -> None:
    """Create a table.

    The first program that writes a column declares its codec, so --key and --column are needed only
    for tables that no program writes first.
    """
    here = connection(context)
    try:
        require_no_internal_name(name)
        codecs = pb.Codecs(key=_key_codec(key) or "", columns=_column_codecs(column))
        ttls = column_ttls(ttl)
        keys = readable.key_codec(codecs.key)
        splits = [readable.key_bytes("--split", keys, text) for text in split or []]
    except InvalidArgument as error:
        fail(error)
    request = pb.CreateTableRequest(
        name=name,
        splits=splits,
        options=pb.TableOptions(
            retention_milliseconds=ceil(retention * 1000),
            split_bytes=split_mib << 20,
            change_feed=change_feed,
            ttls=ttls,
        ),
        exist_ok=exist_ok,
        codecs=codecs,
        request_id=os.urandom(REQUEST_ID_BYTES),
        knows_indexes=True,
    )
    answer = ask_master(here, methods.CREATE_TABLE, request)
    what = "created" if answer.created else "already exists"
    here.show(
        {"created": answer.created, **_as_data(answer.table)},
        plain(f"table {name} {what}{_tablets(answer.table)}"),
    )


@app.command("list")
def list_tables(context: typer.Context) -> None:
    """List all tables, but not those that have the entries of indexes."""
    here = connection(context)
    listed = ask_master(here, methods.LIST_TABLES, pb.ListTablesRequest()).tables
    tables = [table for table in listed if not table.index_of]
    screen = Screen("table", "id", "tablets", "schema", "observers", "retention", box=None)
    for table in tables:
        screen.add_row(
            plain(table.name + (" (being deleted)" if table.deleting else "")),
            str(table.table_id),
            str(table.tablets),
            str(table.schema_version),
            str(len(table.observers)),
            _retention(table),
        )
    here.show([_as_data(table) for table in tables], screen if tables else "no tables")


@app.command()
def describe(context: typer.Context, name: Name) -> None:
    """Show the schema of a table."""
    here = connection(context)
    request = pb.DescribeTableRequest(name=name, knows_indexes=True)
    table = ask_master(here, methods.DESCRIBE_TABLE, request).table
    lines = [
        f"table {table.name}, id {table.table_id}{_tablets(table)}",
        f"schema version {table.schema_version}",
        f"retention {_retention(table)}",
        f"change feed {'on' if table.options.change_feed else 'off'}",
    ]
    if table.codecs.key:
        lines.append(f"row keys {table.codecs.key}")
    lines += [f"column {row_text(one.column)} {one.codec}" for one in table.codecs.columns]
    lines += [
        f"column {row_text(one.column)} expires after {one.ttl_milliseconds / 1000:g} s"
        for one in table.options.ttls
    ]
    lines += [f"index {one.name}, {described(one)}" for one in indexes_of(table.indexes)]
    for observer in table.observers:
        columns = ", ".join(column.decode(errors="backslashreplace") for column in observer.columns)
        states = " (weak)" * observer.weak + " (paused)" * observer.paused
        lines.append(f"observer {observer.name} of {columns}{states}")
    screen = Screen.grid()
    for line in lines:
        screen.add_row(plain(line))
    here.show(_as_data(table), screen)


@app.command("change-feed")
def change_feed(
    context: typer.Context,
    name: Name,
    on: Annotated[bool, typer.Option("--on", help="Switch it on.")] = False,
    off: Annotated[bool, typer.Option("--off", help="Switch it off.")] = False,
) -> None:
    """Give a table a change feed, or take it away.

    It lacks what was committed before it was switched on.
    """
    here = connection(context)
    if on == off:
        fail(InvalidArgument("--on", "expected either --on or --off"))
    request = pb.SetChangeFeedRequest(table=name, change_feed=on)
    table = ask_master(here, methods.SET_CHANGE_FEED, request).table
    state = "on" if table.options.change_feed else "off"
    here.show(_as_data(table), plain(f"the change feed of table {name} is {state}"))


@app.command()
def alter(
    context: typer.Context,
    name: Name,
    key: KeyCodec = None,
    column: ColumnCodecs = None,
    ttl: Ttls = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Change the codecs and times to live that a table's schema keeps.

    What is stored stays as it is: programs read it with the new codec from now on. Programs that
    declare another one are refused. Without a codec (--column NAME=, --key ""), the next program
    that writes declares one.

    A time to live (--ttl NAME=30d) also applies to values that are there; those that are older
    are no longer visible, and are deleted. With --ttl NAME=, values no longer expire.
    """
    here = connection(context)
    try:
        require_no_internal_name(name)
        codecs = pb.ChangeCodecsRequest(
            table=name, key=_key_codec(key), columns=_column_codecs(column, may_be_empty=True)
        )
        ttls = column_ttls(ttl, may_be_empty=True)
    except InvalidArgument as error:
        fail(error)
    changes_codecs = key is not None or bool(column)
    if not changes_codecs and not ttls:
        fail(
            InvalidArgument(
                "--column", "expected --column NAME=CODEC, --key CODEC or --ttl NAME=TIME"
            )
        )
    if not yes:
        what = ["What is stored is not converted."] * changes_codecs
        what += ["Values that are older than their time to live are deleted."] * bool(ttls)
        confirm(f"Change the table {name!r}? {' '.join(what)}")
    altered: list[pb.Table] = []
    if changes_codecs:
        altered.append(ask_master(here, methods.CHANGE_CODECS, codecs).table)
    if ttls:
        request = pb.SetTtlsRequest(table=name, ttls=ttls)
        altered.append(ask_master(here, methods.SET_TTLS, request).table)
    table = altered[-1]
    here.show(
        _as_data(table), plain(f"table {name} altered, schema version {table.schema_version}")
    )


@app.command()
def delete(
    context: typer.Context,
    name: Name,
    missing_ok: Annotated[
        bool, typer.Option("--missing-ok", help="Succeed if the table does not exist.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a table with everything in it."""
    here = connection(context)
    try:
        require_no_internal_name(name)
    except InvalidArgument as error:
        fail(error)
    if not yes:
        confirm(f"Delete the table {name!r} with everything in it?")
    request = pb.DeleteTableRequest(
        name=name, missing_ok=missing_ok, request_id=os.urandom(REQUEST_ID_BYTES)
    )
    deleted = ask_master(here, methods.DELETE_TABLE, request).deleted
    here.show(
        {"deleted": deleted}, plain(f"table {name} {'deleted' if deleted else 'does not exist'}")
    )


def _key_codec(name: str | None) -> str | None:
    if name:
        readable.require_key_name("--key", name)
    return name


def _column_codecs(given: list[str] | None, *, may_be_empty: bool = False) -> list[pb.ColumnCodec]:
    found = []
    for text in given or ():
        column, equals, codec = text.rpartition("=")
        if not column or not equals:
            raise InvalidArgument("--column", f"expected NAME=CODEC, found {text[:80]!r}")
        if codec or not may_be_empty:
            readable.require_value_name("--column", codec)
        found.append(pb.ColumnCodec(column=row_bytes("--column", column), codec=codec))
    return found


def column_ttls(given: list[str] | None, *, may_be_empty: bool = False) -> list[ColumnTtl]:
    """Raises `InvalidArgument`."""
    found: dict[bytes, ColumnTtl] = {}
    for text in given or ():
        column, equals, ttl = text.rpartition("=")
        if not column or not equals:
            raise InvalidArgument("--ttl", f"expected COLUMN=TIME, found {text[:80]!r}")
        milliseconds = 0
        if ttl or not may_be_empty:
            milliseconds = ceil(1000 * duration_seconds("--ttl", ttl))
        if milliseconds > TTL_MILLISECONDS_MAX:
            raise InvalidArgument("--ttl", f"expected at most 100 years, found {ttl!r}")
        name = row_bytes("--ttl", column)
        if name in found:
            raise InvalidArgument("--ttl", f"column {column!r} is named twice")
        found[name] = ColumnTtl(column=name, ttl_milliseconds=milliseconds)
    return list(found.values())


def _retention(table: pb.Table) -> str:
    milliseconds = table.options.retention_milliseconds
    return f"{milliseconds / 1000:g} s" if milliseconds else "default"


def _tablets(table: pb.Table) -> str:
    """Nothing where a row store has the cells."""
    return f", {counted(table.tablets, 'tablet')}" if table.tablets else ""


def _as_data(table: pb.Table) -> dict[str, object]:
    return {
        "name": table.name,
        "table_id": table.table_id,
        "tablets": table.tablets,
        "schema_version": table.schema_version,
        "retention_seconds": table.options.retention_milliseconds / 1000 or None,
        "split_bytes": table.options.split_bytes or None,
        "change_feed": table.options.change_feed,
        "ttl_seconds": {
            row_text(one.column): one.ttl_milliseconds / 1000 for one in table.options.ttls
        },
        "deleting": table.deleting,
        "key_codec": table.codecs.key or None,
        "columns": {row_text(one.column): one.codec for one in table.codecs.columns},
        "indexes": [
            {
                "name": one.name,
                "columns": [row_text(column) for column in one.names],
                "unique": one.unique,
            }
            for one in indexes_of(table.indexes)
        ],
        "observers": [
            {
                "name": one.name,
                "columns": [column.decode(errors="backslashreplace") for column in one.columns],
                "weak": one.weak,
                "paused": one.paused,
            }
            for one in table.observers
        ],
    }


index_app = typer.Typer(no_args_is_help=True, help="Create, check and drop indexes of tables.")

_Reference = Annotated[str, typer.Argument(help="module:name of a percolator.recipes.Index.")]
_IndexName = Annotated[str, typer.Argument(metavar="NAME", help="The index.", show_default=False)]


@index_app.callback()
def index() -> None:
    """Create, check and drop indexes of tables."""


@index_app.command("create")
def create_index(
    context: typer.Context,
    table: Name,
    name: _IndexName,
    column: Annotated[
        list[str] | None,
        typer.Option(
            "--column",
            metavar="COLUMN[=CODEC]",
            help="A column; by default, with the codec that the table keeps for it. Repeatable, in "
            "the order in which values are compared.",
        ),
    ] = None,
    unique: Annotated[
        bool, typer.Option("--unique", help="Let no two rows have the same values.")
    ] = False,
) -> None:
    """Add an index to a table, and build it while programs go on writing.

    If it is interrupted, call it again. It also builds an index that is there.
    """
    here = connection(context)
    if not column:
        fail(InvalidArgument("--column", "is missing: an index has one column at least"))
    kept = ask_master(
        here, methods.DESCRIBE_TABLE, pb.DescribeTableRequest(name=table, knows_indexes=True)
    ).table
    try:
        require_no_internal_name(table)
        columns = _asked_for(column, CodecNames.of(kept.codecs))
        wanted = _declared(table, name, columns, unique)
    except (InvalidArgument, SchemaError) as error:
        fail(error)
    rows = here.run_with_database(lambda database: database.create_index(wanted))
    here.show(
        {"table": table, "index": name, "rows": rows},
        plain(f"{counted(rows, 'row is', 'rows are')} indexed"),
    )


@index_app.command("drop")
def drop_index(context: typer.Context, table: Name, name: _IndexName) -> None:
    """Remove an index of a table."""
    here = connection(context)
    here.run_with_database(lambda database: database.drop_index(Table(table), name))
    here.show({"table": table, "index": name}, plain(f"index {name} of table {table} dropped"))


def _asked_for(given: list[str] | None, kept: CodecNames) -> list[tuple[bytes, str]]:
    """The columns of an index and their codecs. Raises `InvalidArgument` or `SchemaError`."""
    found = []
    for text in given or ():
        column, equals, codec = text.rpartition("=")
        stored = row_bytes("--column", column if equals else text)
        if not equals:
            codec = kept.columns.get(stored, "")
        if not codec:
            raise InvalidArgument("--column", f"expected COLUMN=CODEC, found {text[:80]!r}")
        readable.require_value_name("--column", codec)
        require_indexable(codec, stored)
        found.append((stored, codec))
    return found


def _declared(table: str, name: str, columns: list[tuple[bytes, str]], unique: bool) -> Index[Any]:
    """The index, as a program would declare it."""
    rows = Table(table, key=codecs.stored)
    listed = (rows.column(one, readable.value_codec(codec) or codecs.raw) for one, codec in columns)
    return rows.index(name, *listed, unique=unique)


@index_app.command("backfill")
def backfill(context: typer.Context, reference: _Reference) -> None:
    """Build the index over rows that were written before, and fix whatever is wrong in it.

    Its observer must be registered. Programs may run meanwhile.
    """
    here, chosen = connection(context), _index(reference)
    rows = here.run_with_database(chosen.backfill)
    here.show(
        {"index": chosen.table.name, "rows": rows},
        plain(f"{counted(rows, 'row is', 'rows are')} indexed"),
    )


@index_app.command("check")
def check(
    context: typer.Context,
    table: Annotated[
        str,
        typer.Argument(
            help="The table; or, without NAME, module:name of a percolator.recipes.Index.",
            show_default=False,
        ),
    ],
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="The index.", show_default=False)
    ] = None,
) -> None:
    """Compare an index with its table, at one snapshot. Exits with 1 if they differ.

    If an observer keeps the index, run `percolator wait` before: what it has not handled yet
    differs.
    """
    here = connection(context)
    if name is None:
        if ":" not in table:
            fail(InvalidArgument("NAME", f"is missing: say which index of table {table!r}"))
        chosen = _index(table)
        shown = chosen.table.name

        async def compare(database: aio.Database) -> list[str]:
            async with database.snapshot() as snapshot:
                return await chosen.check(snapshot)

    else:
        request = pb.DescribeTableRequest(name=table, knows_indexes=True)
        described_table = ask_master(here, methods.DESCRIBE_TABLE, request).table
        known = next((one for one in indexes_of(described_table.indexes) if one.name == name), None)
        if known is None:
            fail(no_index(table, name))
        shown, declared = name, _declared(table, name, [*known.columns], known.unique)

        async def compare(database: aio.Database) -> list[str]:
            return await database.check_index(declared)

    problems = here.run_with_database(compare)
    lines = Text("\n").join(map(plain, problems or ["column and index agree"]))
    here.show({"index": shown, "problems": problems}, lines)
    if problems:
        raise typer.Exit(1)


def _index(reference: str) -> recipes.Index[Any, Any, Any]:
    try:
        found = named(reference, "index")
    except InvalidArgument as error:
        fail(error)
    if not isinstance(found, recipes.Index):
        fail(InvalidArgument("index", f"{reference} is {found!r:.80}, not an Index"))
    return found
