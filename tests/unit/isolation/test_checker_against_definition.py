"""Valid histories are always accepted; one wrong detail is always flagged.

The histories come from a store that is snapshot isolated by construction; the verdict on damaged
ones comes from the definition of snapshot isolation, applied pair by pair.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.isolation.checker import ViolationKind, check, settled
from tests.isolation.history import Found, History, Outcome, Put, Read, Scan, TransactionRecord
from tests.unit.isolation.definition import is_snapshot_isolated
from tests.unit.isolation.small_store import COLUMNS, ROWS, SmallStore

SEEDS = st.integers(0, 2**32 - 1)
STEPS = st.integers(1, 120)


def _valid(seed: int, steps: int) -> History:
    """A valid history in which all outcomes are known."""
    store = SmallStore(Random(seed))
    return settled(store.run(steps), store.resolve)


@settings(max_examples=400, deadline=None)
@given(SEEDS, STEPS)
def test_a_valid_history_is_accepted(seed: int, steps: int) -> None:
    store = SmallStore(Random(seed))
    report = check(store.run(steps), resolve=store.resolve)
    assert report, str(report)


@settings(max_examples=100, deadline=None)
@given(SEEDS, STEPS)
def test_a_valid_history_is_valid_by_definition(seed: int, steps: int) -> None:
    """Otherwise the two other tests would prove little."""
    assert is_snapshot_isolated(_valid(seed, steps))


# ------------------------------------------------------------------ any change of any detail


def _any_value(chance: Random) -> bytes:
    return b"%d" % chance.randint(0, 30)


def _change_operation(record: TransactionRecord, chance: Random) -> None:
    if not record.operations:
        return
    index = chance.randrange(len(record.operations))
    operation = record.operations[index]
    match operation:
        case Read(key, _):
            value = chance.choice([None, b"", _any_value(chance)])
            record.operations[index] = Read(key, value)
        case Put(key, _):
            record.operations[index] = Put(key, _any_value(chance))
        case Scan():
            record.operations[index] = _changed_scan(operation, chance)
        case _:
            del record.operations[index]


def _changed_scan(scan: Scan, chance: Random) -> Scan:
    found = list(scan.found)
    place = chance.randint(0, len(found))
    added = Found(chance.choice(ROWS), chance.choice(COLUMNS), _any_value(chance))
    match chance.randrange(6):
        case 0:
            found.insert(place, added)
        case 1:
            found.insert(place, chance.choice([*found, added]))
        case 2:
            chance.shuffle(found)
        case 3:
            return scan._replace(row_limit=chance.randint(0, 2))
        case 4:
            return scan._replace(start=chance.choice(ROWS), stop=chance.choice(ROWS))
        case _:
            del found[place : place + 1]
    return scan._replace(found=tuple(found))


def _change_timestamps(record: TransactionRecord, chance: Random) -> None:
    if chance.random() < 0.5:
        record.start_ts = max(1, record.start_ts + chance.randint(-9, 9))
    elif record.committed:
        record.commit_ts = max(0, record.commit_ts + chance.randint(-9, 9))


def _change_outcome(record: TransactionRecord, chance: Random) -> None:
    record.outcome = chance.choice([Outcome.ABORTED, Outcome.COMMITTED, Outcome.FOUND_COMMITTED])


def _change_order(record: TransactionRecord, chance: Random) -> None:
    record.number = chance.choice([0, 1000])
    record.session = chance.choice([record.session, "session 0"])


def _change_instants(record: TransactionRecord, chance: Random) -> None:
    """Moves one instant, keeping the order in which one client sees its own."""
    instants = {name: getattr(record, name) for name in INSTANTS}
    known = [name for name in INSTANTS if instants[name] is not None]
    moved = chance.choice(known)
    instants[moved] += chance.randint(-20, 20)
    for name, instant in zip(known, sorted(instants[name] for name in known), strict=True):
        setattr(record, name, instant)
    if chance.random() < 0.2:
        setattr(record, moved, None)


INSTANTS = ("begin_called", "begin_returned", "commit_called", "commit_returned")

CHANGES: list[Callable[[TransactionRecord, Random], None]] = [
    _change_operation,
    _change_operation,
    _change_timestamps,
    _change_outcome,
    _change_order,
    _change_instants,
]


@settings(max_examples=800, deadline=None)
@given(SEEDS, st.integers(5, 80))
def test_after_any_change_the_verdict_is_that_of_the_definition(seed: int, steps: int) -> None:
    chance = Random(seed)
    history = _valid(seed, steps)
    chance.choice(CHANGES)(chance.choice(history.transactions), chance)
    report = check(history)
    assert bool(report) is is_snapshot_isolated(history), str(report)


# ----------------------------------------------------------- changes that are wrong for certain

Places = list[tuple[TransactionRecord, int]]


def _places(history: History, kind: type[Read] | type[Scan]) -> Places:
    return [
        (record, index)
        for record in history
        for index, operation in enumerate(record.operations)
        if isinstance(operation, kind)
    ]


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(30, 120))
def test_a_read_of_any_other_value_is_flagged(seed: int, steps: int) -> None:
    history = _valid(seed, steps)
    for record, index in _places(history, Read):
        read = record.operations[index]
        assert isinstance(read, Read)
        for value in (None, b"", b"1", b"2", b"3", b"never written"):
            if value != read.value:
                record.operations[index] = Read(read.key, value)
                report = check(history)
                assert report.counts.total() == 1
                assert report.violations[0].transactions[0] is record
        record.operations[index] = read


def _damaged(found: tuple[Found, ...], complete: bool) -> list[tuple[Found, ...]]:
    """Results that cannot be right if `found` is."""
    damaged = []
    for place, cell in enumerate(found):
        before, after = found[:place], found[place + 1 :]
        damaged.append((*before, cell._replace(value=b"never written"), *after))
        damaged.append((*before, cell, cell, *after))
        damaged.append((*before, cell, cell._replace(row=cell.row + b"\x00new"), *after))
        if complete:
            damaged.append((*before, *after))
    if len({cell.row for cell in found}) > 1:
        damaged.append(found[::-1])
    return damaged


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(30, 120))
def test_a_scan_with_a_cell_lost_doubled_changed_added_or_moved_is_flagged(
    seed: int, steps: int
) -> None:
    history = _valid(seed, steps)
    for record, index in _places(history, Scan):
        scan = record.operations[index]
        assert isinstance(scan, Scan)
        for found in _damaged(scan.found, scan.complete):
            record.operations[index] = scan._replace(found=found)
            report = check(history)
            assert not report, found
            assert report.violations[0].transactions[0] is record
        record.operations[index] = scan


def _readers(history: History, writer: TransactionRecord) -> list[TransactionRecord]:
    """The transactions that read something that only `writer` wrote: values are unique."""
    written = {value for value in writer.writes().values() if value is not None}
    return [
        record
        for record in history
        if record is not writer
        for operation in record.operations
        if isinstance(operation, Read) and operation.value in written
    ]


@settings(max_examples=200, deadline=None)
@given(SEEDS, st.integers(60, 200))
def test_a_commit_that_was_read_cannot_be_undone_or_postponed(seed: int, steps: int) -> None:
    history = _valid(seed, steps)
    for place, writer in enumerate(history.transactions):
        readers = _readers(history, writer)
        if not readers or not writer.committed:
            continue
        records = list(history.transactions)
        records[place] = replace(writer, outcome=Outcome.ABORTED)
        report = check(History(records))
        assert report.counts[ViolationKind.ABORTED_READ] >= 1, str(report)
        records[place] = replace(writer, commit_ts=max(r.start_ts for r in readers) + 1)
        assert not check(History(records))
        del records[place]
        assert check(History(records)).counts[ViolationKind.UNWRITTEN_READ] >= 1


@settings(max_examples=100, deadline=None)
@given(SEEDS, st.integers(60, 200))
def test_two_concurrent_writers_of_a_cell_cannot_both_have_committed(seed: int, steps: int) -> None:
    """Commits a copy of each committed writer once more, within the original's interval."""
    history = _valid(seed, steps)
    for writer in list(history):
        if not (writer.committed and writer.locked()):
            continue
        copied = copy.deepcopy(writer)
        copied.session, copied.number = "twin", 1
        copied.commit_ts = writer.commit_ts + 1
        report = check(History([*history, copied], history.initial))
        assert report.counts[ViolationKind.CONFLICT] >= 1, str(report)
