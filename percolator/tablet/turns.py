"""The queues of a tablet's cells: transactions that are about to write one cell do it in turn.

Without a queue, transactions that read a cell and then write it collide, and all but one of them
have to begin again. In a queue each begins when the one before it has committed. It is advice, in
memory: the judge decides what may be committed, in turn or not. So a place that is lost, because
the tablet moves or a turn takes too long, costs a conflict and nothing else.

Rules, each with the failure that it prevents:
- A turn lasts for a limited time. Its transaction may never end it: its client is dead, or it waits
  for another cell, whose turn belongs to one that waits for this cell.
- A turn ends with the commit record of its transaction, or its rollback marker, and not with a
  message of its client: the next one would begin a round trip later. What has neither, such as a
  transaction that has only read, is ended by such a message.
- A transaction that has yet to begin may begin directly above the commit that ends the turn before
  its own. That timestamp was fetched together with the commit's, so nobody else has it. It is only
  given to one that had called when it was asked for: the snapshot of another one would lack what
  was committed before its first read.
- It is given once. The next attempt of the same transaction would lose where the one before it has
  lost, and be taken for it.
- Whoever asks again for a place that it has keeps it: an attempt that has to begin anew would wait
  behind all others, and messages may come twice.
- One that no longer asks leaves the queue: nobody would begin when its turn comes.
- Where transactions wait for each other at cells of the tablet, one of them loses its place: one
  that has begun, and has its turn at a cell that sorts behind the one at which it waits. Its client
  gives way (protocol/turns.py), as it would after a while, and nobody else could go on before. One
  that has yet to begin waits in the order of the cells, and has ended the turns that are behind.
- The number of those that wait, and of those whose turn it is, is limited: any client can ask for
  turns at cells that do not exist.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from percolator.errors import Overloaded

HOLD_SECONDS_MIN = 0.1
HOLD_SECONDS_MAX = 16.0
_CHAIN_MAX = 16
"""The most transactions that are looked at, each of which waits for the next."""


class Place:
    """One transaction's place in the queue of a cell, and then its turn."""

    __slots__ = (
        "_set_aside",
        "asking",
        "came",
        "contended",
        "hold_seconds",
        "number",
        "place",
        "start",
    )

    def __init__(self, place: int) -> None:
        self.place = place
        self.number = 0
        """When it was asked for last, in the order of all such calls of the tablet."""
        self.start = 0
        """Its start timestamp; 0 until that is known."""
        self.hold_seconds = HOLD_SECONDS_MIN
        self.asking = 0
        """How many calls wait for it: copies of one message."""
        self.contended = False
        """It had to wait."""
        self._set_aside = 0
        self.came: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the turn has come."""

    def begin(self, set_aside: int) -> None:
        """The turn has come. `set_aside`: a start timestamp for it, or 0."""
        self._set_aside = set_aside
        self.start = self.start or set_aside
        self.came.set_result(None)

    def take_start(self) -> int:
        """The timestamp that was set aside for it, the first time; then 0, since an attempt
        begins where no other one has. Raises if it was given up."""
        self.came.result()
        start, self._set_aside = self._set_aside, 0
        return start


class Queue:
    """The transactions at one cell: whose turn it is, and who waits."""

    __slots__ = ("set_aside", "timer", "turn", "waiting")

    def __init__(self, turn: Place) -> None:
        self.turn = turn
        self.waiting: OrderedDict[int, Place] = OrderedDict()
        """By place, in the order in which they came."""
        self.timer: asyncio.TimerHandle | None = None
        self.set_aside = (0, 0, 0)
        """The start timestamp of the transaction whose turn it is, when a timestamp was set aside
        together with its commit's; that timestamp; the number of the first call that came too
        late."""


class Turns:
    """The queues of one tablet."""

    def __init__(self, waiting_max: int, retry_seconds: float) -> None:
        self._waiting_max = waiting_max
        self._retry_seconds = retry_seconds
        self.queues: dict[bytes, Queue] = {}
        """By cell. Empty nearly always: public for a look on the hottest paths."""
        self.waiting = 0
        """The number of transactions that wait for their turn."""
        self._waits: dict[int, bytes] = {}
        """By place: the cell at which it waits, or the last one of several."""
        self._numbers = 0
        self.granted = 0
        self.given_up = 0
        """Places that were lost or given up before their turn came."""
        self.timed_out = 0
        """Turns that have lasted for as long as they may."""

    def join(self, cell: bytes, place: int, start: int, hold_seconds: float) -> Place:
        """The turn that belongs to this place, or will. Call `leave` if it is not awaited to the
        end. Raises `Overloaded`."""
        queue = self.queues.get(cell)
        turn = None if queue is None else _of_place(queue, place)
        if turn is None:
            self._require_few(queue)
            turn = Place(place)
            if queue is not None:
                queue.waiting[place] = turn
                self.waiting += 1
                turn.contended = True
        turn.number = self._numbers
        self._numbers += 1
        turn.start = start
        turn.hold_seconds = min(max(hold_seconds, HOLD_SECONDS_MIN), HOLD_SECONDS_MAX)
        turn.asking += 1
        if queue is None:
            self.queues[cell] = queue = Queue(turn)
            self._begin(cell, queue, 0)
        elif turn is not queue.turn:
            self._waits[place] = cell
            self._end_deadlock(cell, place)
        return turn

    def _end_deadlock(self, cell: bytes, place: int) -> None:
        """Takes its place from one of those that wait for each other since `place` waits there."""
        waiters, cells = [place], [cell]
        while (turn := self.queues[cells[-1]].turn).place != place:
            waits_at = self._waits.get(turn.place)
            if waits_at is None or len(cells) == _CHAIN_MAX:
                return
            waiters.append(turn.place)
            cells.append(waits_at)
        # Each waits for the turn of the next: so each has its turn where the one before it waits.
        for waiter, waits_at, has in zip(waiters, cells, cells[-1:] + cells, strict=False):
            if waits_at < has and self.queues[waits_at].waiting[waiter].start:
                self.end(waits_at, waiter)
                return

    def _require_few(self, queue: Queue | None) -> None:
        number, what = len(self.queues), "have"
        if queue is not None:
            number, what = self.waiting, "wait for"
        if number >= self._waiting_max:
            raise Overloaded(
                f"{number} transactions {what} their turn at cells of this tablet",
                retry_after_seconds=self._retry_seconds,
            )

    def leave(self, cell: bytes, turn: Place) -> None:
        """Nobody asks for this turn any more, whether it has come or not."""
        turn.asking -= 1
        queue = self.queues.get(cell)
        # Its transaction may have asked anew since.
        if not turn.asking and queue is not None and _of_place(queue, turn.place) is turn:
            self.end(cell, turn.place)

    def answered(self, cell: bytes, turn: Place, start: int) -> bool:
        """The turn has come, and the transaction begins at this timestamp. True if another one
        waits, or this one had to."""
        turn.asking -= 1
        turn.start = turn.start or start
        queue = self.queues.get(cell)
        return turn.contended or (queue is not None and bool(queue.waiting))

    def end(self, cell: bytes, place: int) -> None:
        """Ends the turn at this place, or gives the place up."""
        queue = self.queues.get(cell)
        turn = None if queue is None else _of_place(queue, place)
        if queue is None or turn is None:
            return
        if turn is queue.turn:
            self._next(cell, queue)
        else:
            del queue.waiting[place]
            self._has_waited(cell, place)
            self.given_up += 1
            turn.came.cancel()

    def _has_waited(self, cell: bytes, place: int) -> None:
        self.waiting -= 1
        if self._waits.get(place) == cell:
            del self._waits[place]

    # ------------------------------------------------------------------ commits

    def followers(self, cells: Iterable[bytes], start: int) -> int:
        """The number of the first call that comes too late for the timestamp above a transaction's
        commit; 0 if nobody waits for that. Called before the timestamps are fetched."""
        for cell in cells:
            queue = self.queues.get(cell)
            if queue is not None and queue.turn.start == start and queue.waiting:
                return self._numbers
        return 0

    def set_aside(self, cells: Iterable[bytes], start: int, timestamp: int, too_late: int) -> None:
        """Notes the timestamp directly above the commit of a transaction."""
        for cell in cells:
            queue = self.queues.get(cell)
            if queue is not None and queue.turn.start == start and queue.waiting:
                queue.set_aside = (start, timestamp, too_late)
                return  # it is the start of one transaction

    def decided(self, cell: bytes, start: int) -> None:
        """The commit record of this transaction, or its rollback marker, is durable."""
        queue = self.queues.get(cell)
        if queue is not None and queue.turn.start == start:
            self._next(cell, queue)

    # ------------------------------------------------------------------ whose turn it is

    def _begin(self, cell: bytes, queue: Queue, start: int) -> None:
        turn = queue.turn
        loop = asyncio.get_running_loop()
        queue.timer = loop.call_later(turn.hold_seconds, self._time_out, cell, queue)
        queue.set_aside = (0, 0, 0)
        self.granted += 1
        turn.begin(start)

    def _time_out(self, cell: bytes, queue: Queue) -> None:
        self.timed_out += 1
        self._next(cell, queue)

    def _next(self, cell: bytes, queue: Queue) -> None:
        if queue.timer is not None:
            queue.timer.cancel()
        if not queue.waiting:
            del self.queues[cell]
            return
        committed, timestamp, too_late = queue.set_aside
        before, queue.turn = queue.turn, queue.waiting.popitem(last=False)[1]
        self._has_waited(cell, queue.turn.place)
        is_usable = committed == before.start and queue.turn.number < too_late
        self._begin(cell, queue, timestamp if is_usable and not queue.turn.start else 0)

    def close(self) -> None:
        """Ends all queues: the tablet answers nothing any more."""
        queues, self.queues, self.waiting = self.queues, {}, 0
        self._waits.clear()
        for queue in queues.values():
            if queue.timer is not None:
                queue.timer.cancel()
            for turn in queue.waiting.values():
                turn.came.cancel()


def _of_place(queue: Queue, place: int) -> Place | None:
    if queue.turn.place == place:
        return queue.turn
    return queue.waiting.get(place)
