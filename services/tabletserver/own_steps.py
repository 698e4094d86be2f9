"""Steps of callers whose tokens have rights to some tables only: those of their own transactions.

Everybody who sends steps of the protocol can forge them. A lock decides about others through its
primary and its start timestamp: it could make those who meet it roll back a transaction in a table
that the token may not touch. And a row of one table may decide about a transaction that has locked
rows of another. So each step is judged by these rules:

- Every timestamp in it was handed out, by the oracle, to callers with this token. So no step is
  about a transaction of anybody else, and none can put a record where another's is.
- The cells are those that the token may write and read (a refusal shows what is in the way). So is
  the primary that a lock names.
- A lock is put where none is, or over one of the same transaction, and none but these is deleted.

What such a caller can still do is spoil its own transactions: among others, commit at a timestamp
that it had before its locks were put, below snapshots that have read these rows. Locks of others
are resolved for it (percolator/services/tabletserver/rights.py).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from percolator.errors import (
    CellAddress,
    InvalidArgument,
    InvariantViolation,
    PermissionDenied,
    SnapshotTooOld,
)
from percolator.formats.records import LockRecord, locked_column
from percolator.services.chassis.rpc import caller_identity
from percolator.services.tabletserver.rights import RowRights
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import (
    SPACE_DATA,
    SPACE_LOCK,
    SPACE_NOTIFY,
    SPACE_ROLLBACK,
    SPACE_WRITE,
)
from percolator.v1.tabletserver_pb2 import Change, Condition, StepList

HandedOut = Callable[[str, Sequence[int]], Awaitable[Sequence[bool]]]
"""Asks the oracle which of these timestamps it has handed out to the token of this name."""

_REMEMBERED_MAX = 100_000
_START_BYTES = 8
_COMMITS = (StepList.KIND_COMMIT_PRIMARY, StepList.KIND_COMMIT_SECONDARY)


class OwnSteps:
    """Judges steps for callers whose tokens have rights to some tables only. Belongs to one event
    loop."""

    def __init__(self, rights: RowRights, handed_out: HandedOut) -> None:
        self._rights = rights
        self._handed_out = handed_out
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()
        """Timestamps of which the oracle has said that they are a token's, by its name."""

    async def require_mutations(self, table_id: int, batch: pb.MutationBatch) -> set[int]:
        """Raises `PermissionDenied` unless the caller may send all of this. Returns the timestamps
        in it, all of which are the caller's own."""
        listed = batch.steps
        _check_lengths(listed)
        rows = (*(one.row for one in batch.mutations), *listed.rows)
        await self._rights.require_write_rows(table_id, rows)
        own: set[int] = set()
        primaries: list[bytes] = []
        for mutation in batch.mutations:
            if mutation.changes:
                _check_column(mutation.column)
                own.update(_timestamps_of(mutation, primaries))
        starts = listed.start_timestamps
        for kind, column, value, start, commit in zip(
            listed.kinds,
            listed.columns,
            listed.values,
            starts,
            listed.commit_timestamps,
            strict=True,
        ):
            _check_column(column)
            own.add(start)
            if kind == StepList.KIND_PREWRITE:
                primaries.append(value)
            elif kind in _COMMITS:
                own.add(commit)
            else:
                raise _denied("write outside of transactions")
            if value[:_START_BYTES] != start.to_bytes(_START_BYTES, "big"):
                raise _denied("send a record of another transaction")
        for lock in primaries:
            primary = _primary_in(lock)
            if not await self._rights.may_write(primary.table_id, primary.row):
                raise _denied("lock cells for a row that it may not write to decide about")
        await self._require_own(own)
        return own

    async def require_transactions(self, table_id: int, batch: pb.TransactionBatch) -> set[int]:
        """As `require_mutations`. The tablet sets no timestamp aside for such a caller: it would
        not have come from the oracle."""
        rows = (*batch.rows, *(one.row for one in batch.notifications))
        await self._rights.require_write_rows(table_id, rows)
        for column in (*batch.columns, *(one.column for one in batch.notifications)):
            _check_column(column)
        del batch.followed[:]
        own = set(batch.start_timestamps)
        await self._require_own(own)
        return own

    async def _require_own(self, timestamps: Iterable[int]) -> None:
        name = caller_identity().name
        asked = sorted(one for one in timestamps if (name, one) not in self._known)
        if not asked:
            return
        for timestamp, is_own in zip(asked, await self._handed_out(name, asked), strict=True):
            if not is_own:
                raise SnapshotTooOld(
                    f"the oracle does not know that it has handed out {timestamp} to the token "
                    f"{name!r}: begin a new transaction",
                    timestamp=timestamp,
                )
            self._known[name, timestamp] = None
        while len(self._known) > _REMEMBERED_MAX:
            self._known.popitem(last=False)


def _timestamps_of(mutation: pb.Mutation, locks: list[bytes]) -> Iterable[int]:
    """The timestamps that the changes are about; adds the locks that they put to `locks`."""
    for change in mutation.changes:
        kind, space, start = change.kind, change.space, change.value[:_START_BYTES]
        is_put = kind == Change.KIND_PUT
        if is_put and space == SPACE_LOCK and _has_lock_of(mutation, start):
            locks.append(change.value)
            yield int.from_bytes(start, "big")
        elif kind == Change.KIND_DELETE_IF_PREFIX and space == SPACE_LOCK:
            yield _start(start)
        elif is_put and space == SPACE_WRITE:
            yield _start(start)
            yield change.timestamp
        elif (is_put and space in (SPACE_ROLLBACK, SPACE_NOTIFY)) or (
            kind != Change.KIND_DELETE_IF_PREFIX and space == SPACE_DATA
        ):
            yield change.timestamp
        else:
            raise _denied("change a cell in this way")


def _has_lock_of(mutation: pb.Mutation, start: bytes) -> bool:
    """True if the mutation is refused where another transaction has a lock."""
    for one in mutation.conditions:
        if one.space != SPACE_LOCK or len(start) < _START_BYTES:
            continue
        if one.expectation == Condition.EXPECTATION_ABSENT and not (
            one.prefix or one.from_timestamp or one.until_timestamp or one.qualifier
        ):
            return True
        if (
            one.expectation in (Condition.EXPECTATION_PRESENT, Condition.EXPECTATION_AT_MOST)
            and one.prefix[:_START_BYTES] == start
        ):
            return True
    return False


def _check_lengths(listed: StepList) -> None:
    number = len(listed.kinds)
    for name in ("rows", "columns", "values", "start_timestamps", "commit_timestamps"):
        if len(getattr(listed, name)) != number:
            raise InvalidArgument(f"steps.{name}", f"expected {number}, as there are kinds")


def _primary_in(lock: bytes) -> CellAddress:
    try:
        return LockRecord.decode(lock).primary
    except InvariantViolation as error:
        raise InvalidArgument("value", error.message) from None


def _start(start: bytes) -> int:
    if len(start) < _START_BYTES:
        raise InvalidArgument("value", "expected a record that begins with a start timestamp")
    return int.from_bytes(start, "big")


def _check_column(column: bytes) -> None:
    """Among reserved columns, only read locks are a client's: the others are of observers, and of
    whoever builds an index."""
    if column[:1] == b"\0" and locked_column(column) is None:
        raise _denied("write a reserved column")


def _denied(what: str) -> PermissionDenied:
    return PermissionDenied(
        f"the token {caller_identity().name!r} has rights to some tables only, and may not {what}"
    )
