"""The log of a tablet: one property at a time, on a store that does what a test tells it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.log import (
    CLOCK_RATES_RATIO_MAX,
    Base,
    Entry,
    Kind,
    LogMoved,
    Segment,
    TabletLog,
)
from percolator.bucket.port import Doubtful, Head, Listed, Stored
from percolator.errors import StoreUnusable, Unavailable
from percolator.tasks import Tasks
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, Page
from tests.unit.bucket.clocks import virtual_clock

FOLDER = "tablets/7"
CALL_SECONDS = 5.0


class Store(BucketInMemory):
    """Keeps all promises. A test may do something before, or after, a call on a key."""

    def __init__(self, faults: BucketFaults | None = None, seed: int = 1) -> None:
        super().__init__(virtual_clock(), random.Random(seed), Tasks(), faults)
        self.before: dict[tuple[str, str], Callable[[], Awaitable[None]]] = {}
        self.after: dict[tuple[str, str], Callable[[], Awaitable[None]]] = {}
        self.listed: list[list[str]] = []
        """The results of the next lists, instead of true ones."""
        self.lost: dict[str, bool] = {}
        """Keys about which there is no answer, and whether creations arrive there."""

    def log(self, epoch: int, **settings: float) -> TabletLog:
        clock, rng = virtual_clock(), random.Random(epoch)
        bucket = Bucket(self, clock, rng, attempt_seconds=CALL_SECONDS / 2, seconds=CALL_SECONDS)
        return TabletLog(bucket, random.Random(), FOLDER, epoch, **settings)

    async def owner(self, epoch: int, *bodies: bytes, **settings: float) -> TabletLog:
        """An owner that has appended some batches."""
        log = self.log(epoch, **settings)
        await log.take_over()
        for body in bodies:
            await log.append(body)
        return log

    def numbers(self) -> list[int]:
        return [int(one[-20:]) for one in self.objects if one.startswith(f"{FOLDER}/log/")]

    async def create(self, key: str, data: bytes) -> str:
        await self._do(self.before, "create", key)
        if key in self.lost:
            if self.lost[key] and key not in self.objects:
                await super().create(key, data)
            raise Doubtful("500")
        tag = await super().create(key, data)
        await self._do(self.after, "create", key)
        return tag

    async def read(self, key: str) -> Stored | None:
        if key in self.lost:
            raise Doubtful("500")
        found = await super().read(key)
        await self._do(self.after, "read", key)
        return found

    async def head(self, key: str) -> Head | None:
        await self._do(self.before, "head", key)
        return await super().head(key)

    async def list(self, folder: str, after: str, limit: int) -> Page:
        if self.listed:
            return [Listed(key, 0) for key in self.listed.pop(0)]
        return await super().list(folder, after, limit)

    async def delete(self, key: str) -> None:
        await self._do(self.before, "delete", key)
        await super().delete(key)

    @staticmethod
    async def _do(
        hooks: dict[tuple[str, str], Callable[[], Awaitable[None]]], verb: str, key: str
    ) -> None:
        hook = hooks.pop((verb, key), None)
        if hook is not None:
            await hook()


def key(number: int) -> str:
    return f"{FOLDER}/log/{number:020d}"


async def entries(log: TabletLog, after: int = 0, through: int = 0) -> list[Entry]:
    async with aclosing(log.entries(Segment(FOLDER, after, through or log.number))) as found:
        return [one async for one in found]


async def bodies(log: TabletLog) -> list[bytes]:
    """The batches after the base of an owner."""
    return [one.body for one in await entries(log, log.base.number) if one.kind is Kind.BATCH]


async def published(log: TabletLog) -> None:
    """Publishes a base that includes all that is stored."""
    await log.append(b"", Base("checkpoint", (), log.number))


async def silence() -> None:
    """The store does not answer any more, whatever it has done."""
    await asyncio.sleep(1_000)


def seconds() -> float:
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------ ownership


async def test_a_successor_reads_in_order_all_that_was_appended() -> None:
    store = Store()
    former = await store.owner(1, b"a", b"b")
    assert former.number == 3
    log = await store.owner(2)
    await log.append(b"c")
    assert await bodies(log) == [b"a", b"b", b"c"]
    assert [one.epoch for one in await entries(log)] == [1, 1, 1, 2, 2]


async def test_after_a_takeover_the_former_owner_acknowledges_nothing() -> None:
    store = Store()
    former = await store.owner(1, b"a")
    assert await former.is_held()
    log = await store.owner(2)
    assert not await former.is_held()
    assert former.is_lost
    with pytest.raises(LogMoved, match="tablets/7 has an owner at epoch 2") as caught:
        await former.append(b"lost")
    assert caught.value.epoch == 2
    assert await log.is_held()
    assert await bodies(log) == [b"a"]


async def test_a_takeover_is_noticed_by_the_next_entry_alone() -> None:
    store = Store()
    former = await store.owner(1)
    await store.owner(2)
    with pytest.raises(LogMoved):
        await former.append(b"lost")
    looks = former.looks
    assert not await former.is_held()
    assert former.looks == looks


@pytest.mark.parametrize("epoch", [2, 1], ids=["same", "earlier"])
async def test_only_a_later_epoch_takes_over(epoch: int) -> None:
    store = Store()
    owner = await store.owner(2)
    with pytest.raises(LogMoved, match="epoch 2"):
        await store.owner(epoch)
    assert await owner.is_held()


async def test_an_entry_that_arrives_before_the_takeover_is_kept() -> None:
    store = Store()
    former, log = await store.owner(1), store.log(2)
    store.before["create", key(2)] = lambda: _done(former.append(b"a"))
    await log.take_over()
    assert log.number == 3
    assert await bodies(log) == [b"a"]


async def test_a_log_that_was_not_taken_over_is_not_written() -> None:
    store = Store()
    log = store.log(1)
    for call in (log.append(b"a"), log.is_held()):
        with pytest.raises(Unavailable, match="not taken over"):
            await call
    assert store.numbers() == []


async def test_a_second_entry_at_the_same_time_is_refused() -> None:
    log = await Store().owner(1)
    with pytest.raises(RuntimeError, match="at the same time"):
        await asyncio.gather(log.append(b"a"), log.append(b"b"))


# ------------------------------------------------------------ unknown outcomes


@pytest.mark.parametrize("is_cancelled", [False, True], ids=["given up", "cancelled"])
@pytest.mark.parametrize("arrives", [False, True], ids=["before it arrives", "after it arrived"])
async def test_after_an_unknown_outcome_an_owner_has_to_take_over_again(
    is_cancelled: bool, arrives: bool
) -> None:
    store = Store()
    log = await store.owner(1, b"a")
    store.lost[key(3)] = arrives
    appending = asyncio.create_task(log.append(b"b"))
    if is_cancelled:
        await asyncio.sleep(1.0)
        appending.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else Unavailable):
        await appending
    store.lost.clear()
    for call in (log.append(b"c"), log.is_held()):
        with pytest.raises(Unavailable):
            await call
    await log.take_over()
    await log.append(b"c")
    assert await bodies(log) == ([b"a", b"b", b"c"] if arrives else [b"a", b"c"])


async def _done(work: Awaitable[object]) -> None:
    await work


# ------------------------------------------------------------ lists that lag


@pytest.mark.parametrize("shown", [0, 1, 2])
async def test_a_claimant_finds_the_end_though_the_list_lacks_it(shown: int) -> None:
    store = Store()
    await store.owner(1, b"a", b"b")
    await store.owner(2, b"c")
    store.listed = [[key(one) for one in range(1, shown + 1)]]
    log = store.log(3)
    await log.take_over(served_epoch=2)
    assert log.number == 6
    assert await bodies(log) == [b"a", b"b", b"c"]


async def test_a_claimant_finds_the_end_though_the_list_shows_nothing_above_the_floor() -> None:
    store = Store()
    former = await store.owner(1, b"a", b"b", b"c")
    await published(former)
    await former.append(b"d")
    await former.trim()
    store.listed = [[]]
    log = await store.owner(2)
    assert log.base.number == 4
    assert await bodies(log) == [b"", b"d"]


@pytest.mark.parametrize("lost", [[3, 4], [1, 2, 3, 4]])
async def test_a_log_that_has_lost_its_end_is_not_taken_over(lost: list[int]) -> None:
    """Nor by another try: a takeover would have hidden the loss."""
    store = Store()
    await store.owner(1, b"a")
    await store.owner(2, b"b")
    for number in lost:
        del store.objects[key(number)]
    for epoch in (3, 4):
        with pytest.raises(StoreUnusable, match=r"ends at epoch [01], but .* served at epoch 2"):
            await store.log(epoch).take_over(served_epoch=2)


async def test_an_object_that_is_no_entry_is_reported() -> None:
    store = Store()
    store.objects[f"{FOLDER}/log/readme"] = b""
    with pytest.raises(StoreUnusable, match="tablets/7/log/readme is no entry of a log"):
        await store.owner(1)


# ------------------------------------------------------------ trimming


async def test_trimming_keeps_takeovers_and_the_entries_before_them() -> None:
    store = Store()
    await store.owner(1, b"a", b"b")  # 1 to 3
    await store.owner(2, b"c", b"d")  # 4 to 6
    log = await store.owner(3, b"e", b"f")  # 7 to 9
    await published(log)
    await log.append(b"g")
    assert await log.trim() == 4
    assert store.numbers() == [1, 3, 4, 6, 7, 10, 11]
    assert await log.trim() == 0
    successor = await store.owner(4)
    assert successor.base == log.base
    assert await bodies(successor) == [b"", b"g"]
    # It has read no entries, and finds the same to be kept.
    await published(successor)
    await successor.trim()
    assert store.numbers() == [1, 3, 4, 6, 7, 11, 12, 13]


async def test_the_entry_after_the_base_may_be_a_takeover() -> None:
    store = Store()
    await store.owner(1, b"a", b"b")
    log = await store.owner(2)
    await log.append(b"", Base("checkpoint", (), 3))
    assert await log.trim() == 1
    assert store.numbers() == [1, 3, 4, 5]


async def test_trimming_goes_on_where_another_one_has_stopped() -> None:
    store = Store()
    former = await store.owner(1, *[b"a"] * 40)
    await published(former)
    store.before["delete", key(20)] = silence
    trimming = asyncio.create_task(former.trim())
    await asyncio.sleep(1.0)
    trimming.cancel()
    assert 40 in store.numbers()
    log = await store.owner(2)
    assert await log.trim() == 40
    assert store.numbers() == [1, 42, 43]


async def test_a_look_during_a_creation_is_not_deceived_by_a_successor_that_trims() -> None:
    """The entry has arrived, was read by a successor, and is in its base before the owner hears of
    it: were it deleted, its number would look free."""
    store = Store()
    former = await store.owner(1, b"a")
    store.lost[key(3)] = True
    appending = asyncio.create_task(former.append(b"b"))
    await asyncio.sleep(1.0)
    store.lost.clear()
    log = await store.owner(2, b"c")
    assert await bodies(log) == [b"a", b"b", b"c"]
    await published(log)
    await log.trim()
    assert not await former.is_held()
    assert await appending == 3  # it is stored


async def test_a_look_says_what_was_true_when_it_was_asked_for() -> None:
    """Although the owner has appended meanwhile, and a successor has trimmed."""
    store = Store()
    former = await store.owner(1, b"a")

    async def meanwhile() -> None:
        await former.append(b"b")
        await former.append(b"c")
        log = await store.owner(2, b"d")
        await published(log)
        await log.trim()
        assert key(3) not in store.objects

    store.before["head", key(3)] = meanwhile
    assert await former.is_held()
    assert not await former.is_held()


async def test_two_trims_at_the_same_time_keep_what_has_to_be_kept() -> None:
    store = Store()
    await store.owner(1, b"a", b"b")  # 1 to 3
    log = await store.owner(2, *[b"c"] * 6)  # 4 to 10
    await entries(log)
    await published(log)
    store.before["delete", key(9)] = lambda: asyncio.sleep(1.0)
    first = asyncio.create_task(log.trim())
    await asyncio.sleep(0.5)
    await published(log)
    # It begins when the first one is not finished, and goes on when it is.
    store.after["read", f"{FOLDER}/floor"] = lambda: asyncio.sleep(1.0)
    await asyncio.gather(first, log.trim())
    assert store.numbers() == [1, 3, 4, 12]


async def _write(log: TabletLog) -> None:
    for _ in range(1_000):
        await log.append(b"a")


@pytest.mark.parametrize("call", ["take over", "seal"])
async def test_an_owner_that_never_pauses_is_taken_over_all_the_same(call: str) -> None:
    tries = 0
    for seed in range(20):
        store = Store(BucketFaults(call_seconds=0.02), seed)
        former = await store.owner(1)
        log = store.log(2)

        writing = asyncio.create_task(_write(former))
        await asyncio.sleep(1.0)
        before = former.number
        await (log.take_over() if call == "take over" else log.seal())
        with pytest.raises(LogMoved):
            await writing
        tries += former.number - before
    assert tries < 20 * 50


async def test_an_entry_that_was_on_its_way_when_the_look_was_asked_for_proves_nothing() -> None:
    store = Store()
    former = await store.owner(1, b"a")
    store.after["create", key(3)] = lambda: asyncio.sleep(1.0)
    appending = asyncio.create_task(former.append(b"b"))
    await asyncio.sleep(0.5)
    await store.owner(2)
    looking = asyncio.create_task(former.is_held())
    assert await appending == 3
    assert not await looking


@pytest.mark.parametrize("call", ["take over", "seal"])
async def test_a_number_that_was_used_and_deleted_is_not_the_end(call: str) -> None:
    store = Store()
    former = await store.owner(1, b"a", b"b")

    async def meanwhile() -> None:
        await former.append(b"c")
        await former.append(b"d")
        await published(former)
        await former.trim()
        assert key(4) not in store.objects

    store.before["create", key(4)] = meanwhile
    log = store.log(2)
    if call == "seal":
        assert (await log.seal()).number == 7
        store.listed = [[key(4)]]
        assert (await store.log(2).seal()).number == 7
    else:
        await log.take_over()
        assert log.number == 7
        assert await log.is_held()
    assert key(4) in store.objects  # nobody looks there
    assert not await former.is_held()


@pytest.mark.parametrize("kind", [Kind.TAKEOVER, Kind.SEAL])
async def test_what_was_left_at_a_deleted_number_is_not_believed(kind: Kind) -> None:
    """A claimant knows an old floor, a list shows what another one has left above it."""
    store = Store()
    former = await store.owner(1, b"a", b"b")
    paused = store.log(3)

    async def meanwhile() -> None:
        await former.append(b"c")
        await former.append(b"d")
        await published(former)
        await former.trim()
        # The other one dies before it has looked at the floor.
        other = store.log(9)
        await other._create(other._entry(4, kind, Base(), lease_seconds=0.0))
        store.listed = [[key(4)]]

    store.after["read", f"{FOLDER}/floor"] = meanwhile
    await paused.take_over()
    assert paused.number == 7


# ------------------------------------------------------------ bases and entries


async def test_a_base_is_what_the_last_entry_names() -> None:
    store = Store()
    former = await store.owner(1, b"a")
    base = Base("checkpoint", (Segment("tablets/3", 4, 9),), 2)
    await former.append(b"b", base)
    await former.append(b"c")
    log = await store.owner(2)
    assert log.base == base
    assert (await entries(log))[-1].base == base


async def test_the_first_owner_begins_with_the_base_that_it_is_given() -> None:
    store = Store()
    base = Base("checkpoint", (Segment("tablets/3", 4, 9),))
    log = store.log(1)
    await log.take_over(base)
    assert log.base == base
    successor = store.log(2)
    await successor.take_over(Base("another"))
    assert successor.base == base


async def test_a_base_that_failed_to_be_published_is_not_the_base() -> None:
    store = Store()
    former = await store.owner(1, b"a")
    await store.owner(2)
    with pytest.raises(LogMoved):
        await published(former)
    assert former.base.number == 0
    assert await former.trim() == 0


@pytest.mark.parametrize("number", [1, 6])
async def test_a_base_neither_goes_back_nor_includes_what_is_not_stored(number: int) -> None:
    log = await Store().owner(1, b"a", b"b")
    await published(log)
    with pytest.raises(RuntimeError, match=f"includes {number}, expected one from 3 to 4"):
        await log.append(b"c", Base("checkpoint", (), number))
    await log.append(b"c")


async def test_a_hole_is_reported_and_not_passed() -> None:
    store = Store()
    log = await store.owner(1, *[b"a"] * 30)
    del store.objects[key(25)]
    with pytest.raises(StoreUnusable, match=r"log/0*25 is missing: the log has a hole"):
        await entries(log)


async def test_an_entry_that_a_later_owner_has_deleted_is_no_hole() -> None:
    store = Store()
    former = await store.owner(1, b"a", b"b", b"c")
    log = await store.owner(2)
    await published(log)
    await log.trim()
    with pytest.raises(LogMoved, match="epoch 2"):
        await entries(former)


async def test_reading_may_be_left_in_the_middle() -> None:
    """Entries that were read ahead, and one that could not be, are forgotten."""
    store = Store()
    log = await store.owner(1, *[b"a"] * 30)
    store.objects[key(4)] = b"damaged"
    async with aclosing(log.entries(Segment(FOLDER, 0, 31))) as found:
        async for one in found:
            if one.number == 2:
                await asyncio.sleep(1.0)
                break


@pytest.mark.parametrize("data", [b"", b"PLG1", bytes(60)])
async def test_a_damaged_entry_is_reported(data: bytes) -> None:
    store = Store()
    log = await store.owner(1, b"a", b"b")
    whole = store.objects[key(2)]
    for damaged in (data, whole[:-1], whole + b"x", store.objects[key(3)]):
        store.objects[key(2)] = damaged
        with pytest.raises(StoreUnusable, match=r"log/0*2 is damaged: it is not entry 2"):
            await entries(log)


@pytest.mark.parametrize(
    "floor", [b"", b"[]", b"{}", b'{"floor": "3"}', b'{"floor": 1, "deleted": 2}']
)
async def test_a_damaged_floor_is_reported(floor: bytes) -> None:
    store = Store()
    store.objects[f"{FOLDER}/floor"] = floor
    with pytest.raises(StoreUnusable, match="tablets/7/floor is damaged"):
        await store.owner(1)


# ------------------------------------------------------------ seals


async def test_a_sealed_log_gets_no_more_entries() -> None:
    store = Store()
    owner = await store.owner(1, b"a")
    sealed = await store.log(1).seal()
    assert (sealed.number, sealed.kind) == (3, Kind.SEAL)
    with pytest.raises(LogMoved, match="is sealed at epoch 1"):
        await owner.append(b"b")
    with pytest.raises(LogMoved, match="is sealed at epoch 1"):
        await store.owner(2)
    assert await store.log(2).seal() == sealed


async def test_an_owner_with_a_later_epoch_is_not_sealed() -> None:
    store = Store()
    owner = await store.owner(2)
    with pytest.raises(LogMoved, match="epoch 2"):
        await store.log(1).seal()
    assert await owner.is_held()


async def test_a_seal_follows_what_the_owner_appends_meanwhile() -> None:
    store = Store()
    owner = await store.owner(1)
    store.before["create", key(2)] = lambda: _done(owner.append(b"a"))
    assert (await store.log(1).seal()).number == 3


async def test_a_log_without_entries_is_not_sealed() -> None:
    with pytest.raises(StoreUnusable, match="has no entries"):
        await Store().log(1).seal()


# ------------------------------------------------------------ interval


async def test_entries_are_an_interval_apart_and_the_first_after_a_pause_goes_at_once() -> None:
    store = Store()
    log = await store.owner(1, interval_seconds=0.1)
    began = []
    for pause in (1.0, 0.0, 0.02, 0.3, 0.0):
        await asyncio.sleep(pause)
        await log.append(b"a")
        began.append(seconds())
    assert began == pytest.approx([1.0, 1.1, 1.2, 1.5, 1.6])


async def test_an_entry_that_is_cancelled_before_its_turn_was_not_written() -> None:
    log = await Store().owner(1, b"a", interval_seconds=10.0)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await log.append(b"b")
    await log.append(b"c")
    assert await bodies(log) == [b"a", b"c"]


# ------------------------------------------------------------ lease


async def test_an_owner_with_a_lease_answers_reads_without_the_store() -> None:
    log = await Store().owner(1, lease_seconds=2.0)
    await asyncio.sleep(1.0)
    assert log.has_lease()
    assert await log.is_held()
    assert log.looks == 0
    await log.append(b"a")
    await asyncio.sleep(1.9)
    assert log.has_lease()
    await asyncio.sleep(0.2)
    assert not log.has_lease()
    assert await log.is_held()
    assert log.looks == 1
    assert log.has_lease()


async def test_without_a_lease_each_read_is_proved_by_the_store() -> None:
    log = await Store().owner(1, b"a")
    assert not log.has_lease()
    assert await log.is_held()
    assert not log.has_lease()
    assert log.looks == 1


@pytest.mark.parametrize("proof", ["entry", "look"])
async def test_a_lease_is_counted_from_the_beginning_of_its_proof(proof: str) -> None:
    store = Store()
    log = await store.owner(1, lease_seconds=2.0)
    await asyncio.sleep(5.0)
    store.after["create", key(2)] = lambda: asyncio.sleep(1.5)
    store.before["head", key(2)] = lambda: asyncio.sleep(1.5)
    assert await (log.append(b"a") if proof == "entry" else log.is_held())
    assert log.has_lease()
    await asyncio.sleep(0.6)
    assert not log.has_lease()


@pytest.mark.parametrize("own_seconds", [0.0, 1.0])
async def test_a_successor_serves_when_the_former_owners_lease_has_run_out(
    own_seconds: float,
) -> None:
    """Its own settings do not matter."""
    store = Store()
    former = await store.owner(1, b"a", lease_seconds=10.0)
    log = store.log(2, lease_seconds=own_seconds)
    await log.take_over()
    assert seconds() == 0.0  # it may open the tablet meanwhile
    assert former.has_lease()
    assert not log.has_lease()
    written, held = asyncio.create_task(log.append(b"b")), asyncio.create_task(log.is_held())
    await asyncio.sleep(10.0 * CLOCK_RATES_RATIO_MAX - 0.1)
    assert not former.has_lease()
    assert not written.done()
    assert not held.done()
    assert not log.has_lease()
    await asyncio.wait([written, held])
    assert await held
    assert seconds() == pytest.approx(10.0 * CLOCK_RATES_RATIO_MAX)
    assert not await former.is_held()


async def test_a_claimant_that_dies_leaves_the_former_owners_lease_to_be_waited_out() -> None:
    store = Store()
    await store.owner(1, b"a", lease_seconds=10.0)
    await store.log(2, lease_seconds=1.0).take_over()
    log = store.log(3)
    await log.take_over()
    await log.is_held()
    assert seconds() == pytest.approx(10.0 * CLOCK_RATES_RATIO_MAX)
    # From its first batch on, its own lease counts.
    await log.append(b"b")
    await store.owner(4, b"c")
    assert seconds() == pytest.approx(10.0 * CLOCK_RATES_RATIO_MAX)


async def test_a_deposed_owner_has_no_lease_as_soon_as_it_knows() -> None:
    store = Store()
    former = await store.owner(1, lease_seconds=10.0)
    await store.log(2).take_over()
    assert former.has_lease()
    with pytest.raises(LogMoved):
        await former.append(b"a")
    assert not former.has_lease()
    assert not await former.is_held()


async def test_a_seal_returns_when_the_owners_lease_has_run_out() -> None:
    store = Store()
    await store.owner(1, b"a", lease_seconds=10.0)
    for seconds_then in (11.0, 22.0):  # the second does not know when the first has sealed it
        await store.log(1).seal()
        assert seconds() == pytest.approx(seconds_then)


async def test_an_owner_that_seals_its_log_gives_its_lease_up() -> None:
    store = Store()
    owner = await store.owner(1, b"a", lease_seconds=10.0)
    await owner.seal()
    assert not owner.has_lease()
    assert not await owner.is_held()
    await store.log(1).seal()
    assert seconds() == 0.0
