"""Reads and writes that another transaction's lock blocks until their time is up."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from percolator import ConflictError, Database
from percolator.aio import Transaction
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.protocol.resolving.cleanup import Cleanup
from tests.contracts.conftest import Accounts

_SECONDS = 3.0
"""Enough for what follows the wait, on a busy machine as well: then the outcome is known."""


class Died(BaseException):
    """The client has gone no further."""


def test_one_handler_catches_a_read_and_a_write_that_a_lock_blocks(
    db: Database, accounts: Accounts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is that of a living client, which does not go on."""

    async def removes_nothing(*_: Any, **__: Any) -> set[int]:
        return set()

    holder = _with_locks_left(db, accounts, monkeypatch)
    monkeypatch.setattr(Cleanup, "resolve", removes_nothing)
    blocked: list[Callable[[], object]] = [
        lambda: db.snapshot().get("a", accounts.balance, timeout=_SECONDS),
        lambda: db.snapshot().get_many(accounts.table, ["a"], timeout=_SECONDS),
        lambda: list(db.snapshot().scan(accounts.table, timeout=_SECONDS)),
        lambda: _write(db, accounts),
    ]
    # Each waits for all of its time: they wait side by side.
    with ThreadPoolExecutor(len(blocked)) as threads:
        for refused in list(map(threads.submit, blocked)):
            with pytest.raises(ConflictError, match="is locked by transaction") as caught:
                refused.result()
            assert caught.value.cell is not None
            assert caught.value.other_start_timestamp == holder
    monkeypatch.undo()


def _write(db: Database, accounts: Accounts) -> None:
    with db.transaction(timeout=_SECONDS) as tx:
        tx.set("a", accounts.balance, 2)


def _with_locks_left(db: Database, accounts: Accounts, monkeypatch: pytest.MonkeyPatch) -> int:
    """Leaves a lock behind; returns its transaction's start timestamp."""

    async def dies(*_: Any) -> int:
        raise Died

    async def removes_nothing(*_: Any) -> None:
        pass

    with monkeypatch.context() as patch:
        patch.setattr(commit, "roll_back_all", removes_nothing)
        # In one round, no lock would be stored.
        patch.setattr(Transaction, "_only_two_phases", True)
        patch.setattr(Commit, "commit_primary", dies)
        tx = db.transaction()
        tx.set("a", accounts.balance, 1)
        with pytest.raises(Died):
            tx.commit()
    assert tx.start_timestamp is not None
    return tx.start_timestamp
