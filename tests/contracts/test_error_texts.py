"""Texts of errors: where, how often, and what to do instead."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from typing import Any

import pytest

from percolator import (
    ConflictError,
    Database,
    InvalidArgument,
    Outcome,
    RetryPolicy,
    SchemaError,
    Table,
    Transaction,
    UsageError,
    aio,
    codecs,
    transactional,
)
from percolator.errors import CellAddress
from percolator.formats.records import KIND_DELETE, KIND_LOCK_ONLY, KIND_PUT
from percolator.protocol import steps
from percolator.protocol.write_set import Write, WriteSteps
from percolator.routing.catalog import TableSchema
from percolator.routing.cells import CellMutation, ListedStep
from percolator.routing.lanes import fill_list
from percolator.tablet import group_commit, requests
from percolator.tablet.cells import ColumnEncoder
from percolator.tablet.requests import MutationChecker, StepChecker
from percolator.v1 import tabletserver_pb2 as pb
from tests.contracts.conftest import Accounts, put
from tests.unit.tablet.tablets import Rig

Use = Callable[[Transaction, Accounts, Any], object]


def in_asyncio(db: Database, function: Callable[[aio.Database], Any]) -> object:
    """Runs a coroutine function with the database that the blocking one wraps."""
    return db._loop_thread.call(lambda: function(db._asynchronous))


# ---------------------------------------------------------------------------- values and keys


WRONG: dict[str, tuple[str, Use]] = {
    "value": (
        "row 'bob', column 'balance': expected int, got str",
        lambda tx, one, untyped: tx.set("bob", untyped, "10"),
    ),
    "value of too many bits": (
        "row 'bob', column 'balance': 9223372036854775808 does not fit into 64 bits",
        lambda tx, one, untyped: tx.set("bob", untyped, 2**63),
    ),
    "row to write": (
        "row 5, column 'balance': expected str, got int",
        lambda tx, one, untyped: tx.set(5, untyped, 5),
    ),
    "row to delete": (
        "row 5, column 'balance': expected str, got int",
        lambda tx, one, untyped: tx.delete(5, untyped),
    ),
    "row to lock": (
        "row 5, column 'balance': expected str, got int",
        lambda tx, one, untyped: tx.lock(5, untyped),
    ),
    "row to read": (
        "row 5, column 'balance': expected str, got int",
        lambda tx, one, untyped: tx.get(5, untyped),
    ),
    "one of many rows": (
        "row 5: expected str, got int",
        lambda tx, one, untyped: tx.get_many(untyped.table, ["bob", 5]),
    ),
    "start": (
        "start 5: expected str, got int",
        lambda tx, one, untyped: list(tx.scan(untyped.table, start=5)),
    ),
    "end": (
        "end 5: expected str, got int",
        lambda tx, one, untyped: list(tx.scan(untyped.table, end=5)),
    ),
    "prefix": (
        "prefix 5: expected str, got int",
        lambda tx, one, untyped: list(tx.scan(untyped.table, prefix=5)),
    ),
    "very long row": (
        "row b'x{98}\\.\\.\\.: expected str, got bytes",
        lambda tx, one, untyped: tx.get_many(untyped.table, [b"x" * 4_000]),
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_named(db: Database, accounts: Accounts, what: str) -> None:
    expected, use = WRONG[what]
    with (
        db.transaction() as tx,
        pytest.raises(SchemaError, match=f"^table '{accounts.table.name}', {expected}"),
    ):
        use(tx, accounts, accounts.balance)
    assert tx.commit_timestamp is None


def test_bytes_that_a_codec_cannot_read_are_named(db: Database, accounts: Accounts) -> None:
    put(db, accounts.table.column("balance", codecs.stored), bob=b"abc")
    where = f"^table '{accounts.table.name}', row 'bob', column 'balance': 3 stored bytes are not"
    with db.snapshot() as snapshot:
        with pytest.raises(SchemaError, match=where):
            snapshot.get("bob", accounts.balance)
        (bob,) = snapshot.get_many(accounts.table, ["bob"])
        for read in (bob.__getitem__, bob.get):
            with pytest.raises(SchemaError, match=where):
                read(accounts.balance)
    other = Table(f"other-{accounts.table.name}", key=codecs.ordered_integer)
    db.create_table(other)
    with db.transaction() as tx:
        tx.set(b"bob", Table(other.name, key=codecs.stored).column("x", codecs.text), "abc")
    with (
        db.snapshot() as snapshot,
        pytest.raises(SchemaError, match=f"^table '{other.name}', row b'bob': 3 stored bytes"),
    ):
        list(snapshot.scan(other))


@pytest.mark.parametrize(
    ("splits", "error", "said"),
    [
        ([5], SchemaError, r"^table 'never', split 5: expected str, got int"),
        (["a", "b" * 4_097], InvalidArgument, r"^splits\[1\]: is longer than 4096 bytes"),
    ],
    ids=["does not fit", "longer than any row"],
)
def test_a_split_that_cannot_be_is_named(
    db: Database, splits: list[Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        db.create_table(Table("never"), splits=splits)
    assert "never" not in db.tables()


# ---------------------------------------------------------------------------- the end of attempts


def _always_too_late(db: Database, accounts: Accounts) -> Callable[[Transaction], None]:
    """A function whose transaction always finds that another one was first."""

    def function(tx: Transaction) -> None:
        tx.get("a", accounts.balance)
        put(db, accounts.balance, a=0)
        tx.set("a", accounts.balance, 1)

    return function


def test_a_conflict_names_the_table_and_shortens_long_names(
    db: Database, accounts: Accounts
) -> None:
    row = "a" * 4_000
    tx = db.transaction()
    tx.get(row, accounts.balance)
    db.run(lambda other: other.set(row, accounts.balance, 0))
    tx.set(row, accounts.balance, 1)
    with pytest.raises(ConflictError) as caught:
        tx.commit()
    text = f"row '{'a' * 99}... (4000 bytes), column 'balance' of table '{accounts.table.name}' was"
    assert text in str(caught.value)
    assert caught.value.cell is not None
    assert caught.value.cell.row == row.encode()


def test_a_conflict_shows_the_key_of_its_row_as_the_command_line_takes_it(db: Database) -> None:
    orders = Table("orders", key=codecs.tuple_of(codecs.text, codecs.ordered_integer))
    state = orders.column("state", codecs.text)
    db.create_table(orders, exist_ok=True)
    tx = db.transaction()
    tx.get(("eu", 17), state)
    db.run(lambda other: other.set(("eu", 17), state, "paid"))
    tx.set(("eu", 17), state, "sent")
    with pytest.raises(
        ConflictError, match=r"^row \[\"eu\", 17\], column 'state' of table 'orders' was committed"
    ):
        tx.commit()


@pytest.mark.parametrize("attempts", [1, 3])
@pytest.mark.parametrize("blocking", [True, False])
def test_the_last_error_says_how_often_and_how_long_it_was_tried(
    db: Database, accounts: Accounts, attempts: int, blocking: bool
) -> None:
    async def too_late(tx: aio.Transaction) -> None:
        await tx.get("a", accounts.balance)
        async with db._asynchronous.transaction() as other:
            await other.set("a", accounts.balance, 0)
        await tx.set("a", accounts.balance, 1)

    tried = "1 attempt" if attempts == 1 else f"{attempts} attempts"
    said = rf"^gave up after {tried} in \d+\.\d s; last error: .*was committed by transaction"
    retry = RetryPolicy(attempts_max=attempts)
    ways: dict[bool, Callable[[], object]] = {
        True: lambda: db.run(_always_too_late(db, accounts), retry=retry),
        False: lambda: in_asyncio(db, lambda one: one.run(too_late, retry=retry)),
    }
    with pytest.raises(ConflictError, match=said) as caught:
        ways[blocking]()
    assert caught.value.cell is not None
    assert isinstance(caught.value.__cause__, ConflictError)
    assert not caught.value.__cause__.message.startswith("gave up")


def test_an_error_that_is_useless_to_repeat_is_raised_as_it_is(db: Database) -> None:
    def function(tx: Transaction) -> None:
        tx.get("a", Table("nowhere").column("c", codecs.text))

    with pytest.raises(
        SchemaError, match=r"^there is no table 'nowhere': create it with"
    ) as caught:
        db.run(function)
    assert caught.value.__cause__ is None


# ---------------------------------------------------------------------------- misuse


def test_a_committed_transaction_is_not_rolled_back(db: Database, accounts: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("a", accounts.balance, 1)
    with pytest.raises(UsageError, match="has committed, so it cannot be rolled back"):
        tx.rollback()
    assert tx.outcome is Outcome.COMMITTED
    with db.transaction() as tx:
        tx.get("a", accounts.balance)
    with pytest.raises(UsageError, match="has committed"):
        tx.rollback()

    async def in_a_task(one: aio.Database) -> None:
        async with one.transaction() as tx:
            await tx.set("a", accounts.balance, 2)
        tx.rollback()

    with pytest.raises(UsageError, match="has committed"):
        in_asyncio(db, in_a_task)


def test_rolling_back_twice_is_harmless(db: Database, accounts: Accounts) -> None:
    tx = db.transaction()
    tx.set("a", accounts.balance, 1)
    tx.rollback()
    tx.rollback()
    assert tx.outcome is Outcome.ABORTED


@pytest.mark.parametrize("at", [5, 0, 1_700_000_000])
def test_a_bare_number_is_no_moment(db: Database, at: Any) -> None:
    said = rf"^at: {at} is a bare int: write percolator\.Timestamp\({at}\)"
    asynchronous = db._asynchronous.internal
    for use in (db.snapshot, db.pin, lambda at: asynchronous.snapshot(at, None)):
        with pytest.raises(InvalidArgument, match=said):
            use(at=at)


def test_a_generator_function_is_refused(db: Database, accounts: Accounts) -> None:
    """Its body would run after the commit, or never."""

    def yields(tx: Transaction) -> Generator[int]:
        tx.set("a", accounts.balance, 1)
        yield 1

    async def yields_in_asyncio(tx: aio.Transaction) -> AsyncGenerator[int, None]:
        await tx.set("a", accounts.balance, 1)
        yield 1

    untyped: Any = yields_in_asyncio
    function: Callable[[Transaction], object] = yields
    calls: list[Callable[[], object]] = [
        lambda: db.run(yields),
        lambda: transactional(function)(db),
        lambda: db.run(lambda tx: (row for row in tx.scan(accounts.table))),
        lambda: in_asyncio(db, lambda one: one.run(untyped)),
    ]
    for call in calls:
        with pytest.raises(UsageError, match="a generator, whose body would run afterwards"):
            call()
    assert not list(db.snapshot().scan(accounts.table))


def test_internal_tables_are_neither_created_nor_dropped(db: Database) -> None:
    for name in ("percolator.mine", "percolator.dead-letters", "percolator."):
        with pytest.raises(InvalidArgument, match=f"^table: '{name}' is internal"):
            db.create_table(Table(name))
        with pytest.raises(InvalidArgument, match="is internal"):
            db.drop_table(Table(name), missing_ok=True)
    db.create_table(Table("percolators"), exist_ok=True)


# A step in a list means what its mutation means, which row stores apply.

NOW = 1_800_000_000_000 << 18  # the virtual clock's
START, PUSHED, COMMIT = NOW + 7, NOW + 8, NOW + 9
WRITES: dict[CellAddress, Write] = {
    CellAddress(1, b"row", b"put"): (KIND_PUT, b"value"),
    CellAddress(1, b"row", b"long"): (KIND_PUT, b"longer than fits into a lock"),
    CellAddress(1, b"row", b"deleted"): (KIND_DELETE, b""),
    CellAddress(1, b"row", b"locked"): (KIND_LOCK_ONLY, b""),
}
SCHEMA = TableSchema(
    3, {b"put": (b"one", b"two"), b"long": (b"one",), b"deleted": (b"one",), b"locked": (b"one",)}
)


def _sent() -> list[CellMutation]:
    """Mutations that transactions send on their way to a commit, for every kind of write."""
    found = []
    for cell, write in WRITES.items():
        steps = WriteSteps(START, {cell: write}, inline_bytes_max=10)
        steps.session = b"session"
        found += [
            steps.prewrite_step(cell, 0, 1000),
            steps.prewrite_step(cell, PUSHED, 1000),
            steps.commit_primary_step(SCHEMA, 0, COMMIT),
            steps.commit_primary_step(SCHEMA, PUSHED, COMMIT),
            steps.commit_secondary_step(cell, SCHEMA, COMMIT),
        ]
    return found


async def test_a_step_in_a_list_is_the_same_mutation_to_the_tablet() -> None:
    rig = await Rig().open()
    listed = [one for one in _sent() if isinstance(one.mutation, ListedStep)]
    in_list = pb.StepList()
    fill_list(in_list, [one.mutation for one in listed if isinstance(one.mutation, ListedStep)])
    alone = pb.MutationBatch(mutations=[one.message() for one in listed])
    state, columns = rig.tablet._state, ColumnEncoder()
    await state.guard.require(COMMIT, "commit")
    assert StepChecker(state, columns).check(in_list) == MutationChecker(state, columns).check(
        alone
    )


def test_everything_on_the_way_to_a_commit_travels_in_lists_but_a_lock_with_long_data() -> None:
    alone = [one.message() for one in _sent() if not isinstance(one.mutation, ListedStep)]
    assert [(one.column, len(one.changes)) for one in alone] == [(b"long", 2)] * 2


# A tablet judges a one-round commit by the conditions of a prewrite, which it cannot import.
#
# The client reads the index of the condition that failed by its own list, so the two have to agree.

PREWRITE_START = 7


def test_a_commit_in_one_round_is_judged_by_the_conditions_of_a_prewrite() -> None:
    prewrite = steps.prewrite(b"row", b"column", PREWRITE_START, b"lock", None)
    asked = [
        (
            condition.space,
            condition.expectation,
            condition.from_timestamp,
            condition.until_timestamp,
            condition.prefix,
            condition.required,
            condition.qualifier,
        )
        for condition in prewrite.conditions
    ]
    assert requests.prewrite_conditions(PREWRITE_START) == asked


def test_client_and_tablet_find_the_own_commit_by_the_same_condition() -> None:
    assert group_commit.OWN_COMMIT == steps.OWN_COMMIT
