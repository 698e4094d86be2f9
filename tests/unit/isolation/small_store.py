"""A tiny store that is snapshot isolated by construction, run at random to make valid histories.

The oracle counts; a cell keeps all its versions; a commit is refused if a cell that it writes or
locks has a newer commit. Nothing here is shared with the checker. Values are unique, so any change
to what was read changes the meaning of the history.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from random import Random

from tests.isolation.history import (
    CellKey,
    Found,
    History,
    RecordedTransaction,
    Recorder,
    Scan,
    TransactionRecord,
)

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
        written = versions[-1][0] if versions else 0
        return max(written, self._lock_commits.get(key, 0))

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
