"""Notifications in tablets: found by passes and streams, deleted as ordinary mutations."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from percolator.codecs.readable import quoted
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    NotExecuted,
    NotReady,
    PercolatorError,
    TabletLocation,
    TabletMoved,
    Unavailable,
)
from percolator.observers.context import Admission, FoundWork, Waiting, WorkHints, WorkRequest
from percolator.protocol import steps
from percolator.protocol.cleanup import Cleanup
from percolator.protocol.conflicts import MetLock
from percolator.protocol.environment import Environment
from percolator.routing.catalog import Catalog, TabletMap
from percolator.routing.cells import CellMutation
from percolator.tasks import Tasks
from percolator.timestamps import SEQUENCE_BITS
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell, RowRange
from percolator.wire.backoff import Backoff
from percolator.wire.methods import SCAN_NOTIFICATIONS, WATCH_NOTIFICATIONS
from percolator.wire.status import from_detail
from percolator.world import World


class TabletNotifications:
    """`percolator.observers.context.Notifications` of tablet servers."""

    pause_seconds_max = inf
    """Streams announce what is written."""

    def __init__(self, context: TabletContext) -> None:
        self._context = context

    async def look(self, admission: Admission, *, everything: bool) -> int:
        return await TabletPass(self._context, admission).run(everything=everything)

    def hints(
        self, watched: Mapping[int, Sequence[bytes]], *, listen_only: bool = False
    ) -> AsyncGenerator[WorkHints, None]:
        context = self._context
        return watch_work(
            context.world,
            context.tablets,
            context.catalog.all_tablets,
            watched,
            listen_only=listen_only,
        )

    async def survey(
        self, request: WorkRequest, deadline: float = inf
    ) -> AsyncGenerator[FoundWork, None]:
        """Tablet by tablet; the answers of one tablet come in row order. Each call has the usual
        time limit."""
        context = self._context
        places = [request]
        while places:
            until = min(context.env.deadline(), deadline)
            found = await find_work(context.world, context.tablets, places, until)
            places = []
            for answer in found:
                if answer.problem is not None:
                    raise answer.problem
                if answer.rest is not None:
                    start, end = answer.rest
                    places.append(replace(answer.request, start=start, end=end))
                yield answer

    async def forget(self, handled: Sequence[Waiting], deadline: float) -> PercolatorError | None:
        sent = [
            CellMutation(
                one.table_id,
                steps.forget_notifications(one.row, one.column, one.observer, one.timestamps),
            )
            for one in handled
        ]
        answers = await self._context.env.cells.mutate(sent, deadline)
        return next((one for one in answers if isinstance(one, PercolatorError)), None)


_log = logging.getLogger(__name__)

_TABLETS_AT_ONCE = 16
_ROWS_PER_ANSWER = 256
_OLD_LOCK_MILLISECONDS = 1_000
_YOUNG_MILLISECONDS = 2_000
"""By this age, the worker to which a notification was announced has had its chance."""
_JUMPS_MAX = 8
"""The most jumps in one pass."""
_RANDOM_BYTES = 8
_RESOLVE_SECONDS = 2.0
"""How long a pass waits, at most once, for primaries that no server has now."""
_KNOWN_SECONDS = 0.1
"""The wait reported to `cleanup`. The locks are old, so it should check their owners at once."""


@dataclass(frozen=True)
class TabletContext:
    """The connection with which tablets are looked at."""

    world: World
    env: Environment
    cleanup: Cleanup
    catalog: Catalog
    tablets: TabletMap


class TabletPass:
    """One pass: every tablet once, and a few more random places.

    A pass visits every tablet of the watched tables in random order, each starting at a random row.
    Rows that are found are locked, many at a time. If some are locked already, another worker is at
    work there, and the pass jumps to another random place. Without that, workers that have met once
    would move on side by side, like buses on a crowded line.

    While streams deliver new notifications, young ones are left to the workers that received them.
    Locks on watched columns that are older than a second are resolved: an owner that died after its
    commit point leaves nothing else behind, and resolving the lock writes the notification.
    """

    def __init__(self, context: TabletContext, admission: Admission) -> None:
        self._context = context
        self._admission = admission
        self._tables: dict[int, WorkRequest] = {}
        for one in admission.watched:
            known = self._tables.setdefault(one.table_id, WorkRequest(one.table_id))
            strong = () if one.observer.weak else tuple(one.columns)
            self._tables[one.table_id] = replace(
                known,
                observers=(*known.observers, one.id),
                locked_columns=tuple(sorted({*known.locked_columns, *strong})),
                row_limit=_ROWS_PER_ANSWER,
            )
        self._places: list[WorkRequest] = []
        self._jumps = 0
        self._young_from = 0
        self._may_resolve = True

    async def run(self, *, everything: bool) -> int:
        """Returns the number of cells found for which this worker will run observers."""
        if not self._tables:
            return 0
        left = self._context.env.limits.call_seconds
        now = await self._context.env.timestamps.get(timeout_seconds=left)
        before = now - (_OLD_LOCK_MILLISECONDS << SEQUENCE_BITS)
        for table_id, request in self._tables.items():
            self._tables[table_id] = replace(request, locks_before=max(before, 0))
        if not everything:
            self._young_from = now - (_YOUNG_MILLISECONDS << SEQUENCE_BITS)
        for location in await self._tablets():
            self._places += self._from_random_row(location)
        while self._places:
            places, self._places = self._places[:_TABLETS_AT_ONCE], self._places[_TABLETS_AT_ONCE:]
            asked = [one for place in places if (one := self._with_space(place))]
            context = self._context
            for answer in await find_work(
                context.world, context.tablets, asked, context.env.deadline()
            ):
                await self._process(answer, now)
        return self._admission.admitted

    def _with_space(self, request: WorkRequest) -> WorkRequest | None:
        """The request without observers whose queue is full: they may have millions of cells."""
        observers = tuple(
            one
            for one in request.observers
            if (watched := self._admission.observer(request.table_id, one)) is not None
            and self._admission.has_space(watched)
        )
        return replace(request, observers=observers) if observers else None

    async def _tablets(self) -> list[TabletLocation]:
        context = self._context
        found: list[TabletLocation] = []
        for table_id in self._tables:
            known = context.tablets.tablets(table_id)
            found += known or await context.catalog.all_tablets(table_id, context.env.deadline())
        context.world.random.shuffle(found)
        return found

    def _from_random_row(self, tablet: TabletLocation) -> list[WorkRequest]:
        """The tablet in two pieces: from a random row to its end, and what is before that row."""
        request = self._tables[tablet.table_id]
        row = self._random_row(tablet)
        if row is None:
            return [replace(request, start=tablet.start, end=tablet.end)]
        return [
            replace(request, start=row, end=tablet.end),
            replace(request, start=tablet.start, end=row),
        ]

    def _random_row(self, tablet: TabletLocation) -> bytes | None:
        """A random row inside the tablet; None if there is none between its ends."""
        start, end = tablet.start, tablet.end
        shared = 0
        while shared < min(len(start), len(end)) and start[shared] == end[shared]:
            shared += 1
        low = int.from_bytes(start[shared:][:_RANDOM_BYTES].ljust(_RANDOM_BYTES, b"\x00"), "big")
        high = int.from_bytes(end[shared:][:_RANDOM_BYTES].ljust(_RANDOM_BYTES, b"\x00"), "big")
        if not end:
            high = 1 << 8 * _RANDOM_BYTES
        if high - low < 2:
            return None
        middle = self._context.world.random.randrange(low + 1, high)
        return start[:shared] + middle.to_bytes(_RANDOM_BYTES, "big")

    async def _process(self, answer: FoundWork, now: int) -> None:
        taken = await self._admission.take(
            one for one in answer.waiting if not 0 < self._young_from < one.timestamps[-1]
        )
        if answer.locks and self._may_resolve:
            await self._resolve(answer.request.table_id, answer.locks, now)
        if answer.problem is not None:
            return  # no server has it now; the next pass tries again
        if not taken:
            self._jump()
        elif answer.rest is not None:
            start, end = answer.rest
            self._places.insert(0, replace(answer.request, start=start, end=end))

    async def _resolve(self, table_id: int, locks: Sequence[Cell], now: int) -> None:
        """Resolves locks, as far as their primaries answer.

        The next pass meets the others again; they do not hold up the work of other tablets.
        """
        deadline = min(self._context.env.now() + _RESOLVE_SECONDS, self._context.env.deadline())
        try:
            await self._context.cleanup.resolve(
                [MetLock.of(table_id, lock) for lock in locks],
                deadline=deadline,
                known_now=now,
                waited_seconds=_KNOWN_SECONDS,
            )
        except PercolatorError as error:
            _log.debug("old locks of table %d cannot be resolved now: %s", table_id, error)
            self._may_resolve = False
        else:
            self._may_resolve = self._context.env.now() < deadline

    def _jump(self) -> None:
        if self._jumps >= _JUMPS_MAX:
            return
        self._jumps += 1
        tablets = [
            tablet
            for table_id in self._tables
            for tablet in self._context.tablets.tablets(table_id)
        ]
        if tablets:
            self._places.append(
                self._from_random_row(self._context.world.random.choice(tablets))[0]
            )


_SCANS_PER_CALL_MAX = 64
_ATTEMPT_SECONDS_MAX = 5.0
_SEARCH_RETRY_SECONDS_MIN = 0.02
_SEARCH_RETRY_SECONDS_MAX = 1.0


async def find_work(
    world: World, tablets: TabletMap, requests: Sequence[WorkRequest], deadline: float
) -> list[FoundWork]:
    """Finds what waits in these ranges: one answer per tablet, in order of requests and rows.

    A tablet that moves or is split meanwhile is asked at its new place. Raises nothing: the answer
    for a range that was not answered by the deadline says why.

    It finds whatever the streams of `watch_work` did not deliver: those are quick, and may leave
    something out.
    """
    return await _Search(world, tablets, deadline).answer(requests)


class _Open:
    """A request, or some rows of one, that is not answered yet."""

    __slots__ = ("location", "order", "problem", "request")

    def __init__(self, order: tuple[int, bytes], request: WorkRequest) -> None:
        self.order = order
        self.request = request
        self.location: TabletLocation | None = None
        self.problem: PercolatorError | None = None


class _Search:
    """One call of `find_work`."""

    def __init__(self, world: World, tablets: TabletMap, deadline: float) -> None:
        self._world = world
        self._tablets = tablets
        self._deadline = deadline
        self._answers: list[tuple[tuple[int, bytes], FoundWork]] = []
        self._no_master: PercolatorError | None = None
        """Why no master has answered in this round. Each further question would take seconds, while
        the requests whose tablets are known wait."""

    async def answer(self, requests: Sequence[WorkRequest]) -> list[FoundWork]:
        clock = self._world.clock
        backoff = Backoff(
            clock,
            self._world.random,
            _SEARCH_RETRY_SECONDS_MIN,
            _SEARCH_RETRY_SECONDS_MAX,
        )
        left = [_Open((index, asked.start), asked) for index, asked in enumerate(requests)]
        while left:
            placed, left = await self._place(left)
            calls = [self._ask(address, pieces) for address, pieces in _by_server(placed)]
            for unanswered in await asyncio.gather(*calls):
                left += unanswered
            if left and not await backoff.pause(self._deadline):
                self._answers += [(piece.order, _unanswered(piece)) for piece in left]
                break
        return [answer for _, answer in sorted(self._answers, key=lambda pair: pair[0])]

    async def _place(self, pieces: Sequence[_Open]) -> tuple[list[_Open], list[_Open]]:
        """The requests, cut at tablet boundaries, and those whose tablets are not known."""
        placed: list[_Open] = []
        lost: list[_Open] = []
        self._no_master = None
        for piece in pieces:
            start, asked = piece.request.start, piece.request
            while True:
                cut = _Open((piece.order[0], start), replace(asked, start=start))
                cut.problem = piece.problem
                location = await self._locate(cut)
                if location is None:
                    if not isinstance(cut.problem, _PASSING):
                        self._answers.append((cut.order, _unanswered(cut)))
                    else:
                        lost.append(cut)
                    break
                ends = [end for end in (asked.end, location.end) if end]
                cut.location = location
                cut.request = replace(cut.request, end=min(ends) if ends else b"")
                placed.append(cut)
                start = location.end
                if not start or (asked.end and start >= asked.end):
                    break
        return placed, lost

    async def _locate(self, piece: _Open) -> TabletLocation | None:
        table_id, row = piece.request.table_id, piece.request.start
        location = self._tablets.locate(table_id, row)
        if location is not None:
            return location
        piece.problem = await self._refresh(table_id, row)
        if piece.problem is not None:
            return None
        location = self._tablets.locate(table_id, row)
        if location is None:
            piece.problem = Unavailable(f"no tablet is known to hold row {quoted(row)}")
        return location

    async def _ask(self, address: str, pieces: list[_Open]) -> list[_Open]:
        """Asks one server. Returns the requests to repeat, at whichever server has them by then."""
        seconds = self._deadline - self._world.clock.monotonic_seconds()
        call = self._world.network.unary(address, SCAN_NOTIFICATIONS)
        request = pb.ScanNotificationsRequest(scans=[_scan(piece) for piece in pieces])
        try:
            response = await call(request, min(max(seconds, 0.001), _ATTEMPT_SECONDS_MAX))
            if len(response.scans) != len(pieces):
                raise ExecutionUnknown(
                    f"{address} answered {len(response.scans)} of {len(pieces)} scans"
                )
        except PercolatorError as error:
            await self._look_up(pieces[0], error)
            for piece in pieces:
                piece.problem = error
            return self._still_open(pieces)
        unanswered = []
        for piece, result in zip(pieces, response.scans, strict=True):
            if result.HasField("error"):
                piece.problem = from_detail(result.error)
                await self._look_up(piece, piece.problem)
                unanswered.append(piece)
            else:
                self._answers.append((piece.order, _found(piece, result)))
        return self._still_open(unanswered)

    async def _look_up(self, piece: _Open, error: PercolatorError) -> None:
        location, asked = piece.location, piece.request
        if location is None or not isinstance(error, TabletMoved | NotReady | ExecutionUnknown):
            return
        if isinstance(error, TabletMoved):
            self._tablets.learn(error.locations)
        if self._tablets.locate(asked.table_id, asked.start) is not location:
            return
        # If that fails, only the old map is available; the next attempt may come here again.
        silent = location.address if isinstance(error, DeadlineExceeded) else ""
        await self._refresh(asked.table_id, asked.start, silent)

    async def _refresh(self, table_id: int, row: bytes, server: str = "") -> PercolatorError | None:
        """Asks a master where the row is, or all tablets of a server; returns why that failed."""
        if self._no_master is not None:
            return self._no_master
        try:
            if server:
                await self._tablets.refresh_server(server)
            else:
                await self._tablets.refresh(table_id, row)
        except PercolatorError as error:
            if isinstance(error, _PASSING):
                self._no_master = error
            return error
        return None

    def _still_open(self, pieces: list[_Open]) -> list[_Open]:
        """The requests that may still be answered. A permanent error counts as an answer."""
        lasting = [piece for piece in pieces if not isinstance(piece.problem, _PASSING)]
        self._answers += [(piece.order, _unanswered(piece)) for piece in lasting]
        return [piece for piece in pieces if isinstance(piece.problem, _PASSING)]


_PASSING = (NotExecuted, ExecutionUnknown)
"""Errors after which another attempt may succeed."""


def _by_server(pieces: Sequence[_Open]) -> list[tuple[str, list[_Open]]]:
    """The calls to make: address and requests, at most `_SCANS_PER_CALL_MAX` each."""
    servers: dict[str, list[_Open]] = {}
    for piece in pieces:
        if piece.location is not None:
            servers.setdefault(piece.location.address, []).append(piece)
    return [
        (address, placed[at : at + _SCANS_PER_CALL_MAX])
        for address, placed in servers.items()
        for at in range(0, len(placed), _SCANS_PER_CALL_MAX)
    ]


def _scan(piece: _Open) -> pb.NotificationScan:
    asked = piece.request
    scan = pb.NotificationScan(
        range=RowRange(start=asked.start, end=asked.end),
        observers=asked.observers,
        locked_columns=asked.locked_columns,
        locks_before=asked.locks_before,
        row_limit=asked.row_limit,
    )
    if piece.location is not None:
        scan.target.tablet_id, scan.target.epoch = piece.location.tablet_id, piece.location.epoch
    return scan


def _found(piece: _Open, result: pb.NotificationScanResult) -> FoundWork:
    table_id, location = piece.request.table_id, piece.location
    tablet = (location.tablet_id, location.epoch) if location is not None else None
    return FoundWork(
        request=piece.request,
        waiting=[
            Waiting(table_id, one.row, one.column, one.observer, tuple(one.timestamps))
            for one in result.notifications
        ],
        locks=list(result.locks),
        rest=(result.rest.start, result.rest.end) if result.HasField("rest") else None,
        problem=None,
        place=tablet,
        mark=result.notifications_written,
    )


def _unanswered(piece: _Open) -> FoundWork:
    asked = piece.request
    return FoundWork(asked, [], [], (asked.start, asked.end), piece.problem)


_STREAM_SECONDS = 600.0
"""How long a stream may last. Then it is reopened, even if it has died without an error."""
_MAP_SECONDS = 0.5
"""How often this process's own map is checked for new servers, which costs almost nothing."""
_ASK_SECONDS = 5.0
"""How often a master is asked where all tablets are."""
_WATCH_RETRY_SECONDS_MIN = 0.05
_WATCH_RETRY_SECONDS_MAX = 2.0
_BATCHES_WAITING_MAX = 64
"""Batches kept for a slow reader. Above this, servers wait, and drop the rest."""

Finder = Callable[[int, float], Awaitable[Sequence[TabletLocation]]]
"""Finds all tablets of a table, by a deadline: `Catalog.all_tablets`."""


async def watch_work(
    world: World,
    tablets: TabletMap,
    find: Finder,
    watched: Mapping[int, Sequence[bytes]],
    *,
    listen_only: bool = False,
) -> AsyncGenerator[WorkHints, None]:
    """Yields hints for these observers, by table, from every server of the tables' tablets.

    Each row goes to one of the workers that watch its observer; with `listen_only`, this process
    gets every row. The generator never ends by itself, and raises no errors of the cluster. Close
    it (`contextlib.aclosing`) to end the streams.

    There is one stream per tablet server. Broken streams are reopened, and a server that begins to
    serve one of the tables is watched as soon as this process learns of it. Streams only make work
    quick to find: `find_work` finds whatever they did not deliver.
    """
    request = pb.WatchNotificationsRequest(
        watched=[
            pb.WatchNotificationsRequest.Watched(table_id=table_id, observers=observers)
            for table_id, observers in sorted(watched.items())
        ],
        listen_only=listen_only,
    )
    watch = _Watch(world, tablets, find, request)
    try:
        async for hints in watch.hints():
            yield hints
    finally:
        await watch.close()


class _Watch:
    def __init__(
        self,
        world: World,
        tablets: TabletMap,
        find: Finder,
        request: pb.WatchNotificationsRequest,
    ) -> None:
        self._world = world
        self._tablets = tablets
        self._find = find
        self._tables = [one.table_id for one in request.watched]
        self._request = request
        self._queue: asyncio.Queue[WorkHints] = asyncio.Queue(_BATCHES_WAITING_MAX)
        self._streams: dict[str, asyncio.Task[None]] = {}
        self._tasks = Tasks()

    async def hints(self) -> AsyncGenerator[WorkHints, None]:
        self._tasks.start(self._follow())
        while True:
            yield await self._queue.get()

    async def close(self) -> None:
        await self._tasks.cancel()

    async def _follow(self) -> None:
        """Keeps one stream to every server of the tables, and ends those to the others."""
        clock = self._world.clock
        asked = -_ASK_SECONDS
        while True:
            if clock.monotonic_seconds() - asked >= _ASK_SECONDS:
                await self._ask()
                asked = clock.monotonic_seconds()
            addresses = {
                location.address
                for table_id in self._tables
                for location in self._tablets.tablets(table_id)
            }
            for address in sorted(addresses - self._streams.keys()):
                self._streams[address] = self._tasks.start(self._listen(address))
            for address in sorted(self._streams.keys() - addresses):
                self._streams.pop(address).cancel()
            await clock.sleep(_MAP_SECONDS)

    async def _ask(self) -> None:
        for table_id in self._tables:
            try:
                await self._find(table_id, self._world.clock.monotonic_seconds() + _ASK_SECONDS)
            except (NotExecuted, ExecutionUnknown):
                # No master answers: keep watching the known servers, and ask about the others next
                # time. To wait for each table would take minutes.
                return
            except PercolatorError:
                continue  # the table is gone

    async def _listen(self, address: str) -> None:
        world = self._world
        backoff = _new_backoff(world)
        call = world.network.stream(address, WATCH_NOTIFICATIONS)
        while True:
            answers = call(self._request, _STREAM_SECONDS)
            began = True
            asked_seconds = 0.0
            try:
                async for answer in answers:
                    hints = WorkHints(address, began, answer.notifications, answer.left_out)
                    await self._queue.put(hints)
                    began = False
                    backoff = _new_backoff(world)
            except PercolatorError as error:
                # The server is down or drains: its tablets will soon be elsewhere.
                _log.debug("the stream of notifications from %s ended: %s", address, error)
                asked_seconds = error.retry_after_seconds
            finally:
                # If cancelled between two answers, it would live on until garbage collection.
                if isinstance(answers, AsyncGenerator):
                    await answers.aclose()
            await world.clock.sleep(max(backoff.next_seconds(), asked_seconds))


def _new_backoff(world: World) -> Backoff:
    return Backoff(
        world.clock,
        world.random,
        _WATCH_RETRY_SECONDS_MIN,
        _WATCH_RETRY_SECONDS_MAX,
    )
