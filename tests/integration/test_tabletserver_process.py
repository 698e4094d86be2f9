"""The tablet server process: failing disks, full disks, draining, dumping, refusing to start."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from ctypes.util import find_library
from pathlib import Path

import psutil
import pytest

from percolator.errors import PercolatorError
from percolator.formats.records import RecordKind, WriteRecord
from percolator.services.chassis.store_watch import PROBE
from percolator.services.local.process import LocalClusterError, ServiceProcess
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.errors_pb2 import StoreUnusable as StoreUnusableDetail
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from tests.mounted_file_system import MAY_MOUNT, FileSystem

TABLET = 7
UNLIMITED = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)


async def test_after_an_input_output_error_the_log_decides_and_the_tablet_serves_again(
    tmp_path: Path,
) -> None:
    async with tablet_server(tmp_path) as server:
        await server.serve(TABLET, 1, {b"before": b"1"})
        limited = psutil.Process(server.process.pid)
        log_bytes = max((tmp_path / "store" / "3" / "7" / "e1").glob("*.log")).stat().st_size
        limited.rlimit(psutil.RLIMIT_FSIZE, (log_bytes + 20, psutil.RLIM_INFINITY))
        (result,) = await server.mutate(puts(TABLET, 1, {b"failed": b"2"}))
        assert [one.result.outcome for one in result.unapplied] == [pb.OUTCOME_UNKNOWN]
        limited.rlimit(psutil.RLIMIT_FSIZE, UNLIMITED)
        for _ in range(200):
            (again,) = await server.mutate(puts(TABLET, 1, {b"after": b"3"}))
            if acknowledged(again):
                break
            assert again.error.HasField("store_unusable") or again.error.HasField("not_ready")
            await asyncio.sleep(0.05)
        rows = await server.rows(TABLET, 1)
        assert rows[b"before"] == b"1"
        assert rows.keys() - {b"failed"} == {b"before", b"after"}


async def test_a_full_disk_refuses_writes_of_every_tablet_and_serves_reads(tmp_path: Path) -> None:
    async with tablet_server(tmp_path) as server:
        await server.serve(TABLET, 1, {b"row": b"value"})
    reserve = str(1 << 49)
    async with tablet_server(tmp_path, "--disk-reserve-bytes", reserve) as server:
        await server.open(TABLET, 2)
        (refused,) = await server.mutate(puts(TABLET, 2, {b"row": b"other"}))
        assert refused.error.store_unusable.reason == StoreUnusableDetail.REASON_DISK_FULL
        assert await server.rows(TABLET, 2) == {b"row": b"value"}


def dump(path: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "serve",
        "tabletserver",
        "dump",
        str(path),
        *flags,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False)


async def test_dump_refuses_an_open_tablet_and_shows_a_closed_one_unchanged(
    tmp_path: Path,
) -> None:
    tablet = tmp_path / "store" / "3" / str(TABLET)
    async with tablet_server(tmp_path) as server:
        await server.serve(TABLET, 1, {b"row\x00": b'say "hi"'})
        refused = dump(tablet)
        assert refused.returncode == 2
        assert "is open" in refused.stderr
    before = {path.name: path.read_bytes() for path in (tablet / "e1").iterdir()}
    shown = dump(tablet, "--json")
    assert shown.returncode == 0, shown.stderr
    cells = [json.loads(line) for line in shown.stdout.splitlines()]
    (write,) = [cell for cell in cells if cell["space"] == "W"]
    shown_as = {"row": "row\\x00", "value": "say \\x22hi\\x22", "kind": "PUT"}
    assert shown_as.items() <= write.items()
    # Text, as in all JSON of this project: many programs round numbers above 2^53.
    assert f"timestamp={int(write['timestamp'])}" in dump(tablet).stdout
    assert write["timestamp"] == str(int(write["timestamp"]))
    assert isinstance(write["start"], str)
    assert 'row="row\\x00"' in dump(tablet / "e1").stdout
    assert {path.name: path.read_bytes() for path in (tablet / "e1").iterdir()} == before


async def test_a_drained_server_exits_with_0_and_leaves_no_log_to_replay(tmp_path: Path) -> None:
    async with tablet_server(tmp_path) as server:
        await server.serve(TABLET, 1, {b"row": b"value"})
        assert await server.stop() == 0
    logs = (tmp_path / "store" / "3" / str(TABLET) / "e1").glob("*.log")
    assert sum(log.stat().st_size for log in logs) == 0


async def test_streams_of_notifications_end_at_the_drain_and_do_not_delay_it(
    tmp_path: Path,
) -> None:
    async with tablet_server(tmp_path) as server:
        await server.open(TABLET, 1)
        watched = [{"table_id": 3, "observers": [b"f"]}]
        request = pb.WatchNotificationsRequest(watched=watched)
        watch = server.network.stream(server.process.address, methods.WATCH_NOTIFICATIONS)
        stream = watch(request, 60)
        assert not (await anext(stream)).notifications
        server.process.ask_to_stop()
        assert [answer async for answer in stream] == []
        assert server.process.wait_stopped() == 0


# `kill -9` under load, torn logs, damage: no acknowledged write is lost, the rest is served.


KILLS = 3
LOAD_SECONDS = 0.4
WRITERS = 4
ROWS_PER_BATCH = 20


class Load:
    """Writers that never stop, and record what was acknowledged."""

    def __init__(self) -> None:
        self.sent: dict[bytes, bytes] = {}
        self.acknowledged: dict[bytes, bytes] = {}
        self._numbers = itertools.count()

    async def run(self, server: TabletServer, epoch: int) -> None:
        await asyncio.gather(*(self._write(server, epoch) for _ in range(WRITERS)))

    async def _write(self, server: TabletServer, epoch: int) -> None:
        while True:
            numbers = list(itertools.islice(self._numbers, ROWS_PER_BATCH))
            rows = {b"%08d" % (n * 7919 % 100_000_000): b"value %d" % n for n in numbers}
            self.sent |= rows
            try:
                (result,) = await server.mutate(puts(TABLET, epoch, rows))
            except PercolatorError:
                return
            assert acknowledged(result) == len(rows)
            self.acknowledged |= rows


async def test_every_acknowledged_write_survives_kill_9(tmp_path: Path) -> None:
    load = Load()
    async with tablet_server(tmp_path) as server:
        for epoch in range(1, 2 * KILLS, 2):
            await server.open(TABLET, epoch)
            before = len(load.acknowledged)
            running = asyncio.create_task(load.run(server, epoch))
            await asyncio.sleep(LOAD_SECONDS)
            server.kill()
            await running
            assert len(load.acknowledged) > before, "the load did nothing before the kill"
            await server.start()
            await server.open(TABLET, epoch + 1)
            found = await server.rows(TABLET, epoch + 1)
            assert load.acknowledged.items() <= found.items() <= load.sent.items()


def newest_log(store: Path, tablet: int) -> Path:
    return max((store / "3" / str(tablet) / "e1").glob("*.log"))


async def test_a_log_torn_behind_what_was_acknowledged_opens_with_all_of_it(
    tmp_path: Path,
) -> None:
    """The torn batch is lost as a whole: no part of it is ever visible, wherever it was torn."""
    early = {b"early %d" % n: b"x" * 50 for n in range(30)}
    late = {b"late %d" % n: b"y" * 50 for n in range(30)}
    torn = (1, 2, 3)
    async with tablet_server(tmp_path) as server:
        complete = {}
        for tablet in torn:
            await server.serve(tablet, 1, early)
            complete[tablet] = newest_log(server.store, tablet).stat().st_size
            await server.put(tablet, 1, late)
        server.kill()
        for tablet in torn:
            log = newest_log(server.store, tablet)
            whole = log.stat().st_size
            cuts = (complete[tablet] + 1, (complete[tablet] + whole) // 2, whole - 1)
            with log.open("r+b") as file:
                file.truncate(cuts[tablet - 1])
        await server.start()
        for tablet in torn:
            await server.open(tablet, 2)
            assert await server.rows(tablet, 2) == early


# Two servers and one tablet: the former owner acknowledges nothing that the next one lacks.


def epochs(store: Path) -> list[str]:
    return sorted(path.name for path in (store / "3" / str(TABLET)).iterdir())


async def test_a_cut_off_owner_acknowledges_nothing_that_is_lost(tmp_path: Path) -> None:
    """It can still reach its clients, but does not learn that the tablet has moved."""
    store = tmp_path / "store"
    async with (
        tablet_server(tmp_path, name="former", store=store) as former,
        tablet_server(tmp_path, name="next", store=store) as successor,
    ):
        await former.open(TABLET, 1)
        known: dict[bytes, bytes] = {}
        refusals: list[pb.MutationBatchResult] = []

        async def write(writer: int) -> None:
            for number in range(100_000):
                rows = {b"%d/%06d/%d" % (writer, number, n): b"v" for n in range(10)}
                (result,) = await former.mutate(puts(TABLET, 1, rows))
                if acknowledged(result) < len(rows):
                    refusals.append(result)
                    return
                known.update(rows)

        writing = asyncio.gather(*(write(writer) for writer in range(4)))
        await asyncio.sleep(0.3)
        await successor.open(TABLET, 2)
        await asyncio.wait_for(writing, 10)
        assert known.items() <= (await successor.rows(TABLET, 2)).items()
        assert len(known) > 0
        for result in refusals:
            moved = result.error if result.HasField("error") else result.unapplied[0].result.error
            assert moved.ByteSize() > 0
        answer = await former.read(TABLET, 1, b"0/000000/0")
        assert answer.error.HasField("tablet_moved")
        assert [described.tablet_id for described in await former.describe()] == []


async def test_a_paused_owner_comes_back_and_answers_nothing_from_its_old_state(
    tmp_path: Path,
) -> None:
    store = tmp_path / "store"
    async with (
        tablet_server(tmp_path, name="former", store=store) as former,
        tablet_server(tmp_path, name="next", store=store) as successor,
    ):
        await former.open(TABLET, 1)
        await former.put(TABLET, 1, {b"row": b"old"})
        former.process.pause()
        late_write = asyncio.create_task(former.mutate(puts(TABLET, 1, {b"late": b"x"})))
        late_read = asyncio.create_task(former.read(TABLET, 1, b"row"))
        await asyncio.sleep(0.1)
        await successor.open(TABLET, 2)
        former.process.resume()
        (written,) = await late_write
        assert acknowledged(written) == 0
        assert (await late_read).HasField("error")
        assert await successor.rows(TABLET, 2) == {b"row": b"old"}


# A tablet server as a process, and plain writes and reads on it.

CALL_SECONDS = 20.0
READY_SECONDS = 40.0
TABLE_ID = 3
COLUMN = b"c"
START = 1_760_000_000_000 << 18
COMMIT = START + 1
LATER = COMMIT + 1


class TabletServer:
    """One process on a store root that others may share. Each of its tablets covers all rows."""

    def __init__(self, name: str, directory: Path, store: Path, *flags: str) -> None:
        store.mkdir(exist_ok=True)
        self.store = store
        self.process = ServiceProcess(
            name,
            "tabletserver",
            ["--store", str(store), *flags],
            logs=directory,
            run=directory,
        )
        self._network: GrpcNetwork | None = None

    async def start(self) -> None:
        await self._disconnect()
        self.process.start()
        self.process.wait_ready(READY_SECONDS)
        self._network = GrpcNetwork()

    def kill(self) -> None:
        """Kills it as `kill -9` does; unanswered requests fail."""
        self.process.kill()

    async def stop(self) -> int:
        self.process.ask_to_stop()
        code = self.process.wait_stopped()
        await self._disconnect()
        return code

    async def open(self, tablet: int, epoch: int) -> pb.TabletDescription:
        request = pb.OpenTabletRequest(
            table_id=TABLE_ID, tablet_id=tablet, epoch=epoch, schema_version=1
        )
        call = self.network.unary(self.process.address, methods.OPEN_TABLET)
        return (await call(request, CALL_SECONDS)).tablet

    async def close(self, tablet: int, epoch: int) -> None:
        call = self.network.unary(self.process.address, methods.CLOSE_TABLET)
        await call(pb.CloseTabletRequest(tablet_id=tablet, epoch=epoch), CALL_SECONDS)

    async def describe(self) -> list[pb.TabletDescription]:
        call = self.network.unary(self.process.address, methods.DESCRIBE_TABLETS)
        return list((await call(pb.DescribeTabletsRequest(), CALL_SECONDS)).tablets)

    async def report(self) -> pb.ReportResponse:
        call = self.network.unary(self.process.address, methods.REPORT)
        return await call(pb.ReportRequest(), CALL_SECONDS)

    async def mutate(self, *batches: pb.MutationBatch) -> list[pb.MutationBatchResult]:
        call = self.network.unary(self.process.address, methods.MUTATE)
        return list((await call(pb.MutateRequest(batches=batches), CALL_SECONDS)).batches)

    async def put(self, tablet: int, epoch: int, rows: dict[bytes, bytes]) -> None:
        """Commits the rows; fails unless every one is acknowledged."""
        (result,) = await self.mutate(puts(tablet, epoch, rows))
        assert acknowledged(result) == len(rows), result

    async def serve(self, tablet: int, epoch: int, rows: dict[bytes, bytes]) -> None:
        """Opens the tablet, and commits the rows."""
        await self.open(tablet, epoch)
        await self.put(tablet, epoch, rows)

    async def rows(self, tablet: int, epoch: int) -> dict[bytes, bytes]:
        """All rows of the tablet, with their values."""
        call = self.network.stream(self.process.address, methods.SCAN)
        request = pb.ScanRequest(target=target(tablet, epoch), all_columns=True, timestamp=LATER)
        found: dict[bytes, bytes] = {}
        async for page in call(request, CALL_SECONDS):
            assert not page.HasField("error"), page.error
            found.update(zip(page.found.rows, page.found.values, strict=True))
        return found

    async def read(self, tablet: int, epoch: int, row: bytes) -> pb.ReadBatchResult:
        call = self.network.unary(self.process.address, methods.READ)
        read = pb.RowRead(row=row, columns=[COLUMN], timestamp=LATER)
        batch = pb.ReadBatch(target=target(tablet, epoch), reads=[read])
        return (await call(pb.ReadRequest(batches=[batch]), CALL_SECONDS)).batches[0]

    @property
    def network(self) -> GrpcNetwork:
        assert self._network is not None, "not started"
        return self._network

    async def _disconnect(self) -> None:
        if self._network is not None:
            await self._network.close()
            self._network = None


@asynccontextmanager
async def tablet_server(
    directory: Path, *flags: str, name: str = "server", store: Path | None = None
) -> AsyncIterator[TabletServer]:
    """A running tablet server; stopped at the end, whatever happens in between."""
    server = TabletServer(name, directory, store or directory / "store", *flags)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def said(server: TabletServer, event: str) -> None:
    """Waits until the server has logged the event."""
    while f'"{event}"' not in server.process.log.read_text():  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.1)


def target(tablet: int, epoch: int) -> pb.TabletTarget:
    return pb.TabletTarget(tablet_id=tablet, epoch=epoch, schema_version=1)


def puts(tablet: int, epoch: int, rows: dict[bytes, bytes]) -> pb.MutationBatch:
    """Unconditional commits of these rows."""
    return pb.MutationBatch(
        target=target(tablet, epoch),
        mutations=[
            pb.Mutation(
                row=row,
                column=COLUMN,
                changes=[
                    pb.Change(
                        kind=pb.Change.KIND_PUT,
                        space=cells_pb2.SPACE_WRITE,
                        timestamp=COMMIT,
                        value=WriteRecord(START, RecordKind.PUT, value).encode(),
                    )
                ],
            )
            for row, value in rows.items()
        ],
    )


def acknowledged(result: pb.MutationBatchResult) -> int:
    """How many mutations of the batch were reported durable."""
    return result.mutations - len(result.unapplied)


# A tablet server on a file system in user space whose program stalls, dies and is started again.
#
# Such file systems are refused as network ones, unless the settings permit them.

USER_SPACE_MAY_MOUNT = os.geteuid() == 0 and os.path.exists("/dev/fuse") and find_library("fuse3")


SECONDS = 20.0
PERMITTED = "--store-unsafe"


class UserSpaceFileSystem:
    """A directory, shown at another place by a process of its own."""

    def __init__(self, directory: Path) -> None:
        self.point = directory / "mounted"
        self.point.mkdir()
        self._source = directory / "source"
        self._source.mkdir()
        self._program: subprocess.Popen[bytes] | None = None

    def mount(self) -> None:
        self._program = subprocess.Popen(
            [
                *(sys.executable, "-m", "tests.integration.passthrough"),
                *(str(self._source), str(self.point)),
            ]
        )
        deadline = time.monotonic() + SECONDS
        while not self.point.is_mount():
            assert self._program.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def signal(self, number: signal.Signals) -> None:
        assert self._program is not None
        self._program.send_signal(number)

    def die(self) -> None:
        assert self._program is not None
        self._program.kill()
        self._program.wait(SECONDS)

    def unmount(self) -> None:
        subprocess.run(["umount", "-l", str(self.point)], check=True, capture_output=True)


@pytest.fixture
def file_system(tmp_path: Path) -> Iterator[UserSpaceFileSystem]:
    found = UserSpaceFileSystem(tmp_path)
    found.mount()
    yield found
    # However far the test came.
    found.die()
    subprocess.run(["umount", "-l", str(found.point)], check=False, capture_output=True)


@pytest.mark.timeout(120)
@pytest.mark.skipif(not USER_SPACE_MAY_MOUNT, reason="needs root, /dev/fuse and libfuse 3")
async def test_it_waits_while_its_store_stalls_and_ends_when_its_program_dies(
    file_system: UserSpaceFileSystem, tmp_path: Path
) -> None:
    store = file_system.point / "store"
    async with tablet_server(tmp_path, PERMITTED, store=store) as server:
        await server.serve(TABLET, 1, {b"before": b"1"})
        file_system.signal(signal.SIGSTOP)
        try:
            writing = asyncio.ensure_future(server.mutate(puts(TABLET, 1, {b"during": b"2"})))
            reading = asyncio.ensure_future(server.read(TABLET, 1, b"before"))
            await said(server, "the store hangs")
            assert "the store hangs" in (await server.report()).writes_refused.message
            # The event loop goes on. Nothing is answered whose owner cannot be looked up.
            assert [one.tablet_id for one in await server.describe()] == [TABLET]
            assert not writing.done()
            assert not reading.done()
        finally:
            file_system.signal(signal.SIGCONT)
        await said(server, "the store answers again")
        await asyncio.gather(writing, reading, return_exceptions=True)
        await server.put(TABLET, 1, {b"after": b"3"})
        assert not (await server.report()).HasField("writes_refused")
        file_system.die()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    file_system.unmount()
    file_system.mount()
    async with tablet_server(tmp_path, PERMITTED, name="next", store=store) as server:
        await server.open(TABLET, 2)
        assert {b"before", b"after"} <= set(await server.rows(TABLET, 2))


@pytest.mark.timeout(120)
@pytest.mark.skipif(not USER_SPACE_MAY_MOUNT, reason="needs root, /dev/fuse and libfuse 3")
async def test_it_ends_when_its_store_is_unmounted_though_its_files_are_still_open(
    file_system: UserSpaceFileSystem, tmp_path: Path
) -> None:
    store = file_system.point / "store"
    async with tablet_server(tmp_path, PERMITTED, store=store) as server:
        await server.serve(TABLET, 1, {b"before": b"1"})
        file_system.unmount()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    assert not list(file_system.point.iterdir())


@pytest.mark.timeout(120)
@pytest.mark.skipif(not USER_SPACE_MAY_MOUNT, reason="needs root, /dev/fuse and libfuse 3")
async def test_a_store_that_is_itself_a_mount_point_is_gone_when_it_is_unmounted(
    file_system: UserSpaceFileSystem, tmp_path: Path
) -> None:
    """The directory below the mount point is there all the same."""
    async with tablet_server(tmp_path, PERMITTED, store=file_system.point) as server:
        file_system.unmount()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    # A check that was under way may have found the store, and write its probe a moment later.
    assert {one.name for one in file_system.point.iterdir()} <= {PROBE}


@pytest.mark.timeout(120)
@pytest.mark.skipif(not USER_SPACE_MAY_MOUNT, reason="needs root, /dev/fuse and libfuse 3")
async def test_it_is_refused_unless_the_settings_permit_it(
    file_system: UserSpaceFileSystem, tmp_path: Path
) -> None:
    with pytest.raises(LocalClusterError, match=r"network file system \(fuse\.passthrough\)"):
        async with tablet_server(tmp_path, store=file_system.point / "store"):
            pass


# A tablet server whose file system hangs, answers again, is shut down and comes back.


@pytest.fixture
def dying_file_system(tmp_path: Path) -> Iterator[FileSystem]:
    found = FileSystem(tmp_path)
    found.make()
    found.mount()
    yield found
    found.unmount_in_any_case()


@pytest.mark.timeout(120)
@pytest.mark.skipif(not MAY_MOUNT, reason="needs root, loop devices and mkfs.ext4")
async def test_it_waits_while_its_store_hangs_and_ends_when_the_store_is_gone(
    dying_file_system: FileSystem, tmp_path: Path
) -> None:
    store = dying_file_system.point / "store"
    async with tablet_server(tmp_path, store=store) as server:
        await server.serve(TABLET, 1, {b"before": b"1"})
        dying_file_system.freeze()
        try:
            writing = asyncio.ensure_future(server.mutate(puts(TABLET, 1, {b"during": b"2"})))
            await said(server, "the store hangs")
            # The event loop goes on: what needs no disk is answered, and nothing is acknowledged.
            assert [one.tablet_id for one in await server.describe()] == [TABLET]
            assert await server.rows(TABLET, 1) == {b"before": b"1"}
            assert not writing.done()
        finally:
            dying_file_system.thaw()
        await said(server, "the store answers again")
        await asyncio.gather(writing, return_exceptions=True)
        await server.put(TABLET, 1, {b"after": b"3"})
        dying_file_system.shut_down()
        assert await asyncio.to_thread(server.process.wait_stopped) == 1
        await said(server, "the store is gone")
    dying_file_system.unmount()
    dying_file_system.mount()
    async with tablet_server(tmp_path, name="next", store=store) as server:
        await server.open(TABLET, 2)
        assert {b"before", b"after"} <= set(await server.rows(TABLET, 2))
