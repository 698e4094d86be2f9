"""Valid histories are always accepted; one wrong detail is always flagged.

The histories come from a store that is snapshot isolated by construction; the verdict on damaged
ones comes from the definition of snapshot isolation, applied pair by pair.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, permutations, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import InvalidArgument
from tests.isolation.checker import ViolationKind, check, settled
from tests.isolation.history import (
    CellKey,
    Delete,
    Found,
    History,
    Operation,
    Outcome,
    Put,
    Read,
    RecordedTransaction,
    Recorder,
    Scan,
    TransactionRecord,
)
from tests.unit.isolation.histories import (
    delete,
    history,
    lock,
    put,
    read,
    read_lock,
    scan,
    transaction,
)

# Snapshot isolation by definition, pair by pair and slow: the checker must give the same verdict.
#
# It works on settled histories (without unknown outcomes).


def is_snapshot_isolated(history: History) -> bool:
    """True if every rule holds."""
    return (
        all(_reads_its_snapshot(history, record) for record in history if record.start_ts)
        and _timestamps_are_unique(history)
        and all(_commits_above_its_start(record) for record in history)
        and not any(_concurrent(*pair) for pair in combinations(history, 2))
        and all(_in_session_order(*pair) for pair in permutations(history, 2))
        and all(_in_real_time_order(*pair) for pair in permutations(history, 2))
    )


def _snapshot(history: History, timestamp: int) -> dict[CellKey, bytes | None]:
    snapshot: dict[CellKey, bytes | None] = dict(history.initial)
    committed = [r for r in history if r.committed and r.writes()]
    for record in sorted(committed, key=lambda record: record.commit_ts):
        if record.commit_ts and record.commit_ts <= timestamp:
            snapshot |= record.writes()
    return snapshot


def _reads_its_snapshot(history: History, record: TransactionRecord) -> bool:
    visible = _snapshot(history, record.start_ts)
    for operation in record.operations:
        match operation:
            case Read(key, value):
                if visible.get(key) != value:
                    return False
            case Put(key, value):
                visible[key] = value
            case Delete(key):
                visible[key] = None
            case Scan():
                if not _is_right(operation, visible):
                    return False
            case _:
                pass
    return True


def _is_right(scan: Scan, visible: dict[CellKey, bytes | None]) -> bool:
    rows: dict[bytes, list[Found]] = {}
    for (table, row, column), value in visible.items():
        in_range = scan.start <= row and (scan.stop == b"" or row < scan.stop)
        wanted = scan.columns is None or column in scan.columns
        if table == scan.table and in_range and wanted and value is not None:
            rows.setdefault(row, []).append(Found(row, column, value))
    due = sorted(rows, reverse=scan.reverse)[: scan.row_limit or None]
    got: list[bytes] = []
    for found in scan.found:
        if not got or got[-1] != found.row:
            got.append(found.row)
    if not scan.complete:
        due = due[: len(got)]
    cells = [cell for row in due for cell in rows[row]]
    return got == due and sorted(scan.found) == sorted(cells)


def _committed_at(record: TransactionRecord) -> int | None:
    """A transaction that wrote nothing has no commit timestamp, whatever its record says."""
    return record.commit_ts if record.committed and record.locked() else None


def _handed_out(record: TransactionRecord) -> list[int]:
    timestamps = []
    if record.start_ts and not record.historic:
        timestamps.append(record.start_ts)
    commit_ts = _committed_at(record)
    if commit_ts is not None:
        timestamps.append(commit_ts)
    return timestamps


def _timestamps_are_unique(history: History) -> bool:
    timestamps = [timestamp for record in history for timestamp in _handed_out(record)]
    return len(set(timestamps)) == len(timestamps)


def _commits_above_its_start(record: TransactionRecord) -> bool:
    commit_ts = _committed_at(record)
    return commit_ts is None or commit_ts > record.start_ts


def _concurrent(one: TransactionRecord, other: TransactionRecord) -> bool:
    """Both committed, both wrote or locked one cell, and neither began after the other."""
    exclude = one.locked() & other.locked()
    exclude |= one.locked() & other.read_locked() | one.read_locked() & other.locked()
    if not (one.committed and other.committed and exclude):
        return False
    return one.commit_ts > other.start_ts and other.commit_ts > one.start_ts


def _in_session_order(before: TransactionRecord, after: TransactionRecord) -> bool:
    if before.session != after.session or before.number >= after.number:
        return True
    if before.historic or after.historic or not before.start_ts or not after.start_ts:
        return True
    told = _committed_at(before) if before.outcome is Outcome.COMMITTED else None
    return after.start_ts > max(before.start_ts, told or 0)


def _in_real_time_order(before: TransactionRecord, after: TransactionRecord) -> bool:
    if before.historic or after.historic or before.clock != after.clock:
        return True
    received = [(before.begin_returned, before.start_ts)]
    if before.outcome is Outcome.COMMITTED:
        received.append((before.commit_returned, _committed_at(before) or 0))
    asked = [
        (after.begin_called, after.start_ts),
        (after.commit_called, _committed_at(after) or 0),
    ]
    return all(
        later > earlier
        for received_at, earlier in received
        for asked_at, later in asked
        if received_at is not None and asked_at is not None and earlier and later
        if received_at < asked_at
    )


# A tiny store that is snapshot isolated by construction, run at random to make valid histories.
#
# The oracle counts; a cell keeps all its versions; a commit is refused if a cell that it writes or
# locks has a newer commit. Nothing here is shared with the checker. Values are unique, so any
# change to what was read changes the meaning of the history.

ROWS = [b"", b"\x00", b"a", b"ab", b"b", b"c"]
COLUMNS = [b"", b"v"]


@dataclass
class _Running:
    recorded: RecordedTransaction
    buffer: dict[CellKey, bytes | None]
    locks: set[CellKey]
    read_locks: set[CellKey]


class SmallStore:
    """Runs transactions of a few sessions, interleaved at every operation."""

    def __init__(self, random: Random, *, sessions: int = 3) -> None:
        self._random = random
        self._timestamps = itertools.count(1)
        self._values = itertools.count(1)
        self._versions: dict[CellKey, list[tuple[int, bytes | None]]] = {}
        self._lock_commits: dict[CellKey, int] = {}
        self._read_lock_commits: dict[CellKey, int] = {}
        self._recorder = Recorder(itertools.count().__next__)
        self._sessions: list[_Running | None] = [None] * sessions
        self.commit_timestamps: dict[int, int] = {}
        """The commit timestamp of every committed transaction, by its start, for a resolver."""

    def run(self, steps: int) -> History:
        for _ in range(steps):
            self._step(self._random.randrange(len(self._sessions)))
        return self._recorder.history

    def resolve(self, record: TransactionRecord) -> int | None:
        return self.commit_timestamps.get(record.start_ts)

    def _step(self, session: int) -> None:
        running = self._sessions[session]
        if running is None:
            self._sessions[session] = self._begin(f"session {session}")
        elif self._random.random() < 0.25:
            self._commit(running)
            self._sessions[session] = None
        else:
            self._operation(running)

    def _begin(self, session: str) -> _Running:
        historic = self._random.random() < 0.1
        recorded = self._recorder.begin(session, historic=historic)
        now = next(self._timestamps)
        recorded.began(self._random.randint(1, now) if historic else now)
        return _Running(recorded, {}, set(), set())

    def _operation(self, running: _Running) -> None:
        key = "t", self._random.choice(ROWS), self._random.choice(COLUMNS)
        recorded = running.recorded
        kind = self._random.randrange(11)
        if recorded.record.historic:
            kind = 10 if kind > 5 else 0
        if kind < 4:
            recorded.read(key, self._visible(running).get(key))
        elif kind < 6:
            value = b"%d" % next(self._values)
            running.buffer[key] = value
            recorded.put(key, value)
        elif kind < 7:
            running.buffer[key] = None
            recorded.delete(key)
        elif kind < 8:
            running.locks.add(key)
            recorded.lock(key)
        elif kind < 9:
            running.read_locks.add(key)
            recorded.read_lock(key)
        else:
            recorded.scan(self._scan(running))

    def _visible(self, running: _Running) -> dict[CellKey, bytes]:
        """The whole snapshot under the transaction's own writes."""
        start_ts = running.recorded.record.start_ts
        snapshot: dict[CellKey, bytes | None] = {}
        for key, versions in self._versions.items():
            for commit_ts, value in versions:
                if commit_ts <= start_ts:
                    snapshot[key] = value
        snapshot |= running.buffer
        return {key: value for key, value in snapshot.items() if value is not None}

    def _scan(self, running: _Running) -> Scan:
        chance = self._random
        start, stop = chance.choice(ROWS), chance.choice([*ROWS, b""])
        columns = chance.choice([None, None, (b"v",), (b"",), (b"v", b"")])
        reverse, limit = chance.random() < 0.3, chance.choice([0, 0, 1, 2])
        rows: dict[bytes, list[Found]] = {}
        for (_, row, column), value in sorted(self._visible(running).items()):
            in_range = start <= row and (row < stop or stop == b"")
            if in_range and (columns is None or column in columns):
                rows.setdefault(row, []).append(Found(row, column, value))
        ordered = sorted(rows, reverse=reverse)[: limit or None]
        complete = chance.random() < 0.8
        if not complete:
            ordered = ordered[: chance.randint(0, len(ordered))]
        found = tuple(cell for row in ordered for cell in rows[row])
        return Scan("t", start, stop, found, columns, reverse, limit, complete)

    def _commit(self, running: _Running) -> None:
        recorded, touched = running.recorded, running.buffer.keys() | running.locks
        start_ts = recorded.record.start_ts
        if self._random.random() < 0.1:
            recorded.aborted()
            return
        recorded.commit_called()
        if not touched and not running.read_locks:
            recorded.committed()
        elif any(self._newest(key) > start_ts for key in touched | running.read_locks) or any(
            self._read_lock_commits.get(key, 0) > start_ts for key in touched
        ):
            recorded.aborted()
        else:
            self._apply(running)

    def _newest(self, key: CellKey) -> int:
        versions = self._versions.get(key, [])
        return max(versions[-1][0] if versions else 0, self._lock_commits.get(key, 0))

    def _apply(self, running: _Running) -> None:
        recorded = running.recorded
        unsent = self._random.random() < 0.05
        if unsent:
            recorded.unknown()
            return
        commit_ts = next(self._timestamps)
        self.commit_timestamps[recorded.record.start_ts] = commit_ts
        for key, value in running.buffer.items():
            self._versions.setdefault(key, []).append((commit_ts, value))
        for key in running.locks:
            self._lock_commits[key] = commit_ts
        for key in running.read_locks:
            self._read_lock_commits[key] = commit_ts
        if self._random.random() < 0.1:
            recorded.unknown()
        else:
            recorded.committed(commit_ts)


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


# Small cases, all of them or very many: the verdict is that of the definition.
#
# If a checker has a hole, some small case shows it.

_CELLS = [Found(b"a", b"v", b"1"), Found(b"b", b"v", b"1"), Found(b"b", b"w", b"1")]
_CELLS += [Found(b"c", b"v", b"1")]
_OWN: list[list[Operation]] = [[delete("b.v")], [put("bb", "2"), delete("c")]]


@pytest.mark.parametrize("own", _OWN, ids=["a deletion", "a write and a deletion"])
def test_every_answer_of_every_scan_of_three_rows(own: list[Operation]) -> None:
    """Bounds, order, limits, both directions, stopped early or not, over own writes."""
    cells = [*_CELLS, Found(b"bb", b"v", b"2")]
    answers = [found for length in range(3) for found in product(cells, repeat=length)]
    answers += permutations(cells, 3)
    questions = product((b"", b"b"), (b"", b"c"), (False, True), (0, 1, 2), (True, False))
    verdicts: Counter[bool] = Counter()
    for start, stop, reverse, limit, complete in questions:
        for found in answers:
            asked = Scan("t", start, stop, tuple(found), None, reverse, limit, complete)
            one = history(
                transaction(3, *own, asked, commit=4 if own else 0),
                **{"a": "1", "b": "1", "b.w": "1", "c": "1"},
            )
            right = is_snapshot_isolated(one)
            assert bool(check(one)) is right, f"{asked}: {check(one)}"
            verdicts[right] += 1
    assert verdicts[True] > 50


def test_any_small_history() -> None:
    """Random timestamps, outcomes, reads and scans: equal timestamps, commits below starts,
    overlapping writers, reads of own deletions, snapshots of the past, unknown outcomes."""
    verdicts: Counter[bool] = Counter()
    for seed in range(2_500):
        chance = Random(seed)
        found = _any_history(chance)
        ended = {record.start_ts: chance.choice((None, chance.randint(1, 9))) for record in found}
        resolve = partial(_resolved, ended)
        right = is_snapshot_isolated(settled(found, resolve))
        report = check(found, resolve=resolve)
        assert bool(report) is right, f"seed {seed}: {report}"
        verdicts[right] += 1
    assert min(verdicts[True], verdicts[False]) > 200, verdicts


def _resolved(ended: dict[int, int | None], record: TransactionRecord) -> int | None:
    return ended[record.start_ts]


def _any_history(chance: Random) -> History:
    records: list[TransactionRecord] = []
    for number in range(1, chance.randint(2, 4) + 1):
        start = chance.randint(1, 7)
        operations = [_any_operation(chance) for _ in range(chance.randint(0, 3))]
        records.append(
            transaction(
                start,
                *operations,
                commit=chance.choice((start + 1, start + 2, chance.randint(1, 9))),
                outcome=chance.choice((*Outcome, Outcome.COMMITTED, Outcome.ABORTED)),
                session=f"session {chance.randint(1, 3)}",
                number=number,
                historic=chance.random() < 0.1,
            )
        )
    return history(*records)


def _any_operation(chance: Random) -> Operation:
    name, value = chance.choice("xy"), chance.choice("12")
    match chance.randrange(10):
        case 0 | 1 | 2:
            return read(name, chance.choice((None, None, value)))
        case 3 | 4:
            return put(name, value)
        case 5:
            return delete(name)
        case 6:
            return lock(name)
        case 7:
            return read_lock(name)
        case _:
            found = [(row, chance.choice("12")) for row in "xy" if chance.random() < 0.3]
            return scan("", chance.choice(("", "y")), *found, limit=chance.choice((0, 1)))


def test_reads_without_a_snapshot_are_refused() -> None:
    """There would be nothing to compare them with."""
    with pytest.raises(InvalidArgument, match="without a start timestamp"):
        check(history(transaction(0, read("x", "1"))))
