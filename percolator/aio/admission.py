"""Which transactions may begin: no more than can end in time.

Beyond what the cluster or this process can do, each transaction that begins slows down all others.
If all may begin, all miss their deadlines, and all their work is wasted. So:

- At most `transactions_busy_max` transactions wait in calls at the same time. Others wait before
  they begin, first come, first served. The time between calls does not count: a program may keep
  any number of transactions open.
- A transaction is refused (`Overloaded`) if those ahead of it would take two thirds of its time. By
  Little's law, that is their number divided by the rate at which transactions end. After it has
  begun, it is never refused.
- Those that have been in progress for longer than its time are not ahead, but take long by
  themselves: scans, or transactions that wait for a server that does not answer. If it had to wait
  for as long as they, it would be refused for the others.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from types import TracebackType

from percolator.codecs.readable import counted
from percolator.errors import Overloaded, UsageError

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
            refused = self._refusal(self.busy + len(self.waiting), deadline)
            if refused is not None:
                raise refused

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

    def _refusal(self, ahead: int, deadline: float) -> Overloaded | None:
        now = self.now()
        left = deadline - now
        if left > FORESIGHT_SECONDS:
            return None
        rate = self._rate_at(now)
        seconds = ahead / rate if rate else 0.0
        if left > 0 and (
            seconds <= left * SHARE or ahead - self._older_than(left, now) <= left * SHARE * rate
        ):
            return None
        # While nothing ends, the rate is next to nothing, and forgotten soon.
        seconds = min(max(seconds, LOOK_SECONDS), ASKED_SECONDS_MAX)
        return Overloaded(
            f"overloaded: {counted(ahead, 'transaction')} ahead; retry after {seconds:.2g} s",
            retry_after_seconds=seconds,
        )

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
            refused = self._refusal(self.busy, deadline)
            if refused is None:
                self.busy += 1
                waiter.set_result(None)
            else:
                waiter.set_exception(refused)

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
            refused = self._refusal(self.busy + len(self.waiting), deadline)
            if refused is None:
                self.waiting.append((waiter, deadline))
            else:
                waiter.set_exception(refused)
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
