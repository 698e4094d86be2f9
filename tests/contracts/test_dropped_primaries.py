"""Transactions across two tables whose client dies, and whose primary's table is then dropped."""

from __future__ import annotations

from typing import Any

import pytest

from percolator import Database
from percolator.protocol import commit
from percolator.protocol.commit import Commit
from percolator.protocol.verdicts import Verdicts
from tests.contracts.conftest import Accounts


class Died(BaseException):
    """The client has gone no further."""


async def _dies(*_: Any) -> int:
    raise Died


async def _never_comes(*_: Any) -> None:
    pass


def _write_to_both(db: Database, first: Accounts, second: Accounts) -> None:
    with db.transaction() as tx:
        tx.set("a", first.balance, 1)
        tx.set("a", second.balance, 1)


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The client that comes afterwards knows no verdict, as if it were another one."""
    monkeypatch.setattr(Verdicts, "put", lambda *_: None)
    return monkeypatch


def test_what_was_committed_is_completed(db: Database, forgetful: pytest.MonkeyPatch) -> None:
    first, second = Accounts(db), Accounts(db)  # the first has the primary, since its id is lower
    forgetful.setattr(commit, "commit_secondaries", _never_comes)
    _write_to_both(db, first, second)
    forgetful.undo()
    db.drop_table(first.table)
    for _ in range(2):
        with db.snapshot() as snapshot:
            assert snapshot.get("a", second.balance) == 1
    with db.transaction() as tx:
        tx.set("a", second.balance, 2)


def test_what_was_not_committed_is_rolled_back(
    db: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Accounts(db), Accounts(db)
    monkeypatch.setattr(commit, "roll_back_all", _never_comes)
    monkeypatch.setattr(Commit, "commit_primary", _dies)
    with pytest.raises(Died):
        _write_to_both(db, first, second)
    monkeypatch.undo()
    db.drop_table(first.table)
    with db.snapshot() as snapshot:
        assert snapshot.get("a", second.balance) is None
    with db.transaction() as tx:
        tx.set("a", second.balance, 2)
