"""Telling workers of notifications as they are written: hints, to find work within milliseconds.

Nothing depends on them: what a stream leaves out because its reader is slow, or what was written
while nobody listened, is found by scanning. So a stream holds no more than so many, and a commit
never waits for one. Each row goes to one of those who watch its observer, so that two workers do
not run for the same work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import chain
from zlib import crc32

from percolator.errors import InvalidArgument, NotReady, Overloaded
from percolator.tablet.keys import split_component, timestamp_of
from percolator.v1 import tabletserver_pb2 as pb

HINTS_WAITING_MAX = 8_192
"""Of one stream, about 2 MiB."""
HINTS_PER_ANSWER_MAX = 256
STREAMS_MAX = 1_000
OBSERVERS_WATCHED_MAX = 10_000
"""By one stream."""
_RETRY_SECONDS = 0.5

Hint = tuple[int, bytes, bytes, bytes, int]
"""Table, row, column, observer, timestamp."""


class NotificationWatch:
    """All streams of one tablet server. Lives on one event loop."""

    def __init__(self) -> None:
        self._audiences: dict[tuple[int, bytes], _Audience] = {}
        """By table and observer: whoever tells needs no search."""
        self.streams = 0
        """Open at present."""
        self.told = 0
        self.left_out = 0
        self._closed = False

    def tell(self, table_id: int, notifications: Iterable[bytes]) -> None:
        """Passes on what has become durable: keys of SPACE_NOTIFY without their space byte."""
        if not self._audiences:
            return  # nobody watches: a commit pays nothing for them
        for key in notifications:
            row, row_end = split_component(key, 0)
            column, at = split_component(key, row_end)
            observer, _ = split_component(key, at)
            audience = self._audiences.get((table_id, observer))
            if audience is None:
                continue
            hint = table_id, row, column, observer, timestamp_of(key)
            for stream in audience.told_of_row(key[:row_end]):
                if stream.put(hint):
                    self.told += 1
                else:
                    self.left_out += 1

    async def stream(
        self, request: pb.WatchNotificationsRequest
    ) -> AsyncGenerator[pb.WatchNotificationsResponse, None]:
        """Hints as they come, until `close`. Raises `InvalidArgument`, `Overloaded`, `NotReady`."""
        watched = _checked(request)
        if self._closed:
            raise NotReady("the server is shutting down", retry_after_seconds=_RETRY_SECONDS)
        if self.streams >= STREAMS_MAX:
            raise Overloaded(
                f"{STREAMS_MAX} streams of notifications are open",
                retry_after_seconds=_RETRY_SECONDS,
            )
        stream = _Stream()
        self.streams += 1
        for one in watched:
            audience = self._audiences.setdefault(one, _Audience())
            audience.streams(request.listen_only).append(stream)
        try:
            yield pb.WatchNotificationsResponse()
            while (answer := await stream.next()) is not None:
                yield answer
        finally:
            self.streams -= 1
            for one in watched:
                audience = self._audiences[one]
                audience.streams(request.listen_only).remove(stream)
                if not audience:
                    del self._audiences[one]

    def close(self) -> None:
        """Ends all streams; new ones are refused."""
        self._closed = True
        for stream in dict.fromkeys(chain.from_iterable(self._audiences.values())):
            stream.close()


class _Audience:
    """Who watches one observer of one table."""

    def __init__(self) -> None:
        self._workers: list[_Stream] = []
        """In the order in which they came. Each is told of some of the rows."""
        self._listeners: list[_Stream] = []
        """They are told of everything."""

    def streams(self, listen_only: bool) -> list[_Stream]:
        return self._listeners if listen_only else self._workers

    def __iter__(self) -> Iterator[_Stream]:
        return chain(self._workers, self._listeners)

    def __bool__(self) -> bool:
        return bool(self._workers or self._listeners)

    def told_of_row(self, row: bytes) -> Iterator[_Stream]:
        if self._workers:
            yield self._workers[crc32(row) % len(self._workers)]
        yield from self._listeners


class _Stream:
    """What waits for one reader."""

    def __init__(self) -> None:
        self._hints: deque[Hint] = deque()
        self._left_out = 0
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, hint: Hint) -> bool:
        """Whether there was room."""
        self._changed.set()
        if len(self._hints) >= HINTS_WAITING_MAX:
            # What came first stays: the oldest work is the first to be done.
            self._left_out += 1
            return False
        self._hints.append(hint)
        return True

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def next(self) -> pb.WatchNotificationsResponse | None:
        """The next hints, as soon as there are some; None at the end."""
        while not self._hints and not self._left_out:
            if self._closed:
                return None
            self._changed.clear()
            await self._changed.wait()
        hints = self._hints
        answer = pb.WatchNotificationsResponse(left_out=self._left_out)
        self._left_out = 0
        for _ in range(min(len(hints), HINTS_PER_ANSWER_MAX)):
            table_id, row, column, observer, timestamp = hints.popleft()
            answer.notifications.add(
                table_id=table_id, row=row, column=column, observer=observer, timestamp=timestamp
            )
        return answer


def _checked(request: pb.WatchNotificationsRequest) -> dict[tuple[int, bytes], None]:
    """Whose notifications are watched, in which tables."""
    if not request.watched:
        raise InvalidArgument("watched", "none")
    watched: dict[tuple[int, bytes], None] = {}
    for index, one in enumerate(request.watched):
        if not one.observers:
            raise InvalidArgument(f"watched[{index}].observers", "none")
        watched.update(dict.fromkeys((one.table_id, observer) for observer in one.observers))
    if len(watched) > OBSERVERS_WATCHED_MAX:
        raise InvalidArgument(
            "watched", f"{len(watched)} observers, at most {OBSERVERS_WATCHED_MAX} allowed"
        )
    return watched
