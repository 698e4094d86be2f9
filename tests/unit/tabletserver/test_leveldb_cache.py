"""A snapshot of LevelDB has everything that was written before it, and nothing unfinished."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from percolator.errors import StoreUnusable
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.bucket_store import Cache
from percolator.services.tabletserver.leveldb_cache import (
    LevelDBCache,
    LevelDBCaches,
    parse_manifest,
)
from percolator.services.tabletserver.storage import Budget

pytestmark = pytest.mark.real_time


@pytest.fixture
def pool() -> Iterator[DiskThreads]:
    with DiskThreads(2, "leveldb") as pool:
        yield pool


def paths(root: Path, pattern: str) -> list[Path]:
    return sorted(root.glob(pattern))


def caches_in(
    root: Path, pool: DiskThreads, boot: str = "boot", idle: int = 1 << 30
) -> LevelDBCaches:
    return LevelDBCaches(root, pool, random.Random(), boot=boot, idle_bytes_max=idle)


async def fresh(caches: LevelDBCaches, tablet_id: int = 1) -> LevelDBCache:
    cache = await (await caches.begin(tablet_id)).open(open_tablets=1)
    assert isinstance(cache, LevelDBCache)
    return cache


async def put_all(cache: Cache, entries: dict[bytes, bytes]) -> None:
    batch = cache.batch()
    for key, value in entries.items():
        batch.put(key, value)
    await cache.write(batch)


async def copied(caches: LevelDBCaches, cache: Cache, tablet_id: int = 2) -> Cache:
    """A cache with the files of a snapshot of another one."""
    snapshot = await cache.snapshot()
    new = await caches.begin(tablet_id)
    for name, size in snapshot.sizes.items():
        data = await snapshot.read(name)
        assert len(data) == size
        await new.put(name, data)
    for name, data in snapshot.small.items():
        await new.put(name, data)
    snapshot.close()
    return await new.open(open_tablets=1)


async def test_a_snapshot_has_everything_that_was_written_before(
    tmp_path: Path, pool: DiskThreads
) -> None:
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    await put_all(cache, {b"a": b"1", b"b": b"2"})
    copy = await copied(caches, cache)
    assert dict(copy.iterate(b"", b"z")) == {b"a": b"1", b"b": b"2"}
    await copy.close()
    await cache.close()


async def test_snapshots_taken_during_compactions_are_whole(
    tmp_path: Path, pool: DiskThreads
) -> None:
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    chance = random.Random(5)
    value = chance.randbytes(2_000)
    written: dict[bytes, bytes] = {}
    for _ in range(12):
        some = {b"%05d" % chance.randrange(10_000): value + chance.randbytes(2) for _ in range(800)}
        written |= some
        await put_all(cache, some)
        copy = await copied(caches, cache)
        assert dict(copy.iterate(b"", b"z")) == written
        await copy.close()
    compacting = asyncio.ensure_future(cache.compact(b"", b"z"))
    copy = await copied(caches, cache)
    await compacting
    assert dict(copy.iterate(b"", b"z")) == written
    await copy.close()
    await cache.close()


async def test_a_snapshot_taken_amid_writes_has_everything_from_before(
    tmp_path: Path, pool: DiskThreads
) -> None:
    """LevelDB skips a flush that it groups with a write which waits for an earlier flush."""
    small = Budget(write_buffers_bytes=100_000)
    caches = LevelDBCaches(tmp_path, pool, random.Random(), boot="boot", budget=small)
    cache = await fresh(caches)
    written = 0

    async def keep_writing() -> None:
        nonlocal written
        while written < 400:
            await put_all(cache, {b"%06d" % (written + 1): os.urandom(60_000)})
            written += 1

    writing = asyncio.ensure_future(keep_writing())
    while not writing.done():
        before = written
        copy = await copied(caches, cache)
        found = sum(1 for _ in copy.iterate(b"", b"z"))
        assert before <= found <= written + 1
        await copy.close()
    await writing
    await cache.close()


async def test_a_flush_that_leveldb_skips_is_repeated(
    tmp_path: Path, pool: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    await put_all(cache, {b"a": b"1"})
    correct, skipped = LevelDBCache._flush, [0, 1]
    monkeypatch.setattr(LevelDBCache, "_flush", lambda self: skipped.pop() or correct(self))
    copy = await copied(caches, cache)
    assert not skipped
    assert copy.get(b"a") == b"1"
    monkeypatch.undo()
    await copy.close()
    await cache.close()


async def test_a_snapshot_that_leveldb_has_not_flushed_is_refused(
    tmp_path: Path, pool: DiskThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LevelDB reports no failure of a flush: a checkpoint without these writes would seem whole."""
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    await put_all(cache, {b"a": b"1"})
    monkeypatch.setattr(LevelDBCache, "_flush", lambda _: None)
    with pytest.raises(OSError, match="not flushed"):
        await cache.snapshot()
    monkeypatch.undo()
    (await cache.snapshot()).close()
    await cache.close()


@pytest.mark.parametrize("lost", ["*.ldb", "CURRENT"])
async def test_a_cache_that_has_lost_a_file_has_no_snapshot(
    tmp_path: Path, pool: DiskThreads, lost: str
) -> None:
    """And the cache can still be closed."""
    cache = await fresh(caches_in(tmp_path, pool))
    await put_all(cache, {b"a": b"1"})
    (await cache.snapshot()).close()
    for path in paths(tmp_path, f"*/*/{lost}"):
        path.unlink()
    with pytest.raises(OSError, match="flushed"):
        async with asyncio.timeout(20.0):
            await cache.snapshot()
    await cache.close()


async def test_a_closed_cache_has_no_snapshot(tmp_path: Path, pool: DiskThreads) -> None:
    cache = await fresh(caches_in(tmp_path, pool))
    await cache.close()
    with pytest.raises(OSError, match="closed"):
        await cache.snapshot()


async def test_a_manifest_cut_anywhere_tells_of_whole_changes_only(
    tmp_path: Path, pool: DiskThreads
) -> None:
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    for number in range(20):
        await put_all(cache, {b"%05d" % number: b"x" * 100})
        (await cache.snapshot()).close()
    (manifest,) = paths(tmp_path, "*/*/MANIFEST-*")
    data = manifest.read_bytes()
    whole = parse_manifest(data)
    assert whole.whole == data
    present = {int(path.stem): path.stat().st_size for path in paths(tmp_path, "*/*/*.ldb")}
    assert whole.tables.items() <= present.items()
    ends = set()
    for cut in range(len(data) + 1):
        found = parse_manifest(data[:cut])
        assert data.startswith(found.whole)
        assert len(found.whole) <= cut
        ends.add(len(found.whole))
    assert len(ends) > 20
    await cache.close()


def test_a_manifest_of_another_kind_is_refused() -> None:
    with pytest.raises(StoreUnusable, match="tag 77"):
        parse_manifest(b"\0\0\0\0\1\0\1" + bytes([77]))


async def test_a_cache_is_found_by_the_next_process_but_not_after_the_machine_was_started(
    tmp_path: Path, pool: DiskThreads
) -> None:
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    await put_all(cache, {b"a": b"1"})
    cache.abandon()
    again = await caches_in(tmp_path, pool).find(1, open_tablets=1)
    assert again is not None
    assert again.get(b"a") == b"1"
    again.abandon()
    later = caches_in(tmp_path, pool, boot="another boot")
    assert await later.find(1, open_tablets=1) is None
    await later.drop_idle([1])
    assert await caches_in(tmp_path, pool).find(1, open_tablets=1) is None


@pytest.mark.parametrize("torn", ["CURRENT", "MANIFEST", ".log"])
async def test_a_torn_cache_is_not_found_or_lacks_what_is_torn(
    tmp_path: Path, pool: DiskThreads, torn: str
) -> None:
    caches = caches_in(tmp_path, pool)
    cache = await fresh(caches)
    for number in range(200):
        await put_all(cache, {b"%05d" % number: b"x" * 1_000})
    cache.abandon()
    (file,) = [path for path in paths(tmp_path, "*/*/*") if torn in path.name]
    data = bytearray(file.read_bytes())
    at = len(data) // 2
    data[at : at + 20] = b"#" * min(20, len(data) - at)
    file.write_bytes(data)
    assert await caches.find(1, open_tablets=1) is None


async def test_a_new_cache_never_has_the_path_of_a_former_one(
    tmp_path: Path, pool: DiskThreads
) -> None:
    """A process that was given up may still compact there."""
    caches = caches_in(tmp_path, pool)
    former = await fresh(caches)
    before = set(paths(tmp_path, "*/*"))
    new = await fresh(caches)
    assert not before & set(paths(tmp_path, "*/*"))
    assert await caches.find(1, open_tablets=1) is None  # it is open
    new.abandon()
    former.abandon()


async def test_of_idle_caches_the_latest_are_kept(tmp_path: Path, pool: DiskThreads) -> None:
    caches = caches_in(tmp_path, pool, idle=2_500_000)
    for tablet_id in range(1, 6):
        cache = await fresh(caches, tablet_id)
        await put_all(cache, {b"%d" % number: os.urandom(1_000) for number in range(1_000)})
        await cache.close()
        for directory in paths(tmp_path, f"*/{tablet_id}-*"):
            os.utime(directory, (tablet_id, tablet_id))
    await caches.drop_idle([1])
    left = sorted(path.name.partition("-")[0] for path in paths(tmp_path, "*/*"))
    assert left == ["1", "4", "5"]


async def test_files_that_are_none_of_leveldbs_are_refused(
    tmp_path: Path, pool: DiskThreads
) -> None:
    new = await caches_in(tmp_path, pool).begin(1)
    with pytest.raises(StoreUnusable, match=r"\.\./x"):
        await new.put("../x", b"")
