"""Calls on a store that loses, delays and falsifies answers still know what happened."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from percolator.bucket.bucket import Bucket, Written
from percolator.bucket.port import Doubtful, Head, Refused, Stored
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    StoreUnusable,
    Unavailable,
)
from percolator.tasks import Tasks
from tests.bucket.rivals import COUNTER, create_counter, increment
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, tag_of
from tests.unit.bucket.clocks import virtual_clock

EVERY_FAULT = BucketFaults(
    lost_request=0.08,
    lost_answer=0.08,
    late_request=0.08,
    late_answer=0.08,
    failed_before=0.08,
    failed_after_success=0.08,
    list_delay_seconds=5.0,
)
KINDS = {
    "lost_request",
    "lost_answer",
    "late_request",
    "late_answer",
    "failed_before",
    "failed_after_success",
}


class Hostile(BucketInMemory):
    """A store with what tests need around it."""

    def __init__(self, tasks: Tasks, faults: BucketFaults | None = None, seed: int = 1) -> None:
        super().__init__(virtual_clock(), random.Random(seed), tasks, faults)
        self.told: list[tuple[bool, Exception]] = []
        """The errors of the next attempts to write, and whether each is made all the same."""
        self.told_readers: list[Exception] = []

    def bucket(self, seconds: float = 600.0) -> Bucket:
        return Bucket(self, virtual_clock(), random.Random(7), attempt_seconds=1.0, seconds=seconds)

    async def create(self, key: str, data: bytes) -> str:
        if self.told:
            is_made, error = self.told.pop(0)
            if is_made:
                self._create(key, data)
            raise error
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        if self.told:
            is_made, error = self.told.pop(0)
            if is_made:
                self._replace(key, data, tag)
            raise error
        return await super().replace(key, data, tag)

    async def read(self, key: str) -> Stored | None:
        if self.told_readers:
            raise self.told_readers.pop(0)
        return await super().read(key)


@asynccontextmanager
async def hostile(faults: BucketFaults | None = None, seed: int = 1) -> AsyncIterator[Hostile]:
    tasks = Tasks()
    try:
        yield Hostile(tasks, faults, seed)
    finally:
        await tasks.drain(60.0)


@pytest.mark.parametrize("seed", range(5))
async def test_each_number_is_created_by_one_of_its_rivals_whatever_is_lost_or_late(
    seed: int,
) -> None:
    async with hostile(EVERY_FAULT, seed) as store:
        buckets = [store.bucket() for _ in range(4)]
        for number in range(40):
            key = f"log/{number}"
            made = await asyncio.gather(
                *(one.create(key, b"%d" % rival) for rival, one in enumerate(buckets))
            )
            (winner,) = [rival for rival, one in enumerate(made) if one.is_own]
            assert {one.found for one in made} == {Stored(b"%d" % winner, tag_of(b"%d" % winner))}
        # Requests that are still on their way change nothing either.
        kept = dict(store.objects)
    assert dict(store.objects) == kept
    assert store.struck.keys() >= KINDS
    assert sum(one.doubtful for one in buckets) > 0


@pytest.mark.parametrize("seed", range(5))
async def test_no_increment_is_lost_or_made_twice(seed: int) -> None:
    async def count(bucket: Bucket, writer: str) -> None:
        for number in range(1, 11):
            await increment(bucket, writer, number)

    async with hostile(EVERY_FAULT, seed) as store:
        await create_counter(store.bucket())
        await asyncio.gather(*(count(store.bucket(), writer) for writer in "abcd"))
    assert json.loads(store.objects[COUNTER])["sum"] == 40
    assert store.struck.keys() >= KINDS


async def test_deletions_end_and_lists_catch_up() -> None:
    async with hostile(EVERY_FAULT) as store:
        bucket = store.bucket()
        for number in range(60):
            await bucket.create(f"log/{number:03d}", b"%d" % number)
            if len(await bucket.list("log")) > len(store.objects):
                assert store.struck["list_delay_seconds"]
        for number in range(0, 60, 2):
            await bucket.delete(f"log/{number:03d}")
            assert await bucket.read(f"log/{number:03d}") is None
        await asyncio.sleep(6)
        keys = [one.key for one in await bucket.list("log")]
        assert keys == [f"log/{number:03d}" for number in range(1, 60, 2)]
    assert store.struck.keys() >= {*KINDS, "list_delay_seconds"}


# ------------------------------------------------------------ one false answer at a time

ANSWERS = [Refused("412"), Refused("409"), Doubtful("500"), TimeoutError()]


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
async def test_ones_own_object_is_recognized_behind_any_answer(answer: Exception) -> None:
    async with hostile() as store:
        store.told = [(True, answer), (True, answer)]
        made = await store.bucket().create("log/1", b"own")
        assert made == Written(True, Stored(b"own", tag_of(b"own")))
        changed = await store.bucket().replace("log/1", b"newer", tag_of(b"own"))
        assert changed == Written(True, Stored(b"newer", tag_of(b"newer")))
        assert store.told == []


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
async def test_what_did_not_arrive_is_sent_again(answer: Exception) -> None:
    async with hostile() as store:
        store.told = [(False, answer)] * 3
        assert (await store.bucket().create("log/1", b"own")).is_own
        store.told = [(False, answer)] * 3
        assert (await store.bucket().replace("log/1", b"newer", tag_of(b"own"))).is_own


@pytest.mark.parametrize("answer", ANSWERS, ids=str)
async def test_a_rivals_object_is_told_as_such(answer: Exception) -> None:
    async with hostile() as store:
        store.objects["log/1"] = b"rival"
        store.told = [(False, answer)]
        made = await store.bucket().create("log/1", b"own")
        assert made == Written(False, Stored(b"rival", tag_of(b"rival")))
        store.told = [(False, answer)]
        changed = await store.bucket().replace("log/1", b"own", tag_of(b"before"))
        assert changed == Written(False, Stored(b"rival", tag_of(b"rival")))


async def test_a_change_of_an_object_that_is_gone_finds_nothing() -> None:
    async with hostile() as store:
        assert await store.bucket().replace("log/1", b"own", "tag") == Written(False, None)


async def test_a_read_that_fails_after_a_refusal_is_repeated() -> None:
    async with hostile() as store:
        store.told, store.told_readers = [(True, Refused("409"))], [Doubtful("500")] * 3
        bucket = store.bucket()
        assert (await bucket.create("log/1", b"own")).is_own
        assert bucket.doubtful == 3


async def test_a_store_that_is_silent_for_too_long_leaves_the_outcome_unknown() -> None:
    async with hostile(BucketFaults(lost_request=1.0)) as store:
        with pytest.raises(Unavailable, match=r"attempts in 30 s to read 'log/1'"):
            await store.bucket(seconds=30.0).create("log/1", b"own")
        with pytest.raises(Unavailable, match="no answer in"):
            await store.bucket(seconds=30.0).head("log/1")


# ------------------------------------------------------------ how long an attempt may take


class Slow(Hostile):
    """A store whose answers take long."""

    seconds = 0.0
    """How long every attempt takes."""
    bytes_per_second = 1 << 40
    silent_until = 0.0

    async def create(self, key: str, data: bytes) -> str:
        await self._take(len(data))
        return await super().create(key, data)

    async def read(self, key: str) -> Stored | None:
        await self._take(len(self.objects.get(key, b"")))
        return await super().read(key)

    async def head(self, key: str) -> Head | None:
        await self._take(0)
        return await super().head(key)

    async def _take(self, size: int) -> None:
        if self._now() < self.silent_until:
            await asyncio.Event().wait()
        await asyncio.sleep(self.seconds + size / self.bytes_per_second)

    def _now(self) -> float:
        return self._clock.monotonic_seconds()


async def test_over_a_slow_line_a_large_object_needs_one_attempt_to_be_stored() -> None:
    store = Slow(Tasks())
    store.bytes_per_second = 300 << 10
    bucket = store.bucket()
    assert (await bucket.create("log/1", b"x" * (4 << 20))).is_own
    assert bucket.doubtful == 0


async def test_over_a_slow_line_a_large_object_is_read_whose_size_is_not_known() -> None:
    store = Slow(Tasks())
    store.bytes_per_second = 300 << 10
    store.objects["log/1"] = b"x" * (2 << 20)
    assert await store.bucket().read("log/1") is not None


async def test_a_store_that_takes_longer_than_the_first_attempt_may_is_slow_and_works() -> None:
    store = Slow(Tasks())
    store.seconds = 2.5
    bucket = store.bucket(seconds=30.0)
    assert (await bucket.create("log/1", b"own")).is_own
    assert await bucket.head("log/1") is not None


async def test_after_an_outage_nothing_waits_long_for_an_attempt_that_was_lost_in_it() -> None:
    store = Slow(Tasks())
    store.silent_until = store._now() + 100.0
    bucket = store.bucket()
    assert (await bucket.create("log/1", b"own")).is_own
    assert store._now() < store.silent_until + 6.0
    store.silent_until = store._now() + 100.0
    assert await bucket.head("log/1") is not None
    assert store._now() < store.silent_until + 4.0


async def test_a_store_that_goes_on_refusing_what_holds_is_unusable() -> None:
    async with hostile() as store:
        store.objects["log/1"] = b"there"
        store.told = [(False, Refused("412"))] * 1_000
        with pytest.raises(StoreUnusable, match="although the condition holds: 412"):
            await store.bucket(seconds=30.0).replace("log/1", b"newer", tag_of(b"there"))


@pytest.mark.parametrize(
    ("before", "expected"),
    [([], PermissionDenied), ([(False, Doubtful("500"))], Unavailable)],
    ids=["first", "after silence"],
)
async def test_lost_rights_say_nothing_about_an_earlier_attempt(
    before: list[tuple[bool, Exception]], expected: type[PercolatorError]
) -> None:
    async with hostile() as store:
        store.told = [*before, (False, PermissionDenied("no rights"))]
        with pytest.raises(expected, match="no rights"):
            await store.bucket().create("log/1", b"own")


async def test_rights_that_are_lost_before_the_reading_leave_the_outcome_unknown() -> None:
    async with hostile() as store:
        store.told, store.told_readers = [(True, Refused("412"))], [PermissionDenied("no rights")]
        with pytest.raises(Unavailable, match="is unknown: no rights"):
            await store.bucket().create("log/1", b"own")


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".a", "a b", "ä", "x" * 513])
async def test_a_key_that_some_store_would_change_is_refused(key: str) -> None:
    async with hostile() as store:
        bucket = store.bucket()
        for call in (bucket.create(key, b""), bucket.read(key), bucket.delete(key)):
            with pytest.raises(InvalidArgument, match="key: expected"):
                await call
        assert not store.objects
