"""Commits, which run to their end whether or not a caller waits, and recent transactions.

A caller may leave in the middle, come back, or send the same commit twice at once: all such calls
wait for the same attempt. What is remembered here makes that cheap, and detects a caller that sends
other writes under the same start timestamp. No promise rests on it: that the outcome is the same at
every gateway is ensured by the cells (`percolator/protocol/repeat.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Coroutine, Iterable, Sequence
from copy import copy
from typing import Any

import structlog

from percolator.aio.database import Database
from percolator.aio.engine import Engine
from percolator.arguments import FAMILIES_MAX
from percolator.codecs.names import other_codec
from percolator.codecs.readable import quoted
from percolator.conditions import Predicate
from percolator.errors import (
    CellAddress,
    ConflictError,
    DeadlineExceeded,
    InvalidArgument,
    InvariantViolation,
    OutcomeUnknown,
    PercolatorError,
    PermissionDenied,
    Retry,
    SchemaError,
    SnapshotTooOld,
    TransactionTooLarge,
    UniqueViolation,
)
from percolator.limits import Limits
from percolator.protocol import repeat
from percolator.protocol.conflicts import AnotherWriteSet
from percolator.protocol.environment import ROLLED_BACK
from percolator.protocol.write_set import WriteSet, WriteSteps, locked_cell, read_lock_of
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import RangeRequest
from percolator.services.chassis.rpc import Quota, caller_identity
from percolator.tasks import Tasks
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import gateway_pb2 as pb
from percolator.wire.timestamp_source import OracleOfCluster

_LENGTH_BYTES = 8

_KINDS = frozenset(pb.CellWrite.Kind.values()) - {pb.CellWrite.KIND_UNSPECIFIED}


class Writes:
    """The writes of one transaction, and the cells that it notifies."""

    def __init__(self, limits: Limits, start: int) -> None:
        self.start = start
        self.cells = WriteSet(limits)
        self.notified: set[CellAddress] = set()

    @property
    def primary(self) -> CellAddress | None:
        """The cell that decides the outcome; None if there is nothing to decide."""
        return min(self.cells.stored(self.start), default=None)

    def digest(self) -> bytes:
        """A hash of writes that does not depend on their order."""
        digest = hashlib.blake2b(digest_size=16)
        for (table_id, row, column), (kind, value) in sorted(self.cells.cells.items()):
            _update(digest, (b"%d %d" % (table_id, kind), row, column, value))
        for table_id, row, column in sorted(self.notified):
            _update(digest, (b"%d notify" % table_id, row, column))
        return digest.digest()


def _update(digest: hashlib.blake2b, parts: Iterable[bytes]) -> None:
    for part in parts:
        digest.update(len(part).to_bytes(_LENGTH_BYTES, "big"))
        digest.update(part)


class Requests:
    """Checks requests against the limits, and tables' names against the cluster's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._limits = engine.limits

    async def writes(self, request: pb.CommitRequest, deadline: float) -> Writes:
        """The write set of a commit."""
        found = Writes(self._limits, request.start_timestamp)
        places: dict[CellAddress, int] = {}
        start = request.start_timestamp
        for place, write in enumerate(request.writes):
            field = f"writes[{place}]"
            if len(write.value) > self._limits.value_bytes_max:
                raise _too_long(f"{field}.value", write.value, self._limits.value_bytes_max)
            cell = await self._cell(field, write, start, deadline)
            first = places.setdefault(cell, place)
            if first != place:
                raise InvalidArgument(field, f"names the same cell as writes[{first}]")
            await self._add(found, field, write, cell, deadline)
            if write.value and write.kind != pb.CellWrite.KIND_PUT:
                raise InvalidArgument(f"{field}.value", "is allowed in a put only")
        return found

    async def _add(
        self, found: Writes, field: str, write: pb.CellWrite, cell: CellAddress, deadline: float
    ) -> None:
        try:
            match write.kind:
                case pb.CellWrite.KIND_PUT:
                    found.cells.put(cell, write.value)
                case pb.CellWrite.KIND_DELETE:
                    found.cells.delete(cell)
                case pb.CellWrite.KIND_LOCK:
                    found.cells.lock(cell)
                case pb.CellWrite.KIND_READ_LOCK:
                    found.cells.read_lock(cell)
                case pb.CellWrite.KIND_NOTIFY:
                    await self._require_weak_observer(field, cell, deadline)
                    found.notified.add(cell)
                case _:
                    raise _no_kind(field, write.kind)
        except TransactionTooLarge as error:
            raise InvalidArgument(field, error.message) from None
        if len(found.notified) > self._limits.transaction_cells_max:
            raise InvalidArgument(
                field,
                f"a transaction has at most {self._limits.transaction_cells_max} notifications",
            )

    async def _require_weak_observer(self, field: str, cell: CellAddress, deadline: float) -> None:
        schemas = self._engine.env.schemas
        known = schemas.get(cell.table_id)
        if known is None or cell.column not in known.weak_observers:
            known = await schemas.refresh(cell.table_id, deadline)
        if cell.column not in known.weak_observers:
            raise InvalidArgument(field, f"column {quoted(cell.column)} has no weak observer")

    async def primary(self, request: pb.ResolveRequest, deadline: float) -> CellAddress:
        """The primary of the transaction whose outcome is asked about."""
        if request.HasField("primary") + bool(request.cells) + bool(request.writes) != 1:
            raise InvalidArgument(
                "primary", "give either the primary or all cells that were written"
            )
        if request.HasField("primary"):
            told = request.primary
            if caller_identity().rights is not None:
                raise PermissionDenied(
                    "a token with rights to some tables names the cells or the writes instead: "
                    "a primary does not show whose it is"
                )
            address = CellAddress(told.table_id, told.row, told.column)
            # It may be a hidden cell: that of a read lock.
            self._check_names("primary", address.row, locked_cell(address).column)
            return address
        start, cells_max = request.start_timestamp, self._limits.transaction_cells_max
        field = "cells" if request.cells else "writes"
        named: Sequence[pb.CellName | pb.CellWrite] = request.cells or request.writes
        if len(named) > cells_max:
            raise InvalidArgument(field, f"has {len(named)} entries, at most {cells_max}")
        found: list[CellAddress] = []
        for place, one in enumerate(named):
            cell = await self._cell(f"{field}[{place}]", one, start, deadline)
            kind = one.kind if isinstance(one, pb.CellWrite) else pb.CellWrite.KIND_PUT
            if kind not in _KINDS:
                # Taken for another kind, another cell would seem to decide, and have nothing on it.
                raise _no_kind(f"{field}[{place}]", kind)
            if kind == pb.CellWrite.KIND_READ_LOCK:
                found.append(read_lock_of(cell, start))
            elif kind != pb.CellWrite.KIND_NOTIFY:
                found.append(cell)
        if not found:
            raise InvalidArgument("writes", "has nothing but notifications, which decide nothing")
        return min(found)

    async def _cell(
        self, field: str, named: pb.CellWrite | pb.CellName, start: int, deadline: float
    ) -> CellAddress:
        caller_identity().require_write(named.table, named.row)
        self._check_names(field, named.row, named.column)
        table_id = await self.table_id(f"{field}.table", named.table, start, deadline)
        return CellAddress(table_id, named.row, named.column)

    async def table_id(self, field: str, name: str, start: int, deadline: float) -> int:
        """The id of a table. Raises `SchemaError` if there is no such table.

        Also if the table is younger than the transaction that began at `start`, which may have read
        another table of this name, through any gateway. It would commit into the wrong table.
        """
        info = await self.table(field, name, deadline)
        info.require_older_than(start)
        return info.table_id

    async def table(self, field: str, name: str, deadline: float) -> TableInfo:
        """The table of this name. Raises `SchemaError` if there is none."""
        if not name:
            raise InvalidArgument(field, "is missing")
        return await self._engine.catalog.table(name, deadline)

    def check_row_query(self, field: str, query: pb.RowQuery) -> None:
        self._engine.require_row(f"{field}.row", query.row)
        self.check_columns(f"{field}.", query)

    async def range_request(
        self, request: pb.ScanTableRequest, deadline: float
    ) -> RangeRequest | None:
        """The range to scan; None if it is empty."""
        start, end = request.range.start, request.range.end
        self._check_bound("range.start", start)
        self._check_bound("range.end", end)
        self.check_columns("", request)
        predicate = Predicate(request.filter) if request.HasField("filter") else None
        if request.count and request.row_limit:
            raise InvalidArgument("row_limit", "cannot be combined with a count")
        info = await self.table("table", request.table, deadline)
        info.require_older_than(request.start_timestamp)
        columns = [*request.columns]
        if predicate is not None:
            self._check_filter(predicate, info)
            columns += [name for name in predicate.columns if name not in columns]
        if end and start >= end:
            return None
        return RangeRequest(
            info.table_id,
            start,
            end,
            tuple(columns) if request.columns or request.column_prefixes else None,
            request.start_timestamp,
            request.reverse,
            request.row_limit,
            prefixes=tuple(request.column_prefixes),
            predicate=predicate,
        )

    def _check_filter(self, predicate: Predicate, info: TableInfo) -> None:
        """Refuses columns that are none, and codecs that are not those of the table."""
        for name in predicate.columns:
            self._check_column("filter.column", name)
        known = info.codecs.names.columns
        for name, codec in predicate.codecs:
            if codec not in ("", "raw", known.get(name, codec)):
                raise other_codec(info.name, name, known[name], codec)

    def check_columns(
        self, field: str, asked: pb.RowQuery | pb.ScanTableRequest | pb.FindRowsRequest
    ) -> None:
        """`field` comes before the names of fields in errors."""
        columns, prefixes = asked.columns, asked.column_prefixes
        for place, column in enumerate(columns):
            self._check_column(f"{field}columns[{place}]", column)
        if len(set(columns)) != len(columns):
            raise InvalidArgument(f"{field}columns", "names a column twice")
        for place, prefix in enumerate(prefixes):
            self._check_column(f"{field}column_prefixes[{place}]", prefix)
        if len(prefixes) > FAMILIES_MAX:
            raise InvalidArgument(f"{field}column_prefixes", f"expected at most {FAMILIES_MAX}")

    def _check_names(self, field: str, row: bytes, column: bytes) -> None:
        self._engine.require_row(f"{field}.row", row)
        self._check_column(f"{field}.column", column)

    def _check_bound(self, field: str, bound: bytes) -> None:
        # The key behind a row, from which a scan that broke off is continued, is a byte longer.
        self._engine.require_row(field, bound.removesuffix(b"\0"))

    def _check_column(self, field: str, column: bytes) -> None:
        if not column:
            raise InvalidArgument(field, "is empty")
        if len(column) > self._limits.column_bytes_max:
            raise _too_long(field, column, self._limits.column_bytes_max)
        if column[0] == 0:
            raise InvalidArgument(field, "begins with 00, which is reserved")


def _no_kind(field: str, kind: int) -> InvalidArgument:
    return InvalidArgument(f"{field}.kind", f"{kind} is not a kind of write")


def _too_long(field: str, value: bytes, bytes_max: int) -> InvalidArgument:
    return InvalidArgument(field, f"has {len(value)} bytes, at most {bytes_max}")


COMMITS_RETRY_SECONDS = 0.1

_log = structlog.get_logger("percolator.gateway")

Fate = int | PercolatorError
"""The commit timestamp, or why there is none."""


class Known:
    """A transaction that was begun or committed here."""

    __slots__ = ("attempt", "begun_seconds", "digest", "fate", "primary", "token", "touched")

    def __init__(self, begun_seconds: float | None) -> None:
        self.begun_seconds = begun_seconds
        """When its start timestamp was handed out here; None if it was handed out elsewhere."""
        self.touched = begun_seconds is None
        """True if another caller or gateway may have touched its cells."""
        self.digest = b""
        """A digest of its writes; empty until they are known."""
        self.primary: CellAddress | None = None
        self.attempt: asyncio.Task[Fate] | None = None
        """The attempt in progress to commit it."""
        self.fate: Fate | None = None
        """Once it is final."""
        self.token: str | None = None
        """The name of the token with rights to some tables only whose transaction it is known to
        be."""


class Commits:
    """All commits of one gateway. Belongs to one event loop."""

    def __init__(
        self,
        database: Database,
        oracle: OracleOfCluster,
        *,
        commit_seconds: float,
        quota: Quota,
        remembered_max: int,
    ) -> None:
        """`quota` is that of commits in progress, including those whose callers have gone. The
        `oracle` says whose timestamps are whose."""
        self._database = database
        self._oracle = oracle
        self._engine = database.internal.engine
        self._env = database.internal.engine.env
        self._commit_seconds = commit_seconds
        self._quota = quota
        self._remembered_max = remembered_max
        self._known: OrderedDict[int, Known] = OrderedDict()
        self._newest = 0
        """The largest timestamp seen so far."""
        self._attempts = Tasks(_attempt_failed)
        self.outcomes: Counter[str] = Counter(dict.fromkeys(_OUTCOMES, 0))
        self.joined = 0
        """Commits that found the same commit in progress or remembered."""
        self.looked_up = 0
        """Commits that first looked at the cells for traces of earlier attempts."""

    @property
    def in_progress(self) -> int:
        """Commits being tried, whether or not a caller waits for them."""
        return len(self._attempts)

    async def close(self, drain_seconds: float) -> None:
        """Waits for commits in progress. Others resolve the locks of those that are cut off."""
        await self._attempts.drain(drain_seconds)

    # ------------------------------------------------------------------ timestamps

    async def begin(self, deadline: float) -> int:
        """Begins a transaction; its start timestamp."""
        caller = caller_identity()
        if caller.rights is None:
            start = await self._fresh(deadline)
            self._remember(start, Known(self._engine.now()))
        else:
            start = await self._oracle.take_for(caller.name)
            self._newest = max(self._newest, start)
            self._remember(start, Known(self._engine.now())).token = caller.name
        return start

    async def require_own(self, start: int) -> None:
        """Raises `SnapshotTooOld` unless the oracle has handed out this start timestamp to the
        caller, if its token has rights to some tables only.

        Everybody knows a transaction by its start alone: what such a caller commits or rolls back
        in its own table would be believed of another transaction's locks, in all tables.
        """
        caller = caller_identity()
        if caller.rights is None:
            return
        known = self._known.get(start)
        if known is not None and known.token == caller.name:
            return
        (is_own,) = await self._oracle.handed_out(caller.name, (start,))
        if not is_own:
            raise SnapshotTooOld(
                f"the oracle does not know that it has handed out {start} to the token "
                f"{caller.name!r}",
                timestamp=start,
            )
        known = self._known.get(start) or self._remember(start, Known(None))
        known.token = caller.name

    async def check_start(self, start: int, deadline: float) -> None:
        """Refuses a timestamp that the oracle cannot have handed out."""
        await self.check_timestamp("start_timestamp", start, deadline)

    async def check_timestamp(self, field: str, timestamp: int, deadline: float) -> None:
        """As `check_start`, for a timestamp in another field."""
        if not timestamp:
            raise InvalidArgument(field, "is missing: Begin hands one out")
        if timestamp > self._newest:
            now = await self._fresh(deadline)
            if timestamp > now:
                # A later commit below it would change what had been read at it before.
                raise InvalidArgument(
                    field, f"{timestamp} is in the future: the oracle is at {now}"
                )

    async def _fresh(self, deadline: float) -> int:
        left = max(deadline - self._engine.now(), 0.001)
        fresh = await self._env.timestamps.get(timeout_seconds=left)
        self._newest = max(self._newest, fresh)
        return fresh

    # ------------------------------------------------------------------ commit

    async def commit(self, start: int, writes: Writes, deadline: float) -> int:
        """The commit timestamp. Raises `OutcomeUnknown` if it is not known by the deadline."""
        known = self._known.get(start) or self._remember(start, Known(None))
        digest = writes.digest()
        if known.digest and known.digest != digest:
            raise InvalidArgument(
                "writes", f"another write set was sent under the start timestamp {start}"
            )
        if known.fate is not None or known.attempt is not None:
            self.joined += 1
        if known.fate is not None:
            return _returned(known.fate)
        attempt = known.attempt or self._begin_attempt(start, known, writes, digest)
        return await self._outcome_of(attempt, start, known, deadline)

    def _begin_attempt(
        self, start: int, known: Known, writes: Writes, digest: bytes
    ) -> asyncio.Task[Fate]:
        caller = caller_identity()
        self._quota.take(caller)
        begun_seconds = None if known.touched else known.begun_seconds
        known.digest, known.primary, known.touched = digest, writes.primary, True
        work = self._attempt(start, begun_seconds, writes)
        known.attempt = self._attempts.start(self._run(start, known, work))
        known.attempt.add_done_callback(lambda _: self._quota.give_back(caller))
        return known.attempt

    async def _outcome_of(
        self, attempt: asyncio.Task[Fate], start: int, known: Known, deadline: float
    ) -> int:
        """Waits for the attempt, which continues if this caller leaves."""
        await asyncio.wait((attempt,), timeout=max(deadline - self._engine.now(), 0.0))
        if not attempt.done() or attempt.cancelled():
            raise OutcomeUnknown(
                f"the commit of the transaction begun at {start} is still in progress",
                start_timestamp=start,
                primary=known.primary,
            )
        return _returned(attempt.result())

    async def _run(self, start: int, known: Known, work: Coroutine[None, None, Fate]) -> Fate:
        try:
            fate = await work
        except PercolatorError as problem:
            fate = problem
        finally:
            known.attempt = None
        if isinstance(fate, AnotherWriteSet):
            fate = InvalidArgument("writes", fate.message)
        self.outcomes[_name_of(fate)] += 1
        if isinstance(fate, int | ConflictError):
            # A copy, since an error that was raised keeps the writes alive, through its traceback.
            known.fate = copy(fate)
        elif not isinstance(fate, OutcomeUnknown):
            known.digest = b""  # an undecided attempt does not fix what the transaction writes
            _log.info("a commit was not decided", start_timestamp=start, reason=str(fate))
        return fate

    async def _attempt(self, start: int, begun_seconds: float | None, writes: Writes) -> Fate:
        """Runs until the outcome is known or `commit_seconds` are over."""
        deadline = self._engine.now() + self._commit_seconds
        if begun_seconds is None:
            fate, begun_seconds = await self._look_up(start, writes, deadline)
            if fate is not None:
                return fate
        transaction = self._database.internal.transaction(self._commit_seconds)
        transaction.internal.resume(start, begun_seconds)
        transaction.internal.writes.adopt(writes.cells)
        for cell in writes.notified:
            transaction.internal.buffer.notify_cell(cell)
        try:
            commit_ts = await transaction.commit()
        except OutcomeUnknown:
            raise
        except PercolatorError as problem:
            return await self._after_failure(start, writes, problem, deadline)
        if commit_ts is None:
            raise InvariantViolation("a commit with writes returned no timestamp")
        return commit_ts

    async def _look_up(
        self, start: int, writes: Writes, deadline: float
    ) -> tuple[Fate | None, float]:
        """The outcome of earlier attempts, if any, and when it began on this machine's clock."""
        now = await self._fresh(deadline)
        age_seconds = ((now >> SEQUENCE_BITS) - (start >> SEQUENCE_BITS)) / 1000
        begun_seconds = self._engine.now() - age_seconds
        if not writes.cells.cells:
            return None, begun_seconds
        self.looked_up += 1
        steps = self._steps(start, writes)
        outcome = await repeat.former_outcome(self._env, steps, deadline)
        if outcome == ROLLED_BACK:
            rolled_back = ConflictError(
                f"the transaction begun at {start} is rolled back",
                cell=locked_cell(steps.primary),
                start_timestamp=start,
            )
            return rolled_back, begun_seconds
        return outcome, begun_seconds

    def _steps(self, start: int, writes: Writes) -> WriteSteps:
        inline_bytes_max = self._engine.limits.value_inline_bytes_max
        return WriteSteps(start, writes.cells.stored(start), inline_bytes_max)

    async def _after_failure(
        self, start: int, writes: Writes, problem: PercolatorError, deadline: float
    ) -> Fate:
        """It counts as aborted only once a durable record rules out that it ever commits."""
        primary = writes.primary
        if isinstance(problem, AnotherWriteSet):
            steps = self._steps(start, writes)
            self._env.background.start(repeat.abandon(self._env, steps, deadline))
            return problem
        if primary is None or isinstance(problem, SnapshotTooOld):
            # There is nothing to decide, or it is too late to find out.
            return problem
        if self._env.verdicts.get(start) != ROLLED_BACK and not _lost(problem, primary):
            try:
                commit_ts = await repeat.resolve(self._env, start, primary, "writes", deadline)
            except PercolatorError as trouble:
                return OutcomeUnknown(
                    f"{problem.message}; whether it was rolled back could not be learned: "
                    f"{trouble.message}",
                    start_timestamp=start,
                    primary=primary,
                )
            if commit_ts != ROLLED_BACK:
                return commit_ts
        if isinstance(problem, ConflictError | UniqueViolation):
            return problem
        return ConflictError(
            f"rolled back: {problem}",
            start_timestamp=start,
            cell=locked_cell(primary),
            where=problem.where,
        )

    # ------------------------------------------------------------------ questions

    async def resolve(self, start: int, primary: CellAddress, field: str, deadline: float) -> int:
        """The commit timestamp, or ROLLED_BACK."""
        known = self._known.get(start)
        if known is not None and known.primary == primary:
            if known.attempt is not None:
                await asyncio.wait(
                    (known.attempt,), timeout=max(deadline - self._engine.now(), 0.0)
                )
            if isinstance(known.fate, int):
                return known.fate
            if known.fate is not None:
                return ROLLED_BACK
        try:
            return await repeat.resolve(self._env, start, primary, field, deadline)
        except (InvalidArgument, SchemaError, SnapshotTooOld):
            raise  # asking again would give the same answer
        except PercolatorError as problem:
            raise OutcomeUnknown(
                f"the outcome of the transaction begun at {start} could not be learned: {problem}",
                start_timestamp=start,
                primary=primary,
            ) from problem

    # ------------------------------------------------------------------ memory

    def _remember(self, start: int, known: Known) -> Known:
        self._known[start] = known
        while len(self._known) > self._remembered_max:
            oldest, one = self._known.popitem(last=False)
            if one.attempt is not None:
                self._known[oldest] = one  # still in progress: there are few of these
                break
        return known


def _attempt_failed(_: asyncio.Task[Any], bug: BaseException) -> None:
    # Logged, since its callers may all have left.
    _log.error("a commit failed unexpectedly", exc_info=bug)


def _returned(fate: Fate) -> int:
    if isinstance(fate, int):
        return fate
    problem = copy(fate)  # other callers may get the same error
    if isinstance(problem, ConflictError):
        # In the library a conflict means: run the transaction again. A repeated call cannot help.
        problem.retry = Retry.USELESS
    raise problem


_OUTCOMES = ("committed", "aborted", "unknown", "refused")


def _name_of(fate: Fate) -> str:
    if isinstance(fate, int):
        return "committed"
    if isinstance(fate, ConflictError):
        return "aborted"
    return "unknown" if isinstance(fate, OutcomeUnknown | DeadlineExceeded) else "refused"


def _lost(problem: PercolatorError, primary: CellAddress) -> bool:
    """Another commit of the primary above the start is as final as a roll-back marker."""
    if not isinstance(problem, ConflictError):
        return False
    return problem.cell == primary and problem.other_commit_timestamp > 0
