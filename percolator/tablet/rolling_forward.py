"""Rolls all locks of committed transactions forward, in the background, once a client says so.

A job of a million rows leaves as many locks. A client that rolls one forward sends a message's
worth of fields for it; the tablet has everything at hand but the commit timestamp. What each rule
prevents:

* Each lock becomes the step that a client would send (`commit_secondary` of
  `percolator/protocol/steps.py`), and goes through the same queue and judge. So it does not matter
  who comes first, and every rule about commits holds here, too. Only the question for the commit
  itself is left out: a client asks it to learn that others were first, and a cell is never locked
  by a transaction whose commit it has.
* The value is that of the lock in the store, of the transaction that the caller has named. While
  the step waits for its batch, the lock can only go; then the step is refused.
* The caller says that it has seen the commit on the primary. A tablet looks for itself, once for
  each transaction of which it has a lock: on the word of a caller that is mistaken it would commit
  cells of a transaction that was rolled back, up to millions. Where the primary does not say the
  same, or does not answer, the locks are left to those who meet them.
* The observers are those of the caller's schema. When the tablet gets another version, the rest is
  left, and its locks wait for a caller that knows better.
* Nothing is stored about an order. A tablet that is closed forgets it, and those who meet the locks
  that stay deal with them, as always.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from itertools import islice
from typing import NamedTuple

from percolator.errors import CellAddress, InvalidArgument, Overloaded, PercolatorError
from percolator.formats.records import (
    KIND_LOCK_ONLY,
    LOCK_HEADER_BYTES,
    LOCK_KIND_OFFSET,
    START_TIMESTAMP_BYTES,
    LockRecord,
    timestamp_bytes,
    value_offset,
)
from percolator.tablet.cells import (
    LOCK,
    NOTIFY,
    WRITE,
    ColumnEncoder,
    L,
    cell_bounds,
    component,
    split_component,
    unescaped,
)
from percolator.tablet.group_commit import GroupCommit, MutationWork
from percolator.tablet.requests import (
    DELETE,
    MUTATION_BYTES,
    PRESENT,
    PUT,
    CheckedChange,
    CheckedCondition,
    CheckedMutation,
    ListedCells,
    refuse_listed,
)
from percolator.tablet.state import TabletState
from percolator.tasks import Tasks
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import SPACE_LOCK
from percolator.wire.status import from_detail

ORDERS_MAX = 64
"""Further ones are forgotten."""
TRANSACTIONS_MAX = 10_000
"""In one order: more than the parts of a shared transaction."""
AHEAD_CELLS_MAX = 16_384
AHEAD_SECONDS_MAX = 1.0
"""How far, and how long, a caller may wait for the tablet to get ahead of it."""
COLUMNS_MAX = 1_024
"""Decoded columns that are remembered."""
BATCH_SECONDS = 60.0
"""How long one batch of locks may wait to be written."""

_NONE = CellAddress(0, b"", b"")

_log = logging.getLogger(__name__)


class _Fate:
    """Fate of the locks of one transaction."""

    __slots__ = ("commit_ts", "conditions", "primary", "shared", "start")

    def __init__(self, start: int, commit_ts: int) -> None:
        own = timestamp_bytes(start)
        self.start = start
        self.commit_ts = commit_ts
        self.primary = _NONE
        """The cell that decides, as its first lock names it."""
        self.conditions: list[CheckedCondition] = [(SPACE_LOCK, PRESENT, 0, 0, own, b"", b"")]
        self.shared: bytes | None = None
        """Bytes between header and value of its last lock."""

    def value(self, lock: bytes) -> bytes | None:
        """The value in one of its locks; None if that names another primary than the first one."""
        shared = self.shared
        if shared is None or not lock.startswith(shared, LOCK_HEADER_BYTES):
            primary = LockRecord.decode(lock).primary
            if self.primary is _NONE:
                self.primary = primary
            elif primary != self.primary:
                return None
            shared = self.shared = lock[LOCK_HEADER_BYTES : value_offset(lock)]
        return lock[LOCK_HEADER_BYTES + len(shared) :]


class _Columns(dict[bytes, bytes]):
    """Decodes the components of columns, as `ColumnEncoder` encodes them."""

    def __missing__(self, encoded: bytes) -> bytes:
        if len(self) >= COLUMNS_MAX:
            self.clear()
        column = self[encoded] = unescaped(encoded[:-2])
        return column


class _Order(NamedTuple):
    """The transactions that one caller has named."""

    fates: dict[bytes, _Fate]
    """By the beginning of their locks, the start timestamp. Those that are not committed as the
    caller says are removed."""
    unproven: list[_Fate]
    """Transactions of which a lock was found, and whose primaries were not asked yet."""
    observed: Mapping[bytes, tuple[bytes, ...]]
    schema_version: int
    row: bytes


class RollingForward:
    """The orders of one tablet: carried out one after the other."""

    def __init__(self, state: TabletState, commit: GroupCommit, columns: ColumnEncoder) -> None:
        self._state = state
        self._commit = commit
        self._cells = ListedCells(state, columns)
        self._columns = _Columns()
        self._orders: deque[_Order] = deque()
        """The first one is being carried out."""
        self._tasks = Tasks()
        self._rolled = 0
        """How many locks it has rolled forward."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        """Callers that wait until there are so many."""

    def take(self, request: pb.RollForwardRequest) -> None:
        """Takes an order. Raises `InvalidArgument`, `UnheardTimestamp`, `TabletMoved` and
        `SchemaChanged`."""
        self._state.require_target(request.target)
        order = self._checked(request)
        known = {start for one in self._orders for start in one.fates}
        fates = {start: fate for start, fate in order.fates.items() if start not in known}
        if not fates or len(self._orders) >= ORDERS_MAX:
            return
        self._orders.append(order._replace(fates=fates))
        if len(self._orders) == 1:
            self._tasks.start(self._run())

    async def get_ahead(self, cells: int) -> None:
        """Returns once that many more locks are rolled forward, or none are left, or after a while:
        the caller is a scan, which is on its way to them."""
        if not self._orders:
            return
        change: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((self._rolled + min(cells, AHEAD_CELLS_MAX), change))
        await asyncio.wait((change,), timeout=AHEAD_SECONDS_MAX)

    async def close(self) -> None:
        """Forgets what is left."""
        await self._tasks.cancel()
        self._wake(everyone=True)

    def _checked(self, request: pb.RollForwardRequest) -> _Order:
        starts, commits = list(request.start_timestamps), list(request.commit_timestamps)
        if not starts or len(starts) > TRANSACTIONS_MAX:
            reason = f"expected 1 to {TRANSACTIONS_MAX}, found {len(starts)}"
            raise InvalidArgument("start_timestamps", reason)
        if len(starts) != len(commits):
            raise InvalidArgument("commit_timestamps", f"{len(commits)} for {len(starts)} starts")
        fates: dict[bytes, _Fate] = {}
        for at, (start, commit_ts) in enumerate(zip(starts, commits, strict=True)):
            if not 0 < start < commit_ts:
                refuse_listed("commit_timestamps", at, f"{commit_ts} is not above {start}")
            self._state.guard.admit(commit_ts, "commit_timestamps[%d]", at)
            fates[timestamp_bytes(start)] = _Fate(start, commit_ts)
        observed = self._cells.observed("observed", request.observed)
        return _Order(fates, [], observed, request.target.schema_version, request.row)

    async def _run(self) -> None:
        while self._orders:
            try:
                await self._roll(self._orders[0])
            except PercolatorError as error:
                _log.info("%s leaves the rest of its locks: %s", self._state.identity, error)
            except self._state.storage.failures as error:
                _log.warning("%s", self._state.unreadable(error))
            finally:
                self._orders.popleft()
        self._wake(everyone=True)

    def _wake(self, *, everyone: bool = False) -> None:
        waiting, self._waiting = self._waiting, []
        for until, change in waiting:
            if everyone or self._rolled >= until:
                change.set_result(None)
            else:
                self._waiting.append((until, change))

    async def _roll(self, order: _Order) -> None:
        identity = self._state.identity
        first, stop = cell_bounds(identity.start, identity.end)
        # The caller is on its way through the rows, mostly upwards: the next ones are first.
        begin = max(first, component(order.row))
        await self._roll_between(order, begin, stop)
        await self._roll_between(order, first, begin if stop is None else min(begin, stop))

    async def _roll_between(self, order: _Order, first: bytes, stop: bytes | None) -> None:
        limits = self._state.limits
        at: bytes | None = first
        while at is not None:
            found: list[CheckedMutation] = []
            begin, weight = at, 0
            while at is not None and len(found) < limits.commit_mutations_max:
                self._state.require_open()
                at, more = self._gather(order, at, stop, found)
                weight += more
                await asyncio.sleep(0)
                if weight > limits.commit_bytes_max // 2:
                    break
            if found and not await self._are_proven(order):
                at = begin
            elif found:
                await self._write(order, found, weight)

    async def _are_proven(self, order: _Order) -> bool:
        """Looks at the primaries of the transactions of which locks were found for the first time.
        Removes those that are not known to be committed as the caller says; False if there are any.
        """
        fates = order.unproven[:]
        order.unproven.clear()
        ask, asked = self._state.commits, [(fate.primary, fate.start) for fate in fates]
        commits = await ask(asked) if asked and ask is not None else [0] * len(asked)
        wrong = [fate for fate, seen in zip(fates, commits, strict=True) if seen != fate.commit_ts]
        for fate in wrong:
            del order.fates[timestamp_bytes(fate.start)]
        if wrong:
            _log.warning(
                "%s leaves the locks of %d transactions, the first of which began at %d: their "
                "primaries do not say that they were committed as a client has told it",
                self._state.identity,
                len(wrong),
                wrong[0].start,
            )
        return not wrong

    def _gather(
        self, order: _Order, first: bytes, stop: bytes | None, found: list[CheckedMutation]
    ) -> tuple[bytes | None, int]:
        """Looks at some locks, and adds their steps to `found`. Returns where to go on, or None at
        the end, and about how many bytes the steps hold."""
        fates, observed, columns = order.fates, order.observed, self._columns
        get = self._state.storage.get
        most = self._state.limits.slice_rows
        weight = looked_at = 0
        cell = b""
        for cell, header in islice(self._state.mirror.between(first, stop), most):
            looked_at += 1
            start = header[:START_TIMESTAMP_BYTES]
            fate = fates.get(start)
            if fate is None:
                continue
            lock = get(L + cell)
            if lock is None or not lock.startswith(start):
                continue
            kind = lock[LOCK_KIND_OFFSET : LOCK_KIND_OFFSET + 1]
            if fate.primary is _NONE:
                order.unproven.append(fate)
            value = fate.value(lock)
            if value is None:
                continue
            record = start + kind + value
            row, behind_row = split_component(cell, 0)
            column = columns[cell[behind_row:]]
            changes: list[CheckedChange] = [
                (DELETE, LOCK, 0, b"", b""),
                (PUT, WRITE, fate.commit_ts, record, b""),
            ]
            if column in observed and kind[0] != KIND_LOCK_ONLY:
                changes += [(PUT, NOTIFY, fate.commit_ts, b"", name) for name in observed[column]]
            found.append((row, column, cell, 0, fate.conditions, changes))
            weight += len(row) + len(record) + MUTATION_BYTES
        return (cell + b"\0" if looked_at == most else None), weight

    async def _write(self, order: _Order, found: list[CheckedMutation], weight: int) -> None:
        """Returns once the batch is durable. Raises if it is not known to be."""
        clock, limits = self._state.clock, self._state.limits
        deadline = clock.monotonic_seconds() + BATCH_SECONDS
        work = MutationWork(found, weight, order.schema_version, deadline)
        while True:
            try:
                self._commit.execute(work)
                break
            except Overloaded:  # clients come first
                await clock.sleep(limits.overload_retry_seconds)
                self._state.require_open()
        for result in await work.done:
            if result.outcome in (pb.OUTCOME_NOT_EXECUTED, pb.OUTCOME_UNKNOWN):
                raise from_detail(result.error)
        self._rolled += len(found)
        self._wake()
