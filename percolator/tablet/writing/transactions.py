"""Whole transactions as they come in to be committed in one round: checked, and on their way.

As with mutations, everything is checked before anything is queued. What a transaction will write is
complete but for its commit timestamp, which is known only once its cells are held.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import accumulate

from percolator.errors import InvalidArgument
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    KIND_PUT,
    KIND_PUT_IN_DATA,
    KINDS,
    WRITE_HEADER,
)
from percolator.tablet.keys import DATA, NOTIFY, READ_LOCK_MARK, WRITE, ColumnEncoder
from percolator.tablet.limits import too_long
from percolator.tablet.memory.read_locks import cells_locked_by
from percolator.tablet.memory.state import TabletState
from percolator.tablet.writing.listed_cells import ListedCells, refuse_listed
from percolator.tablet.writing.mutations import (
    MUTATION_BYTES,
    PUT,
    CheckedChange,
    CheckedMutation,
)
from percolator.v1 import tabletserver_pb2 as pb

CellWrite = tuple[bytes, bytes, bytes, int, bytes, tuple[bytes, ...]]
"""Row, column, `keys.cell_prefix` of the two, kind, value, and the observers to be notified."""


class TransactionWork:
    """The transactions of one request, and its answer: it leaves when all of them have ended."""

    def __init__(
        self, transactions: int, weight: int, schema_version: int, deadline_seconds: float
    ) -> None:
        self.weight = weight
        self.schema_version = schema_version
        self.deadline_seconds = deadline_seconds
        self.commit_timestamps = [0] * transactions
        self.uncommitted: list[tuple[int, pb.MutationResult]] = []
        self.followed: list[int] = []
        self.left = transactions
        self.timer: asyncio.TimerHandle | None = None
        """Ends those of its transactions that wait for cells at the deadline."""
        self.refusal_bytes = 0
        """The size of the cells that made conditions fail."""
        self.done: asyncio.Future[pb.TransactionBatchResult] = (
            asyncio.get_running_loop().create_future()
        )

    def ended(
        self, index: int, commit: int, result: pb.MutationResult | None, *, is_followed: bool
    ) -> bool:
        """Notes how a transaction ended. Returns True, and answers, when it was the last one."""
        if result is None:
            self.commit_timestamps[index] = commit
            if is_followed:
                self.followed.append(index)
        else:
            self.uncommitted.append((index, result))
        self.left -= 1
        if self.left:
            return False
        if self.timer is not None:
            self.timer.cancel()
        if not self.done.done():
            answer = pb.TransactionBatchResult(
                commit_timestamps=self.commit_timestamps, followed=sorted(self.followed)
            )
            for at, why in self.uncommitted:
                answer.uncommitted.add(transaction=at, result=why)
            self.done.set_result(answer)
        return True


class WholeTransaction:
    """One transaction, from its arrival to its end."""

    __slots__ = (
        "cells",
        "commit",
        "index",
        "is_followed",
        "read_locked",
        "refusal",
        "start",
        "weak",
        "work",
        "writes",
    )

    def __init__(
        self,
        work: TransactionWork,
        index: int,
        start: int,
        writes: Sequence[CellWrite],
        weak: Sequence[CellWrite],
    ) -> None:
        """`weak` are cells of which observers are notified although nothing is written to them."""
        self.work = work
        self.index = index
        self.start = start
        self.writes = writes
        self.weak = weak
        self.cells = [write[2] for write in writes]
        self.read_locked: Sequence[bytes] = ()
        """The cells of which it sets read locks."""
        self.commit = 0
        self.is_followed = False
        """The timestamp after its commit is set aside for another transaction of its client."""
        self.refusal: pb.MutationResult | None = None
        """Why it is not committed, if it was judged and a condition failed."""

    def mutations(self) -> list[CheckedMutation]:
        """What is written, once the commit timestamp is known."""
        start, commit = self.start, self.commit
        found: list[CheckedMutation] = []
        for row, column, cell, kind, value, observers in self.writes:
            header = WRITE_HEADER.pack(start, kind)
            changes: list[CheckedChange]
            if kind == KIND_PUT:
                changes = [(PUT, WRITE, commit, header + value, b"")]
            else:
                changes = [(PUT, WRITE, commit, header, b"")]
                if kind == KIND_PUT_IN_DATA:
                    changes.append((PUT, DATA, start, value, b""))
            if observers:
                changes += [(PUT, NOTIFY, commit, b"", observer) for observer in observers]
            found.append((row, column, cell, start, [], changes))
        for row, column, cell, _, _, observers in self.weak:
            notified: list[CheckedChange] = [
                (PUT, NOTIFY, commit, b"", observer) for observer in observers
            ]
            found.append((row, column, cell, start, [], notified))
        return found

    def end(self, result: pb.MutationResult | None) -> bool:
        """Ends it: committed, or with this result. True if its request is answered with it."""
        return self.work.ended(self.index, self.commit, result, is_followed=self.is_followed)


class TransactionChecker:
    """Checks the transactions of one tablet."""

    def __init__(self, state: TabletState, columns: ColumnEncoder) -> None:
        self._limits = state.limits
        self._guard = state.guard
        self._read_locks = state.read_locks
        self._cells = ListedCells(state, columns)

    def check(self, batch: pb.TransactionBatch, deadline_seconds: float) -> list[WholeTransaction]:
        """Raises `InvalidArgument` and `UnheardTimestamp`."""
        starts, counts = list(batch.start_timestamps), list(batch.cells)
        if not starts:
            raise InvalidArgument("start_timestamps", "none")
        if len(starts) != len(counts):
            raise InvalidArgument("cells", f"{len(counts)} entries for {len(starts)} transactions")
        for index, start in enumerate(starts):
            if not start:
                refuse_listed("start_timestamps", index, "missing")
            self._guard.admit(start, "start_timestamps[%d]", index)
        observed = self._cells.observed("observed", batch.observed)
        writes, weight = self._writes(batch, observed)
        followed = _followed(batch, len(starts))
        weak, weak_weight = self._weak(batch, len(starts))
        weight += weak_weight
        work = TransactionWork(len(starts), weight, batch.target.schema_version, deadline_seconds)
        found: list[WholeTransaction] = []
        first = 0
        for index, (start, stop) in enumerate(zip(starts, accumulate(counts), strict=True)):
            part = writes[first:stop]
            if not counts[index] or stop > len(writes):
                refuse_listed("cells", index, f"{counts[index]}, {len(part)} of them in the lists")
            transaction = WholeTransaction(work, index, start, part, weak.get(index, ()))
            if len(part) > 1 and len(set(transaction.cells)) != len(part):
                refuse_listed("cells", index, "two writes of one cell")
            if self._read_locks.used:
                transaction.read_locked = cells_locked_by(transaction.cells)
                if not set(transaction.cells).isdisjoint(transaction.read_locked):
                    refuse_listed("cells", index, "a write of a cell, and a read lock of it")
            transaction.is_followed = index in followed
            found.append(transaction)
            first = stop
        if first != len(writes):
            raise InvalidArgument("cells", f"{first} in total, {len(writes)} in the lists")
        return found

    def _writes(
        self, batch: pb.TransactionBatch, observed: Mapping[bytes, tuple[bytes, ...]]
    ) -> tuple[list[CellWrite], int]:
        rows, columns, kinds, values = batch.rows, batch.columns, batch.kinds, batch.values
        if not len(rows) == len(columns) == len(kinds) == len(values):
            raise InvalidArgument("rows", "rows, columns, kinds and values differ in number")
        value_bytes_max = self._limits.value_bytes_max
        found: list[CellWrite] = []
        weight = 0
        cells = zip(rows, columns, kinds, values, strict=True)
        for at, (row, column, kind, value) in enumerate(cells):
            cell = self._cells.cell("", at, row, column)
            if READ_LOCK_MARK in cell:
                self._read_locks.note(cell)
            if kind not in KINDS:
                refuse_listed("kinds", at, f"{kind} is not a kind of record")
            if len(value) > value_bytes_max:
                refuse_listed("values", at, too_long(value, value_bytes_max))
            if value and kind not in (KIND_PUT, KIND_PUT_IN_DATA):
                refuse_listed("values", at, "only a put has a value")
            observers = observed.get(column, ()) if kind != KIND_LOCK_ONLY else ()
            found.append((row, column, cell, kind, value, observers))
            weight += len(row) + len(value) + MUTATION_BYTES
        return found, weight

    def _weak(
        self, batch: pb.TransactionBatch, count: int
    ) -> tuple[dict[int, list[CellWrite]], int]:
        found: dict[int, list[CellWrite]] = {}
        weight = 0
        for at, one in enumerate(batch.notifications):
            if one.transaction >= count:
                refuse_listed("notifications", at, f"there is no transaction {one.transaction}")
            cell = self._cells.cell(f"notifications[{at}].", 0, one.row, one.column)
            names = tuple(one.observers)
            self._cells.check_observers(f"notifications[{at}].observers", names)
            write = (one.row, one.column, cell, KIND_LOCK_ONLY, b"", names)
            found.setdefault(one.transaction, []).append(write)
            weight += len(one.row) + sum(map(len, names)) + MUTATION_BYTES
        return found, weight


def _followed(batch: pb.TransactionBatch, count: int) -> frozenset[int]:
    """The transactions after which another one of their client begins."""
    followed = batch.followed
    if not followed:
        return frozenset()
    for at, index in enumerate(followed):
        if index >= count:
            refuse_listed("followed", at, f"there is no transaction {index}")
    return frozenset(followed)
