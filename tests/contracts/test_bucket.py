"""Promises of a bucket, for the model in memory and for the driver on a server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.place import parse_bucket
from percolator.bucket.port import Attempts, Refused, Stored
from percolator.bucket.probe import Probe
from percolator.bucket.s3 import s3_attempts
from percolator.tasks import Tasks
from percolator.world import MachineClock
from tests.bucket.ceph import Ceph
from tests.doubles.bucket_in_memory import BucketInMemory
from tests.doubles.s3_server import s3_server, set_credentials

MODEL, DRIVER, CEPH = "the model", "the driver on a server", "the driver on Ceph"


@pytest.fixture(
    params=[
        MODEL,
        pytest.param(DRIVER, marks=pytest.mark.real_time),
        pytest.param(CEPH, marks=pytest.mark.bucket),
    ]
)
def attempts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Attempts]:
    if request.param == MODEL:
        yield BucketInMemory(MachineClock(), random.Random(1), Tasks())
    elif request.param == CEPH:
        ceph: Ceph = request.getfixturevalue("ceph")
        set_credentials(monkeypatch, ceph.account.access_key_id, ceph.account.secret)
        yield s3_attempts(ceph.new_bucket(), attempt_seconds=5.0)
    else:
        set_credentials(monkeypatch)
        with s3_server() as server:
            yield s3_attempts(parse_bucket(server.address), attempt_seconds=5.0)


async def test_a_key_is_created_once(attempts: Attempts) -> None:
    tag = await attempts.create("log/1", b"first")
    with pytest.raises(Refused):
        await attempts.create("log/1", b"second")
    assert await attempts.read("log/1") == Stored(b"first", tag)


async def test_an_object_is_replaced_only_for_its_own_tag(attempts: Attempts) -> None:
    first = await attempts.create("head", b"1")
    second = await attempts.replace("head", b"2", first)
    assert second != first
    for stale in (first, "d41d8cd98f00b204e9800998ecf8427e"):
        with pytest.raises(Refused):
            await attempts.replace("head", b"3", stale)
    assert await attempts.read("head") == Stored(b"2", second)


async def test_what_does_not_exist_is_not_replaced(attempts: Attempts) -> None:
    with pytest.raises(Refused):
        await attempts.replace("nothing", b"x", "d41d8cd98f00b204e9800998ecf8427e")
    assert await attempts.read("nothing") is None
    assert await attempts.head("nothing") is None


async def test_a_head_has_the_tag_and_the_size_of_what_a_read_returns(attempts: Attempts) -> None:
    await attempts.create("a/b", b"four")
    read, head = await attempts.read("a/b"), await attempts.head("a/b")
    assert read is not None
    assert head == (read.tag, 4)


async def test_a_list_has_the_first_keys_of_a_folder_in_order_with_sizes(
    attempts: Attempts,
) -> None:
    for key in ("log/3", "log/1", "log/2/part", "logs/1", "lo", "log/10"):
        await attempts.create(key, key.encode())
    everything = [(key, len(key)) for key in ("log/1", "log/10", "log/2/part", "log/3")]
    assert await attempts.list("log", "", 10) == everything
    assert await attempts.list("log", "log/1", 2) == everything[1:3]
    assert await attempts.list("log", "log/3", 10) == []
    assert await attempts.list("nothing", "", 10) == []
    assert await attempts.list("", "", 2) == [("lo", 2), ("log/1", 5)]


async def test_a_deleted_object_is_gone_and_may_be_deleted_again(attempts: Attempts) -> None:
    await attempts.create("old/1", b"x")
    await attempts.create("old/2", b"y")
    for _ in range(2):
        await attempts.delete("old/1")
        assert await attempts.read("old/1") is None
        assert await attempts.list("old", "", 10) == [("old/2", 1)]


async def test_of_many_who_create_one_key_at_once_one_wins(attempts: Attempts) -> None:
    bucket = made_bucket(attempts)
    for number in range(5):
        made = await asyncio.gather(
            *(bucket.create(f"log/{number}", b"%d" % rival) for rival in range(8))
        )
        assert sum(one.is_own for one in made) == 1
        assert len({one.found for one in made}) == 1


async def test_all_promises_are_kept_and_the_probe_leaves_nothing(attempts: Attempts) -> None:
    probe = Probe(made_bucket(attempts), MachineClock(), "check-1")
    assert [why async for _, why in probe.verdicts()] == [""] * 7
    assert probe.warnings == []
    assert await attempts.list("check-1", "", 100) != []
    assert await probe.clean_up()
    assert set(probe.median_seconds()) == {"create", "replace", "read", "head", "list", "delete"}
    assert await attempts.list("check-1", "", 100) == []


def made_bucket(attempts: Attempts) -> Bucket:
    return Bucket(attempts, MachineClock(), random.Random(2), attempt_seconds=5.0, seconds=20.0)
