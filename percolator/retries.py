"""Transactions and time: when one may begin, and functions that are run again after conflicts.

Admission     which transactions of a client may begin
RetryPolicy   how often and how long a function is tried
Attempts      the attempts at one function: waits between them, and where it stands in line
"""

from __future__ import annotations

import asyncio
import inspect
import sys
import warnings
from bisect import bisect_left
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

from percolator.arguments import WHOLE_MAX, require_function, require_seconds, require_whole
from percolator.codecs.readable import counted
from percolator.errors import (
    CellAddress,
    ConflictError,
    InvalidArgument,
    Overloaded,
    PercolatorError,
    Retry,
    SchemaError,
    UsageError,
)
from percolator.formats.records import KIND_READ_LOCK
from percolator.protocol.contention import (
    HELD_MAX,
    WRITTEN_MIN,
    Contender,
    Handover,
    Loss,
    conflict_pause_seconds,
)
from percolator.protocol.environment import Environment
from percolator.protocol.turns import TransactionTurns
from percolator.protocol.write_set import Write
from percolator.routing.cells import Turn
from percolator.wire.backoff import Backoff, asked_pause_seconds, doubled_seconds

R = TypeVar("R")


# Which transactions may begin: no more than can end in time.
#
# Beyond what the cluster or this process can do, each transaction that begins slows down all
# others. If all may begin, all miss their deadlines, and all their work is wasted. So:
#
# - At most `transactions_busy_max` transactions wait in calls at the same time. Others wait before
#   they begin, first come, first served. The time between calls does not count: a program may keep
#   any number of transactions open.
# - A transaction is refused (`Overloaded`) if those ahead of it would take two thirds of its time.
#   By Little's law, that is their number divided by the rate at which transactions end. After it
#   has begun, it is never refused.
# - Those that have been in progress for longer than its time are not ahead, but take long by
#   themselves: scans, or transactions that wait for a server that does not answer. If it had to
#   wait for as long as they, it would be refused for the others.

BUSY_MIN = 64
"""So many transactions may always begin, if the limit is not lower. The rate is measured only while
there are more, or some wait: with fewer, it is that of the program's demand."""
SHARE = 2 / 3
"""The share of a transaction's time that those ahead of it may take. The rest is for what takes
longer than expected, such as its own conflicts. With half, too few are in flight to fill calls."""
FORESIGHT_SECONDS = 4.0
"""A transaction with more time than this is not refused yet: the rate may change."""
WINDOW_SECONDS = 0.25
WINDOW_ENDS = 64
"""The rate is measured over at least this time and so many ends: they come in batches."""
_FORGOTTEN_SECONDS = 5.0
ASKED_SECONDS_MAX = 30.0
"""The longest pause that a refusal asks for."""
LOOK_SECONDS = 0.1
"""How late it is noticed that a waiting transaction has to be refused."""


class Admission:
    """The transactions of one client. Belongs to its event loop."""

    def __init__(self, busy_max: int, now: Callable[[], float]) -> None:
        self._busy_max = busy_max
        self.now = now
        self._loop = asyncio.get_running_loop()
        self.busy = 0
        """How many transactions wait in calls, or were just let in."""
        self.in_calls: set[Calls] = set()
        """The transactions that wait in calls."""
        self._begins: list[float] = []
        """When the transactions in calls began, in order, as of some time ago."""
        self._looked_at = 0.0
        self.waiting: deque[tuple[asyncio.Future[None], float]] = deque()
        """Transactions that have not begun, with their deadlines."""
        self._rate = 0.0
        """Ends per second; 0 if not known."""
        self._measured_at = 0.0
        self._ends = 0
        """Since the present window began."""
        self._window_began = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    # ------------------------------------------------------------------ before a transaction

    def require(self, deadline: float) -> None:
        """Raises `Overloaded` if a transaction with this deadline would probably miss it."""
        if self._is_full():
            ahead = self.busy + len(self.waiting)
            seconds = self._seconds_asked(ahead, deadline)
            if seconds:
                # Made here: a frame that had it as a variable would be in a cycle with it, and with
                # thousands of refusals in a second, a tenth of the time went into collecting those.
                raise _overloaded(ahead, seconds)

    async def enter(self, deadline: float) -> None:
        """Returns when a transaction may begin. Raises `Overloaded`, if need be later."""
        self.require(deadline)
        if self.busy < self._busy_max and not self.waiting:
            return
        if self._closed:
            raise _closed()
        waiter = self._loop.create_future()
        self.waiting.append((waiter, deadline))
        self._look_later()
        try:
            await waiter
        finally:
            # Its place was counted for it when it was let in; it counts itself from now on.
            if not waiter.cancelled() and waiter.exception() is None:
                self.busy -= 1
            del waiter  # otherwise, it and the error that it raises are a cycle, as above

    def _seconds_asked(self, ahead: int, deadline: float) -> float:
        """The pause that a transaction is asked for which would probably miss its deadline; 0 for
        one that may go on."""
        now = self.now()
        left = deadline - now
        if left > FORESIGHT_SECONDS:
            return 0.0
        rate = self._rate_at(now)
        seconds = ahead / rate if rate else 0.0
        if left > 0 and (
            seconds <= left * SHARE or ahead - self._older_than(left, now) <= left * SHARE * rate
        ):
            return 0.0
        # While nothing ends, the rate is next to nothing, and forgotten soon.
        return min(max(seconds, LOOK_SECONDS), ASKED_SECONDS_MAX)

    def _older_than(self, seconds: float, now: float) -> int:
        """How many transactions in calls began earlier than so many seconds ago."""
        if now - self._looked_at >= LOOK_SECONDS:  # for every refusal, it would cost too much
            self._begins = sorted(calls.began for calls in [*self.in_calls])
            self._looked_at = now
        return bisect_left(self._begins, now - seconds)

    def _is_full(self) -> bool:
        return self.busy >= BUSY_MIN or bool(self.waiting)

    def _rate_at(self, now: float) -> float:
        if now - self._measured_at > _FORGOTTEN_SECONDS:
            return 0.0
        elapsed = now - self._window_began
        if self._ends and elapsed > WINDOW_SECONDS:
            return min(self._rate, self._ends / elapsed)  # a server has become slow
        return self._rate

    # ------------------------------------------------------------------ after a transaction

    def note_end(self) -> None:
        """A transaction that had begun has ended. In any thread."""
        if not self._is_full():
            self._ends = 0
            return
        now = self.now()
        if not self._ends:
            self._window_began = now
        self._ends += 1
        elapsed = now - self._window_began
        if self._ends > WINDOW_ENDS and elapsed >= WINDOW_SECONDS:
            self._rate = self._ends / elapsed
            self._measured_at = now
            self._ends = 0

    def let_in(self) -> None:
        """Lets waiting transactions begin while there is room."""
        while self.waiting and self.busy < self._busy_max:
            waiter, deadline = self.waiting.popleft()
            if waiter.done():  # its caller was cancelled
                continue
            seconds = self._seconds_asked(self.busy, deadline)
            if seconds:
                waiter.set_exception(_overloaded(self.busy, seconds))
            else:
                self.busy += 1
                waiter.set_result(None)

    def _look_later(self) -> None:
        if self._timer is None:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _look(self) -> None:
        """Refuses waiting transactions that would miss their deadlines."""
        self._timer = None
        self.let_in()
        waiting, self.waiting = self.waiting, deque()
        for waiter, deadline in waiting:
            if waiter.done():
                continue
            ahead = self.busy + len(self.waiting)
            seconds = self._seconds_asked(ahead, deadline)
            if seconds:
                waiter.set_exception(_overloaded(ahead, seconds))
            else:
                self.waiting.append((waiter, deadline))
        if self.waiting:
            self._look_later()

    def close(self) -> None:
        """Fails those that wait."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for waiter, _ in self.waiting:
            if not waiter.done():
                waiter.set_exception(_closed())
        self.waiting.clear()


def _overloaded(ahead: int, seconds: float) -> Overloaded:
    return Overloaded(
        f"overloaded: {counted(ahead, 'transaction')} ahead; retry after {seconds:.2g} s",
        retry_after_seconds=seconds,
    )


def _closed() -> UsageError:
    return UsageError("the database is closed")


class Calls:
    """The calls of one transaction that are in progress. It is busy during any of them."""

    __slots__ = ("_admission", "_count", "began")

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._count = 0
        self.began = 0.0
        """When the first of them began."""

    def __enter__(self) -> None:
        if not self._count:
            self._admission.busy += 1
            self._admission.in_calls.add(self)
            if not self.began:
                self.began = self._admission.now()
        self._count += 1

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._count -= 1
        if not self._count:
            self._admission.busy -= 1
            self._admission.in_calls.discard(self)
            if self._admission.waiting:
                self._admission.let_in()


# Functions that may be run, and their results.


def require_runnable(function: object, keywords: object) -> None:
    """Refuses what cannot be run in a transaction, with these keyword arguments if any."""
    if not callable(function):
        require_function(function)  # raises
    if keywords is not None and not isinstance(keywords, Mapping):
        raise InvalidArgument(
            "keywords", f"expected a mapping from names to values, got {type(keywords).__name__}"
        )


def finished(result: R) -> R:
    """The result of a function that ran in a transaction. Refuses a coroutine: it has not run."""
    if inspect.iscoroutine(result):
        result.close()
        raise UsageError(
            "expected a function, got a coroutine function: use percolator.aio for those"
        )
    _refuse_generator(result)
    return result


def awaited(result: Awaitable[R]) -> Awaitable[R]:
    """The awaitable that a coroutine function returned. Refuses the results of other functions."""
    _refuse_generator(result)
    if not inspect.isawaitable(result):
        raise UsageError(
            f"expected a coroutine function, got a function that returns {type(result).__name__}"
        )
    return result


def _refuse_generator(result: object) -> None:
    if inspect.isgenerator(result) or inspect.isasyncgen(result):
        raise UsageError(
            "expected a function that runs in the transaction, got one that returns a generator, "
            "whose body would run afterwards: return a list instead"
        )


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how long a transaction is tried.

    >>> percolator.connect(retry=RetryPolicy(deadline_seconds=5.0))
    >>> @transactional(retry=RetryPolicy(attempts_max=3))
    """

    attempts_max: int = 1_000
    deadline_seconds: float = 30.0
    """The time for all attempts together, including the pauses between them."""
    backoff_seconds_min: float = 0.002
    backoff_seconds_max: float = 1.0

    def __post_init__(self) -> None:
        require_whole(self.attempts_max, "attempts_max", 1, WHOLE_MAX)
        for field in ("deadline_seconds", "backoff_seconds_min", "backoff_seconds_max"):
            require_seconds(getattr(self, field), field)
        if self.backoff_seconds_min > self.backoff_seconds_max:
            raise InvalidArgument(
                "backoff_seconds_min",
                f"expected at most backoff_seconds_max, which is {self.backoff_seconds_max}, got "
                f"{self.backoff_seconds_min}",
            )

    def allows(self, error: PercolatorError, attempts: int) -> bool:
        """True if the transaction may be run again: never if it may have committed."""
        return is_repeatable(error) and attempts < self.attempts_max


def require_policy(retry: object) -> None:
    """Refuses what is neither a policy nor None, which stands for the default."""
    if retry is not None and not isinstance(retry, RetryPolicy):
        raise InvalidArgument("retry", f"expected a RetryPolicy, got {type(retry).__name__}")


# Calls inside of calls: a function that runs in a transaction may start another one, and wait.
#
# If its place in the line of a hot cell was granted (protocol/contention.py), an inner call that
# stood in line there would wait for the outer one, which waits for it. So a call inside of one that
# stands in line does not stand in line itself. It is found by the context of the running code,
# which tasks and `asyncio.to_thread` inherit.


class Call(Protocol):
    """A function that is being run in a transaction, again after conflicts."""

    is_running: bool
    """One of its attempts is being made. A task that it has started may outlast it."""

    @property
    def in_line(self) -> bool:
        """True if it stands in line at hot cells, or its place there was granted."""


_LIBRARY = "percolator."
_outer: ContextVar[tuple[Call, ...]] = ContextVar("outer calls", default=())
"""The calls that the running code is inside of."""


def warn_of_inner_call() -> None:
    """Warns of a transaction of its own that a function runs inside of another one.

    It commits even if the other one fails or is run again, and that is seldom meant.
    """
    level = 1
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(_LIBRARY):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "a transaction is run inside of another one, and is no part of it: it commits even if the "
        "other one does not. Pass the transaction (tx) instead of the database to join it",
        RuntimeWarning,
        stacklevel=level,
    )


class Inside:
    """A block of code that runs inside of this call."""

    __slots__ = ("_before", "_call")

    def __init__(self, call: Call) -> None:
        self._call = call
        self._before: tuple[Call, ...] = ()

    def __enter__(self) -> None:
        self._before = _outer.get()
        _outer.set((*self._before, self._call))
        self._call.is_running = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._call.is_running = False
        # Not by its token: a coroutine that was dropped is ended in any context.
        _outer.set(self._before)


class Attempts:
    """Counts the attempts at one transaction, and waits between them.

    Transactions hold cells, and wait for others that do (protocol/contention.py). After a conflict,
    the transaction stands in line for the cells that it held and the one where it has lost. If
    another client won, it waits for its turn there before it begins (protocol/turns.py), or first
    pauses where there are no turns. It also pauses if it lost at a cell that it held: to one
    that stands in no line, perhaps to a call of its own function.
    """

    def __init__(self, policy: RetryPolicy, env: Environment, caller: object = None) -> None:
        """`caller` is what is run, such as a function: one that has lost at a cell writes it."""
        self._policy = policy
        self._env = env
        self._caller = caller
        self._began = env.now()
        self._deadline = self._began + policy.deadline_seconds
        self._backoff: Backoff | None = None
        self._attempts = 0
        self._lost_to_others = 0
        self._contender: Contender | None = None
        self._written = env.hot_cells.written_by(caller)
        self._read: list[CellAddress] = []
        """The cells that this attempt has read one by one."""
        self.turns: TransactionTurns | None = None
        """Its turns at cells where other clients write; most need none."""
        self._gave_way_at: CellAddress | None = None
        """The cell at whose read this attempt has ended, since another one held it."""
        self._outer = _outer.get()
        self.is_running = False
        for outer in self._outer:
            if isinstance(outer, Attempts) and outer.is_running and outer._env is env:
                warn_of_inner_call()
                break

    def inside(self) -> Inside:
        """The block in which the attempts are made: calls in it know that they are inner ones."""
        return Inside(self)

    def seconds_left(self) -> float:
        return max(self._deadline - self._env.now(), 0.001)

    async def again(self, error: PercolatorError) -> bool:
        """After a failed attempt, waits and returns True, or returns False to give up."""
        self._attempts += 1
        is_tried_again = False
        try:
            if self._policy.allows(error, self._attempts):
                is_tried_again = await self._wait(error)
        finally:
            if not is_tried_again:
                self.end()
        return is_tried_again

    async def _wait(self, error: PercolatorError) -> bool:
        loss, cell = Loss.reported_by(error), None
        keeps_places = self.turns is not None and self.turns.run_again(error)
        if loss is not None:
            cell = loss.cell
        elif isinstance(error, ConflictError) and error.cell == self._gave_way_at:
            cell = error.cell
        self._gave_way_at = None
        self._read.clear()
        if keeps_places:
            if self._contender is not None:
                self._contender.leave()
            return self._env.now() < self._deadline
        if isinstance(error, Overloaded):
            self.end()
            return await self._wait_as_asked(error.retry_after_seconds)
        if cell is None or self._must_not_wait:
            self.end()
            return await self._back_off()
        contender = self._made_contender()
        is_held = contender.is_granted_at(cell)
        for each in (*contender.held, cell):
            contender.lost_at(each)
        if loss is not None and not self._env.knows_winner(loss):
            # It keeps what it holds meanwhile: the next in line would meet the same rivals.
            has_missed = self.turns is not None and self.turns.has_missed(cell)
            if self._env.turns is None or has_missed:
                await self._pause(self._after_losing_at(cell), self._deadline)
            else:
                self._env.rivals.note_turn(cell, self._caller, self._env.now())
                self.made_turns().ask(cell)
        elif loss is not None and is_held:
            self.end()  # the next in line may fare better
            if not await self._back_off():
                return False
        place = contender.stand_in_line()
        if self.turns is not None and not place.done():
            self.turns.end()  # those ahead in line may wait for their turns behind its own
        return await self._granted(place, self._deadline) and self._env.now() < self._deadline

    async def _wait_as_asked(self, asked_seconds: float) -> bool:
        """False, at once, if another attempt would not have as much time as the pause takes."""
        seconds = asked_pause_seconds(self._env.random, asked_seconds)
        if seconds * 2 > self._deadline - self._env.now():
            return False
        await self._env.clock.sleep(max(seconds, self._policy.backoff_seconds_min))
        return True

    def _back_off(self) -> Coroutine[None, None, bool]:
        """Pauses, longer each time. False if no time is left for another attempt."""
        if self._backoff is None:
            shortest, longest = self._policy.backoff_seconds_min, self._policy.backoff_seconds_max
            self._backoff = Backoff(self._env.clock, self._env.random, shortest, longest)
        return self._backoff.pause(self._deadline)

    def _after_losing_at(self, cell: CellAddress) -> float:
        """The longest pause after a conflict with another client."""
        shortest, longest = self._policy.backoff_seconds_min, self._policy.backoff_seconds_max
        longest_seconds = doubled_seconds(shortest, longest, doublings=self._lost_to_others)
        self._lost_to_others += 1
        self._env.rivals.note_loss(cell, self._caller, longest_seconds, self._env.now())
        return longest_seconds

    def must_wait(self, cell: CellAddress) -> bool:
        """Before the first read of an attempt: True if it has to `wait_in_line` for the cell.
        Otherwise, it holds the cell from now on if its function writes such cells."""
        env = self._env
        self._note_read(cell)
        if self.lines_up:
            return True
        if not self._writes(cell):
            return env.is_contended(cell)
        contender = self._made_contender()
        if contender.is_granted_at(cell):
            return False
        if cell in env.rivals.contended or not env.hot_cells.is_free(cell):
            return True
        contender.hold(cell)
        return False

    def reads(self, cell: CellAddress, start: int) -> None:
        """Before a later read. Raises `ConflictError` if another transaction holds the cell, and
        will have committed it above this one's snapshot by the time that this one commits."""
        self._note_read(cell)
        if not self._writes(cell):
            return
        contender, holder = self._made_contender(), self._env.hot_cells.holders.get(cell)
        if holder is None:
            contender.hold(cell)
        elif holder is not contender and self._gives_way:
            self._gave_way_at = cell
            self._env.tally.lost_at(cell)
            raise ConflictError(
                f"{self._env.described(cell)} is being written by another transaction of this "
                "client",
                cell=cell,
                start_timestamp=start,
            )

    async def wait_in_line(self, cell: CellAddress, deadline: float) -> Handover | None:
        """With the first read of an attempt: waits if it would probably lose at the cell.

        Returns at the deadline at the latest, with its place granted or not; perhaps with a
        handover.
        """
        caller = self._caller
        longest_seconds = self._env.rivals.longest_seconds(cell, caller, self._env.now())
        if self.in_line or self._must_not_wait:
            return None
        would_lose = self._writes(cell) or self._env.hot_cells.has_lost(caller, cell)
        if not (longest_seconds or would_lose):
            return None
        contender = self._made_contender()
        contender.lost_at(cell)
        place = contender.stand_in_line(is_reading=True)
        if not await self._granted(place, deadline):
            self.end()
            return None
        if longest_seconds:
            if self._env.turns is None:
                await self._pause(longest_seconds, deadline)
            else:
                self.made_turns().ask(cell)
            return None  # others may have committed meanwhile
        return place.result()

    async def _pause(self, longest_seconds: float, deadline: float) -> None:
        now = self._env.now()
        seconds = conflict_pause_seconds(self._env.random, longest_seconds, now - self._began)
        await self._env.clock.sleep(max(min(seconds, deadline - now), 0.0))

    @property
    def is_followed(self) -> bool:
        """True if another transaction could begin directly above this one's commit, which is about
        to be sent."""
        if self._contender is None or (self.turns is not None and self.turns.held):
            return False  # its turn passes to another client
        return self._contender.is_followed

    def committed(self, commit_ts: int, writes: Mapping[CellAddress, Write]) -> None:
        """As `end`. The next in line may begin directly above the commit."""
        for cell in self._read:
            column = cell[::2]
            is_read_locked = cell in writes and writes[cell][0] == KIND_READ_LOCK
            if cell in writes and not is_read_locked:
                self._written[column] = self._written.get(column, 0) + 1
            else:
                self._written[column] = 0
                self._env.hot_cells.let_go_at(cell)
            if is_read_locked:
                self._env.hot_cells.forget_loss(self._caller, cell)
                self._env.rivals.forget_loss(self._caller, cell)
        if self._contender is not None:
            self._contender.leave(Handover.after(commit_ts, writes))

    def end(self) -> None:
        """Lets the next in line go: this transaction has committed, or was given up."""
        if self._contender is not None:
            self._contender.leave()
        if self.turns is not None:
            self.turns.end()

    async def ended(self) -> None:
        """As `end`, to be called from other threads."""
        self.end()

    @property
    def in_line(self) -> bool:
        """True if it stands in line or its place was granted, so that `end` would let others go."""
        if self.turns is not None and self.turns.held:
            return True
        return self._contender is not None and self._contender.in_line

    @property
    def lines_up(self) -> bool:
        """True if the next attempt waits for turns before it begins."""
        return self.turns is not None and not self.turns.is_lined_up and not self._must_not_wait

    def made_turns(self) -> TransactionTurns:
        if self.turns is None:
            self.turns = TransactionTurns(self._env)
        return self.turns

    def turn_came(self, cell: CellAddress, turn: Turn) -> None:
        """Remembers a cell where others wait, so that the next transaction waits, too."""
        if turn.contended:
            self._env.rivals.note_turn(cell, self._caller, self._env.now())

    @property
    def _must_not_wait(self) -> bool:
        """True if transactions for which it would wait may be waiting for this call to return."""
        return any(call.in_line for call in self._outer)

    @property
    def _gives_way(self) -> bool:
        """True if it may end at a read, so that it is run again."""
        return not self._attempts and self._policy.attempts_max > 1 and not self._must_not_wait

    def _writes(self, cell: CellAddress) -> bool:
        """True if the function writes all that it reads of the cell's column."""
        return self._written.get(cell[::2], 0) >= WRITTEN_MIN

    def _note_read(self, cell: CellAddress) -> None:
        if self._caller is not None and len(self._read) < HELD_MAX:
            self._read.append(cell)

    def _made_contender(self) -> Contender:
        if self._contender is None:
            self._contender = Contender(self._env.hot_cells, self._caller, self._began)
        return self._contender

    async def _granted(self, place: asyncio.Future[Handover | None], deadline: float) -> bool:
        """Waits for a place in line, but not beyond the deadline. True if it came in time."""
        if place.done():
            return True
        try:
            async with asyncio.timeout(deadline - self._env.now()):
                await place
        except TimeoutError:
            return False
        return True

    def exhausted(self, error: PercolatorError) -> PercolatorError:
        """The last error, one that `is_repeatable`, with how often and how long it was tried."""
        seconds = self._env.now() - self._began
        tried = "1 attempt" if self._attempts == 1 else f"{self._attempts} attempts"
        final = copy(error)
        final.message = f"gave up after {tried} in {seconds:.1f} s; last error: {error.message}"
        final.args = (final.message, *error.args[1:])
        return final


def is_repeatable(error: PercolatorError) -> bool:
    """True if another attempt may succeed where this one has done nothing. Otherwise, the number of
    attempts is not what a transaction has failed for."""
    return error.retry is Retry.SAFE or (isinstance(error, SchemaError) and error.was_dropped)
