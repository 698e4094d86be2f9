"""A bucket in memory that behaves as badly as a store may: for tests, and for simulations.

Its tags are hashes of the bytes, as those of S3 are. Faults are drawn from the `Random` that it is
given, so that a run can be repeated, and `struck` counts them: a test in which none struck has
tested nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeVar

from sortedcontainers import SortedDict

from percolator.bucket.port import Doubtful, Head, Listed, Refused, Stored
from percolator.bucket.settings import Settings
from percolator.tasks import Tasks
from percolator.world import Clock, Random

T = TypeVar("T")
Keys = list[str]
Page = list[Listed]

_DRAWN = (
    "lost_request",
    "lost_answer",
    "late_request",
    "late_answer",
    "failed_before",
    "failed_after_success",
)


@dataclass(frozen=True)
class BucketFaults:
    """Shares of the attempts, from 0 to 1, that each fault strikes; and how long things take."""

    lost_request: float = 0.0
    """Not done, and no answer."""
    lost_answer: float = 0.0
    """Done, and no answer."""
    late_request: float = 0.0
    """No answer, and done later: perhaps when nobody expects it any more."""
    late_answer: float = 0.0
    """Done, and answered later: perhaps when nobody waits any more."""
    failed_before: float = 0.0
    """Not done, and answered with 409 or 500, though the condition may hold."""
    failed_after_success: float = 0.0
    """Done, and answered with 409, 412 or 500."""
    late_seconds: float = 20.0
    """The longest delay of what is late."""
    call_seconds: float = 0.02
    """A call takes at most this on its way there, and again on its way back."""
    list_delay_seconds: float = 0.0
    """For so long, a list may lack what was created, and have what was deleted."""


class BucketInMemory:
    """The port's attempts, on a dictionary."""

    def __init__(
        self, clock: Clock, random: Random, tasks: Tasks, faults: BucketFaults | None = None
    ) -> None:
        """Requests that are late arrive in `tasks`."""
        self.objects: SortedDict[str, bytes] = SortedDict()
        self.faults = faults or BucketFaults(call_seconds=0.0)
        self.bucket_settings = Settings()
        """Settings that it tells."""
        self.struck: Counter[str] = Counter()
        """How often each fault has struck, by its name in `BucketFaults`."""
        self._clock = clock
        self._random = random
        self._tasks = tasks
        self._before: dict[str, tuple[float, bool]] = {}
        """When keys were created or deleted last, and whether they were there before."""

    @property
    def name(self) -> str:
        """The store for messages."""
        return "a bucket in memory"

    async def create(self, key: str, data: bytes) -> str:
        """Stores an object if the key has none."""
        return await self._attempt(lambda: self._create(key, data), is_change=True)

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        """Stores an object in place of the one with this tag."""
        return await self._attempt(lambda: self._replace(key, data, tag), is_change=True)

    async def read(self, key: str) -> Stored | None:
        """The object; None if the key has none."""
        return await self._attempt(lambda: self._read(key))

    async def head(self, key: str) -> Head | None:
        """The object's tag and size; None if the key has none."""
        found = await self._attempt(lambda: self._read(key))
        return Head(found.tag, len(found.data)) if found else None

    async def list(self, folder: str, after: str, limit: int) -> Page:
        """The first objects of a folder, perhaps as they were a while ago."""
        keys = await self._attempt(lambda: self._list(folder, after, limit))
        return [Listed(key, len(self.objects.get(key, b""))) for key in keys]

    async def delete(self, key: str) -> None:
        """Deletes the object if there is one."""
        await self._attempt(lambda: self._put(key, None), is_change=True)

    async def settings(self) -> Settings:
        """The settings that it tells."""
        return await self._attempt(lambda: self.bucket_settings)

    # ------------------------------------------------------------------ what is done at once

    def _create(self, key: str, data: bytes) -> str:
        if key in self.objects:
            raise Refused("412")
        self._put(key, data)
        return tag_of(data)

    def _replace(self, key: str, data: bytes, tag: str) -> str:
        if key not in self.objects or tag_of(self.objects[key]) != tag:
            raise Refused("412")
        self._put(key, data)
        return tag_of(data)

    def _read(self, key: str) -> Stored | None:
        data = self.objects.get(key)
        return None if data is None else Stored(data, tag_of(data))

    def _put(self, key: str, data: bytes | None) -> None:
        if (key in self.objects) != (data is not None):
            self._before[key] = (self._clock.monotonic_seconds(), key in self.objects)
        if data is None:
            self.objects.pop(key, None)
        else:
            self.objects[key] = data

    def _list(self, folder: str, after: str, limit: int) -> Keys:
        since = self._clock.monotonic_seconds() - self.faults.list_delay_seconds
        listed = set(self.objects)
        for key, (changed, was_there) in self._before.items():
            if changed > since and self._random.random() < 1 / 2:
                self.struck["list_delay_seconds"] += 1
                (listed.add if was_there else listed.discard)(key)
        first = f"{folder}/" if folder else ""
        return sorted(one for one in listed if one.startswith(first) and one > after)[:limit]

    # ------------------------------------------------------------------ faults

    async def _attempt(self, do: Callable[[], T], *, is_change: bool = False) -> T:
        faults, fault = self.faults, self._drawn()
        await self._pass(faults.call_seconds)
        if fault == "lost_request":
            await self._silence()
        if fault == "late_request":
            if is_change:
                self._tasks.start(self._later(do))
            await self._silence()
        if fault == "failed_before":
            raise self._failure(Refused("409") if is_change else None)
        done = do()
        if fault == "lost_answer":
            await self._silence()
        if fault == "failed_after_success":
            refused = Refused("409" if self._random.random() < 1 / 2 else "412")
            raise self._failure(refused if is_change else None)
        await self._pass(faults.late_seconds if fault == "late_answer" else faults.call_seconds)
        return done

    def _drawn(self) -> str:
        """The fault of an attempt, or nothing."""
        left = self._random.random()
        for fault in _DRAWN:
            left -= getattr(self.faults, fault)
            if left < 0:
                self.struck[fault] += 1
                return fault
        return ""

    def _failure(self, refused: Refused | None) -> Exception:
        return refused if refused and self._random.random() < 1 / 2 else Doubtful("500")

    async def _later(self, do: Callable[[], object]) -> None:
        await self._pass(self.faults.late_seconds)
        with suppress(Refused):
            do()

    async def _silence(self) -> None:
        """Longer than anybody waits, in the end."""
        await self._clock.sleep(self.faults.late_seconds)
        raise Doubtful("the connection broke")

    async def _pass(self, seconds_max: float) -> None:
        await self._clock.sleep(seconds_max * self._random.random())


def tag_of(data: bytes) -> str:
    """The tag of an object with these bytes: the same bytes have the same tag, as on S3."""
    return sha256(data).hexdigest()[:32]
