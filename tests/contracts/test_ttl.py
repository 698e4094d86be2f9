"""Columns whose values expire, as programs use them."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta
from typing import Any

import pytest

from percolator import Database, InvalidArgument, SchemaError, Table, Timestamp, codecs, observes
from percolator.schema import Column
from tests.contracts.conftest import needs_tablets

pytestmark = needs_tablets

BRIEF = timedelta(milliseconds=1_500)
HOUR = timedelta(hours=1)


class Sessions:
    """A table with one column whose values expire, and one whose values stay."""

    def __init__(self, db: Database, ttl: timedelta, **options: Any) -> None:
        self.table = Table(f"sessions-{uuid.uuid4()}")
        self.token: Column[str] = self.table.column("token", codecs.text)
        self.seen: Column[int] = self.table.column("seen", codecs.integer)
        db.create_table(self.table, splits=["m"], ttl={self.token: ttl}, **options)


def _write(db: Database, sessions: Sessions, row: str, token: str) -> Timestamp:
    with db.transaction() as tx:
        tx.set(row, sessions.token, token)
        tx.set(row, sessions.seen, 1)
    assert tx.commit_timestamp is not None
    return tx.commit_timestamp


def _written_and_read(db: Database, sessions: Sessions, row: str) -> Timestamp:
    """Writes a value, and reads it before its end, however slow the machine is."""
    while True:
        commit = _write(db, sessions, row, "t1")
        found = db.get(row, sessions.token)
        if db.timestamp() < _end(commit):
            assert found == "t1"
            return commit


def _end(commit: Timestamp) -> Timestamp:
    """The first timestamp at which a value is no longer seen."""
    return Timestamp.of(commit.physical_milliseconds + BRIEF // timedelta(milliseconds=1))


def _after(commit: Timestamp, ttl: timedelta) -> None:
    """Waits until a snapshot that begins now is surely past the value's end."""
    end = commit.to_datetime().timestamp() + ttl.total_seconds() + 0.05
    time.sleep(max(0.0, end - time.time()))


def test_every_way_of_reading_stops_showing_a_value_at_the_same_timestamp(db: Database) -> None:
    sessions = Sessions(db, BRIEF)
    commit = _written_and_read(db, sessions, "ann")
    _after(commit, BRIEF)
    for at, token in ((Timestamp(_end(commit) - 1), "t1"), (_end(commit), None)):
        with db.snapshot(at=at) as snapshot:
            assert snapshot.get("ann", sessions.token) == token
            assert snapshot.get("ann", sessions.seen) == 1
            (row,) = snapshot.get_many(sessions.table, ["ann"])
            assert (sessions.token.name in row.raw()) == (token is not None)
            assert snapshot.get_many([("ann", sessions.token)]) == [token]
            scanned = list(snapshot.scan(sessions.table, columns=[sessions.token]))
            assert [row[sessions.token] for row in scanned] == ([token] if token else [])
            family = sessions.table.family("tok", codecs.text)
            families = list(snapshot.scan(sessions.table, columns=[family]))
            assert [row.family(family) for row in families] == ([{"en": token}] if token else [])
    assert db.get("ann", sessions.token) is None
    assert db.get("ann", sessions.seen) == 1


def test_the_value_before_an_expired_one_does_not_come_back(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    _write(db, sessions, "bob", "old")
    with db.transaction() as tx:
        tx.set("bob", sessions.token, "new")
    db.set_ttl(sessions.token, BRIEF)
    assert tx.commit_timestamp is not None
    _after(tx.commit_timestamp, BRIEF)
    with db.transaction() as tx:
        assert tx.get("bob", sessions.token) is None
        tx.set("bob", sessions.token, "fresh")
    assert db.snapshot(at=tx.commit_timestamp).get("bob", sessions.token) == "fresh"


def test_a_transaction_sees_what_its_snapshot_saw_for_as_long_as_it_runs(db: Database) -> None:
    sessions = Sessions(db, BRIEF)
    while True:
        commit = _write(db, sessions, "eve", "t1")
        tx = db.transaction()
        found = tx.get("eve", sessions.token)
        assert tx.start_timestamp is not None
        if tx.start_timestamp < _end(commit):
            break
        tx.rollback()  # the machine was too slow
    assert found == "t1"
    _after(commit, BRIEF)
    assert tx.get_many([("eve", sessions.token)]) == ["t1"]
    tx.set("eve", sessions.token, "t2")
    second = tx.commit()
    assert db.snapshot(at=second).get("eve", sessions.token) == "t2"


def test_a_changed_ttl_applies_to_values_that_are_there(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    commit = _write(db, sessions, "zoe", "t1")
    db.set_ttl(sessions.seen, BRIEF)
    _after(commit, BRIEF)
    assert db.get("zoe", sessions.token) == "t1"
    assert db.get("zoe", sessions.seen) is None
    db.set_ttl(sessions.token, BRIEF)
    db.set_ttl(sessions.seen, None)
    assert db.get("zoe", sessions.token) is None
    assert db.get("zoe", sessions.seen) == 1, "it was not collected, and does not expire"


def test_a_client_that_does_not_know_of_the_ttl_yet_reads_as_the_others(db: Database) -> None:
    """It still asks for the newest value, and is told to take a timestamp."""
    sessions = Sessions(db, BRIEF)
    _write(db, sessions, "kim", "t1")
    catalog = db._asynchronous._engine.catalog
    info = catalog.known(sessions.table.name)
    assert info is not None
    assert info.schema.expiring == {b"token"}
    object.__setattr__(info.schema, "expiring", frozenset())
    commit = _written_and_read(db, sessions, "kim")
    _after(commit, BRIEF)
    assert db.get("kim", sessions.token) is None


def test_followers_see_the_value_and_nothing_when_it_expires(db: Database) -> None:
    sessions = Sessions(db, BRIEF, change_feed=True)
    commit = _write(db, sessions, "leo", "t1")
    _after(commit, BRIEF)
    second = _write(db, sessions, "leo", "t2")
    with db.changes(sessions.table, after=Timestamp(commit - 1), before=True) as changes:
        found = []
        for change in changes:
            if change.column == sessions.token.name:
                found.append((change.before(sessions.token), change.value(sessions.token)))
            if change.commit_timestamp == second and change.ends_commit:
                break
    assert found == [(None, "t1"), (None, "t2")]


def test_an_observer_is_not_told_of_the_end_and_sees_no_value_after_it(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    runs: list[str | None] = []

    @observes(sessions.token)
    def look(tx: Any, row: str) -> None:
        runs.append(tx.get(row, sessions.token))

    with db.run_observers([look]):
        commit = _write(db, sessions, "max", "t1")
        db.wait_for_observers(timeout=20)
        db.set_ttl(sessions.token, BRIEF)
        _after(commit, BRIEF)
        db.wait_for_observers(timeout=20)
    assert runs == ["t1"]
    commit = _write(db, sessions, "max", "t2")
    _after(commit, BRIEF)
    with db.run_observers([look]):
        db.wait_for_observers(timeout=20)
    assert runs == ["t1", None], "it was late, and ran once"


# ---------------------------------------------------------------------------- arguments


def test_an_existing_table_must_have_the_ttl_that_is_asked_for(db: Database) -> None:
    sessions = Sessions(db, HOUR)
    db.create_table(sessions.table, exist_ok=True)
    db.create_table(sessions.table, exist_ok=True, ttl={sessions.token: HOUR})
    with pytest.raises(InvalidArgument, match=r"^ttl: table .* exists with times to live token"):
        db.create_table(sessions.table, exist_ok=True, ttl={sessions.token: BRIEF})


@pytest.mark.parametrize(
    ("ttl", "reason"),
    [
        (timedelta(0), "expected at least a millisecond"),
        (30, "expected a timedelta, got int"),
        (timedelta(days=365 * 101), "100 years"),
    ],
)
def test_a_bad_ttl_is_refused(db: Database, ttl: Any, reason: str) -> None:
    table = Table(f"t-{uuid.uuid4()}")
    column = table.column("c", codecs.text)
    with pytest.raises(InvalidArgument, match=f"^ttl: .*{reason}"):
        db.create_table(table, ttl={column: ttl})
    db.create_table(table)
    with pytest.raises(InvalidArgument, match=f"^ttl: .*{reason}"):
        db.set_ttl(column, ttl)


def test_only_columns_of_the_table_have_a_ttl(db: Database) -> None:
    table = Table(f"t-{uuid.uuid4()}")
    other = Table("other").column("c", codecs.text)
    untyped: Any = [other]
    with pytest.raises(SchemaError, match="is not a column of table"):
        db.create_table(table, ttl={other: HOUR})
    with pytest.raises(InvalidArgument, match="ttl: expected a timedelta for each"):
        db.create_table(table, ttl=untyped)
    family: Any = table.family("f", codecs.text)
    with pytest.raises(InvalidArgument, match="is a family; only single columns"):
        db.create_table(table, ttl={family: HOUR})
    with pytest.raises(SchemaError, match="there is no table"):
        db.set_ttl(table.column("c", codecs.text), HOUR)
