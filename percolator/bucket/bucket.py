"""A bucket whose calls have outcomes: attempts are repeated until the store shows what happened.

All rules are in `percolator/bucket/port.py`. How long an attempt may take:

- An attempt without an answer is given up soon, and made again. Otherwise, a commit waits for an
  answer that was lost, although the store works.
- One that carries bytes may take longer, in proportion. Otherwise, over a slow line, no large
  object is ever stored.
- The next one may take longer than the one before: it is not known how large an object is that is
  read, or how slow the store is today. Otherwise, none succeeds. But only a few times as long:
  otherwise, after an outage, one waits for an attempt that was lost in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from copy import copy
from typing import NamedTuple, TypeVar

from percolator.bucket.port import (
    LISTED_MAX,
    Attempts,
    Doubtful,
    Head,
    Listed,
    Refused,
    Stored,
    require_key,
)
from percolator.bucket.settings import Settings
from percolator.errors import InvalidArgument, PercolatorError, Retry, StoreFault, StoreUnusable
from percolator.errors import Unavailable as NoAnswer
from percolator.wire.backoff import Backoff, doubled_seconds
from percolator.world import Clock, Random

T = TypeVar("T")

_PAUSE_SECONDS_MIN = 0.05
_PAUSE_SECONDS_MAX = 1.0
_BYTES_PER_SECOND_MIN = 256 << 10
"""The slowest line on which an object is written at the first attempt."""
_FACTOR_MAX = 3
"""How much longer than the first attempt a later one may take."""
_READ_FACTOR_MAX = 10
"""Factor for a later attempt to read, since the size of the object is not known."""


class Written(NamedTuple):
    """The outcome of a creation or of a change."""

    is_own: bool
    """True if what was to be written is there, by this call."""
    found: Stored | None
    """The object that is there. After a change, None if it is gone.

    If a change finds what others wrote, its own bytes may have been there before: another writer
    may have replaced them. Whoever has to know keeps a trace of each writer in the object."""


class Bucket:
    """The objects of a store. Calls raise `Unavailable` if their outcome is not known in time."""

    def __init__(
        self,
        attempts: Attempts,
        clock: Clock,
        random: Random,
        *,
        attempt_seconds: float,
        seconds: float,
    ) -> None:
        """The first attempt without an answer, of a few bytes, is given up after
        `attempt_seconds`, a call after `seconds`."""
        self._attempts = attempts
        self.clock = clock
        """The clock of this machine."""
        self._random = random
        self._attempt_seconds = attempt_seconds
        self._seconds = seconds
        self.doubtful = 0
        """How many attempts had no answer that says anything."""

    @property
    def name(self) -> str:
        """The store for messages."""
        return self._attempts.name

    async def create(self, key: str, data: bytes) -> Written:
        """Stores an object if the key has none, and never had one. `data` is unique."""
        return await self._write(key, data, lambda: self._attempts.create(key, data), None)

    async def replace(self, key: str, data: bytes, tag: str) -> Written:
        """Stores an object in place of the one with this tag. `data` is unique."""
        if not tag:
            raise InvalidArgument("tag", "must not be empty")
        return await self._write(key, data, lambda: self._attempts.replace(key, data, tag), tag)

    async def read(self, key: str) -> Stored | None:
        """The object; None if the key has none."""
        require_key(key)
        return await self._answer(
            "read",
            key,
            lambda: self._attempts.read(key),
            self._patience(factor_max=_READ_FACTOR_MAX),
        )

    async def head(self, key: str) -> Head | None:
        """The object's tag and size; None if the key has none."""
        require_key(key)
        return await self._answer("head", key, lambda: self._attempts.head(key), self._patience())

    async def list(self, folder: str, *, after: str = "", limit: int = LISTED_MAX) -> list[Listed]:
        """The first objects, in the order of their keys, below `folder`, or of all if there is no
        folder. They may lag behind."""
        if folder:
            require_key(folder, "folder")
        if not 1 <= limit <= LISTED_MAX:
            raise InvalidArgument("limit", f"expected 1 to {LISTED_MAX}, found {limit}")
        return await self._answer(
            "list", folder, lambda: self._attempts.list(folder, after, limit), self._patience()
        )

    async def all(self, folder: str) -> AsyncGenerator[Listed, None]:
        """All objects below `folder`, as `list` shows them. Close it (`contextlib.aclosing`)."""
        after = ""
        while True:
            page = await self.list(folder, after=after)
            for one in page:
                yield one
            if len(page) < LISTED_MAX:
                return
            after = page[-1].key

    async def delete(self, key: str) -> None:
        """Deletes the object if there is one. No creation of it may be on its way, or follow."""
        require_key(key)
        await self._answer("delete", key, lambda: self._attempts.delete(key), self._patience())

    async def settings(self) -> Settings:
        """Settings of the bucket, as far as the store tells them to this account."""
        return await self._answer("ask for", "settings", self._attempts.settings, self._patience())

    # ------------------------------------------------------------------ attempts

    async def _write(
        self, key: str, data: bytes, attempt: Callable[[], Awaitable[str]], tag: str | None
    ) -> Written:
        """`tag` is that of the object to be replaced; None if there must be none."""
        require_key(key)
        verb = "create" if tag is None else "replace"
        patience = self._patience(len(data))
        was_doubtful = False
        while True:
            try:
                return Written(True, Stored(data, await self._tried(attempt, patience)))
            except (Refused, Doubtful) as error:
                last = error
            except PercolatorError as error:
                raise _perhaps_done(error, was_doubtful, verb, key) from error
            was_doubtful = was_doubtful or isinstance(last, Doubtful)
            try:
                found = await self._answer(
                    "read", key, lambda: self._attempts.read(key), patience.anew()
                )
            except PercolatorError as error:
                # What was refused may be one's own object, too: an earlier attempt, which a
                # proxy has repeated.
                raise _perhaps_done(error, True, verb, key) from error
            if found is None:
                if tag is not None:
                    return Written(False, None)
            elif found.data == data:
                return Written(True, found)
            elif found.tag != tag:
                return Written(False, found)
            # Nothing has changed: the attempt did not arrive, or has not yet. Sent again, it
            # applies once at most, since the condition holds only once.
            if not await patience.pause():
                raise self._given_up(verb, key, last, patience.rounds, was_doubtful)

    async def _answer(
        self, verb: str, key: str, attempt: Callable[[], Awaitable[T]], patience: _Patience
    ) -> T:
        """The answer of an attempt that may be repeated as often as one likes."""
        while True:
            try:
                return await self._tried(attempt, patience)
            except (Refused, Doubtful) as error:
                if not await patience.pause():
                    raise self._given_up(verb, key, error, patience.rounds, True) from error

    async def _tried(self, attempt: Callable[[], Awaitable[T]], patience: _Patience) -> T:
        seconds = patience.attempt_seconds()
        try:
            async with asyncio.timeout(seconds):
                return await attempt()
        except TimeoutError:
            self.doubtful += 1
            raise Doubtful(f"no answer in {seconds:.3g} s") from None
        except Doubtful:
            self.doubtful += 1
            raise

    def _given_up(
        self, verb: str, key: str, last: Exception, rounds: int, was_doubtful: bool
    ) -> PercolatorError:
        tried = f"{rounds + 1} attempts in {self._seconds:g} s to {verb} {key!r}"
        if isinstance(last, Refused) and not was_doubtful:
            return StoreUnusable(
                f"{self.name} refused {tried}, although the condition holds: {last}",
                fault=StoreFault.INPUT_OUTPUT,
            )
        return NoAnswer(f"{self.name} gave no answer to {tried}; the last: {last}")

    def _patience(self, size: int = 0, *, factor_max: int = _FACTOR_MAX) -> _Patience:
        first_seconds = self._attempt_seconds + size / _BYTES_PER_SECOND_MIN
        deadline = self.clock.monotonic_seconds() + self._seconds
        return _Patience(self.clock, self._random, first_seconds, deadline, factor_max)


class _Patience:
    """How long the attempts of one call may take, and the pauses between them."""

    def __init__(
        self,
        clock: Clock,
        random: Random,
        first_seconds: float,
        deadline: float,
        factor_max: int,
    ) -> None:
        self._clock = clock
        self._random = random
        self._first_seconds = first_seconds
        self._deadline = deadline
        self._factor_max = factor_max
        self._pauses = Backoff(clock, random, _PAUSE_SECONDS_MIN, _PAUSE_SECONDS_MAX)

    @property
    def rounds(self) -> int:
        """Pauses until now."""
        return self._pauses.rounds

    def attempt_seconds(self) -> float:
        """How long the next attempt may take. A late one outlasts the call no more than the first
        one would."""
        left = self._deadline - self._clock.monotonic_seconds()
        first = self._first_seconds
        seconds = doubled_seconds(first, first * self._factor_max, doublings=self.rounds)
        return max(first, min(seconds, left))

    async def pause(self) -> bool:
        """Waits for the next attempt. False if it is too late for one."""
        return await self._pauses.pause(self._deadline)

    def anew(self) -> _Patience:
        """For another question, to be answered by the same time."""
        return _Patience(
            self._clock, self._random, self._first_seconds, self._deadline, self._factor_max
        )


def _perhaps_done(
    error: PercolatorError, was_doubtful: bool, verb: str, key: str
) -> PercolatorError:
    """The error of one attempt says nothing about those before it."""
    if not was_doubtful or error.retry is Retry.UNKNOWN:
        return copy(error)
    return NoAnswer(f"whether an attempt to {verb} {key!r} has succeeded is unknown: {error}")
