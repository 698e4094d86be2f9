"""Transactions of several processes: one decides, any number of them write.

    driver       async with db.shared_transaction() as shared:
                     receipts = run_somewhere(task, shared.ticket)
                     await shared.commit(receipts)

    elsewhere    async with db.share(ticket, task="7") as share:
                     await share.set("bob", balance, 10)
                     return await share.finish()

The writes become visible atomically, when the driver commits, or not at all. Tasks may fail, be run
again, and run twice at the same time: only the attempts whose receipts the driver passes to
`commit` count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from percolator.aio.awaits import Awaits, must_be_awaited
from percolator.aio.engine import Engine
from percolator.aio.transaction import DONE, Later, LateWrites, Written
from percolator.arguments import as_timestamp, require_seconds
from percolator.codecs.indexes import IndexDefinition
from percolator.errors import (
    CellAddress,
    InvalidArgument,
    OtherDriverCommitted,
    OutcomeUnknown,
    PercolatorError,
    SchemaError,
    TransactionTooLarge,
    UsageError,
    WrittenTwice,
)
from percolator.formats.records import KIND_DELETE, KIND_PUT, TTL_MILLISECONDS_MAX
from percolator.limits import Limits
from percolator.protocol.announcing import learn_schemas
from percolator.protocol.commit import Sent
from percolator.protocol.environment import ROLLED_BACK
from percolator.protocol.roll_forward import tell_of_commits
from percolator.protocol.shared.attempt import Attempt
from percolator.protocol.shared.driver import (
    SharedCommit,
    announced_by_all,
    roll_back_all,
    roll_back_left,
)
from percolator.protocol.shared.entries import Entries
from percolator.protocol.shared.participant import (
    GENERATION_MAX,
    Job,
    Keeper,
    Observed,
    ParticipantKey,
    check_task,
)
from percolator.protocol.write_set import Write, other_indexes
from percolator.routing.catalog import TableInfo
from percolator.routing.cells import Groups
from percolator.schema import SHARED_NAME, Column, encoded_key, encoded_value
from percolator.timestamps import Timestamp
from percolator.v1.master_pb2 import TableOptions

# What travels between the processes that take part in a shared transaction.


@dataclass(frozen=True)
class Ticket:
    """Ticket with which a process takes part in a shared transaction. It can be pickled."""

    table_id: int
    row: bytes
    unchanged_since: int
    ttl_seconds: float
    began: int
    """A timestamp from before the first participant began."""

    @property
    def job(self) -> Job:
        """The transaction, as the protocol knows it."""
        return Job(self.table_id, self.row, self.unchanged_since, self.ttl_seconds, self.began)


@dataclass(frozen=True)
class Receipt:
    """The locks of one attempt at a task. It can be pickled: bring it to the driver."""

    row: bytes
    task: str
    parts: tuple[ParticipantKey, ...]
    cells: int
    announced: Mapping[int, Observed] = field(default_factory=dict)
    """By table, the observers to which every cell was announced; empty where commits notify."""
    tables: tuple[int, ...] = ()
    """The tables in which it has locked cells."""
    left: Mapping[int, tuple[IndexDefinition, ...]] = field(default_factory=dict)
    """By table, the indexes whose entries are left to the driver."""


# A task's writes in a shared transaction, by one attempt.

K = TypeVar("K")
T = TypeVar("T")

REPLACE_AFTER_SECONDS = 10.0
"""How long a later attempt waits before it replaces a finished one, on top of its time-out."""
FLUSH_CELLS = 4_096
FLUSH_BYTES = 4 << 20


class Share(Awaits):
    """Writes of one attempt at one task. Leaving its block without `finish` rolls it back.

    >>> async with db.share(ticket, task="7") as share:
    ...     await share.set("bob", balance, 10)
    ...     receipt = await share.finish()
    """

    _called = "share"

    def __init__(
        self,
        engine: Engine,
        ticket: Ticket,
        task: str,
        generation: int,
        timeout_seconds: float,
        replace_after_seconds: float,
        chosen: Set[int] = frozenset(),
        only_changes: bool = False,
    ) -> None:
        if not isinstance(ticket, Ticket):
            raise UsageError(f"expected a Ticket, got {type(ticket).__name__}")
        check_task(task, generation)
        self._engine = engine
        self._ticket = ticket
        self._task = task
        self._timeout_seconds = timeout_seconds
        self._attempt = Attempt(
            engine.env,
            engine.groups,
            engine.cleanup,
            ticket.job,
            task,
            generation,
            replace_after_seconds=replace_after_seconds,
            row_bytes_max=engine.row_bytes_max,
            chosen=chosen,
            only_changes=only_changes,
        )
        self._keeper = Keeper(engine.env, ticket.job)
        self._buffer: dict[CellAddress, Write] = {}
        self._waiting_bytes = 0
        """The size of all writes that are not locked yet, in the buffer and late ones."""
        self._tables: dict[str, TableInfo] = {}
        self._receipt: Receipt | None = None
        self._is_open = False
        self._ending = ""
        """Why nothing more can be written, once the attempt is about to end."""
        self._late = LateWrites(engine.now)
        self._in_use = asyncio.Lock()
        """Held by the one call that uses the attempt."""

    @property
    def kept(self) -> int:
        """How many of the cells that it has locked had their values already."""
        return self._attempt.kept

    async def begin(self) -> None:
        """Begins the attempt, and keeps it alive from now on."""
        self._engine.require_usable()
        if self._is_open or self._receipt is not None:
            raise UsageError("the attempt has begun already")
        self._is_open = True
        self._engine.open_starts.add(self, self._ticket.unchanged_since or self._ticket.began)
        self._engine.participant_heartbeats.add(self._attempt)
        self._engine.participant_heartbeats.add(self._keeper)

    def set(self, row: K, column: Column[T, K], value: T) -> Written:
        """Writes a value. It is locked now or later, and visible when the driver has committed.

        It takes effect at the call, awaited or not. Whoever writes much should await it: when much
        is waiting to be locked, it is locked then, and otherwise stays in memory until `finish`. As
        much as a transaction can write may wait; more is refused with `TransactionTooLarge`.
        """
        _require_column(column)
        data = encoded_value(column, row, value)
        if len(data) > self._engine.limits.value_bytes_max:
            raise InvalidArgument(
                "value", f"has {len(data)} bytes, at most {self._engine.limits.value_bytes_max}"
            )
        return self._write(row, column, (KIND_PUT, data))

    def delete(self, row: K, column: Column[Any, K]) -> Written:
        """Deletes the cell, if it exists.

        It takes effect at the call, awaited or not, as `set` does.
        """
        _require_column(column)
        return self._write(row, column, (KIND_DELETE, b""))

    async def write(self, cells: Mapping[CellAddress, Write]) -> None:
        """Locks cells of known tables: for other parts of the library."""
        self._require_open()
        await self._late.settle(self._deadline())
        async with self._in_use:
            await self._lock_buffered()
            await self._attempt.prewrite(cells, self._deadline())

    @must_be_awaited
    async def finish(self) -> Receipt:
        """Locks what is left, and returns what the driver needs to commit it. Nothing can be
        written afterwards. Raises `ConflictError` if another attempt has replaced this one."""
        self._require_open()
        await self._late.settle(self._deadline())
        self._require_open()
        # Before anything is awaited: a write that came later would succeed, and be lost.
        self._ending = "is being finished, or could not be finished: begin a new attempt"
        async with self._in_use:
            await self._lock_buffered()
            parts = await self._attempt.finish(self._deadline())
            self._receipt = Receipt(
                self._ticket.row,
                self._task,
                tuple(parts),
                self._attempt.cells,
                self._attempt.announced,
                tuple(sorted(self._attempt.tables)),
                self._attempt.left,
            )
            self._leave()
        return self._receipt

    async def abandon(self) -> None:
        """Rolls back what it has locked."""
        if not self._is_open:
            return
        self._ending = "is being abandoned"
        async with self._in_use:
            if self._is_open:  # a call that was under way may have finished it
                self._leave()
                await self._attempt.abandon(self._deadline())

    def _write(self, row: object, column: Column[Any], write: Write) -> Written:
        stored = encoded_key(column.table, row, column=column)
        self._engine.require_row("row", stored)
        self._require_open()
        self._count_waiting(len(stored) + len(column.name) + len(write[1]))
        info = self._tables.get(column.table.name)
        if (
            info is None
            or self._late
            or (write[0] == KIND_PUT and not info.codecs.is_declared(column))
        ):
            find = partial(self._found, column, stored, write[0])
            return self._late.add(find, partial(self._keep, write=write), self._deadline_of_write)
        info.codecs.require_key(column.table)
        self._keep(CellAddress(info.table_id, stored, column.name), write)
        if len(self._buffer) >= FLUSH_CELLS or self._waiting_bytes >= FLUSH_BYTES:
            return Later(self._flush)
        return DONE

    def _count_waiting(self, added: int) -> None:
        """Counts a write of so many bytes that is not locked yet, if there is space for it."""
        limits = self._engine.limits
        for name, waiting, most in (
            ("cells", len(self._buffer) + len(self._late) + 1, limits.transaction_cells_max),
            ("bytes", self._waiting_bytes + added, limits.transaction_bytes_max),
        ):
            if waiting > most:
                raise TransactionTooLarge(
                    f"{waiting} {name} wait to be locked, at most {most} may: await `set` and "
                    "`delete`, which lock them"
                )
        self._waiting_bytes += added

    async def _found(
        self, column: Column[Any], row: bytes, kind: int, deadline: float
    ) -> CellAddress:
        with self._one_failure_ends_it():
            info = await self._table(column)
            if kind == KIND_PUT and not info.codecs.is_declared(column):
                await self._engine.catalog.declare(info, column, deadline)
        info.codecs.require_key(column.table)
        self._require_open()
        return CellAddress(info.table_id, row, column.name)

    def _keep(self, address: CellAddress, write: Write) -> None:
        known = self._buffer.get(address)
        if known is not None and known != write:
            cell = self._engine.env.described(address)
            raise WrittenTwice(f"task {self._task!r} writes {cell} twice", cell=address)
        self._buffer[address] = write

    async def _flush(self) -> None:
        async with self._in_use:
            await self._lock_buffered()

    async def _lock_buffered(self) -> None:
        if self._buffer:
            cells, self._buffer = self._buffer, {}
            taken = sum(len(cell.row) + len(cell.column) + len(cells[cell][1]) for cell in cells)
            # All at once where nothing is left: writes to one cell, or refused ones, count as well.
            self._waiting_bytes = self._waiting_bytes - taken if self._late else 0
            await self._attempt.prewrite(cells, self._deadline())

    @contextmanager
    def _one_failure_ends_it(self) -> Iterator[None]:
        """Whoever went on after a write that has failed would commit the others without it."""
        try:
            yield
        except PercolatorError:
            self._ending = self._ending or "has failed to write a cell: begin a new attempt"
            raise

    async def _table(self, column: Column[Any]) -> TableInfo:
        name = column.table.name
        info = self._tables.get(name)
        if info is None:
            info = await self._engine.catalog.table(name, self._deadline())
            # Under the snapshot that it is compared with, or the beginning of the transaction.
            info.require_older_than(self._ticket.unchanged_since or self._ticket.began)
            self._tables[name] = info
        return info

    def _leave(self) -> None:
        self._is_open = False
        self._engine.participant_heartbeats.discard(self._attempt)
        self._engine.participant_heartbeats.discard(self._keeper)
        self._engine.open_starts.discard(self)

    def _require_open(self) -> None:
        self._engine.require_usable()
        if not self._is_open:
            raise UsageError("the attempt has not begun, or is over")
        if self._ending:
            raise UsageError(f"the attempt {self._ending}")

    def _deadline_of_write(self) -> float:
        self._require_open()
        return self._deadline()

    def _deadline(self) -> float:
        return self._engine.now() + self._timeout_seconds

    async def __aenter__(self) -> Share:
        await self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._leave_block(kind, self._left)

    async def _left(self, kind: type[BaseException] | None) -> None:
        try:
            await self.abandon()
        except PercolatorError:
            if kind is None:  # otherwise the first error says more; the locks expire by themselves
                raise
        finally:
            self._forget_calls(self._engine.loop)


def _require_column(column: object) -> None:
    if not isinstance(column, Column):
        raise UsageError(f"expected a Column, got {type(column).__name__}")


PARTS_MAX = 8_000
"""How many participants one transaction may have: they are committed with one message."""
TTL_TIMES = 5
"""A participant's time to live, as a multiple of a lock's."""
ROLLBACK_SECONDS = 3.0
"""How long the rollback after a failed commit may take, even if the commit used up its time."""
_ROW_BYTES = 16
_INDEXES = "indexes"
"""The driver's own task: entries that no task can add."""
_LEFT = "was left to expire"
_BY_ANOTHER = "was committed by another driver"


class SharedTransaction(Awaits):
    """The driver's side of a shared transaction. Leaving its block without a commit aborts it.

    >>> async with db.shared_transaction() as shared:
    ...     receipts = [await write(shared.ticket, n) for n in range(10)]
    ...     await shared.commit(receipts)
    """

    _called = "shared_transaction"
    commit_timestamp: Timestamp | None = None
    """Set by a commit that wrote something."""

    def __init__(
        self,
        engine: Engine,
        unchanged_since: Timestamp | datetime | None,
        ttl_seconds: float | None,
        timeout_seconds: float,
        ticket: Ticket | None = None,
    ) -> None:
        """`ticket`: of one that another process has begun, and leaves to this one to decide. If two
        decide on one transaction, the first to commit wins, and the other gets an error."""
        self._engine = engine
        self._groups: Groups = engine.groups
        self._unchanged_since = (
            0 if unchanged_since is None else int(as_timestamp(unchanged_since, "unchanged_since"))
        )
        self._ttl_seconds = checked_ttl(engine, ttl_seconds)
        self._timeout_seconds = timeout_seconds
        self._ticket = ticket
        self._keeper: Keeper | None = None
        self._shared_commit: SharedCommit | None = None
        self._named: tuple[ParticipantKey, ...] = ()
        self._announced: Mapping[int, Observed] = {}
        self._tables: frozenset[int] = frozenset()
        """The tables in which the named participants have locks."""
        self._unkept: Mapping[int, tuple[IndexDefinition, ...]] = {}
        """By table, the indexes of which the tasks have left the entries to the driver."""
        self._telling: asyncio.Task[None] | None = None
        self._ended = ""
        self._deciding = ""
        """The name of the call under way. Two at a time might decide differently."""

    @property
    def ticket(self) -> Ticket:
        """Pass it to the processes that take part."""
        if self._ticket is None:
            raise UsageError("the shared transaction has not begun: enter its block")
        return self._ticket

    async def begin(self) -> None:
        """Begins it, and keeps it alive from now on."""
        if self._keeper is not None:
            raise UsageError("the shared transaction has begun already")
        engine = self._engine
        if self._ticket is None:
            ticket = await new_ticket(
                engine, self._unchanged_since, self._ttl_seconds, self._timeout_seconds
            )
            if self._ticket is not None:  # by another call meanwhile: its tasks may have it
                raise UsageError("the shared transaction has begun already")
            self._ticket = ticket
        # Commits below the safe point are refused, so that must not pass the participants.
        engine.open_starts.add(self, self._ticket.unchanged_since or self._ticket.began)
        self._keeper = Keeper(engine.env, self._ticket.job)
        engine.participant_heartbeats.add(self._keeper)

    @must_be_awaited
    async def commit(
        self, receipts: Sequence[Receipt], *, timeout: float | None = None
    ) -> Timestamp | None:
        """Makes everything that these attempts wrote visible at once; nothing else ever will be.

        Returns the commit timestamp, or None if nothing was written. Raises `ConflictError` if a
        participant was rolled back (then nothing is committed, and the tasks have to run again),
        `OtherDriverCommitted` if another driver has committed it without some of these attempts,
        and `OutcomeUnknown` if it cannot find out: then the same call may be repeated. After any
        other error it is rolled back, which may take a few seconds more than the time-out. Entries
        of indexes that tasks cannot keep are added first: then the time-out applies to each page of
        them, and it may raise `UniqueViolation`.
        """
        self._require_open()
        self._deadline(timeout)  # refuses it before anything is done
        with self._only_call("is being committed"):
            return await self._commit(receipts, timeout)

    async def _commit(self, receipts: Sequence[Receipt], timeout: float | None) -> Timestamp | None:
        if self._shared_commit is None:
            chosen = _listed(receipts)
            self._named = _participants_of(chosen, self.ticket)
            self._announced = announced_by_all([one.announced for one in chosen])
            self._tables = frozenset(table for one in chosen for table in one.tables)
            self._unkept = _left_by_any(chosen)
        if not self._named:
            commit_ts = await self._abort(self._deadline(timeout))
            if commit_ts != ROLLED_BACK:
                raise OtherDriverCommitted(commit_ts)
            return None
        deadline = self._deadline(timeout)
        try:
            if self._shared_commit is None:
                indexes = await self._add_entries(timeout)
                engine, deadline = self._engine, self._deadline(timeout)
                self._shared_commit = SharedCommit(
                    engine.env, self._groups, self.ticket.job, self._named, self._announced, indexes
                )
            commit_ts = await self._shared_commit.commit(deadline)
        except OutcomeUnknown:
            raise
        except OtherDriverCommitted:
            self._end(_BY_ANOTHER)
            raise
        except PercolatorError as problem:
            # Unless a marker says that it is never to be executed, a late copy might still be.
            commit_ts = await self._abort_after(self._shared_commit, problem, deadline)
            if commit_ts == ROLLED_BACK:
                raise
        self._end("has committed")
        env = self._engine.env
        env.background.start(roll_back_left(env, self.ticket.job, deadline + ROLLBACK_SECONDS))
        self._telling = env.background.start(self._tell_tablets(commit_ts))
        self.commit_timestamp = Timestamp(commit_ts)
        return self.commit_timestamp

    async def abort(self, *, timeout: float | None = None) -> Timestamp | None:
        """Rolls everything back. If the transaction turns out to be committed, nothing is undone,
        and its commit timestamp is returned. Raises `OtherDriverCommitted` if another driver has
        committed it without some of the attempts that were passed to `commit` here."""
        # The outcome of one that was left is not known yet: its last call may have been a commit.
        if (self._ended and self._ended != _LEFT) or self._ticket is None:
            return self.commit_timestamp
        deadline = self._deadline(timeout)
        with self._only_call("is being rolled back"):
            commit_ts = await self._abort(deadline)
        if commit_ts != ROLLED_BACK:
            self.commit_timestamp = Timestamp(commit_ts)
        return self.commit_timestamp

    async def told(self, seconds: float) -> None:
        """Returns once all tablets know of the commit, or after this time: for a process that ends
        next. Tablets that do not know of it leave the locks to those who meet them."""
        if self._telling is not None:
            await asyncio.wait((self._telling,), timeout=seconds)

    async def _tell_tablets(self, commit_ts: int) -> None:
        """Makes the tablets roll forward what the participants have locked."""
        env = self._engine.env
        commits = {
            participant.start: commit_ts
            for participant in self._named
            # If another driver has committed the tasks, it was without the entries of this one.
            if not participant.is_of_driver or env.verdicts.get(participant.start) == commit_ts
        }
        deadline = env.now() + env.limits.background_seconds
        for table_id in sorted(self._tables):
            with suppress(SchemaError):  # it was dropped, and the others were not
                await tell_of_commits(env, table_id, commits, deadline)

    async def _add_entries(
        self, timeout: float | None
    ) -> Mapping[int, tuple[IndexDefinition, ...]]:
        """Adds the entries that were left to the driver, as one more attempt to be committed.
        Returns the indexes that they are of, by table."""
        engine, seconds = self._engine, timeout or self._timeout_seconds
        indexes = await self._left_indexes(self._deadline(timeout))
        if not indexes:
            return indexes
        starts = frozenset(part.start for part in self._named)
        attempt = Attempt(
            engine.env,
            engine.groups,
            engine.cleanup,
            self.ticket.job,
            _INDEXES,
            GENERATION_MAX,  # above all tasks: it replaces attempts that were not chosen
            replace_after_seconds=0.0,
            row_bytes_max=engine.row_bytes_max,
            chosen=starts,
        )
        entries = Entries(engine.env, attempt, starts, engine.row_bytes_max, seconds)
        engine.participant_heartbeats.add(attempt)
        try:
            await entries.add(indexes)
            parts = await attempt.finish(self._deadline(timeout))
        except SchemaError:
            for table_id, kept in indexes.items():
                schema = await engine.env.schemas.refresh(table_id, self._deadline(timeout))
                if not set(kept) <= set(schema.indexes):
                    raise other_indexes(self.ticket.began, schema.codecs.table) from None
            raise
        finally:
            engine.participant_heartbeats.discard(attempt)
        self._named = tuple(sorted((*self._named, *parts)))
        self._tables |= attempt.tables
        return indexes

    async def _left_indexes(self, deadline: float) -> Mapping[int, tuple[IndexDefinition, ...]]:
        """The indexes whose entries no task has added, by table. In a row store, tasks may not have
        heard of them."""
        env = self._engine.env
        if env.announcing is None:
            return self._unkept
        await env.timestamp(deadline)  # with it comes the epoch of the catalogue
        await learn_schemas(env, self._tables, deadline)
        schemas = {table_id: await env.schema(table_id, deadline) for table_id in self._tables}
        return {table_id: one.indexes for table_id, one in schemas.items() if one.indexes}

    async def _abort_after(
        self, commit: SharedCommit | None, problem: PercolatorError, deadline: float
    ) -> int:
        """Rolls it back because its commit has failed. Returns the commit timestamp if it turns out
        to be committed, else ROLLED_BACK. Raises `OutcomeUnknown` if it may still be."""
        try:
            return await self._abort(max(deadline, self._engine.now() + ROLLBACK_SECONDS))
        except OtherDriverCommitted:
            raise
        except PercolatorError as second:
            # The first problem is the cause, and may well be why this one failed.
            if not self._ended:
                if commit is not None and commit.sent is not Sent.NOTHING:
                    raise commit.unknown(second) from problem
                problem.add_note(f"the shared transaction could not be rolled back: {second}")
            return ROLLED_BACK

    async def _abort(self, deadline: float) -> int:
        try:
            commit_ts = await roll_back_all(
                self._engine.env, self.ticket.job, self._named, deadline
            )
        except OtherDriverCommitted:
            self._end(_BY_ANOTHER)
            raise
        except PercolatorError:
            # The marker that closes it is enough: after it, no participant can be committed.
            if self._engine.env.verdicts.get(self.ticket.began) == ROLLED_BACK:
                self._end("was rolled back")
            raise
        self._end("was rolled back" if commit_ts == ROLLED_BACK else "has committed")
        return commit_ts

    def _end(self, how: str) -> None:
        self._ended = how
        self._engine.open_starts.discard(self)
        if self._keeper is not None:
            self._engine.participant_heartbeats.discard(self._keeper)

    @contextmanager
    def _only_call(self, does: str) -> Iterator[None]:
        """Refuses a second commit or abort until this one has ended."""
        if self._deciding:
            raise UsageError(f"this shared transaction {self._deciding}")
        self._deciding = does
        try:
            yield
        finally:
            self._deciding = ""

    def _require_open(self) -> None:
        self._engine.require_usable()
        if self._ended:
            raise UsageError(f"this shared transaction {self._ended}")

    def _deadline(self, timeout: float | None) -> float:
        if timeout is not None:
            require_seconds(timeout)
        return self._engine.now() + (timeout or self._timeout_seconds)

    def _is_over(self) -> bool:
        return bool(self._ended)

    async def __aenter__(self) -> SharedTransaction:
        await self.begin()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._ended:
            return
        await self._leave_block(kind, self._left)

    async def _left(self, kind: type[BaseException] | None) -> None:
        try:
            await self.abort()
        except PercolatorError:
            if kind is None:  # otherwise the first error says more
                raise
        finally:
            # Nothing may keep it alive any longer: then it expires, unless it has committed.
            # One that has not begun yet, after Ctrl-C while it did, still can.
            if self._keeper is not None and not self._ended:
                self._end(_LEFT)
            self._forget_calls(self._engine.loop)


async def new_ticket(
    engine: Engine, unchanged_since: int, ttl_seconds: float, timeout_seconds: float
) -> Ticket:
    """The ticket of a new shared transaction. It lives as long as processes take part in it, and
    for `ttl_seconds` without any."""
    deadline = engine.now() + timeout_seconds
    table_id = await shared_table(engine, deadline)
    began = await engine.env.timestamps.get(timeout_seconds=timeout_seconds)
    if unchanged_since > began:
        raise InvalidArgument(
            "unchanged_since", f"{unchanged_since} is in the future: the oracle is at {began}"
        )
    return Ticket(
        table_id,
        engine.world.random.getrandbits(8 * _ROW_BYTES).to_bytes(_ROW_BYTES, "big"),
        unchanged_since,
        ttl_seconds,
        began,
    )


def checked_ttl(engine: Engine, seconds: float | None) -> float:
    """Refuses a time to live that is no longer than what slow heartbeats may take: the participants
    of a driver that is alive would be rolled back.

    A client whose locks live longer than usual, as in `percolator.testing`, takes what others take,
    and keeps its participants for longer.
    """
    needed = TTL_TIMES * engine.limits.lock_ttl_seconds
    if seconds is None:
        return needed
    require_seconds(seconds, "ttl")
    least = min(needed, TTL_TIMES * Limits.lock_ttl_seconds)
    most = TTL_MILLISECONDS_MAX // 1000
    if not least <= seconds <= most:
        raise InvalidArgument("ttl", f"expected {least:g} to {most} seconds, got {seconds:g}")
    return max(seconds, needed)


async def shared_table(engine: Engine, deadline: float) -> int:
    """The id of the table of shared transactions, which the first of them creates."""
    try:
        info = await engine.catalog.table(SHARED_NAME, deadline)
    except SchemaError:
        info = await engine.catalog.create(
            SHARED_NAME, (), TableOptions(), exist_ok=True, deadline=deadline
        )
    return info.table_id


def _listed(receipts: Iterable[Receipt]) -> list[Receipt]:
    """The receipts as a list, since a generator can be consumed only once."""
    if isinstance(receipts, Receipt) or not isinstance(receipts, Iterable):
        raise UsageError(f"receipts: expected a sequence of them, got {type(receipts).__name__}")
    return list(receipts)


def _participants_of(receipts: Sequence[Receipt], ticket: Ticket) -> tuple[ParticipantKey, ...]:
    """The participants that these receipts name. Raises `UsageError` if they do not belong
    together."""
    tasks: set[str] = set()
    parts: list[ParticipantKey] = []
    for receipt in receipts:
        if not isinstance(receipt, Receipt):
            raise UsageError(f"expected a Receipt, got {type(receipt).__name__}")
        if receipt.row != ticket.row:
            raise UsageError(f"the receipt of task {receipt.task!r} belongs to another transaction")
        if receipt.task in tasks:
            raise UsageError(f"task {receipt.task!r} has two receipts: pass that of one attempt")
        tasks.add(receipt.task)
        parts += receipt.parts
    if len(parts) > PARTS_MAX:
        raise UsageError(f"{len(parts)} parts, at most {PARTS_MAX} can be committed together")
    return tuple(sorted(parts))


def _left_by_any(receipts: Sequence[Receipt]) -> dict[int, tuple[IndexDefinition, ...]]:
    """By table, the indexes of which one of these attempts has left the entries to the driver."""
    left: dict[int, dict[IndexDefinition, None]] = {}
    for receipt in receipts:
        for table_id, indexes in receipt.left.items():
            left.setdefault(table_id, {}).update(dict.fromkeys(indexes))
    return {table_id: tuple(indexes) for table_id, indexes in left.items()}
