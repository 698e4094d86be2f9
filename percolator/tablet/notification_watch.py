"""Tells workers about notifications as they are written: hints, to find work in milliseconds.

Nothing depends on them: scans find what a stream drops because its reader is slow, and what was
written while nothing listened. So the length of a stream is limited, and a commit never waits for
one. Each row's hint goes to only one of the streams that watch its observer, so that two workers do
not start on the same work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator
from itertools import chain
from zlib import crc32

from percolator.errors import InvalidArgument, NotReady
from percolator.tablet.cells import split_component, timestamp_of
from percolator.v1 import tabletserver_pb2 as pb

HINTS_WAITING_MAX = 8_192
"""The most hints that one stream holds: about 2 MiB."""
HINTS_PER_ANSWER_MAX = 256
OBSERVERS_WATCHED_MAX = 10_000
"""The most observers that one stream can watch."""
_RETRY_SECONDS = 0.5

Hint = tuple[int, bytes, bytes, bytes, int]
"""A hint: table, row, column, observer, timestamp."""


class NotificationWatch:
    """All streams of one tablet server. Bound to one event loop."""

    def __init__(self) -> None:
        self._audiences: dict[tuple[int, bytes], _Audience] = {}
        """The audiences, by table and observer, so that `tell` need not search."""
        self.streams = 0
        """How many streams are open."""
        self.told = 0
        self.left_out = 0
        self._closed = False

    def tell(self, table_id: int, notifications: Iterable[bytes]) -> None:
        """Sends hints for durable notifications: keys of SPACE_NOTIFY without their space byte."""
        if not self._audiences:
            return  # no stream is open, so this costs a commit nothing
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
        """Yields hints until `close`. Raises `InvalidArgument`, `NotReady`."""
        watched = _checked(request)
        if self._closed:
            raise NotReady("the server is shutting down", retry_after_seconds=_RETRY_SECONDS)
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
    """The streams that watch one observer of one table."""

    def __init__(self) -> None:
        self._workers: list[_Stream] = []
        """The workers' streams, oldest first. Each gets the hints for some of the rows."""
        self._listeners: list[_Stream] = []
        """The streams of listeners, which get every hint."""

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
    """The hints queued for one reader."""

    def __init__(self) -> None:
        self._hints: deque[Hint] = deque()
        self._left_out = 0
        self._closed = False
        self._changed = asyncio.Event()

    def put(self, hint: Hint) -> bool:
        """Queues a hint. Returns False if the stream was full."""
        self._changed.set()
        if len(self._hints) >= HINTS_WAITING_MAX:
            # Older hints stay: the oldest work is done first.
            self._left_out += 1
            return False
        self._hints.append(hint)
        return True

    def close(self) -> None:
        self._closed = True
        self._changed.set()

    async def next(self) -> pb.WatchNotificationsResponse | None:
        """Waits for the next hints; None once the stream is closed."""
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
    """The tables and observers to watch, validated."""
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
