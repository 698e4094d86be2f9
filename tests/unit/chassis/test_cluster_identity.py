"""The identity of a store root's cluster: made once, never changed, never guessed.

A row store belongs to one cluster, and says to which. So does a bucket, or a prefix in one.
"""

from __future__ import annotations

import asyncio
import errno
import json
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from percolator.bigtable.admin import create_table
from percolator.bucket.port import Head
from percolator.bucket.settings import Settings
from percolator.errors import (
    InvalidArgument,
    PercolatorError,
    PermissionDenied,
    SchemaError,
    StoreUnusable,
    Unavailable,
    WrongCluster,
)
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID
from percolator.services.chassis.cluster_store import (
    FILE_NAME,
    STORE_FORMAT,
    BucketClusterStore,
    ClusterIdentity,
    RowClusterStore,
    check_identity,
    establish_identity,
    read_identity,
    refuse_other_cluster,
)
from percolator.services.chassis.process import are_compatible
from percolator.services.chassis.records import RowRecords
from percolator.tasks import Tasks
from percolator.testing.bigtable_in_memory import BigtableInMemory, ModelTable
from percolator.testing.in_process_network import InProcessNetwork
from percolator.testing.row_database import MODEL
from percolator.world import World
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, tag_of
from tests.doubles.memory_files import MemoryDisk, MemoryFiles, run_until_killed
from tests.simulation.virtual_time import VirtualClock
from tests.unit.refusals import refused

ROOT = Path("/disk/store")


def empty_disk() -> MemoryDisk:
    disk = MemoryDisk()
    disk.make_durable_directory(ROOT.parent)
    return disk


@pytest.fixture
@asynccontextmanager
async def disk() -> AsyncIterator[MemoryDisk]:
    """A disk on which nothing was written."""
    yield empty_disk()


async def put(disk: MemoryDisk, name: str, content: bytes) -> None:
    disk.make_durable_directory(ROOT)
    async with await MemoryFiles(disk).create(ROOT / name) as file:
        await file.append(content)


async def establish(disk: MemoryDisk, seed: int) -> ClusterIdentity:
    return await establish_identity(MemoryFiles(disk), ROOT, random.Random(seed))


async def test_the_first_master_makes_the_identity_and_all_later_ones_find_it(
    disk: MemoryDisk,
) -> None:
    made = await establish(disk, 1)
    assert made.format == STORE_FORMAT
    assert len(made.cluster_id) == 32
    disk.cut_power()
    assert await establish(disk, 2) == made
    assert await MemoryFiles(disk).list(ROOT) == [FILE_NAME]
    assert await establish(empty_disk(), 2) != made


async def test_a_new_file_system_counts_as_empty(disk: MemoryDisk) -> None:
    disk.make_durable_directory(ROOT / "lost+found")
    assert await establish(disk, 1) == await establish(disk, 2)


async def test_wherever_the_first_master_dies_the_next_one_finds_or_makes_one_identity() -> None:
    calls = 0
    for dies_at in range(100):
        disk = empty_disk()
        first = MemoryFiles(disk)
        first.faults.kill_at(dies_at)
        told = await run_until_killed(first, establish_identity(first, ROOT, random.Random(1)))
        for seed in range(5):
            survivor = await establish(disk, 2)
            assert told in (None, survivor)
            disk.cut_power(random.Random(seed))
            assert await establish(disk, 3) == survivor
        if told is not None:
            calls = dies_at
            break
    assert calls > 5


async def test_many_masters_that_start_at_once_agree_on_one_identity() -> None:
    for seed in range(200):
        disk = empty_disk()
        disk.make_durable_directory(ROOT)
        found = await asyncio.gather(*(staggered(disk, seed, number) for number in range(3)))
        assert len(set(found)) == 1


async def staggered(disk: MemoryDisk, seed: int, number: int) -> ClusterIdentity:
    """A master whose system calls happen at random times."""
    chance = random.Random(f"{seed} {number}")
    files = MemoryFiles(disk)
    step = files.step

    async def late(operation: str, path: Path) -> None:
        await asyncio.sleep(chance.random())
        await step(operation, path)

    files.step = late  # type: ignore[method-assign]
    return await establish_identity(files, ROOT, chance)


async def test_a_root_that_holds_something_else_is_refused_and_left_alone(disk: MemoryDisk) -> None:
    await put(disk, "holiday.jpg", b"...")
    with refused("store", match=r"not empty.*holiday\.jpg"):
        await establish(disk, 1)
    assert await MemoryFiles(disk).list(ROOT) == ["holiday.jpg"]


async def test_a_root_of_another_format_is_refused_by_its_number(disk: MemoryDisk) -> None:
    newer = {"cluster_id": "abc", "format": 3, "created_by": "7.0.0"}
    await put(disk, FILE_NAME, json.dumps(newer).encode())
    says = r"format 3, written by release 7\.0\.0; .* opens format 1: use a release"
    with pytest.raises(WrongCluster, match=says):
        await establish(disk, 1)


async def test_a_root_that_was_marked_because_values_expire_is_opened(disk: MemoryDisk) -> None:
    content = {"cluster_id": "abc", "format": 2, "created_by": "0.3.0"}
    await put(disk, FILE_NAME, json.dumps(content).encode())
    assert await establish(disk, 1) == ClusterIdentity("abc", 2)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\x00",
        b"{}",
        b'{"cluster_id": "abc"}',
        b'{"cluster_id": "", "format": 1}',
        b'{"cluster_id": 7, "format": 1}',
        b'{"cluster_id": "abc", "format": "1"}',
        b'{"cluster_id": "abc", "format": true}',
        b'{"cluster_id": "abc", "format": 0}',
        b"[" * 4000,
        b'{"format": 1, "cluster_id": "a b"}',
        b'{"format": 1, "cluster_id": "\xc3\xa9"}',
    ],
)
async def test_a_damaged_identity_is_refused_and_never_replaced(
    disk: MemoryDisk, content: bytes
) -> None:
    await put(disk, FILE_NAME, content)
    with pytest.raises(StoreUnusable, match=r"store: .*cluster\.json is damaged"):
        await establish(disk, 1)
    assert await MemoryFiles(disk).read(ROOT / FILE_NAME, bytes_max=5_000) == content


@pytest.mark.parametrize("operation", ["create", "append", "fsync", "link", "fsync_directory"])
async def test_a_failing_disk_leaves_no_partial_identity(disk: MemoryDisk, operation: str) -> None:
    disk.make_durable_directory(ROOT)
    files = MemoryFiles(disk)
    files.faults.fail(operation, number=errno.ENOSPC)
    with pytest.raises(OSError, match="No space"):
        await establish_identity(files, ROOT, random.Random(1))
    disk.cut_power(random.Random(1))
    survivor = await establish(disk, 2)
    assert await establish(disk, 3) == survivor


async def test_a_root_that_cannot_be_written_is_refused_even_if_it_has_an_identity(
    disk: MemoryDisk,
) -> None:
    await establish(disk, 1)
    files = MemoryFiles(disk)
    files.faults.fail("create", number=errno.EROFS)
    with pytest.raises(OSError, match="Read-only"):
        await establish_identity(files, ROOT, random.Random(2))


async def test_a_root_below_a_missing_directory_is_not_made() -> None:
    """The disk may not be mounted."""
    with pytest.raises(FileNotFoundError):
        await establish_identity(MemoryFiles(MemoryDisk()), ROOT, random.Random(1))


async def test_other_services_refuse_a_root_of_no_cluster_and_of_another_one(
    disk: MemoryDisk,
) -> None:
    disk.make_durable_directory(ROOT)
    with pytest.raises(InvalidArgument, match="belongs to no cluster yet"):
        await read_identity(MemoryFiles(disk), ROOT)
    identity = await establish(disk, 1)
    await check_identity(MemoryFiles(disk), ROOT, identity.cluster_id)
    with pytest.raises(WrongCluster) as caught:
        await check_identity(MemoryFiles(disk), ROOT, "another")
    assert (caught.value.expected, caught.value.found) == ("another", identity.cluster_id)
    assert isinstance(caught.value, PercolatorError)


async def test_without_masters_a_private_disk_is_accepted(
    disk: MemoryDisk,
) -> None:
    files = MemoryFiles(disk)
    await refuse_other_cluster(files, ROOT, "")
    disk.make_durable_directory(ROOT)
    await refuse_other_cluster(files, ROOT, "")
    identity = await establish(disk, 1)
    for cluster_id in (identity.cluster_id, ""):
        await refuse_other_cluster(files, ROOT, cluster_id)


async def test_a_root_of_no_cluster_or_of_another_one_is_refused_beside_masters(
    disk: MemoryDisk,
) -> None:
    files = MemoryFiles(disk)
    with pytest.raises(InvalidArgument, match="belongs to no cluster"):
        await refuse_other_cluster(files, ROOT, "another")
    disk.make_durable_directory(ROOT)
    with pytest.raises(InvalidArgument, match="belongs to no cluster"):
        await refuse_other_cluster(files, ROOT, "another")
    await establish(disk, 1)
    with pytest.raises(WrongCluster):
        await refuse_other_cluster(files, ROOT, "another")


@pytest.mark.parametrize(
    ("one", "other", "compatible"),
    [
        ("1.4.2", "1.4.9", True),
        ("1.4.2", "1.5.0", True),
        ("1.4.2", "1.3.0rc1", True),
        ("1.4.2", "1.6.0", False),
        ("1.4.2", "1.2.9", False),
        ("1.0.0", "2.0.0", False),
        ("0.9.0", "0.10.0.dev3+local", True),
        ("1.4.2", "", False),
        ("1.4.2", "newest", False),
        ("1.4.2", "1", False),
        ("1.4.2", "1.4x", True),
        ("1.4.2", "1.99999999999999999999", False),
    ],
)
def test_releases_one_minor_version_apart_work_together(
    one: str, other: str, compatible: bool
) -> None:
    assert are_compatible(one, other) is compatible
    assert are_compatible(other, one) is compatible


class Instance:
    """An instance of the model, and processes that open it."""

    def __init__(self) -> None:
        self.model = BigtableInMemory()
        self.network = InProcessNetwork({MODEL.address: self.model})
        self._clock = VirtualClock(asyncio.get_running_loop())
        self._seeds = iter(range(100))

    def opened(self) -> RowClusterStore:
        chance = random.Random(next(self._seeds))
        return RowClusterStore(self.network, MODEL, World(self._clock, self.network, chance))

    async def stored(self, content: dict[str, Any] | bytes) -> None:
        await create_table(self.network, MODEL, TABLE_ID, 1.0)
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        await RowRecords(self.opened().store, self.opened()._world).put(CLUSTER, {IDENTITY: data})


async def test_masters_that_start_together_agree_on_one_identity() -> None:
    instance = Instance()
    stores = [instance.opened() for _ in range(4)]
    found = await asyncio.gather(*(store.establish_identity() for store in stores))
    assert len(set(found)) == 1
    assert await instance.opened().establish_identity() == found[0]
    clock = instance._clock.wall_milliseconds()
    assert 0 <= found[0].epoch_milliseconds <= clock - 86_400_000


async def test_a_store_without_a_master_belongs_to_no_cluster() -> None:
    with pytest.raises(
        InvalidArgument, match="belongs to no cluster yet: start a master"
    ) as caught:
        await Instance().opened().refuse_other_cluster("")
    assert caught.value.field == "store"


async def test_the_store_of_another_cluster_is_refused_and_both_are_named() -> None:
    instance = Instance()
    identity = await instance.opened().establish_identity()
    await instance.opened().refuse_other_cluster(identity.cluster_id)
    await instance.opened().refuse_other_cluster("")
    with pytest.raises(WrongCluster) as caught:
        await instance.opened().refuse_other_cluster("another")
    said = f"{MODEL} belongs to cluster {identity.cluster_id}, the masters to cluster another"
    assert said in str(caught.value)


async def test_a_table_of_that_name_with_other_families_is_refused_by_its_name() -> None:
    instance = Instance()
    instance.model.tables[MODEL.table(TABLE_ID)] = ModelTable(MODEL.table(TABLE_ID), ["cf1"])
    with pytest.raises(SchemaError, match="percolator-0 was made by another program, or changed"):
        await instance.opened().establish_identity()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged"),
        (b"[]", "is damaged"),
        ({"cluster_id": "a", "format": 1}, "epoch_milliseconds is None"),
        ({"cluster_id": "a", "format": 1, "epoch_milliseconds": -1}, "epoch_milliseconds is -1"),
        ({"cluster_id": "", "format": 1, "epoch_milliseconds": 1}, "cluster_id is ''"),
    ],
)
async def test_a_damaged_identity_is_refused(content: dict[str, Any] | bytes, says: str) -> None:
    instance = Instance()
    await instance.stored(content)
    with pytest.raises(StoreUnusable, match=says):
        await instance.opened().establish_identity()


async def test_a_store_of_a_newer_release_is_refused() -> None:
    instance = Instance()
    await instance.stored({"cluster_id": "a", "format": 3, "epoch_milliseconds": 1})
    with pytest.raises(WrongCluster, match="has format 3"):
        await instance.opened().establish_identity()


class Prefix:
    """A prefix in a bucket in memory, and processes that open it."""

    def __init__(self, faults: BucketFaults | None = None, seed: int = 1) -> None:
        self._clock = VirtualClock(asyncio.get_running_loop())
        self.model = BucketInMemory(self._clock, random.Random(seed), Tasks(), faults)
        self._seeds = iter(range(100))

    def opened(self) -> BucketClusterStore:
        chance = random.Random(next(self._seeds))
        return BucketClusterStore(self.model, World(self._clock, InProcessNetwork({}), chance))

    def put(self, key: str, data: bytes) -> None:
        self.model.objects[key] = data


async def test_a_commit_waits_only_seconds_for_an_answer_that_was_lost() -> None:
    prefix = Prefix(BucketFaults(lost_answer=1.0))
    began = asyncio.get_running_loop().time()
    creating = asyncio.create_task(prefix.opened().large.create("log/1", b"own"))
    await asyncio.sleep(1.0)
    prefix.model.faults = BucketFaults()
    assert (await creating).is_own
    assert asyncio.get_running_loop().time() < began + 4.0


HOSTILE = BucketFaults(
    lost_request=0.1,
    lost_answer=0.1,
    late_request=0.1,
    late_answer=0.1,
    failed_before=0.1,
    failed_after_success=0.1,
)


@pytest.mark.parametrize("seed", range(10))
async def test_masters_that_start_together_on_a_prefix_agree_whatever_the_store_does(
    seed: int,
) -> None:
    prefix = Prefix(HOSTILE, seed)
    found = set()

    async def start() -> None:
        """As a supervisor starts it, again and again."""
        while True:
            try:
                found.add(await prefix.opened().establish_identity())
            except Unavailable:
                continue
            return

    await asyncio.gather(*(start() for _ in range(4)))
    await asyncio.sleep(2 * HOSTILE.late_seconds)
    await start()
    assert len(found) == 1
    assert found.pop().format == STORE_FORMAT
    assert prefix.model.struck


async def test_a_prefix_without_a_master_belongs_to_no_cluster() -> None:
    with refused("store", match="belongs to no cluster yet: start a master"):
        await Prefix().opened().refuse_other_cluster("")


async def test_the_prefix_of_another_cluster_is_refused_and_both_are_named() -> None:
    prefix = Prefix()
    identity = await prefix.opened().establish_identity()
    for cluster_id in (identity.cluster_id, ""):
        await prefix.opened().refuse_other_cluster(cluster_id)
    with pytest.raises(WrongCluster) as caught:
        await prefix.opened().refuse_other_cluster("another")
    said = f"belongs to cluster {identity.cluster_id}, the masters to cluster another"
    assert said in str(caught.value)


async def test_a_prefix_that_holds_something_else_is_refused_and_left_alone() -> None:
    """Or its identity was deleted: a second cluster would be mixed with what is left of the
    first."""
    prefix = Prefix()
    prefix.put("check-0123456789abcdef/once", b"left by a check of the store")
    prefix.put("coordinator/role/master", b"...")
    with refused("store", match="not empty.*coordinator/role/master.*has no cluster.json"):
        await prefix.opened().establish_identity()
    assert FILE_NAME not in prefix.model.objects


async def test_what_a_check_of_the_store_has_left_makes_a_prefix_not_foreign() -> None:
    prefix = Prefix()
    prefix.put("check-0123456789abcdef/once", b"left by a check of the store")
    await prefix.opened().establish_identity()


async def test_a_prefix_of_another_format_is_refused_by_its_number() -> None:
    prefix = Prefix()
    newer = {"cluster_id": "abc", "format": 3, "created_by": "7.0.0"}
    prefix.put(FILE_NAME, json.dumps(newer).encode())
    with pytest.raises(WrongCluster, match="format 3, written by release"):
        await prefix.opened().establish_identity()


@pytest.mark.parametrize("content", [b"", b"{", b"null", b'{"cluster_id": "", "format": 1}'])
async def test_a_damaged_identity_in_a_bucket_is_refused_and_never_replaced(content: bytes) -> None:
    prefix = Prefix()
    prefix.put(FILE_NAME, content)
    for call in (prefix.opened().establish_identity(), prefix.opened().refuse_other_cluster("")):
        with pytest.raises(StoreUnusable, match=r"store: cluster\.json in .* is damaged"):
            await call
    assert prefix.model.objects[FILE_NAME] == content


class Careless(BucketInMemory):
    """A bucket that accepts conditions, and ignores one kind of them."""

    ignores = ""

    def _create(self, key: str, data: bytes) -> str:
        if self.ignores == "If-None-Match":
            self._put(key, data)
            return tag_of(data)
        return super()._create(key, data)

    def _replace(self, key: str, data: bytes, tag: str) -> str:
        if self.ignores == "If-Match":
            self._put(key, data)
            return tag_of(data)
        return super()._replace(key, data, tag)


def careless(ignores: str) -> Prefix:
    prefix = Prefix()
    prefix.model = model = Careless(prefix._clock, random.Random(1), Tasks())
    model.ignores = ignores
    return prefix


@pytest.mark.parametrize("condition", ["If-None-Match", "If-Match"])
async def test_a_bucket_that_ignores_a_condition_gets_no_cluster(condition: str) -> None:
    prefix = careless(condition)
    with refused("store", match=f"it ignores {condition}: .*a cluster would lose data there"):
        await prefix.opened().establish_identity()
    assert not prefix.model.objects


async def test_a_bucket_that_began_to_keep_versions_is_tried_again() -> None:
    """radosgw ignores conditions then."""
    prefix = careless("")
    identity = await prefix.opened().establish_identity()
    prefix.model.bucket_settings = Settings(versioning="Enabled")
    assert await prefix.opened().establish_identity() == identity
    assert isinstance(prefix.model, Careless)
    prefix.model.ignores = "If-Match"
    with refused("store", match="it ignores If-Match.*keeps versions. Use another one, or suspend"):
        await prefix.opened().establish_identity()
    assert list(prefix.model.objects) == [FILE_NAME]


async def test_a_bucket_that_would_remove_objects_gets_no_cluster() -> None:
    prefix, rule = Prefix(), Settings(removing=("the rule 'old' removes them 7 days later",))
    prefix.model.bucket_settings = rule
    with refused("store", match="would lose objects: the rule 'old' removes them"):
        await prefix.opened().establish_identity()
    assert not prefix.model.objects
    prefix.model.bucket_settings = Settings()
    identity = await prefix.opened().establish_identity()
    prefix.model.bucket_settings = rule
    store = prefix.opened()
    with capture_logs() as logs:
        assert await store.establish_identity() == identity
        await store.look_at_settings()
    assert [one["log_level"] for one in logs] == ["error"]
    assert store.dangers == rule.removing
    other = prefix.opened()
    with capture_logs() as logs:
        await other.refuse_other_cluster(identity.cluster_id)
    assert [one["rule"] for one in logs] == list(rule.removing)


async def test_a_prefix_inside_that_of_another_cluster_gets_none() -> None:
    outer, inner = Prefix(), Prefix()
    opened = BucketClusterStore(
        inner.model, World(inner._clock, InProcessNetwork({}), random.Random(1)), [outer.model]
    )
    await outer.opened().establish_identity()
    with refused("store", match="is inside a bucket in memory, which belongs to a cluster"):
        await opened.establish_identity()
    assert not inner.model.objects


async def test_an_account_for_one_prefix_need_not_see_the_others() -> None:
    class Closed(BucketInMemory):
        async def head(self, key: str) -> Head | None:
            raise PermissionDenied(f"the account may not read {key}")

    prefix = Prefix()
    outer = Closed(prefix._clock, random.Random(1), Tasks())
    opened = BucketClusterStore(
        prefix.model, World(prefix._clock, InProcessNetwork({}), random.Random(1)), [outer]
    )
    await opened.establish_identity()
    assert FILE_NAME in prefix.model.objects
