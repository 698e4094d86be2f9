"""A table's schema is a catalogue for Spark."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import percolator
import percolator.spark
from percolator import Receipt, Table, Timestamp, codecs
from percolator.aio import SharedTransaction
from percolator.aio.shared import TTL_TIMES
from percolator.codecs.names import CodecNames
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvalidArgument,
    OutcomeUnknown,
    RowChanged,
    SchemaError,
    SnapshotTooOld,
    Unavailable,
)
from percolator.formats.records import KIND_DELETE, KIND_PUT
from percolator.limits import Limits
from percolator.protocol.write_set import Write
from percolator.routing.cells import FoundCell
from percolator.spark import atomic_writer
from percolator.spark.atomic_writer import commit_or_roll_back
from percolator.spark.catalog import FrameCatalog, declared_catalog, require_declared
from percolator.spark.options import KEEP_SECONDS_MIN
from percolator.spark.reader import SHARED_SECONDS, ReadPins
from percolator.spark.transaction_writer import (
    BYTES_MAX,
    CELLS_MAX,
    FEW_CELLS,
    Condition,
    Versions,
    Writes,
    cut,
    differing,
    merged,
)

if TYPE_CHECKING:
    from percolator.spark.shapes import Cell


NAMES = (
    "raw",
    "text",
    "integer",
    "float",
    "boolean",
    "timestamp",
    "date",
    "decimal(10,2)",
    "json",
)


def test_each_column_with_a_codec_is_a_field_of_its_type() -> None:
    columns = {f"c:{name}".encode(): name for name in NAMES}
    made = declared_catalog(CodecNames("ordered_integer", columns))
    assert made is not None
    found = FrameCatalog.parse(made)
    assert [(field.name, field.type) for field in found.key] == [("key", "ordered_integer")]
    assert {field.column: field.type for field in found.values} == columns


@pytest.mark.parametrize(
    ("codec", "kind"),
    [("model(Order)", "json"), ("message(shop.Order)", "raw"), ("uuid", "raw"), ("money", "raw")],
)
def test_what_spark_has_no_type_for_is_json_or_bytes(codec: str, kind: str) -> None:
    made = declared_catalog(CodecNames("text", {b"a": codec}))
    assert made is not None
    assert json.loads(made)["columns"] == {"a": {"type": kind}}
    FrameCatalog.parse(made)


@pytest.mark.parametrize(
    ("key", "fields"),
    [
        ("", [("key", "raw")]),
        ("text", [("key", "text")]),
        ("uuid", [("key", "raw")]),
        ("hashed(text)", [("key", "raw")]),
        ("tuple_of(text, ordered_integer)", [("key_1", "text"), ("key_2", "ordered_integer")]),
        ("tuple_of(text, uuid)", [("key", "raw")]),
    ],
)
def test_the_parts_of_a_key_are_fields_if_spark_can_have_all_of_them(
    key: str, fields: list[tuple[str, str]]
) -> None:
    made = declared_catalog(CodecNames(key, {b"a": "text"}))
    assert made is not None
    found = FrameCatalog.parse(made)
    assert [(field.name, field.type) for field in found.key] == fields


def test_without_a_column_that_a_frame_can_have_there_is_no_catalogue() -> None:
    assert declared_catalog(CodecNames("text")) is None
    assert declared_catalog(CodecNames("text", {b"\xff": "text"})) is None


@pytest.mark.parametrize(
    ("key", "columns", "fields"),
    [
        ("text", ["Key", "key_1"], ["row_key"]),
        ("text", ["key", "row_key"], ["row_row_key"]),
        ("tuple_of(text, text)", ["key_2"], ["row_key_1", "row_key_2"]),
    ],
)
def test_a_column_may_have_the_name_of_the_key(
    key: str, columns: list[str], fields: list[str]
) -> None:
    made = declared_catalog(CodecNames(key, {name.encode(): "text" for name in columns}))
    assert made is not None
    found = FrameCatalog.parse(made)
    assert [field.name for field in found.key] == fields
    assert [field.name for field in found.values] == columns


def _catalogue(kind: str, key: str = "text") -> FrameCatalog:
    document = {"key": {"name": "id", "type": key}, "columns": {"price": {"type": kind}}}
    return FrameCatalog.parse(json.dumps(document))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        ("integer", "integer"),
        ("int", "integer"),
        ("raw", "integer"),
        ("raw", "uuid"),
        ("json", "model(Price)"),
        ("decimal(10,2)", "decimal(10,2)"),
        ("text", ""),
    ],
)
def test_the_same_codec_or_none_or_bytes_are_written(kind: str, codec: str) -> None:
    names = CodecNames(key="text", columns={b"price": codec} if codec else {})
    require_declared("goods", names, _catalogue(kind))
    require_declared("goods", CodecNames(), _catalogue(kind, "ordered_integer"))


@pytest.mark.parametrize(
    ("kind", "codec"),
    [("text", "integer"), ("int", "float"), ("decimal(10,3)", "decimal(10,2)"), ("text", "uuid")],
)
def test_another_codec_is_refused_with_both_names(kind: str, codec: str) -> None:
    names = CodecNames(key="text", columns={b"price": codec})
    with pytest.raises(SchemaError, match="table 'goods', column 'price': the program declares"):
        require_declared("goods", names, _catalogue(kind))


def test_another_key_is_refused() -> None:
    with pytest.raises(SchemaError, match=r"row keys: .* ordered_integer, but the table has text"):
        require_declared("goods", CodecNames(key="text"), _catalogue("text", "ordered_integer"))
    require_declared("goods", CodecNames(key="text"), _catalogue("text", "raw"))


CATALOGUE = FrameCatalog.parse(
    """{"key": {"name": "url", "type": "text"},
        "columns": {"title": {"type": "text"}, "Visits": {"type": "integer"}}}"""
)


def test_names_ignore_case() -> None:
    found = CATALOGUE.chosen(("VISITS", "Title"))
    assert [field.name for field in found] == ["Visits", "title"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("TITEL",), "no column 'TITEL'; did you mean 'title'"),
        (("visit",), "did you mean 'Visits'"),
        (("Url",), "'Url' is the key, which every row has"),
        (("title", "TITLE"), "names a column twice: title, TITLE"),
    ],
)
def test_a_wrong_name_is_refused(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        CATALOGUE.chosen(names)


# Reads share pins, so that a program may define any number of them.


class FakePin:
    def __init__(self, at: Timestamp, error: Exception | None) -> None:
        self.at = at
        self.is_lost = self.closed = False
        self._error = error

    async def set(self) -> None:
        if self._error is not None:
            raise self._error

    async def close(self) -> None:
        self.closed = True


class FakeDatabase:
    """Keeps the pins that were made."""

    def __init__(self) -> None:
        self.made: list[FakePin] = []
        self.error: Exception | None = None

    def pin(self, at: Timestamp, **_: Any) -> FakePin:
        self.made.append(FakePin(at, self.error))
        return self.made[-1]


def reads() -> tuple[Any, FakeDatabase]:
    database: Any = FakeDatabase()
    return ReadPins(database), database


def moment(seconds: float) -> Timestamp:
    return Timestamp.of(int((1_000 + seconds) * 1_000))


async def test_reads_that_begin_together_share_a_pin_that_is_not_above_them() -> None:
    pins, database = reads()
    moments = [moment(number / 10) for number in range(1_000)]
    for at in moments:
        await pins.hold(at, "pages", 3600.0, is_new=True)
        newest = database.made[-1].at
        assert newest <= at < newest + (moment(SHARED_SECONDS) - moment(0))
    assert len(database.made) == 10


async def test_a_shared_pin_lasts_as_long_as_the_last_read_needs_it() -> None:
    pins, database = reads()
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    await asyncio.sleep(5.0)
    await pins.hold(moment(5), "pages", 100.0, is_new=True)
    await pins.hold(moment(6), "pages", 1.0, is_new=True)
    pin: Any = database.made[0]
    assert len(database.made) == 1
    await asyncio.sleep(99.0)
    assert not pin.closed
    await asyncio.sleep(2.0)
    assert pin.closed
    await pins.hold(moment(7), "pages", 100.0, is_new=True)
    assert len(database.made) == 2, "one that was closed holds nothing"


async def test_a_pin_that_was_lost_is_not_shared() -> None:
    pins, database = reads()
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    database.made[0].is_lost = True
    await pins.hold(moment(1), "pages", 100.0, is_new=True)
    assert [pin.at for pin in database.made] == [moment(0), moment(1)]


async def test_reads_of_the_past_have_pins_of_their_own() -> None:
    """A table may have no such past any more, which is only known once the pin is set."""
    pins, database = reads()
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    for past in (-1, 0, 1):
        await pins.hold(moment(past), "links", 100.0, is_new=False)
    await pins.hold(moment(2), "pages", 100.0, is_new=True)
    assert [pin.at for pin in database.made] == [moment(0), moment(-1), moment(0), moment(1)]


async def test_a_pin_that_could_not_be_set_is_not_shared() -> None:
    pins, database = reads()
    database.error = Unavailable("no lock service answers")
    await pins.hold(moment(0), "pages", 100.0, is_new=True)
    database.error = SnapshotTooOld("gone")
    with pytest.raises(SnapshotTooOld):
        await pins.hold(moment(1), "pages", 100.0, is_new=True)
    database.error = None
    await pins.hold(moment(2), "pages", 100.0, is_new=True)
    assert len(database.made) == 3


@pytest.mark.parametrize("seconds", [1, 14.9, 86_401, 0, -1, float("nan"), 10**30, "60", None])
def test_locks_are_kept_as_long_as_the_option_of_a_write_allows(seconds: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^keep_seconds: expected a (positive )?number"):
        percolator.spark.together(keep_seconds=seconds)


def test_the_least_and_the_most_are_accepted() -> None:
    for seconds in (15, 86_400):
        percolator.spark.together(keep_seconds=seconds)


def test_the_least_is_what_shared_transactions_keep_their_locks_for_anyway() -> None:
    assert TTL_TIMES * Limits().lock_ttl_seconds == KEEP_SECONDS_MIN


def test_a_job_that_gets_no_directory_keeps_nothing_alive(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing would ever end its transaction, which holds back the collection of history."""

    def full(**_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(atomic_writer, "shared_database", lambda _: percolator_db)
    monkeypatch.setattr(atomic_writer, "TemporaryDirectory", full)
    with pytest.raises(OSError, match="No space left"), percolator.spark.together():
        pass
    assert percolator_db._asynchronous.internal.engine.open_starts.oldest() == 0


# What is left of the writes of a transaction, once it is known what is there.

SINCE, BEGAN = Timestamp(100), Timestamp(200)
CONDITION = Condition("pages", SINCE, BEGAN, codecs.text)


def at(row: str, column: str = "title") -> CellAddress:
    return CellAddress(7, row.encode(), column.encode())


def put(value: str) -> tuple[int, bytes]:
    return KIND_PUT, value.encode()


DELETE = (KIND_DELETE, b"")


def found(timestamp: int, value: str | None) -> FoundCell:
    return FoundCell(timestamp, None if value is None else value.encode())


def test_rows_that_are_older_than_the_snapshot_are_written() -> None:
    writes = {at("a"): put("new"), at("b"): put("new")}
    there = {at("a"): found(100, "old"), at("a", "visits"): found(3, "1")}
    assert CONDITION.unwritten(writes, there, may_be_own=False) == writes


@pytest.mark.parametrize(
    "changed",
    [
        {at("b"): found(101, "other")},
        {at("b"): found(101, None)},
        {at("b"): found(50, "old"), at("b", "visits"): found(101, "2")},
        {at("b"): found(201, "new")},
    ],
    ids=["updated", "deleted", "in another column", "to the same value"],
)
def test_a_row_that_was_written_since_is_refused_by_its_name(changed: Versions) -> None:
    with pytest.raises(
        RowChanged, match=r"row 'b' of table 'pages' was written at \d+, after 100"
    ) as e:
        CONDITION.unwritten({at("a"): put("new"), at("b"): put("new")}, changed, may_be_own=False)
    assert (e.value.table, e.value.row, e.value.since) == ("pages", b"b", 100)
    assert e.value.commit_timestamp in (101, 201)


def test_a_cell_of_which_nothing_is_left_is_refused() -> None:
    CONDITION.refuse_vanished([])
    with pytest.raises(
        RowChanged, match=r"row 'a' .* was written and cleaned up, after 100, column"
    ):
        CONDITION.refuse_vanished([at("a")])


def test_what_an_earlier_attempt_has_written_is_not_written_again() -> None:
    writes: Writes = {
        at("a"): put("new"),
        at("a", "visits"): DELETE,
        at("b"): put("new"),
    }
    own = {at("a"): found(201, "new"), at("a", "visits"): found(201, None)}
    assert CONDITION.unwritten(writes, own, may_be_own=True) == {at("b"): put("new")}


EQUAL = replace(CONDITION, skip_equal=True)
MERGE = replace(CONDITION, is_merge=True)


@pytest.mark.parametrize(
    ("condition", "writes", "there"),
    [
        (
            EQUAL,
            {at("a"): put("new"), at("a", "visits"): put("1"), at("a", "owner"): DELETE},
            {at("a"): found(201, "new"), at("a", "visits"): found(90, "1")},
        ),
        (
            MERGE,
            {at("a"): DELETE, at("a", "visits"): DELETE, at("a", "owner"): DELETE},
            {at("a"): found(201, None), at("a", "visits"): found(90, None)},
        ),
    ],
    ids=["equal cells", "deletions of nothing"],
)
def test_an_earlier_attempt_is_recognized_without_the_cells_that_it_has_left_out(
    condition: Condition, writes: Writes, there: Versions
) -> None:
    assert condition.unwritten(writes, there, may_be_own=True) == {}
    with pytest.raises(RowChanged):
        CONDITION.unwritten(writes, there, may_be_own=True)


@pytest.mark.parametrize(
    ("condition", "writes", "there"),
    [
        (
            EQUAL,
            {at("a"): put("new"), at("a", "visits"): put("2")},
            {at("a"): found(201, "new"), at("a", "visits"): found(90, "1")},
        ),
        (
            EQUAL,
            {at("a"): put("new"), at("a", "expiring"): put("1")},
            {at("a"): found(201, "new"), at("a", "expiring"): found(90, "1")},
        ),
        (
            MERGE,
            {at("a"): DELETE, at("a", "visits"): DELETE},
            {at("a"): found(201, None), at("a", "visits"): found(90, "1")},
        ),
        (
            MERGE,
            {at("a"): put("new"), at("a", "visits"): DELETE},
            {at("a"): found(201, "new")},
        ),
    ],
    ids=["another value", "one that expires", "what is there", "of a row that stays"],
)
def test_an_earlier_attempt_would_have_left_out_nothing_else(
    condition: Condition, writes: Writes, there: Versions
) -> None:
    with pytest.raises(RowChanged):
        condition.unwritten(writes, there, may_be_own=True, expiring={b"expiring"})


@pytest.mark.parametrize(
    "others",
    [
        {at("a"): found(201, "other"), at("a", "visits"): found(201, None)},
        {at("a"): found(201, "new"), at("a", "visits"): found(202, None)},
        {at("a"): found(201, "new"), at("a", "visits"): found(90, "1")},
        {at("a"): found(150, "new"), at("a", "visits"): found(150, None)},
        {
            at("a"): found(201, "new"),
            at("a", "visits"): found(201, None),
            at("a", "owner"): found(201, "x"),
        },
    ],
    ids=["other value", "two transactions", "a part", "before the job", "more than it writes"],
)
def test_what_an_earlier_attempt_cannot_have_written_is_refused(others: Versions) -> None:
    writes: Writes = {at("a"): put("new"), at("a", "visits"): DELETE}
    with pytest.raises(RowChanged):
        CONDITION.unwritten(writes, others, may_be_own=True)


@pytest.mark.parametrize("update", [True, False])
@pytest.mark.parametrize("insert", [True, False])
def test_a_merge_inserts_updates_and_deletes_as_asked(update: bool, insert: bool) -> None:
    writes: Writes = {
        at("old"): put("new"),
        at("absent"): put("new"),
        at("old but gone"): DELETE,
        at("old but gone", "visits"): DELETE,
        at("absent and gone"): DELETE,
        at("deleted before"): put("new"),
    }
    there = {
        at("old", "visits"): found(1, "1"),
        at("old but gone", "visits"): found(1, "1"),
        at("deleted before"): found(2, None),
    }
    expected = {at("old but gone", "visits")}
    expected |= {at("old")} if update else set()
    expected |= {at("absent"), at("deleted before")} if insert else set()
    assert set(merged(writes, there, update=update, insert=insert)) == expected


rows = st.sampled_from(["a", "b", "c"])
columns = st.sampled_from(["title", "visits"])
cells = st.builds(at, rows, columns)
values = st.sampled_from([put("1"), put("2"), DELETE])
stored = st.builds(found, st.integers(1, 100), st.sampled_from(["1", "2", None]))


@given(st.dictionaries(cells, values, min_size=1), st.dictionaries(cells, stored))
def test_equal_cells_are_left_out_and_the_outcome_is_the_same(
    writes: Writes, there: dict[CellAddress, FoundCell]
) -> None:
    def outcome(applied: Writes) -> dict[CellAddress, bytes]:
        state = {address: cell.value for address, cell in there.items() if cell.value is not None}
        for address, (kind, value) in applied.items():
            state.pop(address, None)
            if kind == KIND_PUT:
                state[address] = value
        return state

    left = differing(writes, there)
    assert outcome(left) == outcome(writes)
    assert all(outcome({address: write}) != outcome({}) for address, write in left.items())


def test_equal_values_that_expire_are_written_again() -> None:
    """Otherwise they would expire as if nobody had written them again."""
    there = {at("a"): found(1, "1"), at("a", "visits"): found(1, "1")}
    writes = {at("a"): put("1"), at("a", "visits"): put("1"), at("b", "visits"): DELETE}
    assert set(differing(writes, there, {b"visits"})) == {at("a", "visits")}


NO_LIMIT = 1_000_000


def _row(number: int) -> bytes:
    return b"%06d" % number


def _cells(rows: int, columns: int = 1, value: bytes = b"v") -> list[Cell]:
    return [(_row(n), b"c%d" % c, value) for n in reversed(range(rows)) for c in range(columns)]


def _rows(part: dict[CellAddress, Write]) -> list[bytes]:
    return list(dict.fromkeys(address.row for address in part))


def test_the_parts_are_in_order_and_have_every_cell_once() -> None:
    found = list(cut(_cells(2_000, 3), 7, 300, [_row(450), _row(1_111)]))
    assert [row for part in found for row in _rows(part)] == [_row(n) for n in range(2_000)]
    assert sum(len(part) for part in found) == 6_000
    assert {address.table_id for part in found for address in part} == {7}


def test_no_part_has_more_rows_cells_or_bytes_than_allowed() -> None:
    assert [len(_rows(part)) for part in cut(_cells(25), 1, 10, [])] == [10, 10, 5]
    by_cells = [len(part) for part in cut(_cells(1_000, 3), 1, NO_LIMIT, [])]
    assert max(by_cells) <= CELLS_MAX
    assert min(by_cells[:-1]) > CELLS_MAX - 3
    large = b"x" * (BYTES_MAX // 4)
    assert [len(part) for part in cut(_cells(9, 1, large), 1, NO_LIMIT, [])] == [4, 4, 1]


def test_a_row_is_never_cut_however_large_it_is() -> None:
    huge = b"x" * (BYTES_MAX + 1)
    found = list(cut([(b"b", b"c", huge), (b"b", b"d", huge), (b"a", b"c", b"v")], 1, 10, []))
    assert ([_rows(part) for part in found], len(found[1])) == ([[b"a"], [b"b"]], 2)


def test_a_part_ends_where_its_tablet_ends() -> None:
    borders = [_row(n) for n in (100, 101, 250)]
    found = list(cut(_cells(300), 1, NO_LIMIT, borders))
    assert [_rows(part)[0] for part in found] == [_row(0), _row(100), _row(250)]


def test_a_few_cells_before_a_border_go_on_with_the_next_tablet() -> None:
    found = list(cut(_cells(100), 1, NO_LIMIT, [_row(FEW_CELLS - 1)]))
    assert [len(part) for part in found] == [100]
    found = list(cut(_cells(100), 1, NO_LIMIT, [_row(FEW_CELLS)]))
    assert [len(part) for part in found] == [FEW_CELLS, 100 - FEW_CELLS]


def test_of_a_cell_that_is_written_twice_the_last_value_counts_and_none_deletes() -> None:
    cells: list[Cell] = [(b"b", b"c", b"1"), (b"a", b"c", None), (b"b", b"c", b"2")]
    (part,) = cut(cells, 1, 10, [])
    assert part == {
        CellAddress(1, b"a", b"c"): (KIND_DELETE, b""),
        CellAddress(1, b"b", b"c"): (KIND_PUT, b"2"),
    }


pages = Table("pages")
size = pages.column("size", codecs.integer)


@pytest.mark.parametrize("is_committed", [True, False])
def test_an_unknown_outcome_is_settled(
    percolator_db: percolator.Database, monkeypatch: pytest.MonkeyPatch, is_committed: bool
) -> None:
    db, commit = percolator_db, SharedTransaction.commit
    db.create_table(pages)

    async def unanswered(
        self: SharedTransaction, receipts: Sequence[Receipt], **_: object
    ) -> Timestamp | None:
        if is_committed:
            # As if the answer had been lost: only the store knows.
            await commit(self, receipts)
            self._ended, self.commit_timestamp = "", None
        raise OutcomeUnknown("no answer", start_timestamp=1)

    monkeypatch.setattr(SharedTransaction, "commit", unanswered)
    with db.shared_transaction() as whole:
        with db.share(whole.ticket, task="1") as share:
            share.set("page", size, 1)
            receipt = share.finish()
        if is_committed:
            assert whole.call_inside(commit_or_roll_back, [receipt], "the job")
        else:
            with pytest.raises(ConflictError, match="the job was rolled back: no answer"):
                whole.call_inside(commit_or_roll_back, [receipt], "the job")
    with db.snapshot() as snapshot:
        assert snapshot.get("page", size) == (1 if is_committed else None)
