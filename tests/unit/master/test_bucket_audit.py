"""An audit of a bucket finds each loss, and takes nothing else for one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest

from percolator.bucket.bucket import Bucket
from percolator.bucket.checkpoint import tablet_folder
from percolator.bucket.port import Listed, Stored
from percolator.errors import InvalidArgument
from percolator.services.chassis.cluster_store import FILE_NAME
from percolator.services.master.bucket_audit import Audit, Report
from tests.unit.tabletserver.bucket_scene import FEW, Scene, put, quiet, scene

IDENTITY = b'{"cluster_id": "abc", "format": 1}'


@pytest.fixture
@asynccontextmanager
async def bucket() -> AsyncIterator[Scene]:
    """Tablet 1 has a checkpoint, and entries after it."""
    async with scene(settings=FEW) as found:
        storage = await found.machine().serve()
        for number in range(15):
            await put(storage, **{f"k{number:02}": str(number)})
        await quiet(storage)
        found.objects.objects[FILE_NAME] = IDENTITY
        yield found


async def audited(found: Scene, *, is_deep: bool = False) -> Report:
    reached = Bucket(found.objects, found.clock, Random(1), attempt_seconds=1.0, seconds=10.0)
    return await Audit(reached, found.clock, Random(2), is_deep=is_deep).run()


@pytest.mark.parametrize("is_deep", [False, True])
async def test_nothing_is_wrong_with_what_is_whole(bucket: Scene, is_deep: bool) -> None:
    before = dict(bucket.objects.objects)
    report = await audited(bucket, is_deep=is_deep)
    assert report.problems == []
    assert report.plan is not None
    (tablet,) = report.tablets
    assert tablet.checkpoint
    assert tablet.to_apply == tablet.end - tablet.included > 0
    assert report.total == (len(before), sum(map(len, before.values())))
    assert dict(bucket.objects.objects) == before


async def test_a_missing_entry_is_a_hole_and_then_no_orphans_are_judged(bucket: Scene) -> None:
    entry = bucket.objects.keys("log")[-2]
    del bucket.objects.objects[entry]
    report = await audited(bucket)
    assert report.tablets[0].holes == [int(entry[-20:])]
    assert report.problems == [f"a bucket in memory: {entry} is missing: the log has a hole"]
    assert report.plan is None


async def test_only_a_deep_audit_finds_an_altered_file(bucket: Scene) -> None:
    (file, *_) = bucket.objects.keys("table")
    data = bucket.objects.objects[file]
    bucket.objects.objects[file] = bytes([data[0] ^ 1]) + data[1:]
    assert (await audited(bucket)).problems == []
    (problem,) = (await audited(bucket, is_deep=True)).problems
    assert f"{file} is damaged: its checksum" in problem
    bucket.objects.objects[file] = data[:-1]
    (problem,) = (await audited(bucket)).problems
    assert f"{file} is damaged: {len(data) - 1} bytes instead of {len(data)}" in problem


async def test_what_a_list_lacks_is_not_taken_for_missing(
    bucket: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    correct = bucket.objects.list

    async def late(folder: str, after: str, limit: int) -> list[Listed]:
        listed = await correct(folder, after, limit)
        return [one for number, one in enumerate(listed) if number % 2 or "/log" in folder]

    monkeypatch.setattr(bucket.objects, "list", late)
    report = await audited(bucket)
    assert len(report.kinds) > 1
    assert report.problems == []


async def test_entries_that_an_owner_deletes_meanwhile_are_no_holes(
    bucket: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage = await bucket.machine().serve(epoch=2)
    entry = bucket.objects.keys("log")[-3]
    read, looks = bucket.objects.read, iter([False, True])

    async def read_and_write(key: str) -> Stored | None:
        """Once the audit has found the end of the log, entries up to it are put in a checkpoint,
        and deleted."""
        found = await read(key)
        if key == f"{tablet_folder(1)}/floor" and next(looks, False):
            for number in range(100, 130):
                await put(storage, **{f"k{number}": "1"})
                await quiet(storage)
        return found

    monkeypatch.setattr(bucket.objects, "read", read_and_write)
    report = await audited(bucket, is_deep=True)
    assert entry not in bucket.objects.objects
    assert report.problems == []


async def test_a_bucket_without_a_cluster_is_refused(bucket: Scene) -> None:
    del bucket.objects.objects[FILE_NAME]
    with pytest.raises(InvalidArgument, match=r"belongs to no cluster: it has no cluster\.json"):
        await audited(bucket)
