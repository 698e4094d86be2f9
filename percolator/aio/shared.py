"""Transactions of several processes: one decides, any number of them write.

    driver       async with db.shared_transaction() as whole:
                     receipts = run_somewhere(task, whole.ticket)
                     await whole.commit(receipts)

    elsewhere    async with db.share(ticket, task="7") as share:
                     await share.set("bob", balance, 10)
                     return await share.finish()

All that is written appears at one moment, when the driver commits, or not at all. Tasks may fail,
be run again, and run twice at the same time: only the attempts whose receipts the driver passes to
`commit` count.

This file is the driver's side; `share.py` is that of a task, and `tickets.py` what travels between.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from types import TracebackType

from percolator.aio.awaiting import Awaits, must_be_awaited
from percolator.aio.engine import Engine
from percolator.aio.tickets import Receipt, Ticket
from percolator.arguments import as_timestamp, require_seconds
from percolator.errors import (
    InvalidArgument,
    OtherDriverCommitted,
    OutcomeUnknown,
    PercolatorError,
    SchemaError,
    UsageError,
)
from percolator.formats.records import TTL_MILLISECONDS_MAX
from percolator.limits import Limits
from percolator.protocol.environment import ROLLED_BACK
from percolator.protocol.resolving.rolling_in_bulk import tell_of_commits
from percolator.protocol.shared.announcing import Observed, announced_by_all
from percolator.protocol.shared.keeping import Keeper
from percolator.protocol.shared.names import PartKey
from percolator.protocol.shared.rolling_back import roll_back_all, roll_back_left
from percolator.protocol.shared.whole import Whole
from percolator.routing.cells import Groups
from percolator.schema import SHARED_NAME
from percolator.timestamps import Timestamp
from percolator.v1.master_pb2 import TableOptions

PARTS_MAX = 8_000
"""How many parts one transaction may have: they are committed with one message."""
TTL_TIMES = 5
"""A part's time to live, as a multiple of a lock's."""
ROLLBACK_SECONDS = 3.0
"""How long the rollback after a failed commit may take, even if the commit used up its time."""
_ROW_BYTES = 16
_LEFT = "was left to expire"
_BY_ANOTHER = "was committed by another driver"


class SharedTransaction(Awaits):
    """The driver's side of a shared transaction. Leaving its block without a commit aborts it."""

    _called = "shared_transaction"

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
        self._whole: Whole | None = None
        self._named: tuple[PartKey, ...] = ()
        self._announced: Mapping[int, Observed] = {}
        self._tables: frozenset[int] = frozenset()
        """The tables in which the named parts have locks."""
        self._telling: asyncio.Task[None] | None = None
        self._ended = ""
        self._deciding = ""
        """What the call under way does. Two at a time might decide differently."""
        self.commit_timestamp: Timestamp | None = None

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
        # Commits below the safe point are refused, so that must not pass the parts.
        engine.open_starts.add(self, self._ticket.unchanged_since or self._ticket.began)
        self._keeper = Keeper(engine.env, self._ticket.job)
        engine.beats.add(self._keeper)

    @must_be_awaited
    async def commit(
        self, receipts: Sequence[Receipt], *, timeout: float | None = None
    ) -> Timestamp | None:
        """Makes everything that these attempts wrote visible at once; nothing else ever will be.

        Returns the commit timestamp, or None if nothing was written. Raises `ConflictError` if a
        part was rolled back (then nothing is committed, and the tasks have to run again),
        `OtherDriverCommitted` if another driver has committed it without some of these attempts,
        and `OutcomeUnknown` if it cannot find out: then the same call may be repeated. After any
        other error it is rolled back, which may take a few seconds more than the time-out.
        """
        self._require_open()
        deadline = self._deadline(timeout)
        with self._only_call("is being committed"):
            return await self._commit(receipts, deadline)

    async def _commit(self, receipts: Sequence[Receipt], deadline: float) -> Timestamp | None:
        if self._whole is None:
            chosen = _listed(receipts)
            self._named = _parts_of(chosen, self.ticket)
            self._announced = announced_by_all([one.announced for one in chosen])
            self._tables = frozenset(table for one in chosen for table in one.tables)
        if not self._named:
            commit = await self._abort(deadline)
            if commit:
                raise OtherDriverCommitted(commit)
            return None
        if self._whole is None:
            engine = self._engine
            self._whole = Whole(
                engine.env, self._groups, self.ticket.job, self._named, self._announced
            )
        try:
            commit = await self._whole.commit(deadline)
        except OutcomeUnknown:
            raise
        except OtherDriverCommitted:
            self._end(_BY_ANOTHER)
            raise
        except PercolatorError as problem:
            # Unless a marker says that it is never to be executed, a late copy might still be.
            commit = await self._abort_after(self._whole, problem, deadline)
            if not commit:
                raise
        self._end("has committed")
        env = self._engine.env
        env.background.start(roll_back_left(env, self.ticket.job, deadline + ROLLBACK_SECONDS))
        self._telling = env.background.start(self._tell_tablets(commit))
        self.commit_timestamp = Timestamp(commit)
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
            commit = await self._abort(deadline)
        if commit:
            self.commit_timestamp = Timestamp(commit)
        return self.commit_timestamp

    async def told(self, seconds: float) -> None:
        """Returns once all tablets know of the commit, or after this time: for a process that ends
        next. Tablets that do not know of it leave the locks to those who meet them."""
        if self._telling is not None:
            await asyncio.wait((self._telling,), timeout=seconds)

    async def _tell_tablets(self, commit: int) -> None:
        """Has the tablets turn what the parts have locked into commits."""
        env = self._engine.env
        commits = {part.start: commit for part in self._named}
        deadline = env.now() + env.limits.background_seconds
        for table_id in sorted(self._tables):
            await tell_of_commits(env, table_id, commits, deadline)

    async def _abort_after(self, whole: Whole, problem: PercolatorError, deadline: float) -> int:
        """Rolls it back because its commit has failed. Returns the commit timestamp if it turns out
        to be committed. Raises `OutcomeUnknown` if it may still be."""
        try:
            return await self._abort(max(deadline, self._engine.now() + ROLLBACK_SECONDS))
        except OtherDriverCommitted:
            raise
        except PercolatorError as second:
            # The first problem is the cause, and may well be why this one failed.
            if not self._ended:
                if whole.is_out:
                    raise whole.unknown(second) from problem
                problem.add_note(f"the shared transaction could not be rolled back: {second}")
            return 0

    async def _abort(self, deadline: float) -> int:
        try:
            commit = await roll_back_all(self._engine.env, self.ticket.job, self._named, deadline)
        except OtherDriverCommitted:
            self._end(_BY_ANOTHER)
            raise
        except PercolatorError:
            # The marker that closes it is enough: no part can be committed after it. They expire.
            if self._engine.env.verdicts.get(self.ticket.began) == ROLLED_BACK:
                self._end("was rolled back")
            raise
        self._end("has committed" if commit else "was rolled back")
        return commit

    def _end(self, how: str) -> None:
        self._ended = how
        self._engine.open_starts.discard(self)
        if self._keeper is not None:
            self._engine.beats.discard(self._keeper)

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
            # Nothing may keep it alive any longer: then its parts expire, unless it has committed.
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
    """Refuses a time to live that is no longer than what slow heartbeats may take: the parts of a
    driver that is alive would be rolled back.

    A client whose locks live longer than usual, as in `percolator.testing`, takes what others take,
    and keeps its parts for longer.
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


def _parts_of(receipts: Sequence[Receipt], ticket: Ticket) -> tuple[PartKey, ...]:
    """The parts that these receipts name. Raises `UsageError` if they do not belong together."""
    tasks: set[str] = set()
    parts: list[PartKey] = []
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
