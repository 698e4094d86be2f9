"""Promises of every `Storage`: the same tests for those in memory, on LevelDB and in a bucket."""

from __future__ import annotations

import asyncio
import errno
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.bucket.bucket import Bucket
from percolator.errors import InvariantViolation, StoreFault, StoreUnusable
from percolator.services.chassis.files import DiskThreads, Files, RealFiles, replace_durably
from percolator.services.tabletserver.bucket_store import BucketOwnership, BucketTabletStore
from percolator.services.tabletserver.leveldb_cache import LevelDBCaches
from percolator.services.tabletserver.storage import (
    Ancestry,
    LevelDBOptions,
    LevelDBStorage,
    write_buffer_bytes,
)
from percolator.tablet.state import TabletIdentity
from percolator.tasks import Tasks
from percolator.testing.memory_storage import DurableMemory, MemoryStorage
from percolator.world import Cursor, MachineClock, Random, Storage
from tests.doubles.bucket_in_memory import BucketInMemory
from tests.doubles.memory_files import MemoryDisk, MemoryFiles

pytestmark = pytest.mark.real_time  # LevelDB writes in a thread


class Place(Protocol):
    """A place where a storage can be opened again and again."""

    async def open(self) -> Storage[Any]: ...


class MemoryPlace:
    def __init__(self) -> None:
        self.disk = DurableMemory()

    async def open(self) -> Storage[Any]:
        return MemoryStorage(self.disk)


class LevelDBPlace:
    def __init__(self, directory: Path, pool: DiskThreads) -> None:
        self._directory = directory
        self._pool = pool

    async def open(self) -> Storage[Any]:
        self._directory.mkdir(exist_ok=True)
        return LevelDBStorage(self._directory, self._pool, LevelDBOptions(), create=True)


class BucketPlace:
    """The log in a bucket in memory, and a cache on LevelDB."""

    def __init__(self, directory: Path, pool: DiskThreads) -> None:
        directory.mkdir()
        clock, random = MachineClock(), Random(1)
        bucket = Bucket(
            BucketInMemory(clock, random, Tasks()), clock, random, attempt_seconds=1.0, seconds=5.0
        )
        caches = LevelDBCaches(directory, pool, random)
        log = structlog.stdlib.get_logger("test")
        self._store = BucketTabletStore(bucket, caches, clock, random, log)
        self._ownership: BucketOwnership | None = None

    async def open(self) -> Storage[Any]:
        if self._ownership is None:
            tablet = TabletIdentity(1, 1, 1, b"", b"")
            self._ownership = await self._store.take_over(tablet, Ancestry())
        return await self._store.open(self._ownership, open_tablets=1)


@pytest.fixture
def pool() -> Iterator[DiskThreads]:
    with DiskThreads(1, "leveldb") as pool:
        yield pool


KINDS = ("memory", "leveldb", "bucket")


def place_of(kind: str, directory: Path, pool: DiskThreads) -> Place:
    match kind:
        case "memory":
            return MemoryPlace()
        case "leveldb":
            return LevelDBPlace(directory / "tablet", pool)
        case _:
            return BucketPlace(directory / "caches", pool)


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path, pool: DiskThreads) -> Place:
    return place_of(request.param, tmp_path, pool)


@asynccontextmanager
async def opened(place: Place) -> AsyncIterator[Storage[Any]]:
    storage = await place.open()
    try:
        yield storage
    finally:
        await storage.close()


@pytest.fixture
@asynccontextmanager
async def storage(place: Place) -> AsyncIterator[Storage[Any]]:
    async with opened(place) as storage:
        yield storage


async def write_all(storage: Storage[Any], entries: Mapping[bytes, bytes | None]) -> None:
    """Writes them in one batch; deletes the keys without a value."""
    batch = storage.batch()
    for key, value in entries.items():
        if value is None:
            batch.delete(key)
        else:
            batch.put(key, value)
    await storage.write(batch)


async def write(storage: Storage[Any], **entries: str | None) -> None:
    await write_all(
        storage,
        {key.encode(): None if value is None else value.encode() for key, value in entries.items()},
    )


def forwards(cursor: Cursor, start: bytes) -> list[tuple[bytes, bytes]]:
    """The entries from a key on, without the storage's own."""
    cursor.seek(start)
    found = []
    while cursor.valid() and cursor.key() < b"\xff":
        found.append(cursor.item())
        cursor.next()
    return found


async def test_of_two_changes_of_a_key_in_one_batch_the_later_counts(storage: Storage[Any]) -> None:
    batch = storage.batch()
    batch.put(b"a", b"1")
    batch.delete(b"a")
    batch.delete(b"b")
    batch.put(b"b", b"2")
    await storage.write(batch)
    assert (storage.get(b"a"), storage.get(b"b")) == (None, b"2")


async def test_a_cursor_does_not_see_what_is_written_after_it_was_made(
    storage: Storage[Any],
) -> None:
    await write(storage, a="1", b="2")
    cursor = storage.cursor()
    iterator = storage.iterate(b"a", b"z")
    await write(storage, a="changed", b=None, c="new")
    assert forwards(cursor, b"a") == [(b"a", b"1"), (b"b", b"2")]
    assert list(iterator) == [(b"a", b"1"), (b"b", b"2")]
    fresh = storage.cursor()
    assert forwards(fresh, b"a") == [(b"a", b"changed"), (b"c", b"new")]
    cursor.close()
    fresh.close()


async def test_a_cursor_keeps_its_view_when_an_older_one_is_closed(storage: Storage[Any]) -> None:
    await write(storage, a="1")
    older = storage.cursor()
    await write(storage, a="2")
    younger = storage.cursor()
    older.close()
    await write(storage, a="3", b="3")
    assert forwards(younger, b"a") == [(b"a", b"2")]
    younger.close()


async def test_an_iteration_ends_before_its_stop(storage: Storage[Any]) -> None:
    await write(storage, a="1", b="2", c="3")
    assert list(storage.iterate(b"a", b"c")) == [(b"a", b"1"), (b"b", b"2")]
    assert list(storage.iterate(b"d", b"z")) == []


async def test_nothing_of_a_batch_is_visible_before_all_of_it_is_durable(
    storage: Storage[Any],
) -> None:
    """Readers go on while another thread is writing. If they saw a part of a write, or all of it
    before it was synced, a power cut could undo something on which a client has acted."""
    keys = [b"%04d" % number for number in range(2000)]
    for generation in range(20):
        new = dict.fromkeys(keys, b"%d" % generation)
        writing = asyncio.ensure_future(write_all(storage, new))
        while not writing.done():
            # A cursor sees a single generation, and a later cursor never sees an older one.
            assert len({value for _, value in storage.iterate(keys[0], b"~")}) <= 1
            await asyncio.sleep(0)
        await writing
        assert {value for _, value in storage.iterate(keys[0], b"~")} == {b"%d" % generation}


async def test_a_closed_storage_opened_again_has_everything(place: Place) -> None:
    async with opened(place) as storage:
        await write(storage, a="1")
        await write(storage, b="2", a=None)
    async with opened(place) as storage:
        assert (storage.get(b"a"), storage.get(b"b")) == (None, b"2")


async def test_whoever_reads_a_closed_storage_has_a_bug_and_the_disk_none(place: Place) -> None:
    async with opened(place) as storage:
        await write(storage, a="1")
    for read in (lambda: storage.get(b"a"), storage.cursor):
        with pytest.raises(RuntimeError):
            read()
    assert not issubclass(RuntimeError, storage.failures)


async def test_the_size_of_a_range_grows_with_what_is_in_it(place: Place) -> None:
    async with opened(place) as storage:
        values = {b"k%04d" % number: b"%d" % number * 100 for number in range(1000)}
        await write_all(storage, values)
    async with opened(place) as storage:  # opening moves LevelDB's log into tables
        whole = storage.approximate_bytes(b"k", b"l")
        assert whole > 0
        assert storage.approximate_bytes(b"k", b"k0500") < whole
        assert storage.approximate_bytes(b"x", b"y") == 0


FENCE = b"\xfe"
"""Stands between the keys of a tablet and those that are the storage's own."""
KEYS = st.binary(max_size=3).filter(lambda key: key < FENCE)
CHANGES = st.lists(
    st.dictionaries(KEYS, st.none() | st.binary(max_size=3), max_size=8),
    max_size=6,
)


@settings(max_examples=40, deadline=None)
@given(batches=CHANGES, start=KEYS)
@pytest.mark.parametrize("kind", KINDS)
def test_any_storage_is_a_sorted_map(
    kind: str, batches: list[dict[bytes, bytes | None]], start: bytes
) -> None:
    async def check(place: Place) -> None:
        model: dict[bytes, bytes] = {}
        async with opened(place) as storage:
            fence: dict[bytes, bytes | None] = {FENCE: b""}
            for changes in [fence, *batches]:
                await write_all(storage, changes)
                merged = model | changes
                model = {key: value for key, value in merged.items() if value is not None}
                assert [storage.get(key) for key in merged] == [model.get(key) for key in merged]
            cursor = storage.cursor()
            assert forwards(cursor, b"") == sorted(model.items())
            behind = sorted(item for item in model.items() if item[0] >= start)
            assert forwards(cursor, start) == behind
            cursor.seek(start)
            backwards = []
            while cursor.valid():
                backwards.append(cursor.key())
                cursor.prev()
            # It stands at the first key that is not below, and there is none behind the last one.
            assert backwards == sorted(
                (key for key in model if behind and key <= behind[0][0]), reverse=True
            )
            cursor.close()

    with tempfile.TemporaryDirectory() as directory, DiskThreads(1, "leveldb") as pool:
        asyncio.run(check(place_of(kind, Path(directory), pool)))


# ------------------------------------------------------------------- what only memory can show


class BreakingDisk(DurableMemory):
    """Fails, or hangs, in the middle of a write."""

    def __init__(self) -> None:
        super().__init__()
        self.failing = False
        self.hanging: asyncio.Event | None = None

    async def sync(self) -> None:
        if self.hanging is not None:
            await self.hanging.wait()
        if self.failing:
            raise OSError("the disk is on fire")


@pytest.mark.parametrize("kept", [False, True])
async def test_a_failed_write_is_in_doubt_until_the_storage_is_opened_again(kept: bool) -> None:
    disk = BreakingDisk()
    storage = MemoryStorage(disk)
    await write(storage, a="before")
    disk.failing = True
    with pytest.raises(OSError, match="on fire"):
        await write(storage, a="doubtful", b="doubtful")
    with pytest.raises(OSError, match="cannot be used"):
        storage.get(b"a")
    with pytest.raises(InvariantViolation):
        MemoryStorage(disk)
    disk.settle(kept=kept)
    reopened = MemoryStorage(disk)
    assert reopened.get(b"a") == (b"doubtful" if kept else b"before")
    assert reopened.get(b"b") == (b"doubtful" if kept else None)


async def test_a_crash_loses_what_was_not_synced() -> None:
    disk = BreakingDisk()
    storage = MemoryStorage(disk)
    await write(storage, a="synced")
    disk.hanging = asyncio.Event()
    writing = asyncio.ensure_future(write(storage, a="unsynced", b="unsynced"))
    await asyncio.sleep(0)
    assert storage.get(b"a") == b"synced"
    storage.crash()
    disk.settle(kept=False)
    disk.hanging.set()
    with pytest.raises(OSError, match="crashed"):
        await writing
    reopened = MemoryStorage(disk)
    assert (reopened.get(b"a"), reopened.get(b"b")) == (b"synced", None)


async def test_two_writes_at_a_time_are_a_bug() -> None:
    disk = BreakingDisk()
    storage = MemoryStorage(disk)
    disk.hanging = asyncio.Event()
    first = asyncio.ensure_future(write(storage, a="1"))
    await asyncio.sleep(0)
    with pytest.raises(InvariantViolation):
        await write(storage, a="2")
    disk.hanging.set()
    await first
    assert storage.get(b"a") == b"1"


# ------------------------------------------------------------------- what only LevelDB can show


def test_a_directory_that_is_no_database_is_refused(tmp_path: Path) -> None:
    (tmp_path / "CURRENT").write_text("MANIFEST-000007\n")
    with DiskThreads(1, "leveldb") as pool, pytest.raises(StoreUnusable) as caught:
        LevelDBStorage(tmp_path, pool)
    assert caught.value.fault in (StoreFault.DAMAGED, StoreFault.INPUT_OUTPUT)


@pytest.mark.parametrize(
    ("directory", "create"),
    [("e5", False), ("e5", True), (".", False)],
    ids=["gone", "gone, to be created", "without a database"],
)
def test_what_has_to_be_there_is_refused_and_not_made(
    tmp_path: Path, pool: DiskThreads, directory: str, create: bool
) -> None:
    """A deposed owner's directory was renamed: a new one would exist beside the sealed one."""
    with pytest.raises(StoreUnusable):
        LevelDBStorage(tmp_path / directory, pool, create=create)
    assert not (tmp_path / "e5").exists()
    assert not (tmp_path / "CURRENT").exists()


def bytes_of_logs(directory: Path) -> int:
    return sum(log.stat().st_size for log in directory.glob("*.log"))


async def test_a_clean_close_leaves_no_log_to_replay(tmp_path: Path, pool: DiskThreads) -> None:
    storage = LevelDBStorage(tmp_path, pool, create=True)
    await write(storage, a="1" * 1000)
    assert bytes_of_logs(tmp_path) > 1000
    await storage.close()
    assert bytes_of_logs(tmp_path) == 0


async def test_an_abandoned_database_keeps_what_was_synced(
    tmp_path: Path, pool: DiskThreads
) -> None:
    storage = LevelDBStorage(tmp_path, pool, create=True)
    await write(storage, a="1")
    storage.abandon()
    reopened = LevelDBStorage(tmp_path, pool)
    assert reopened.get(b"a") == b"1"
    await reopened.close()


def test_write_buffers_shrink_with_the_number_of_tablets() -> None:
    mebibyte = 1024 * 1024
    assert write_buffer_bytes(0) == write_buffer_bytes(32) == 8 * mebibyte
    assert (write_buffer_bytes(64), write_buffer_bytes(10_000)) == (4 * mebibyte, 1 * mebibyte)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError(28, "No space left on device"), StoreFault.DISK_FULL),
        (OSError(30, "Read-only file system"), StoreFault.READ_ONLY),
        (OSError(5, "Input/output error"), StoreFault.INPUT_OUTPUT),
    ],
)
def test_failures_are_told_apart(
    tmp_path: Path, error: OSError, fault: StoreFault, pool: DiskThreads
) -> None:
    storage = LevelDBStorage(tmp_path, pool, create=True)
    assert storage.fault(error) is fault
    assert storage.fault(OSError(f"IO error: {error.strerror}")) is fault
    storage.abandon()


async def test_compaction_changes_nothing_that_is_seen(storage: Storage[Any]) -> None:
    for number in range(500):
        await write_all(storage, {b"W%04d" % number: b"v" * 1_000})
    await write_all(storage, {b"W%04d" % number: None for number in range(400)})
    await storage.compact(b"W", b"X")
    assert [key for key, _ in storage.iterate(b"W", b"X")] == [
        b"W%04d" % number for number in range(400, 500)
    ]


async def test_a_store_that_is_abandoned_while_it_is_compacted_is_closed_afterwards(
    tmp_path: Path, pool: DiskThreads
) -> None:
    storage = LevelDBStorage(tmp_path, pool, create=True)
    await write_all(storage, {b"W%06d" % number: b"v" * 100 for number in range(20_000)})
    compacting = asyncio.ensure_future(storage.compact(b"W", b"X"))
    await asyncio.sleep(0)
    storage.abandon()
    await compacting
    again = LevelDBStorage(tmp_path, pool)
    assert again.get(b"W000000") == b"v" * 100
    await again.close()


# The file system of a simulation behaves like the real one, except after a crash.

# The real ones wait for the disk in a thread, which virtual time knows nothing of.


@pytest.fixture(params=["real", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Files]:
    if request.param == "real":
        found: Files = RealFiles()
    else:
        disk = MemoryDisk()
        disk.make_durable_directory(tmp_path)
        found = MemoryFiles(disk)
    yield found
    found.close()


async def write_file(files: Files, path: Path, data: bytes, *, exclusive: bool = True) -> None:
    async with await files.create(path, exclusive=exclusive) as file:
        await file.append(data)


async def read(files: Files, path: Path) -> bytes:
    return await files.read(path, bytes_max=1000)


async def failure(call: Awaitable[Any]) -> int | None:
    with pytest.raises(OSError) as caught:  # noqa: PT011  # its errno is what the tests compare
        await call
    return caught.value.errno


async def test_what_is_appended_is_read(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "log"
    async with await files.create(path) as file:
        await file.append(b"one")
        await file.fsync()
        await file.append(b"two")
    assert await read(files, path) == b"onetwo"
    assert (await files.stat(path)).size_bytes == 6


async def test_each_wait_for_the_disk_is_counted(files: Files, tmp_path: Path) -> None:
    await replace_durably(files, tmp_path / "mark", b"1")
    assert files.fsyncs == 2
    with pytest.raises(FileNotFoundError):
        await files.fsync_directory(tmp_path / "none")
    assert files.fsyncs == 3


async def test_reading_is_bounded(files: Files, tmp_path: Path) -> None:
    await write_file(files, tmp_path / "log", b"12345")
    assert await files.read(tmp_path / "log", bytes_max=5) == b"12345"


IMPOSSIBLE: dict[str, tuple[int, Callable[[Files, Path], Awaitable[object]]]] = {
    "read more than is asked for": (
        errno.EFBIG,
        lambda files, at: files.read(at / "long", bytes_max=4),
    ),
    "create what exists": (errno.EEXIST, lambda files, at: files.create(at / "file")),
    "make a directory that exists": (
        errno.EEXIST,
        lambda files, at: files.make_directory(at / "other"),
    ),
    "make a directory in none": (
        errno.ENOENT,
        lambda files, at: files.make_directory(at / "none" / "e5"),
    ),
    "rename onto a full directory": (
        errno.ENOTEMPTY,
        lambda files, at: files.rename(at / "other", at / "full"),
    ),
    "rename a file onto a directory": (
        errno.EISDIR,
        lambda files, at: files.rename(at / "file", at / "full"),
    ),
    "rename a directory onto a file": (
        errno.ENOTDIR,
        lambda files, at: files.rename(at / "other", at / "file"),
    ),
    "move a file": (
        errno.EXDEV,
        lambda files, at: files.rename(at / "file", at / "other" / "file"),
    ),
    "rename what is not there": (
        errno.ENOENT,
        lambda files, at: files.rename(at / "none", at / "file"),
    ),
    "link onto a file": (errno.EEXIST, lambda files, at: files.link(at / "long", at / "file")),
    "link a directory": (errno.EPERM, lambda files, at: files.link(at / "other", at / "e")),
    "link what is not there": (errno.ENOENT, lambda files, at: files.link(at / "none", at / "e")),
    "remove a full directory": (
        errno.ENOTEMPTY,
        lambda files, at: files.remove_directory(at / "full"),
    ),
    "unlink a directory": (errno.EISDIR, lambda files, at: files.unlink(at / "other")),
    "remove a file as a directory": (
        errno.ENOTDIR,
        lambda files, at: files.remove_directory(at / "file"),
    ),
    "read a directory": (errno.EISDIR, lambda files, at: files.read(at / "other", bytes_max=1)),
    "list a file": (errno.ENOTDIR, lambda files, at: files.list(at / "file")),
    "look below a file": (errno.ENOTDIR, lambda files, at: files.stat(at / "file" / "x")),
    "fsync a file as a directory": (
        errno.ENOTDIR,
        lambda files, at: files.fsync_directory(at / "file"),
    ),
    "unlink what is not there": (errno.ENOENT, lambda files, at: files.unlink(at / "none")),
    "look at what is not there": (errno.ENOENT, lambda files, at: files.stat(at / "none")),
    "read what is not there": (
        errno.ENOENT,
        lambda files, at: files.read(at / "none", bytes_max=1),
    ),
    "list what is not there": (errno.ENOENT, lambda files, at: files.list(at / "none")),
    "fsync what is not there": (errno.ENOENT, lambda files, at: files.fsync_directory(at / "none")),
    "create in no directory": (errno.ENOENT, lambda files, at: files.create(at / "none" / "x")),
    "lock in no directory": (errno.ENOENT, lambda files, at: files.lock(at / "none" / "LOCK")),
}


@pytest.mark.parametrize("what", IMPOSSIBLE)
async def test_what_is_impossible_or_would_lose_something_is_refused_by_its_errno(
    files: Files, tmp_path: Path, what: str
) -> None:
    for directory in ("full", "other"):
        await files.make_directory(tmp_path / directory)
    for file in ("full/x", "file", "long"):
        await write_file(files, tmp_path / file, b"12345")
    number, call = IMPOSSIBLE[what]
    assert await failure(call(files, tmp_path)) == number
    assert await files.list(tmp_path) == ["file", "full", "long", "other"]
    assert await read(files, tmp_path / "file") == b"12345"


async def test_creation_that_is_not_exclusive_empties_the_file(
    files: Files, tmp_path: Path
) -> None:
    await write_file(files, tmp_path / "a", b"long content")
    await write_file(files, tmp_path / "a", b"x", exclusive=False)
    assert await read(files, tmp_path / "a") == b"x"


async def test_a_directory_lists_its_names_in_order(files: Files, tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        await write_file(files, tmp_path / name, b"")
    await files.unlink(tmp_path / "a")
    await files.make_directory(tmp_path / "d")
    assert await files.list(tmp_path) == ["b", "c", "d"]


async def test_renaming_a_directory_keeps_its_identity_and_one_made_again_is_another(
    files: Files, tmp_path: Path
) -> None:
    await files.make_directory(tmp_path / "e5")
    await write_file(files, tmp_path / "e5" / "log", b"content")
    before = await files.stat(tmp_path / "e5")
    assert before.is_directory
    await files.rename(tmp_path / "e5", tmp_path / "e5.sealed")
    after = await files.stat(tmp_path / "e5.sealed")
    assert (before.inode, before.device) == (after.inode, after.device)
    assert await read(files, tmp_path / "e5.sealed" / "log") == b"content"
    assert await failure(files.stat(tmp_path / "e5")) == errno.ENOENT
    await files.make_directory(tmp_path / "e5")
    assert (await files.stat(tmp_path / "e5")).inode != before.inode


async def test_an_open_file_survives_the_renaming_of_its_directory(
    files: Files, tmp_path: Path
) -> None:
    await files.make_directory(tmp_path / "e5")
    async with await files.create(tmp_path / "e5" / "log") as file:
        await file.append(b"before ")
        await files.rename(tmp_path / "e5", tmp_path / "e5.sealed")
        await file.append(b"after")
    assert await read(files, tmp_path / "e5.sealed" / "log") == b"before after"


async def test_what_is_renamed_onto_a_file_or_an_empty_directory_replaces_it(
    files: Files, tmp_path: Path
) -> None:
    for directory in ("full", "other"):
        await files.make_directory(tmp_path / directory)
    for file in ("full/new", "full/old"):
        await write_file(files, tmp_path / file, file.encode())
    await files.rename(tmp_path / "full" / "new", tmp_path / "full" / "old")
    await files.rename(tmp_path / "full", tmp_path / "other")
    assert (await files.list(tmp_path), await files.list(tmp_path / "other")) == (
        ["other"],
        ["old"],
    )
    assert await read(files, tmp_path / "other" / "old") == b"full/new"


async def test_a_linked_file_has_one_content_under_two_names(files: Files, tmp_path: Path) -> None:
    async with await files.create(tmp_path / "a") as file:
        await file.append(b"1")
        await files.link(tmp_path / "a", tmp_path / "b")
        await file.append(b"2")
    assert await read(files, tmp_path / "b") == b"12"
    await files.unlink(tmp_path / "b")
    assert await read(files, tmp_path / "a") == b"12"


async def test_an_empty_directory_is_removed(files: Files, tmp_path: Path) -> None:
    await files.make_directory(tmp_path / "d")
    await files.remove_directory(tmp_path / "d")
    assert await failure(files.list(tmp_path / "d")) == errno.ENOENT


async def test_a_lock_has_one_holder_until_it_is_released(files: Files, tmp_path: Path) -> None:
    held = await files.lock(tmp_path / "LOCK")
    with pytest.raises(BlockingIOError):
        await files.lock(tmp_path / "LOCK")
    held.release()
    held.release()
    again = await files.lock(tmp_path / "LOCK")
    held.release()
    with pytest.raises(BlockingIOError):
        await files.lock(tmp_path / "LOCK")
    again.release()


async def test_reading_a_locked_file_keeps_the_lock(files: Files, tmp_path: Path) -> None:
    held = await files.lock(tmp_path / "LOCK")
    assert await read(files, tmp_path / "LOCK") == b""
    with pytest.raises(BlockingIOError):
        await files.lock(tmp_path / "LOCK")
    held.release()


async def test_a_file_is_replaced_as_a_whole(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "mark"
    await replace_durably(files, path, b"old and long")
    await replace_durably(files, path, b"new")
    assert await read(files, path) == b"new"
    assert await files.list(tmp_path) == ["mark"]


async def test_the_event_loop_goes_on_during_an_fsync(tmp_path: Path) -> None:
    """It matters only for the real files: another task runs while one waits for the disk."""
    files = RealFiles()
    ran = asyncio.Event()
    try:
        async with await files.create(tmp_path / "log") as file:
            await file.append(b"x")
            asyncio.get_running_loop().call_soon(ran.set)
            await file.fsync()
    finally:
        files.close()
    assert ran.is_set()
