"""A store that breaks a promise is told what it did, and is left as it was."""

from __future__ import annotations

import random

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.port import Head, Refused, Stored
from percolator.bucket.probe import Probe
from percolator.bucket.settings import Settings
from percolator.errors import PermissionDenied, Unavailable
from percolator.tasks import Tasks
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, tag_of
from tests.unit.bucket.clocks import virtual_clock

Keys = list[str]


class Store(BucketInMemory):
    """Keeps all promises, until a subclass breaks one."""

    def __init__(self, faults: BucketFaults | None = None) -> None:
        self.tasks = Tasks()
        super().__init__(virtual_clock(), random.Random(3), self.tasks, faults)


async def verdicts(store: BucketInMemory, seconds: float = 30.0) -> dict[str, str]:
    """The promises that are not kept, after cleaning up."""
    clock = virtual_clock()
    bucket = Bucket(store, clock, random.Random(4), attempt_seconds=1.0, seconds=seconds)
    probe = Probe(bucket, clock, "check-1")
    broken = {promise: why async for promise, why in probe.verdicts() if why}
    assert await probe.clean_up()
    assert not store.objects
    return broken


class IgnoresIfNoneMatch(Store):
    def _create(self, key: str, data: bytes) -> str:
        self._put(key, data)
        return tag_of(data)


class RefusesAndStores(Store):
    """As a store may that looks at the condition only for its answer."""

    def _create(self, key: str, data: bytes) -> str:
        exists = key in self.objects
        self._put(key, data)
        if exists:
            raise Refused("412")
        return tag_of(data)


class IgnoresIfMatch(Store):
    def _replace(self, key: str, data: bytes, tag: str) -> str:
        self._put(key, data)
        return tag_of(data)


class ChangesNothing(Store):
    """Creates for If-Match where there is nothing."""

    def _replace(self, key: str, data: bytes, tag: str) -> str:
        if key in self.objects:
            return super()._replace(key, data, tag)
        return super()._create(key, data)


class RefusesRightTags(Store):
    """As radosgw does, for a tag in quotes."""

    def _replace(self, key: str, data: bytes, tag: str) -> str:
        raise Refused("412")


class ReadsTheOld(Store):
    """A cache in front of the store that has not heard of changes yet."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: dict[str, bytes] = {}

    def _read(self, key: str) -> Stored | None:
        data = self.objects.get(key)
        if data is not None:
            data = self.cache.setdefault(key, data)
        return None if data is None else Stored(data, tag_of(data))


class RemembersThatThereWasNothing(Store):
    def __init__(self) -> None:
        super().__init__()
        self.absent: set[str] = set()

    async def head(self, key: str) -> Head | None:
        if key not in self.objects:
            self.absent.add(key)
        return None if key in self.absent else await super().head(key)


class ListsLate(Store):
    def _list(self, folder: str, after: str, limit: int) -> Keys:
        return super()._list(folder, after, limit)[:-1]


class ListsInAnyOrder(Store):
    """As S3 Express does."""

    def _list(self, folder: str, after: str, limit: int) -> Keys:
        return super()._list(folder, after, limit)[::-1]


class ListsFromTheBeginning(Store):
    def _list(self, folder: str, after: str, limit: int) -> Keys:
        return super()._list(folder, "", limit)


class ListsDeleted(Store):
    def __init__(self) -> None:
        super().__init__()
        self.ever: set[str] = set()

    def _list(self, folder: str, after: str, limit: int) -> Keys:
        self.ever |= self.objects.keys()
        return sorted(one for one in self.ever if one.startswith(folder) and one > after)


class GivesOneTag(Store):
    """Objects of one size have one tag."""

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        await super().replace(key, data, tag)
        return tag


CREATION = "a key is created once (If-None-Match)"
CHANGE = "a change with a wrong tag is refused (If-Match)"
RIGHT = "a change with the right tag is made"
VISIBLE = "what was written is read, found and listed at once"


@pytest.mark.parametrize(
    ("kind", "promise", "why"),
    [
        (IgnoresIfNoneMatch, CREATION, "it said yes to a second creation of a key"),
        (RefusesAndStores, CREATION, "it said yes to a second creation of a key"),
        (IgnoresIfNoneMatch, "of many who create one key, one wins", "8 of 8 who tried"),
        (IgnoresIfMatch, CHANGE, "it changed an object for the tag of another version"),
        (IgnoresIfMatch, "of many who change one object, one wins", "8 of 8 who tried"),
        (ChangesNothing, CHANGE, "it changed an object that did not exist"),
        (RefusesRightTags, RIGHT, "although the condition holds: 412"),
        (ReadsTheOld, RIGHT, "returned other bytes, as if it had not happened yet"),
        (RemembersThatThereWasNothing, VISIBLE, "did not find an object that had just been"),
        (ListsLate, VISIBLE, "a list after the creations lacks 1 of 1 objects"),
        (ListsInAnyOrder, VISIBLE, "a list has keys out of order"),
        (ListsFromTheBeginning, VISIBLE, "a list of the keys above one has others"),
        (ListsDeleted, VISIBLE, "a list after a deletion has the deleted object"),
        (GivesOneTag, RIGHT, "gave two versions of an object the same tag"),
    ],
)
async def test_a_broken_promise_is_told_with_what_the_store_did(
    kind: type[Store], promise: str, why: str
) -> None:
    assert why in (await verdicts(kind()))[promise]


async def test_a_store_that_only_loses_and_delays_keeps_all_promises() -> None:
    faults = BucketFaults(
        lost_request=0.1, lost_answer=0.1, late_answer=0.1, failed_before=0.1,
        failed_after_success=0.1, late_seconds=5.0,
    )  # fmt: skip
    store = Store(faults)
    assert await verdicts(store, seconds=600.0) == {}
    assert set(store.struck) == {
        "lost_request", "lost_answer", "late_answer", "failed_before", "failed_after_success",
    }  # fmt: skip


RULE = "the rule 'old' of the lifecycle removes them 7 days after they were written"
VERSIONS = "the bucket keeps all versions of an object"


async def test_a_rule_that_removes_objects_breaks_a_promise() -> None:
    store = Store()
    store.bucket_settings = Settings(removing=(RULE,))
    assert await verdicts(store) == {"no rule removes or archives objects": RULE}


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        (Settings(), []),
        (Settings(versioning="Suspended"), []),
        (Settings(versioning="Enabled"), [VERSIONS]),
        (Settings(versioning="Enabled", removes_versions=True), []),
        (Settings(untold=("lifecycle (403)",)), ["did not tell the bucket's lifecycle (403)"]),
    ],
)
async def test_what_only_costs_money_or_is_not_told_is_a_warning(
    settings: Settings, texts: list[str]
) -> None:
    store, clock = Store(), virtual_clock()
    store.bucket_settings = settings
    bucket = Bucket(store, clock, random.Random(4), attempt_seconds=1.0, seconds=30.0)
    probe = Probe(bucket, clock, "check-1")
    found = [one async for one in probe.verdicts()]
    assert len(found) == (6 if settings.untold else 7)
    assert len(probe.warnings) == len(texts)
    assert all(text in one for text, one in zip(texts, probe.warnings, strict=True))


async def test_versions_are_named_as_the_possible_cause_of_ignored_conditions() -> None:
    store, clock = IgnoresIfMatch(), virtual_clock()
    store.bucket_settings = Settings(versioning="Enabled")
    bucket = Bucket(store, clock, random.Random(4), attempt_seconds=1.0, seconds=30.0)
    probe = Probe(bucket, clock, "check-1")
    _ = [one async for one in probe.verdicts()]
    assert probe.warnings[0].startswith(VERSIONS)
    assert probe.warnings[1].startswith("versioning may be why promises are not kept")


async def test_what_prevents_all_calls_ends_the_probe() -> None:
    class Closed(Store):
        async def create(self, key: str, data: bytes) -> str:
            raise PermissionDenied("no rights")

    with pytest.raises(PermissionDenied):
        await verdicts(Closed())


async def test_what_cannot_be_deleted_is_told_and_not_waited_for_again() -> None:
    class Keeps(Store):
        asked: list[str]

        async def delete(self, key: str) -> None:
            self.asked.append(key)
            raise PermissionDenied("no rights to delete")

    store, clock = Keeps(), virtual_clock()
    store.asked = []
    bucket = Bucket(store, clock, random.Random(4), attempt_seconds=1.0, seconds=30.0)
    probe = Probe(bucket, clock, "check-1")
    with pytest.raises(PermissionDenied):
        _ = [one async for one in probe.verdicts()]
    store.asked.clear()
    assert not await probe.clean_up()
    assert len(store.asked) == 1
    assert store.objects


async def test_a_store_that_is_silent_is_given_up_in_time() -> None:
    store, clock = Store(BucketFaults(lost_request=1.0)), virtual_clock()
    bucket = Bucket(store, clock, random.Random(4), attempt_seconds=1.0, seconds=10.0)
    probe, began = Probe(bucket, clock, "check-1"), clock.monotonic_seconds()
    with pytest.raises(Unavailable, match="gave no answer"):
        _ = [one async for one in probe.verdicts()]
    assert not await probe.clean_up()
    assert clock.monotonic_seconds() - began < 25.0
