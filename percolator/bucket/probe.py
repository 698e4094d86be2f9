"""Does a bucket keep the promises that a log in it would rely on? Each is tried on keys of its own.

A store that ignores a condition answers as if it had kept it. So nothing is believed but what is
read afterwards, and `Bucket` already reads what it has written: a second creation that is told
"yes" is a broken promise. Only for rules that would remove objects on a later day, the store has to
be asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from statistics import median
from typing import NamedTuple, TypeVar

from percolator.bucket.bucket import Bucket, Written
from percolator.bucket.settings import Settings
from percolator.errors import PercolatorError, Retry, StoreUnusable
from percolator.world import Clock

T = TypeVar("T")

_VERBS = ("create", "replace", "read", "head", "list", "delete")
_RIVALS = 8
_ROUNDS = 5
_WRONG_TAG = "d41d8cd98f00b204e9800998ecf8427e"
"""Looks like a tag of S3: it is that of an empty object, and none is ever written here."""
_BYTES = 4_096
"""About the size of a group commit."""


class Verdict(NamedTuple):
    """Result of the check of one promise."""

    promise: str
    broken: str
    """The store's conduct instead; empty if it keeps the promise."""


class Probe:
    """Tries a bucket below one folder, and deletes what it has written."""

    def __init__(self, bucket: Bucket, clock: Clock, folder: str) -> None:
        """`folder` has never been used: two probes at the same time do not meet."""
        self._bucket = bucket
        self._clock = clock
        self._folder = folder
        self._written: dict[str, None] = {}
        self._seconds: dict[str, list[float]] = {}
        self._numbers = 0
        self.warnings: list[str] = []
        """Settings that break no promise, but may cost money, or could not be found out."""

    async def verdicts(self) -> AsyncIterator[Verdict]:
        """One promise after the other. Raises what prevents any call at all."""
        trials: list[tuple[str, Callable[[], Awaitable[str]]]] = [
            ("a key is created once (If-None-Match)", self._created_once),
            ("of many who create one key, one wins", self._one_creates),
            ("a change with a wrong tag is refused (If-Match)", self._wrong_tag),
            ("a change with the right tag is made", self._right_tag),
            ("of many who change one object, one wins", self._one_changes),
            ("what was written is read, found and listed at once", self._visible_at_once),
        ]
        is_broken = False
        for promise, trial in trials:
            try:
                why = await trial()
            except StoreUnusable as error:
                why = error.message
            is_broken = is_broken or bool(why)
            yield Verdict(promise, why)
        settings = await self._bucket.settings()
        if not any(one.startswith("lifecycle") for one in settings.untold):
            yield Verdict("no rule removes or archives objects", "; ".join(settings.removing))
        self.warnings = warnings_of(settings)
        if is_broken and settings.versioning == "Enabled":
            self.warnings.append(f"versioning may be why promises are not kept: {VERSIONING}")

    async def broken_condition(self) -> str:
        """A test of conditions alone, by a few calls: the store's conduct, if it ignores one;
        empty if it keeps both."""
        return await self._created_once() or await self._wrong_tag()

    def median_seconds(self) -> dict[str, float]:
        """How long each kind of call took, without rivals; deletions once all is cleaned up."""
        return {verb: median(self._seconds[verb]) for verb in _VERBS if verb in self._seconds}

    async def clean_up(self) -> bool:
        """Deletes what the trials have left. False if something may still be there."""
        try:
            for key in self._written:
                await self._timed("delete", self._bucket.delete(key))
        except PercolatorError:
            return False  # the others would fail as slowly
        return True

    # ------------------------------------------------------------------ promises

    async def _created_once(self) -> str:
        key = self._key("once")
        first, second = self._data(), self._data()
        try:
            made = await self._bucket.create(key, first)
        except PercolatorError as error:
            if error.retry is not Retry.UNKNOWN:
                self._written.clear()  # there is nothing to be deleted
            raise
        if not made.is_own:
            return f"the first creation of a new key was refused: {_shown(made)}"
        if (await self._bucket.create(key, second)).is_own:
            return "it ignores If-None-Match: it said yes to a second creation of a key"
        return _differs(await self._read(key), first, "the refused creation")

    async def _one_creates(self) -> str:
        key = self._key("rivals")
        made = await asyncio.gather(
            *(self._bucket.create(key, self._data()) for _ in range(_RIVALS))
        )
        return _winners(made, "create one key")

    async def _wrong_tag(self) -> str:
        key, data = self._key("wrong-tag"), self._data()
        await self._bucket.create(key, data)
        if (await self._bucket.replace(key, self._data(), _WRONG_TAG)).is_own:
            return "it ignores If-Match: it changed an object for the tag of another version"
        if why := _differs(await self._read(key), data, "the refused change"):
            return why
        key = self._key("no-object")
        if (await self._bucket.replace(key, self._data(), _WRONG_TAG)).is_own:
            return "it ignores If-Match: it changed an object that did not exist"
        return ""

    async def _right_tag(self) -> str:
        key = self._key("right-tag")
        found = (await self._bucket.create(key, self._data())).found
        for _ in range(_ROUNDS):
            data = self._data()
            tag = found.tag if found else _WRONG_TAG
            made = await self._timed("replace", self._bucket.replace(key, data, tag))
            if not made.is_own:
                return f"it refuses a change with the right tag: {_shown(made)}"
            if made.found and made.found.tag == tag:
                return "it gave two versions of an object the same tag"
            if why := _differs(await self._read(key), data, "the change", is_late=True):
                return why
            found = made.found
        return ""

    async def _one_changes(self) -> str:
        key = self._key("changes")
        found = (await self._bucket.create(key, self._data())).found
        tag = found.tag if found else _WRONG_TAG
        made = await asyncio.gather(
            *(self._bucket.replace(key, self._data(), tag) for _ in range(_RIVALS))
        )
        return _winners(made, "change one object")

    async def _visible_at_once(self) -> str:
        bucket, made = self._bucket, list[str]()
        for number in range(_ROUNDS):
            key, data = self._key(f"visible/{number:03d}"), self._data()
            # Asked before, as the owner of a log asks for its next number: a store may remember
            # the answer for too long.
            if await bucket.head(key) is not None:
                return "it found an object that was never created"
            await self._timed("create", bucket.create(key, data))
            made.append(key)
            head = await self._timed("head", bucket.head(key))
            if head is None or head.size != len(data):
                return "it did not find an object that had just been created (HEAD)"
            read = await self._timed("read", self._read(key))
            if why := _differs(read, data, "the creation", is_late=True):
                return why
            listed = await self._timed("list", self._listed())
            if listed != made:
                missing = set(made) - set(listed)
                return (
                    f"a list after the creations lacks {len(missing)} of {len(made)} objects"
                    if missing
                    else "a list has keys out of order, or that were never created"
                )
        if await self._listed(after=made[0]) != made[1:]:
            return "a list of the keys above one has others, too, or lacks some"
        await bucket.delete(made[0])
        if await bucket.read(made[0]) is not None or await bucket.head(made[0]) is not None:
            return "it found an object after it had been deleted"
        if await self._listed() != made[1:]:
            return "a list after a deletion has the deleted object, or lacks others"
        return ""

    # ------------------------------------------------------------------ calls

    def _key(self, name: str) -> str:
        key = f"{self._folder}/{name}"
        self._written[key] = None
        return key

    def _data(self) -> bytes:
        """Bytes that nobody else writes."""
        self._numbers += 1
        return f"{self._folder} {self._numbers}".encode().ljust(_BYTES, b".")

    async def _listed(self, after: str = "") -> list[str]:
        return [one.key for one in await self._bucket.list(f"{self._folder}/visible", after=after)]

    async def _read(self, key: str) -> bytes | None:
        found = await self._bucket.read(key)
        return found.data if found else None

    async def _timed(self, verb: str, call: Awaitable[T]) -> T:
        began = self._clock.monotonic_seconds()
        done = await call
        self._seconds.setdefault(verb, []).append(self._clock.monotonic_seconds() - began)
        return done


VERSIONING = (
    "radosgw ignores conditions in a bucket that keeps versions. Use another one, or suspend it"
)


def warnings_of(settings: Settings) -> list[str]:
    """Settings that are no danger for the data, but cost money, or were not told."""
    found = [
        f"the store did not tell the bucket's {setting}: look yourself that nothing removes or "
        "archives objects, and that no versions are kept"
        for setting in settings.untold
    ]
    if settings.versioning == "Enabled" and not settings.removes_versions:
        found.append(
            "the bucket keeps all versions of an object (versioning): what is deleted or replaced "
            "stays and is billed, until a rule with NoncurrentVersionExpiration removes it"
        )
    return found


def _winners(made: list[Written], do: str) -> str:
    won = sum(one.is_own for one in made)
    if won != 1:
        return f"{won} of {len(made)} who tried to {do} at once were told that they did"
    if len({one.found for one in made}) != 1:
        return f"those who tried to {do} at once were shown different objects afterwards"
    return ""


def _differs(found: bytes | None, expected: bytes, after: str, *, is_late: bool = False) -> str:
    if found == expected:
        return ""
    what = "nothing" if found is None else "other bytes"
    stale = ", as if it had not happened yet" if is_late else ""
    return f"a read after {after} returned {what}{stale}"


def _shown(made: Written) -> str:
    return "there is nothing" if made.found is None else "it holds what another call wrote"
