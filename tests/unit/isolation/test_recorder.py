"""At every instant, a record is correct if its client dies right then."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from percolator.errors import InvalidArgument, UsageError
from tests.isolation.checker import check
from tests.isolation.history import (
    Delete,
    Found,
    History,
    HistoryFile,
    Lock,
    Notify,
    Operation,
    Outcome,
    Put,
    Read,
    ReadLock,
    Recorder,
    Scan,
    TransactionRecord,
    read_histories,
    read_history,
    write_history,
)

X = ("accounts", b"\x00x", b"balance")
ALL_BYTES = bytes(range(256))


def _recorder() -> Recorder:
    return Recorder(itertools.count(1).__next__, clock="one")


def _lifted(recorded: History) -> list[str]:
    """Compared as text: named tuples of different types are equal if their fields are."""
    return [repr(record) for record in recorded]


def test_a_transaction_is_recorded_with_its_instants_and_operations_in_order() -> None:
    recorder = _recorder()
    running = recorder.begin("alice")
    running.began(100)
    running.read(X, None)
    running.put(X, b"1")
    running.commit_called()
    running.committed(105)
    (record,) = recorder.history
    assert (record.begin_called, record.begin_returned) == (1, 2)
    assert (record.commit_called, record.commit_returned) == (3, 4)
    assert (record.start_ts, record.commit_ts, record.outcome) == (100, 105, Outcome.COMMITTED)
    assert list(map(repr, record.operations)) == [repr(Read(X, None)), repr(Put(X, b"1"))]


def test_a_client_that_dies_before_commit_has_aborted_and_during_commit_is_unknown() -> None:
    running = _recorder().begin("alice")
    outcomes = [running.record.outcome]
    running.began(100)
    running.put(X, b"1")
    outcomes.append(running.record.outcome)
    running.commit_called()
    outcomes.append(running.record.outcome)
    running.aborted()
    outcomes.append(running.record.outcome)
    assert outcomes == [Outcome.ABORTED, Outcome.ABORTED, Outcome.UNKNOWN, Outcome.ABORTED]


def test_the_transactions_of_a_session_are_numbered_per_session() -> None:
    recorder = _recorder()
    for session in ("a", "b", "a"):
        recorder.begin(session)
    assert [(r.session, r.number) for r in recorder.history] == [("a", 1), ("b", 1), ("a", 2)]


def test_a_writer_whose_start_is_unknown_may_not_commit() -> None:
    """Otherwise its outcome could never be looked up."""
    running = _recorder().begin("a")
    running.put(X, b"1")
    with pytest.raises(UsageError, match="begun"):
        running.commit_called()


def test_the_last_write_of_a_cell_is_what_a_transaction_leaves() -> None:
    running = _recorder().begin("a")
    running.put(X, b"1")
    running.delete(X)
    running.lock(("accounts", b"y", b""))
    assert running.record.writes() == {X: None}
    assert running.record.locked() == {X, ("accounts", b"y", b"")}


def _full_record() -> TransactionRecord:
    scan = Scan("t", b"", ALL_BYTES, (Found(b"r", b"", ALL_BYTES),), (b"a", b""), True, 7, False)
    operations: list[Operation] = [
        Read(X, None),
        Read(X, b""),
        Put(X, ALL_BYTES),
        Delete(X),
        Lock(X),
        ReadLock(X),
        Notify(X),
        scan,
        Scan("t", b"", b"", ()),
    ]
    return TransactionRecord(
        "zoë",
        3,
        2**63 + 1,
        2**64 - 1,
        Outcome.FOUND_COMMITTED,
        operations,
        historic=True,
        observer="index",
        triggers=(X,),
        clock="host",
        begin_called=0.1,
        commit_called=123456.789012345,
    )


def test_a_history_survives_its_file_exactly(tmp_path: Path) -> None:
    recorded = History([_full_record(), TransactionRecord("b", 1)], {X: ALL_BYTES})
    path = tmp_path / "history.jsonl"
    write_history(recorded, path)
    restored = read_history(path)
    assert _lifted(restored) == _lifted(recorded)
    assert restored.initial == recorded.initial


def test_the_last_line_about_a_transaction_counts(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    with HistoryFile(path) as file:
        recorder = Recorder(itertools.count().__next__, listener=file.written)
        first, second = recorder.begin("a"), recorder.begin("b")
        for start_ts, running in ((1, first), (2, second)):
            running.began(start_ts)
            running.put(X, b"1")
            running.commit_called()
        first.committed(3)
    outcomes = {record.session: record.outcome for record in read_history(path)}
    assert outcomes == {"a": Outcome.COMMITTED, "b": Outcome.UNKNOWN}


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(History([TransactionRecord("a", 1), TransactionRecord("a", 2)]), path)
    whole = path.read_text()
    last_line = whole.rstrip("\n").rindex("\n") + 1
    for cut in range(last_line, len(whole) - 1):
        path.write_text(whole[:cut])
        assert [record.number for record in read_history(path)] == [1]


def test_a_damaged_line_in_the_middle_is_refused_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"
    write_history(History([TransactionRecord("a", 1)]), path)
    path.write_text("{}\n" + path.read_text())
    with pytest.raises(InvalidArgument, match="line 1"):
        read_history(path)


def test_the_files_of_several_processes_are_one_history(tmp_path: Path) -> None:
    paths = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for number, path in enumerate(paths, 1):
        write_history(History([TransactionRecord(f"client-{number}", 1)]), path)
    assert [r.session for r in read_histories(paths)] == ["client-1", "client-2"]


def test_processes_that_name_their_sessions_alike_are_refused() -> None:
    """Their transactions overlap, which those of one session must not."""
    twins = History([TransactionRecord("a", 1)]).merged_with([History([TransactionRecord("a", 1)])])
    with pytest.raises(InvalidArgument, match="#1 of session a"):
        check(twins)
