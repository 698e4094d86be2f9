"""Records in a bucket: one version after another, whatever the store does, and nothing is guessed.

Long values are in objects of their own, which a heartbeat does not write again.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
from base64 import b64decode
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percolator.bucket.bucket import Bucket
from percolator.bucket.port import Attempts, Stored
from percolator.errors import PercolatorError, PermissionDenied, StoreFault, StoreUnusable
from percolator.services.chassis import records as module
from percolator.services.chassis.coordinator import CoordinatorTimes, decode, encode
from percolator.services.chassis.record_coordinator import RecordCoordinator, RecordLeadership
from percolator.services.chassis.records import BucketRecords, Seen, Version
from percolator.tasks import Tasks
from percolator.testing.in_process_network import InProcessNetwork
from percolator.world import World
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, Keys, Page
from tests.simulation.virtual_time import VirtualClock

EVERY_FAULT = BucketFaults(
    lost_request=0.07,
    lost_answer=0.07,
    late_request=0.07,
    late_answer=0.07,
    failed_before=0.07,
    failed_after_success=0.07,
    list_delay_seconds=5.0,
)
ROLE = b"role/master"
NAME = "coordinator/role/master"
VALUES = "coordinator/values/role/master/"
MAP = b"=map"
COUNT = b"count"


class Model(BucketInMemory):
    """A bucket that counts the calls, and those that tests stop or refuse."""

    def __init__(self, faults: BucketFaults | None = None, seed: int = 1) -> None:
        self.clock = VirtualClock(asyncio.get_running_loop())
        self.tasks = Tasks()
        super().__init__(self.clock, random.Random(seed), self.tasks, faults)
        self.calls: Counter[str] = Counter()
        self.uploaded = 0
        self._processes = 0
        self.before_read: Callable[[str], Awaitable[None]] | None = None
        self.before_delete: Callable[[str], Awaitable[None]] | None = None

    def records(self, seconds: float = 600.0, reach: Attempts | None = None) -> BucketRecords:
        """Records of another process each time."""
        self._processes += 1
        chance = random.Random(self._processes)
        bucket = Bucket(reach or self, self.clock, chance, attempt_seconds=1.0, seconds=seconds)
        return BucketRecords(bucket, bucket, chance)

    async def create(self, key: str, data: bytes) -> str:
        self.calls["create"] += 1
        self.uploaded += len(data)
        return await super().create(key, data)

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        self.calls["replace"] += 1
        self.uploaded += len(data)
        return await super().replace(key, data, tag)

    async def read(self, key: str) -> Stored | None:
        self.calls["read"] += 1
        if self.before_read is not None:
            await self.before_read(key)
        return await super().read(key)

    async def list(self, folder: str, after: str, limit: int) -> Page:
        self.calls["list"] += 1
        return await super().list(folder, after, limit)

    async def delete(self, key: str) -> None:
        self.calls["delete"] += 1
        if self.before_delete is not None:
            await self.before_delete(key)
        await super().delete(key)

    def values(self) -> Keys:
        return [key for key in self.objects if key.startswith(VALUES)]


@pytest.fixture
@asynccontextmanager
async def model() -> AsyncIterator[Model]:
    yield Model()


def long(text: str) -> bytes:
    return text.encode() * 2_000


async def put_map(records: BucketRecords, value: bytes) -> None:
    await records.put(ROLE, {MAP: value})


async def the_map(records: BucketRecords) -> bytes | None:
    return (await records.read(ROLE, [MAP])).get(MAP)


@pytest.mark.parametrize("seed", range(12))
async def test_of_many_who_change_a_record_one_does_whatever_the_store_does(seed: int) -> None:
    """Each adds one to what it has seen, and writes a long value that fits."""
    model = Model(EVERY_FAULT, seed)
    made = 0

    async def process() -> None:
        nonlocal made
        records = model.records()
        for _ in range(6):
            found = (await records.read(ROLE, [COUNT, MAP])) or {COUNT: b"0", MAP: long("0")}
            count = int(found[COUNT])
            assert found[MAP] == long(str(count)), "both are as of one time"
            seen = Seen(COUNT, found[COUNT] if count else None)
            new = str(count + 1)
            made += await records.change(ROLE, seen, {COUNT: new.encode(), MAP: long(new)})

    await asyncio.gather(*(process() for _ in range(4)))
    await asyncio.sleep(2 * model.faults.late_seconds)
    found = await model.records().read(ROLE, [COUNT, MAP])
    assert made <= int(found[COUNT]), "who was told that it changed the record did so"
    assert found[MAP] == long(found[COUNT].decode())
    assert {name for name in model.struck if "list" not in name} == {
        "lost_request",
        "lost_answer",
        "late_request",
        "late_answer",
        "failed_before",
        "failed_after_success",
    }


async def test_of_two_who_make_the_same_change_at_once_one_does(model: Model) -> None:
    processes = [model.records() for _ in range(2)]
    for count in range(5):
        seen = Seen(COUNT, b"%d" % count if count else None)
        change = {COUNT: b"%d" % (count + 1)}
        made = await asyncio.gather(*(one.change(ROLE, seen, change) for one in processes))
        assert sorted(made) == [False, True]


async def test_a_change_after_an_own_one_is_a_single_call(model: Model) -> None:
    records = model.records()
    await records.put(ROLE, {COUNT: b"1"})
    model.calls.clear()
    assert await records.change(ROLE, Seen(COUNT, b"1"), {COUNT: b"2"})
    assert model.calls == {"replace": 1}
    assert not await records.change(ROLE, Seen(COUNT, b"1"), {COUNT: b"3"})
    assert await model.records().read(ROLE, [COUNT]) == {COUNT: b"2"}


async def test_heartbeats_do_not_upload_the_map(model: Model) -> None:
    world = World(model.clock, InProcessNetwork({}), random.Random(1))
    coordinator = RecordCoordinator(model.records(), world, CoordinatorTimes(beat_seconds=0.5))
    led = await coordinator.campaign("master", "a:1")
    await led.put("map", long("a map of many tablets "))
    uploaded, model.uploaded = model.uploaded, 0
    await asyncio.sleep(10.0)
    assert model.calls["replace"] >= 20
    assert model.uploaded < uploaded / 2
    assert await led.get("map") == long("a map of many tablets ")
    await coordinator.close()


async def test_a_long_value_is_deleted_once_another_one_has_taken_its_place(model: Model) -> None:
    records = model.records()
    for text in ("one", "two", "three"):
        await put_map(records, long(text))
    await put_map(records, b"short")
    await asyncio.sleep(1.0)
    assert model.values() == []
    assert await the_map(records) == b"short"


async def test_long_values_of_processes_that_died_are_deleted_by_the_next_one(model: Model) -> None:
    await put_map(model.records(), long("one"))
    # Who dies between the two writes leaves this; a creation that arrives late does, too.
    await model.create(f"{VALUES}2-0123456789abcdef-1", long("never named"))
    await model.create(f"{VALUES}something else", b"not a value")
    await put_map(model.records(), long("two"))
    await asyncio.sleep(1.0)
    assert len(model.values()) == 2
    assert f"{VALUES}something else" in model.values()
    assert await the_map(model.records()) == long("two")


async def test_a_process_that_was_paused_does_not_delete_what_its_successor_is_about_to_name(
    model: Model,
) -> None:
    """It lists the values when the successor's is there already, but not yet in the record."""
    paused, successor = model.records(), model.records()
    await put_map(paused, long("one"))
    listing = asyncio.Event()
    list_now = model.list

    async def late(folder: str, after: str, limit: int) -> Page:
        await listing.wait()
        return await list_now(folder, after, limit)

    model.list = late  # type: ignore[method-assign]
    await put_map(paused, long("two"))  # and sweeps, after the pause
    replace_now = model.replace

    async def replace_later(key: str, data: bytes, tag: str) -> str:
        listing.set()
        await asyncio.sleep(0.5)
        return await replace_now(key, data, tag)

    model.replace = replace_later  # type: ignore[method-assign]
    await put_map(successor, long("three"))
    await asyncio.sleep(1.0)
    assert model.calls["list"] > 0
    assert await the_map(model.records()) == long("three")


async def test_a_reader_that_meets_a_change_reads_the_next_value(model: Model) -> None:
    writer = model.records()
    await put_map(writer, long("one"))
    once = [1]

    async def change_before(key: str) -> None:
        if key.startswith(VALUES) and once:
            once.clear()
            await put_map(writer, long("two"))
            await asyncio.sleep(1.0)
            assert key not in model.objects

    model.before_read = change_before
    assert await the_map(model.records()) == long("two")
    assert not once


async def test_a_value_that_did_not_change_is_not_read_again(model: Model) -> None:
    reader = model.records()
    await put_map(model.records(), long("one"))
    for _ in range(3):
        assert await the_map(reader) == long("one")
    assert (
        model.calls["read"] <= 5
    )  # the writer's first look, three of the record, one of the value


async def test_what_cannot_be_deleted_costs_space_and_nothing_else(model: Model) -> None:
    async def refuse(key: str) -> None:
        raise PermissionDenied("the account may not delete")

    model.before_delete = refuse
    records = model.records()
    for text in ("one", "two", "three"):
        await put_map(records, long(text))
    assert await the_map(records) == long("three")
    model.before_delete = None
    await put_map(model.records(), long("four"))
    await asyncio.sleep(1.0)
    assert len(model.values()) == 1


# ------------------------------------------------------------------ what is not needed any more


async def rewritten(seed: int) -> list[str]:
    """What is wrong after two processes have replaced a long value again and again, on a bucket
    that loses and delays answers, and one of them once more when it does so no longer."""
    model = Model(EVERY_FAULT, seed)
    problems = list[str]()

    async def read() -> None:
        try:
            await the_map(model.records())
        except StoreUnusable as error:
            problems.append(str(error))

    async def process(name: str, records: BucketRecords) -> None:
        for number in range(6):
            with suppress(PercolatorError):
                await put_map(records, long(f"value {number} of {name}"))
            await read()

    first, second = model.records(seconds=30.0), model.records(seconds=30.0)
    await asyncio.gather(process("a", first), process("b", second))
    await asyncio.sleep(2 * model.faults.late_seconds)
    model.faults = BucketFaults()
    await put_map(first, long("the last but one"))
    await put_map(first, long("the last"))
    await asyncio.sleep(1.0)
    await read()
    if len(model.values()) > 1:
        problems.append(f"{len(model.values()) - 1} long values stay that nothing names")
    return problems


SEEDS = range(12)


async def test_of_long_values_only_those_stay_that_the_record_names() -> None:
    """Also if a deletion fails, or a creation arrives after its value was replaced."""
    assert [problem for seed in SEEDS for problem in await rewritten(seed)] == []


BUGS = {
    "replaced values stay": ("if replaced:", "if False:"),
    "only what the process itself has replaced is deleted": ("former.add(key)", "pass"),
    "what a later version may name is deleted": ("<= present.number", "> 0"),
    "what the record names is deleted": ("sorted(former - _named(present))", "sorted(former)"),
}


@pytest.mark.parametrize("bug", BUGS)
async def test_a_planted_bug_is_found(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source = inspect.getsource(module)
    correct, wrong = BUGS[bug]
    assert source.count(correct) == 1, correct
    planted: dict[str, Any] = {"__name__": module.__name__}
    exec(compile(source.replace(correct, wrong), "planted", "exec"), planted)
    monkeypatch.setattr(
        "tests.unit.chassis.test_bucket_records.BucketRecords", planted["BucketRecords"]
    )
    for seed in range(40):
        if await rewritten(seed):
            return
    pytest.fail("no seed has found it")


# ------------------------------------------------------------------ what nobody wrote


async def stored(model: Model) -> tuple[dict[str, object], str]:
    """The content of the record, and the key of its long value."""
    await put_map(model.records(), long("all tablets"))
    (value,) = model.values()
    return json.loads(model.objects[NAME].partition(b"\n")[2]), value


async def requires_damage(model: Model, key: str, reason: str) -> None:
    with pytest.raises(
        StoreUnusable, match=f"{key} in a bucket in memory is damaged: {reason}"
    ) as caught:
        await the_map(model.records())
    assert caught.value.fault is StoreFault.DAMAGED


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: b"", "it does not begin with the header"),
        (lambda data: data[:-1], "its checksum is wrong"),
        (lambda data: data + b"x", "its checksum is wrong"),
        (lambda data: data.replace(b'"version": 1', b'"version": 7'), "its checksum is wrong"),
        (
            lambda data: data.replace(b"percolator-value 1", b"percolator-value 9"),
            "it has format 9",
        ),
        (lambda data: encode(b"{"), "Expecting property name"),
        (lambda data: encode(b"[]"), "list indices"),
        (lambda data: encode(b"{}"), "'columns'"),
        (lambda data: encode(b"[" * 100_000), ""),
        (lambda data: encode(b'{"version": 0, "columns": {}, "values": {}}'), "its version is 0"),
        (
            lambda data: encode(b'{"version": 1, "columns": {"a": "?"}, "values": {}}'),
            "Only base64",
        ),
        (lambda data: encode(b'{"version": 1, "columns": {}, "values": {"a": {}}}'), ""),
        (
            lambda data: encode(
                b'{"version": 1, "columns": {},'
                b' "values": {"a": {"key": "../a", "size": 1, "crc32": 1}}}'
            ),
            "key: expected",
        ),
    ],
)
async def test_a_damaged_record_is_refused_by_its_key(
    model: Model, damage: Callable[[bytes], bytes], reason: str
) -> None:
    await stored(model)
    model.objects[NAME] = damage(model.objects[NAME])
    await requires_damage(model, NAME, reason)
    with pytest.raises(StoreUnusable, match=NAME):
        await model.records().put(ROLE, {COUNT: b"1"})


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
        | st.fixed_dictionaries({"key": inner, "size": inner, "crc32": inner})
    ),
    max_leaves=12,
)


_NAMED = st.fixed_dictionaries(
    {"key": st.sampled_from(["a/b", "../b", ""]), "size": st.integers(), "crc32": st.integers()}
)


@given(
    st.fixed_dictionaries(
        {
            "version": st.integers(1) | _JSON,
            "columns": st.dictionaries(st.text(max_size=4), st.sampled_from(["", "YQ=="])) | _JSON,
            "values": st.dictionaries(st.text(max_size=4), _NAMED) | _JSON,
        }
    )
)
def test_whatever_a_record_holds_is_understood_or_refused(content: dict[str, object]) -> None:
    refusal: StoreUnusable | None = None
    try:
        found = Version.decode(Stored(encode(json.dumps(content).encode()), "tag"), NAME)
    except StoreUnusable as error:
        refusal = error
    else:
        assert Version.decode(Stored(found.encode("writer"), "tag"), NAME) == found
    if refusal is not None:
        assert refusal.fault is StoreFault.DAMAGED
        assert str(refusal).startswith(f"{NAME} is damaged: ")


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: data.replace(b"all", b"few", 1),
    ],
)
async def test_a_damaged_long_value_is_refused_by_its_key(
    model: Model, damage: Callable[[bytes], bytes]
) -> None:
    _, key = await stored(model)
    model.objects[key] = damage(model.objects[key])
    await requires_damage(model, key, "its checksum is not the one that is recorded")


async def test_a_long_value_that_is_missing_is_named(model: Model) -> None:
    _, key = await stored(model)
    del model.objects[key]
    await requires_damage(model, key, f"it is missing, and {NAME} names it")


async def test_nobody_leads_without_what_earlier_leaders_have_recorded(model: Model) -> None:
    """The next oracle would hand out the same timestamps again."""
    world = World(model.clock, InProcessNetwork({}), random.Random(1))
    first = RecordCoordinator(model.records(), world)
    await (await first.campaign("master", "a:1")).put("map", b"all tablets")
    await first.close()
    lost = model.objects.pop(NAME)
    for _ in range(2):
        with pytest.raises(StoreUnusable, match="record of the role 'master' is missing") as caught:
            await RecordCoordinator(model.records(), world).campaign("master", "b:1")
        assert caught.value.fault is StoreFault.DAMAGED
    model.objects[NAME] = lost
    second = RecordCoordinator(model.records(), world)
    assert await (await second.campaign("master", "b:1")).get("map") == b"all tablets"
    await second.close()


async def test_a_candidate_overtaken_by_the_first_leader_takes_nothing_for_lost(
    model: Model,
) -> None:
    world = World(model.clock, InProcessNetwork({}), random.Random(1))
    first, second = (RecordCoordinator(model.records(), world) for _ in range(2))
    once = [1]

    async def overtake(key: str) -> None:
        if "led" in key and once:
            once.clear()
            await first.campaign("master", "a:1")

    model.before_read = overtake
    waiting = asyncio.create_task(second.campaign("master", "b:1"))
    await asyncio.sleep(1.0)
    assert not once
    assert not waiting.done()
    waiting.cancel()
    await first.close()


async def test_a_store_that_refuses_is_named_as_the_reason(model: Model) -> None:
    async def refuse(key: str) -> None:
        raise PermissionDenied("the account may not read")

    model.before_read = refuse
    with pytest.raises(StoreUnusable, match="the bucket: the account may not read") as caught:
        await the_map(model.records())
    assert caught.value.fault is StoreFault.READ_ONLY


async def test_a_long_value_that_cannot_be_written_leaves_the_record_as_it_was() -> None:
    model = Model()
    await put_map(model.records(), long("one"))
    model.faults = replace(model.faults, lost_request=1.0)
    with pytest.raises(StoreUnusable, match="gave no answer"):
        await put_map(model.records(seconds=5.0), long("two"))
    model.faults = BucketFaults(call_seconds=0.0)
    assert await the_map(model.records()) == long("one")


async def test_a_change_without_an_answer_is_not_said_to_have_failed(model: Model) -> None:
    records = model.records(seconds=5.0)
    await records.put(ROLE, {COUNT: b"1"})
    model.faults = BucketFaults(lost_answer=1.0)
    with pytest.raises(PercolatorError) as caught:
        await records.change(ROLE, Seen(COUNT, b"1"), {COUNT: b"2"})
    assert not isinstance(caught.value, StoreUnusable)
    with suppress(StoreUnusable):
        await records.read(ROLE, [COUNT])
    model.faults = BucketFaults()
    assert await records.read(ROLE, [COUNT]) == {COUNT: b"2"}


# Leases of leaders.

LEASE_SECONDS = 2.0
LEASED = CoordinatorTimes(grace_seconds=20.0, beat_seconds=8.0, lease_seconds=LEASE_SECONDS)
NO_LEASE = replace(LEASED, lease_seconds=0.0)
ORACLE = "coordinator/role/oracle"


class Mortal:
    """The bucket, as a process reaches it that may die, or be far away."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.lives = asyncio.Event()
        self.lives.set()
        self.answers_late_seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._model, name)
        return partial(self._called, found) if asyncio.iscoroutinefunction(found) else found

    async def _called(self, found: Any, *arguments: Any) -> Any:
        await self.lives.wait()
        answer = await found(*arguments)
        await asyncio.sleep(self.answers_late_seconds)
        return answer


class Site:
    """Processes that may lead as the oracle."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._processes = 0
        self.lost = ""
        """The leader that all others take for lost."""

    def coordinator(self, times: CoordinatorTimes = LEASED, reach: Any = None) -> RecordCoordinator:
        """The coordinator of another process each time."""
        records = self.model.records(reach=cast("Attempts | None", reach))
        self._processes += 1
        world = World(self.model.clock, InProcessNetwork({}), random.Random(self._processes))
        return RecordCoordinator(records, world, times)

    async def campaign(self, coordinator: RecordCoordinator, name: str) -> RecordLeadership:
        return await coordinator.campaign("oracle", name, lambda: self.lost)

    def recorded(self) -> dict[str, bytes]:
        columns = json.loads(decode(self.model.objects[ORACLE], ORACLE))["columns"]
        return {name: b64decode(value) for name, value in columns.items()}

    async def until_taken_over(self, name: str) -> None:
        for _ in range(1_000):
            if self.recorded().get("leader") == name.encode():
                return
            await asyncio.sleep(0.01)
        raise AssertionError(f"{name} does not lead")


async def test_while_its_lease_runs_a_leader_answers_without_a_call(model: Model) -> None:
    site = Site(model)
    coordinator = site.coordinator()
    led = await site.campaign(coordinator, "a:1")
    assert await led.is_held()  # by a look, with which a lease begins
    before = site.model.calls.copy()
    for _ in range(10):
        assert await led.is_held()
        await asyncio.sleep(LEASE_SECONDS / 11)
    assert site.model.calls == before
    await asyncio.sleep(LEASE_SECONDS / 5)
    assert await led.is_held()
    assert site.model.calls["read"] == before["read"] + 1
    await coordinator.close()


async def test_a_successor_begins_when_the_lease_of_a_living_leader_has_run_out(
    model: Model,
) -> None:
    site = Site(model)
    first, second = site.coordinator(), site.coordinator()
    led = await site.campaign(first, "a:1")
    assert await led.is_held()
    site.lost = "a:1"
    following = asyncio.create_task(site.campaign(second, "b:1"))
    await site.until_taken_over("b:1")
    began = site.model.clock.monotonic_seconds()
    assert await led.is_held()  # nobody has read or answered anything yet
    await following
    assert site.model.clock.monotonic_seconds() - began > LEASE_SECONDS
    assert not await led.is_held()
    await second.close()
    await first.close()


async def test_a_lease_is_counted_from_when_a_look_began(model: Model) -> None:
    site, slow = Site(model), Mortal(model)
    first, second = site.coordinator(reach=slow), site.coordinator()
    led = await site.campaign(first, "a:1")
    slow.answers_late_seconds = 0.9
    looking = asyncio.create_task(led.is_held())
    await asyncio.sleep(0.1)
    site.lost = "a:1"
    await site.campaign(second, "b:1")
    assert await looking  # when it began, nobody had taken over
    assert not await led.is_held()
    await second.close()
    await first.close()


@pytest.mark.parametrize("dies", [True, False])
async def test_a_claimant_that_ends_while_it_waits_leaves_the_lease_to_the_next(
    model: Model, dies: bool
) -> None:
    site = Site(model)
    claimant = Mortal(model)
    first, third = site.coordinator(), site.coordinator(NO_LEASE)
    second = site.coordinator(NO_LEASE, claimant)
    led = await site.campaign(first, "a:1")
    assert await led.is_held()
    site.lost = "a:1"
    waiting = asyncio.create_task(site.campaign(second, "b:1"))
    await site.until_taken_over("b:1")
    if dies:
        claimant.lives.clear()
        site.lost = "b:1"
    else:
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    began = model.clock.monotonic_seconds()
    following = await site.campaign(third, "c:1")
    assert model.clock.monotonic_seconds() - began > LEASE_SECONDS
    assert not await led.is_held()
    assert await following.is_held()
    assert "lease" not in site.recorded()  # it has run out: nobody has to wait for it again
    claimant.lives.set()
    for coordinator in (first, second, third):
        await coordinator.close()


async def test_a_leader_that_resigns_is_followed_at_once(model: Model) -> None:
    site = Site(model)
    first, second = site.coordinator(), site.coordinator()
    led = await site.campaign(first, "a:1")
    await first.close()
    assert not await led.is_held()
    began = site.model.clock.monotonic_seconds()
    await site.campaign(second, "b:1")
    assert site.model.clock.monotonic_seconds() - began < LEASE_SECONDS
    await second.close()


async def test_a_damaged_lease_is_refused(model: Model) -> None:
    site = Site(model)
    first, second = site.coordinator(), site.coordinator()
    await site.campaign(first, "a:1")
    await first.close()
    await site.model.records().put(b"role/oracle", {b"lease": b"soon"})
    with pytest.raises(StoreUnusable, match="the lease of the role 'oracle' is damaged"):
        await site.campaign(second, "b:1")


@pytest.mark.parametrize("seed", range(10))
async def test_no_leader_answers_once_a_later_one_has_begun_whatever_the_store_does(
    seed: int,
) -> None:
    site = Site(Model(EVERY_FAULT, seed))
    chance = random.Random(seed)
    begun = answered = 0

    async def answers(led: RecordLeadership, seconds: float) -> bool:
        """True if it has led for so long."""
        nonlocal answered
        until = site.model.clock.monotonic_seconds() + seconds
        while site.model.clock.monotonic_seconds() < until:
            later = begun
            if not await led.is_held():
                return False
            assert later <= led.epoch
            answered += 1
            await asyncio.sleep(chance.uniform(0, 0.5))
        return True

    async def process(name: str) -> None:
        nonlocal begun
        times = replace(LEASED, lease_seconds=chance.choice([0.0, 1.0, 4.0]))
        coordinator = site.coordinator(times)
        for _ in range(4):
            led = await site.campaign(coordinator, name)
            begun = max(begun, led.epoch)
            if await answers(led, chance.uniform(0, 20)) and chance.random() < 0.7:
                site.lost = name  # it goes on all the same
                await answers(led, 20)
            await asyncio.gather(led.resign(), answers(led, 20))
        await coordinator.close()

    await asyncio.gather(*(process(f"{one}:1") for one in "abc"))
    assert answered > 50
