"""Recipes, and functions of programs, take transactions of both kinds, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import percolator.testing
from percolator import Database, SchemaError, Table, UsageError, aio, both_kinds, codecs
from percolator.recipes import ShardedCounter
from percolator.testing.pytest_plugin import percolator_db

__all__ = ["percolator_db"]


def test_what_is_neither_kind_is_refused_at_once(percolator_db: Database) -> None:
    visits = ShardedCounter("visits")
    with pytest.raises(UsageError, match="expected a database, got str"):
        visits.create("here")  # type: ignore[call-overload]
    visits.create(percolator_db)
    with percolator_db.snapshot() as snapshot:
        with pytest.raises(UsageError, match="expected a transaction, got Snapshot"):
            visits.add(snapshot, "home", 1)  # type: ignore[call-overload]
        with pytest.raises(UsageError, match="expected a snapshot or a transaction, got Database"):
            visits.value(percolator_db, "home")  # type: ignore[call-overload]


def test_a_transaction_that_has_ended_is_refused(percolator_db: Database) -> None:
    visits = ShardedCounter("visits")
    visits.create(percolator_db)
    tx = percolator_db.transaction()
    tx.rollback()
    with pytest.raises(UsageError, match="was rolled back"):
        visits.add(tx, "home", 1)


accounts = Table("accounts")
balance = accounts.column("balance", codecs.integer)


@both_kinds
async def total(reads: aio.Transaction | aio.Snapshot, names: Sequence[str]) -> int:
    """All of them together."""
    return sum([await reads.get(name, balance, default=0) for name in names])


@both_kinds
async def deposit(tx: aio.Transaction, name: str, *, amount: int) -> int:
    left = await total(tx, [name]) + amount
    await tx.set(name, balance, left)
    return left


def test_a_function_written_once_works_with_blocking_transactions(percolator_db: Database) -> None:
    percolator_db.create_table(accounts)
    with percolator_db.transaction() as tx:
        assert deposit(tx, "bob", amount=3) == 3
        assert deposit(tx, "bob", amount=4) == 7
        assert tx.get("bob", balance) == 7
    with percolator_db.snapshot() as snapshot:
        assert total(snapshot, ["bob", "joe"]) == 7


async def test_a_function_written_once_works_with_those_of_asyncio() -> None:
    async with percolator.testing.connect_async() as db:
        await db.create_table(accounts)
        async with db.transaction() as tx:
            assert await deposit(tx, "bob", amount=3) == 3
        async with db.snapshot() as snapshot:
            assert await total(snapshot, ["bob", "joe"]) == 3


def test_an_error_of_the_function_reaches_its_blocking_caller(percolator_db: Database) -> None:
    percolator_db.create_table(accounts)
    with (
        percolator_db.transaction() as tx,
        pytest.raises(SchemaError, match="expected int"),
    ):
        deposit(tx, "bob", amount=0.5)  # type: ignore[call-overload]


def test_a_function_written_once_keeps_its_name_and_takes_nothing_else(
    percolator_db: Database,
) -> None:
    assert (getattr(total, "__name__", ""), total.__doc__) == ("total", "All of them together.")
    with pytest.raises(UsageError, match="expected a snapshot or a transaction, got Database"):
        total(percolator_db, [])  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="both_kinds takes an async function"):
        both_kinds(len)  # type: ignore[arg-type]
