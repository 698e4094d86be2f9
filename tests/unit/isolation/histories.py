"""Short notation for histories written by hand: one table "t", one column "v" unless named.

history(
    transaction(1, put("x", "1"), commit=2),
    transaction(3, read("x", "1")),
)
"""

from __future__ import annotations

from tests.isolation.history import (
    CellKey,
    Delete,
    Found,
    History,
    Lock,
    Notify,
    Operation,
    Outcome,
    Put,
    Read,
    ReadLock,
    Scan,
    TransactionRecord,
)

COMMITTED, ABORTED, UNKNOWN = Outcome.COMMITTED, Outcome.ABORTED, Outcome.UNKNOWN

Instants = tuple[float | None, float | None, float | None, float | None]


def cell(name: str) -> CellKey:
    """ "x" is row x, column v; "x.a" is row x, column a."""
    row, _, column = name.partition(".")
    return "t", row.encode(), (column or "v").encode()


def read(name: str, value: str | None) -> Read:
    return Read(cell(name), None if value is None else value.encode())


def put(name: str, value: str) -> Put:
    return Put(cell(name), value.encode())


def delete(name: str) -> Delete:
    return Delete(cell(name))


def lock(name: str) -> Lock:
    return Lock(cell(name))


def read_lock(name: str) -> ReadLock:
    return ReadLock(cell(name))


def notify(name: str) -> Notify:
    return Notify(cell(name))


def scan(
    start: str,
    stop: str,
    *found: tuple[str, str],
    columns: str | None = None,
    reverse: bool = False,
    limit: int = 0,
    complete: bool = True,
) -> Scan:
    """`columns` holds one letter per column."""
    return Scan(
        "t",
        start.encode(),
        stop.encode(),
        tuple(Found(*cell(name)[1:], value.encode()) for name, value in found),
        None if columns is None else tuple(letter.encode() for letter in columns),
        reverse,
        limit,
        complete,
    )


def transaction(
    start_ts: int,
    *operations: Operation,
    commit: int = 0,
    outcome: Outcome = COMMITTED,
    session: str = "",
    number: int = 0,
    instants: Instants = (None, None, None, None),
    historic: bool = False,
    clock: str = "",
) -> TransactionRecord:
    """A transaction that committed, in a separate session, unless specified otherwise."""
    begin_called, begin_returned, commit_called, commit_returned = instants
    return TransactionRecord(
        session or f"s{start_ts}",
        number or start_ts,
        start_ts,
        commit,
        outcome,
        list(operations),
        historic=historic,
        clock=clock,
        begin_called=begin_called,
        begin_returned=begin_returned,
        commit_called=commit_called,
        commit_returned=commit_returned,
    )


def run(observer: str, name: str, record: TransactionRecord) -> TransactionRecord:
    """Makes a transaction a run of an observer for a cell."""
    record.observer = observer
    record.triggers = (cell(name),)
    return record


def serializable(record: TransactionRecord) -> TransactionRecord:
    """Makes a transaction one whose reads have to hold at its commit."""
    record.serializable = True
    return record


def history(*records: TransactionRecord, **initial: str) -> History:
    return History(list(records), {cell(name): value.encode() for name, value in initial.items()})
