"""How an engine says what waits for observers: the narrow port on which workers stand.

What is written when, an engine sees to by itself: tablets with the commit of a cell
(`percolator/tablet`), a row store with intents before it
(`percolator/observers/finding/intent_notifications.py`). Here is what workers, `wait` and the
commands ask of it. All of it but `survey` is hints: two workers that find the same change do no
harm, since only one run commits.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from percolator.errors import PercolatorError
from percolator.observers.watched import Watched
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.cells_pb2 import Cell

LOCKS_OF_ANY_AGE = 2**64 - 1


@dataclass(frozen=True)
class WorkRequest:
    """Where to look, and for what."""

    table_id: int
    start: bytes = b""
    end: bytes = b""
    """The rows from start (inclusive) to end (exclusive); an empty end means to the last row."""
    observers: tuple[bytes, ...] = ()
    """The observers whose notifications to find; empty for all."""
    locked_columns: tuple[bytes, ...] = ()
    """Locks on these columns are work, too: an owner that died after its commit point leaves
    nothing else behind, and resolving such a lock writes the notification."""
    locks_before: int = 0
    """Only locks with a start timestamp below this are found."""
    row_limit: int = 0
    """The most rows in each tablet's answer; 0 leaves it to the tablet server."""


class Waiting(NamedTuple):
    """The notifications of one observer about one cell."""

    table_id: int
    row: bytes
    column: bytes
    observer: bytes
    timestamps: tuple[int, ...]
    """Commit timestamps, newest first; only the oldest if there are very many."""


@dataclass(frozen=True, slots=True)
class FoundWork:
    """One answer to a part of one request."""

    request: WorkRequest
    """The request as answered: with the range of which this tells."""
    waiting: list[Waiting]
    """Notifications in row order; all those of a row are in one answer."""
    locks: list[Cell]
    """Cells with locks, with their stored records."""
    rest: tuple[bytes, bytes] | None
    """The part of the range that remains to be requested; None if there is none."""
    problem: PercolatorError | None
    """Why there was no answer in time; then all of the range remains."""
    place: Hashable = None
    """Where was looked: a tablet at its epoch, for instance. None if there was no answer."""
    mark: Hashable = None
    """Not the same in two answers of a place if work has come or gone there unseen in between:
    what `percolator.observers.waiting` needs to know."""


@dataclass(frozen=True, slots=True)
class WorkHints:
    """Some notifications that were just written."""

    address: str
    """Who says so."""
    began: bool
    """The stream has just begun: notifications written before may not have been delivered."""
    notifications: Sequence[pb.WatchedNotification]
    left_out: int
    """How many were dropped before these, because this process reads slowly."""


class Claim(NamedTuple):
    """A cell for one of this worker's observers."""

    watched: Watched
    row: bytes
    column: bytes


class Admission(Protocol):
    """A worker that a pass tells what it finds."""

    @property
    def watched(self) -> Sequence[Watched]:
        """The observers to run at the moment."""
        ...

    @property
    def admitted(self) -> int:
        """The number of cells for which this worker will run observers."""
        ...

    def observer(self, table_id: int, observer: bytes) -> Watched | None:
        """The observer of this name, if it is one of this worker's."""
        ...

    def has_room(self, watched: Watched) -> bool: ...

    def take(self, found: Iterable[Waiting]) -> Awaitable[bool]:
        """Locks and queues what was found. Returns False if another worker is at work there."""
        ...

    def knows(self, claim: Claim) -> bool:
        """Whether it is queued here, or being run."""
        ...

    def claim(self, claims: Sequence[Claim]) -> Awaitable[list[bool]]:
        """Tries to lock these cells. Says for each whether it is this worker's now: then it has to
        be admitted or released."""
        ...

    def admit(self, claim: Claim, timestamps: Iterable[int]) -> None:
        """Queues it, if there is room, and it was not handled meanwhile."""
        ...

    def release(self, claims: Iterable[Claim]) -> None:
        """Leaves these cells to others."""
        ...


class Notifications(Protocol):
    """What waits for observers, in one engine."""

    @property
    def pause_seconds_max(self) -> float:
        """The longest pause between two passes with which work is found in time."""
        ...

    def look(self, admission: Admission, *, everything: bool) -> Awaitable[int]:
        """Makes one pass, and has this worker admit what it finds. Returns how many cells it has
        admitted. Without `everything`, what others were told of just now is left to them."""
        ...

    def hints(
        self, watched: Mapping[int, Sequence[bytes]], *, listen_only: bool = False
    ) -> AsyncGenerator[WorkHints, None]:
        """Yields hints for these observers, by table, as they are written; never ends by itself.

        Each row goes to one of the workers that watch its observer; with `listen_only`, this
        process gets every row.
        """
        ...

    def survey(
        self, request: WorkRequest, deadline: float = ...
    ) -> AsyncGenerator[FoundWork, None]:
        """Yields answers until the whole range is covered. Raises the error of a part that did not
        answer by the deadline."""
        ...

    def forget(
        self, handled: Sequence[Waiting], deadline: float
    ) -> Awaitable[PercolatorError | None]:
        """Deletes exactly these notifications, many at a time. Returns the first error: what was
        not deleted is found again."""
        ...
