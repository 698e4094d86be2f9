"""The master as a process: on which store roots it starts, and what survives its death."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from percolator import Table, aio, codecs, errors
from percolator.errors import (
    NotReady,
    PercolatorError,
    SchemaError,
    SessionExpired,
)
from percolator.formats.records import RecordKind, WriteRecord
from percolator.limits import Limits
from percolator.services.chassis import coordinator
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.services.oracle.oracle import Mark
from percolator.v1 import cells_pb2, master_pb2
from percolator.v1 import cluster_pb2 as pb
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.errors_pb2 import TabletLocation
from percolator.v1.oracle_pb2 import GetTimestampsRequest
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.liveness import Liveness
from percolator.wire.methods import GET_TIMESTAMPS
from percolator.wire.sessions import Sessions, SessionSettings
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import MachineClock, RequestT, ResponseT, UnaryMethod, World, machine_random
from tests.integration.networks import grpc_network
from tests.integration.oracle_with_clock_ahead import AHEAD_MILLISECONDS

START_SECONDS = 20.0


Start = Callable[..., ServiceProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts services, and stops them however the test ends."""
    started: list[ServiceProcess] = []

    def start_one(name: str, *arguments: str) -> ServiceProcess:
        process = ServiceProcess(name, name, list(arguments), logs=tmp_path, run=tmp_path)
        process.start()
        started.append(process)
        process.wait_ready(START_SECONDS)
        return process

    yield start_one
    for process in reversed(started):
        process.ask_to_stop()
        assert process.wait_stopped() == 0, "it did not stop cleanly"


async def described(address: str) -> pb.DescribeResponse:
    async with grpc_network() as network:
        return await network.unary(address, methods.DESCRIBE)(pb.DescribeRequest(), 5)


async def test_the_cluster_keeps_its_id_and_its_servers_through_kill_9(
    start: Start, tmp_path: Path
) -> None:
    first = start("master", "--store", str(tmp_path / "store"))
    before = await described(first.address)
    member = start("lockservice", "--masters", first.address)
    first.kill()
    first.start()
    first.wait_ready(START_SECONDS)
    deadline = time.monotonic() + START_SECONDS
    while len((after := await described(first.address)).servers) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
    assert after.cluster_id == before.cluster_id
    assert [server.address for server in after.servers] == [first.address, member.address]


def of_another_user(store: Path) -> None:
    store.mkdir()
    (store / "thesis.odt").touch()


def of_a_newer_release(store: Path) -> None:
    store.mkdir()
    newer = {"cluster_id": "abc", "format": 99, "created_by": "7.1.0"}
    (store / "cluster.json").write_text(json.dumps(newer))


def of_an_oracle(mark: bytes) -> Callable[[Path], None]:
    def prepare(store: Path) -> None:
        left = store / "coordinator" / "oracle" / "e1.sealed"
        left.mkdir(parents=True)
        (left / "mark").write_bytes(coordinator.encode(mark))

    return prepare


def missing(store: Path) -> None:
    """Nothing is there."""


def refused_start(directory: Path, *service: str) -> str:
    """The message of a service that refuses to start, behind its log, if it has begun one."""
    arguments = ["--store", str(directory / "store"), "--listen=127.0.0.1:0"]
    ended = subprocess.run(
        [sys.executable, "-m", "percolator.cli", "serve", *service, *arguments],
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    *log, line = ended.stderr.strip().splitlines()
    assert [json.loads(entry)["level"] for entry in log] == ["info"] * len(log)
    assert line.startswith(f"{service[0]}: ")
    return line


MARK = Mark(1_800_000_000_000, "").encode()


@pytest.mark.parametrize(
    ("service", "prepare", "named"),
    [
        ("master", of_another_user, "thesis.odt"),
        ("master", of_a_newer_release, "7.1.0"),
        ("master", Path.touch, "directory"),
        ("tabletserver", missing, "store does not exist"),
        ("oracle", of_a_newer_release, "has format 99"),
        ("oracle", Path.touch, "/store"),
        ("oracle", of_an_oracle(MARK.replace(b"18", b"17")), "'mark' of the role 'oracle' is dam"),
        ("oracle", of_an_oracle(MARK.replace(b"mark 1", b"mark 3")), "newer version: format 3"),
    ],
)
def test_an_unusable_store_root_is_one_line_and_exit_code_2(
    tmp_path: Path, service: str, prepare: Callable[[Path], None], named: str
) -> None:
    prepare(tmp_path / "store")
    assert named in refused_start(tmp_path, service)


def test_a_service_refuses_the_store_of_another_cluster_than_its_masters(
    start: Start, tmp_path: Path
) -> None:
    master = start("master", "--store", str(tmp_path / "own"))
    other = tmp_path / "store"
    other.mkdir()
    (other / "cluster.json").write_text('{"cluster_id": "another", "format": 1}')
    line = refused_start(tmp_path, "oracle", "--masters", master.address)
    assert "belongs to cluster another" in line


def test_an_oracle_leaves_the_store_of_a_newer_release_alone(tmp_path: Path) -> None:
    of_a_newer_release(tmp_path / "store")
    refused_start(tmp_path, "oracle")
    assert [one.name for one in (tmp_path / "store").iterdir()] == ["cluster.json"]


def test_a_master_does_not_accept_addresses_of_masters(tmp_path: Path) -> None:
    assert "masters" in refused_start(tmp_path, "master", "--masters", "localhost:7100")


# A whole cluster whose servers are killed: tablets move, and keep all their data.


FAILOVER_SECONDS = 3.0
COMMIT = 1_000 << 18
COLUMN = b"c"
SPLITS = [b"c", b"f", b"i", b"l", b"o"]


class Client:
    """A minimal client that can see which server a cell is on."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.network = GrpcNetwork()

    async def master(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        return await self.network.unary(self.cluster.address, method)(request, 10)

    async def locate(self, table_id: int, row: bytes = b"") -> list[TabletLocation]:
        request = master_pb2.LocateTabletsRequest(
            table_id=table_id, range=cells_pb2.RowRange(start=row)
        )
        return list((await self.master(methods.LOCATE_TABLETS, request)).locations)

    async def create(self, name: str, splits: list[bytes]) -> int:
        request = master_pb2.CreateTableRequest(name=name, splits=splits)
        return (await self.master(methods.CREATE_TABLE, request)).table.table_id

    async def put(self, table_id: int, row: bytes, value: bytes) -> None:
        (location, *_) = await self.locate(table_id, row)
        record = WriteRecord(COMMIT - 1, RecordKind.PUT, value).encode()
        change = tablets.Change(
            kind=tablets.Change.KIND_PUT,
            space=cells_pb2.SPACE_WRITE,
            timestamp=COMMIT,
            value=record,
        )
        mutation = tablets.Mutation(row=row, column=COLUMN, changes=[change])
        target = tablets.TabletTarget(
            tablet_id=location.tablet_id, epoch=location.epoch, schema_version=1
        )
        batch = tablets.MutationBatch(target=target, mutations=[mutation])
        call = self.network.unary(location.address, methods.MUTATE)
        (result,) = (await call(tablets.MutateRequest(batches=[batch]), 5)).batches
        assert not result.HasField("error"), result.error
        assert (result.mutations, len(result.unapplied)) == (1, 0)

    async def get(self, table_id: int, row: bytes) -> bytes | None:
        (location, *_) = await self.locate(table_id, row)
        target = tablets.TabletTarget(
            tablet_id=location.tablet_id, epoch=location.epoch, schema_version=1
        )
        read = tablets.RowRead(row=row, columns=[COLUMN], timestamp=COMMIT)
        call = self.network.unary(location.address, methods.READ)
        request = tablets.ReadRequest(batches=[tablets.ReadBatch(target=target, reads=[read])])
        (result,) = (await call(request, 5)).batches
        assert not result.HasField("error"), result.error
        return result.found.values[0] if result.found.values else None

    async def split_and_move(self, table_id: int, *, after: asyncio.Event) -> None:
        """Splits the last tablet and moves its upper half to another server."""
        await after.wait()
        tablet = (await self.locate(table_id))[-1]
        request = master_pb2.SplitTabletRequest(tablet_id=tablet.tablet_id)
        upper = (await self.master(methods.SPLIT_TABLET, request)).upper
        other = next(
            process.address
            for name, process in self.cluster.processes.items()
            if name.startswith("tabletserver") and process.address != upper.address
        )
        move = master_pb2.MoveTabletRequest(tablet_id=upper.tablet_id, server=other)
        await self.master(methods.MOVE_TABLET, move)

    async def stored_cells(self, table_id: int) -> int:
        """The number of stored cells, as the table's tablets count them."""
        found = 0
        for address in {one.address for one in await self.locate(table_id)}:
            describe = self.network.unary(address, methods.DESCRIBE_TABLETS)
            for one in (await describe(tablets.DescribeTabletsRequest(), 5)).tablets:
                found += one.statistics.cells if one.table_id == table_id else 0
        return found

    async def until(self, condition: Callable[[], Awaitable[bool]], seconds: float) -> float:
        """Returns how long it took. Tolerates errors meanwhile: a fail-over is in progress."""
        started = time.monotonic()
        problem: object = None
        while time.monotonic() - started < seconds:
            try:
                if await condition():
                    return time.monotonic() - started
            except (PercolatorError, AssertionError, ValueError) as error:
                problem = error
            await asyncio.sleep(0.02)
        raise AssertionError(f"it did not happen within {seconds} s; last: {problem}")


@asynccontextmanager
async def running(path: Path, tablet_servers: int = 3) -> AsyncIterator[Client]:
    with LocalCluster(path, tablet_servers=tablet_servers) as cluster:
        client = Client(cluster)
        yield client
        await client.network.close()


def rows() -> list[bytes]:
    return [bytes([letter]) + b"-row" for letter in b"abdeghjkmnpq"]


async def test_whichever_server_is_killed_every_acknowledged_cell_is_served_within_three_seconds(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as client:
        table = await client.create("t", SPLITS)
        for row in rows():
            await client.put(table, row, b"value of " + row)
        before = {one.tablet_id: one for one in await client.locate(table)}
        assert len({one.address for one in before.values()}) == 3

        victim = client.cluster.processes["tabletserver-1"]
        lost = {key for key, one in before.items() if one.address == victim.address}
        victim.kill()

        async def all_there() -> bool:
            return all([await client.get(table, row) == b"value of " + row for row in rows()])

        await client.until(all_there, FAILOVER_SECONDS)
        after = {one.tablet_id: one for one in await client.locate(table)}
        assert {key for key, one in after.items() if one.epoch > before[key].epoch} == lost

        # A restarted master finds everything where it left it, and moves nothing.
        client.cluster.processes["master"].kill()
        assert all([await direct_read(client, one) for one in after.values()])
        client.cluster.restart("master")
        await client.until(all_there, 10)
        again = {one.tablet_id: one for one in await client.locate(table)}
        assert again == after

        # The killed server comes back under a new identity, and none of its data is lost.
        client.cluster.restart("tabletserver-1")
        client.cluster.processes["tabletserver-2"].kill()
        await client.until(all_there, 10)
        await damaged_and_missing_tablets_are_reported_and_the_others_serve_on(client, table)
        await client.until(all_there, 20)


async def damaged_and_missing_tablets_are_reported_and_the_others_serve_on(
    client: Client, table: int
) -> None:
    """Both are served again as soon as they are repaired."""
    located = await client.locate(table)
    ((most, _),) = Counter(one.address for one in located).most_common(1)
    (victim,) = [one for one in client.cluster.processes.values() if one.address == most]
    missing, damaged, *_ = [one for one in located if one.address == most]
    store = client.cluster.data / "store" / str(table)
    victim.pause()
    gone = store / str(missing.tablet_id)
    gone.rename(gone.with_name("elsewhere"))
    current = store / str(damaged.tablet_id) / f"e{damaged.epoch}" / "CURRENT"
    current.rename(client.cluster.data / "CURRENT")
    victim.kill()

    async def reported() -> bool:
        listed = (
            await client.master(methods.LIST_TABLETS, master_pb2.ListTabletsRequest())
        ).tablets
        errors = {one.location.tablet_id: one.error.message for one in listed if not one.serving}
        return (
            errors.keys() == {missing.tablet_id, damaged.tablet_id}
            and "missing" in errors[missing.tablet_id]
            and "no CURRENT" in errors[damaged.tablet_id]
        )

    await client.until(reported, 10)
    for row in rows():
        if not {missing.tablet_id, damaged.tablet_id} & {
            one.tablet_id for one in (await client.locate(table, row))[:1]
        }:
            assert await client.get(table, row) == b"value of " + row
    # The directory was recreated, empty, by the servers that looked for it.
    shutil.rmtree(gone, ignore_errors=True)
    gone.with_name("elsewhere").rename(gone)
    for epoch in current.parent.parent.iterdir():
        # The servers that tried to open it sealed the old epochs and cloned what they found.
        shutil.copy(client.cluster.data / "CURRENT", epoch / "CURRENT")


async def direct_read(client: Client, location: TabletLocation) -> bool:
    """True if the server answers a read without any master running."""
    target = tablets.TabletTarget(
        tablet_id=location.tablet_id, epoch=location.epoch, schema_version=1
    )
    read = tablets.RowRead(row=location.range.start, all_columns=True, timestamp=COMMIT)
    call = client.network.unary(location.address, methods.READ)
    request = tablets.ReadRequest(batches=[tablets.ReadBatch(target=target, reads=[read])])
    return not (await call(request, 5)).batches[0].HasField("error")


scanned = Table("scanned")
number_of = scanned.column("number", codecs.integer)
SCANNED_ROWS = 3_000


async def a_running_scan_neither_loses_nor_doubles_a_row(client: Client) -> None:
    """Forwards and backwards: during the scan, the tablet is split and half of it is moved."""
    limits = Limits(page_rows_max=100)
    async with aio.connect(client.cluster.address, limits=limits) as db:
        await db.create_table(scanned)
        names = [f"{number:04d}" for number in range(SCANNED_ROWS)]
        await db.set_many([(name, {number_of: int(name)}) for name in names])
        info = await db._engine.catalog.table(scanned.name, db._engine.now() + 10)
        for reverse in (False, True):
            seen: list[str] = []
            changes = asyncio.Event()
            split = asyncio.create_task(client.split_and_move(info.table_id, after=changes))
            async with db.snapshot() as snapshot:
                async for row in snapshot.scan(scanned, reverse=reverse):
                    seen.append(row.key)
                    assert row[number_of] == int(row.key)
                    if len(seen) == 150:
                        changes.set()
                    if len(seen) == 500:
                        # The client has buffered pages: the tablet moves before they are used up.
                        await split
            assert seen == sorted(names, reverse=reverse)
        assert len(await client.locate(info.table_id)) == 3

        async def trimmed() -> bool:
            """True if each tablet knows exactly how many cells belong to it."""
            return await client.stored_cells(info.table_id) == SCANNED_ROWS

        await client.until(trimmed, 20)


async def test_tablets_keep_all_their_data_when_split_and_moved_and_lose_it_when_dropped(
    tmp_path: Path,
) -> None:
    async with running(tmp_path, tablet_servers=2) as client:
        await a_running_scan_neither_loses_nor_doubles_a_row(client)
        table = await client.create("t", [])
        for row in rows():
            await client.put(table, row, b"value of " + row)
        (whole,) = await client.locate(table)
        halves = await client.master(
            methods.SPLIT_TABLET, master_pb2.SplitTabletRequest(tablet_id=whole.tablet_id, row=b"h")
        )
        assert [one.tablet_id for one in await client.locate(table)] == [
            halves.lower.tablet_id,
            halves.upper.tablet_id,
        ]
        target = next(
            process.address
            for name, process in client.cluster.processes.items()
            if name.startswith("tabletserver") and process.address != halves.upper.address
        )
        moved = await client.master(
            methods.MOVE_TABLET,
            master_pb2.MoveTabletRequest(tablet_id=halves.upper.tablet_id, server=target),
        )
        assert moved.location.address == target
        for row in rows():
            assert await client.get(table, row) == b"value of " + row

        await client.master(methods.DRAIN_SERVER, master_pb2.DrainServerRequest(server=target))
        assert {one.address for one in await client.locate(table)} == {halves.lower.address}
        assert await client.get(table, b"q-row") == b"value of q-row"

        # A server that is told to stop first hands over its tablets, and takes none back.
        await client.master(
            methods.DRAIN_SERVER, master_pb2.DrainServerRequest(server=target, undo=True)
        )
        leaving = next(
            process
            for process in client.cluster.processes.values()
            if process.address == halves.lower.address
        )
        leaving.ask_to_stop()
        assert leaving.wait_stopped() == 0
        assert "all tablets are served elsewhere" in leaving.log.read_text()
        assert {one.address for one in await client.locate(table)} == {target}
        for row in rows():
            assert await client.get(table, row) == b"value of " + row

        await client.master(methods.DELETE_TABLE, master_pb2.DeleteTableRequest(name="t"))
        with pytest.raises(SchemaError):
            await client.locate(table)
        directory = tmp_path / "store" / str(table)

        async def gone() -> bool:
            return not directory.exists()

        await client.until(gone, 10)


# The oracle as a process: killed under load, started twice, with a failing disk or bad state.

READY_SECONDS = 30.0


def oracle_process(directory: Path, *arguments: str, program: str = "oracle") -> ServiceProcess:
    arguments = ("--store", str(directory / "store"), *arguments)
    return ServiceProcess("oracle", program, list(arguments), logs=directory, run=directory)


@contextmanager
def oracle_running(process: ServiceProcess) -> Iterator[ServiceProcess]:
    process.start()
    try:
        process.wait_ready(READY_SECONDS)
        yield process
    finally:
        stop(process)


def stop(process: ServiceProcess) -> int:
    process.ask_to_stop()
    return process.wait_stopped()


@asynccontextmanager
async def source_at(address: str) -> AsyncIterator[TimestampSource]:
    async with grpc_network() as network:
        source = TimestampSource(World(MachineClock(), network, machine_random()), [address])
        try:
            yield source
        finally:
            await source.close()


class Load:
    """Many tasks that request timestamps all the time. Each timestamp must exceed all those that
    any task had received before it was requested."""

    def __init__(self, source: TimestampSource) -> None:
        self._source = source
        self._largest = 0
        self.received: list[int] = []
        self._tasks = [asyncio.create_task(self._ask()) for _ in range(50)]

    async def _ask(self) -> None:
        while True:
            before = self._largest
            timestamp = await self._source.get(timeout_seconds=READY_SECONDS)
            assert timestamp > before
            self._largest = max(self._largest, timestamp)
            self.received.append(timestamp)

    async def more(self, count: int) -> None:
        """Returns once this many more have been received."""
        wanted = len(self.received) + count
        while len(self.received) < wanted:
            await asyncio.sleep(0.01)
            for task in self._tasks:
                if task.done():
                    await task

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self._tasks, return_exceptions=True):
            assert isinstance(outcome, asyncio.CancelledError), outcome


async def test_killed_under_load_with_the_clock_set_back_timestamps_still_increase(
    tmp_path: Path,
) -> None:
    """`kill -9` three times. The first run's clock is two hours ahead of the others'."""
    ahead = oracle_process(tmp_path, program="tests.integration.oracle_with_clock_ahead")
    later = oracle_process(tmp_path)
    ahead.start()
    later.listen_on(ahead.wait_ready(READY_SECONDS).address)
    try:
        async with source_at(ahead.address) as source:
            load = Load(source)
            await load.more(5_000)
            for dying in (ahead, later, later):
                highest = max(load.received)
                dying.kill()
                later.start()
                await asyncio.to_thread(later.wait_ready, READY_SECONDS)
                received = len(load.received)
                await load.more(5_000)
                assert min(load.received[received + 50 :]) > highest
            await load.stop()
        assert len(set(load.received)) == len(load.received)
        physical = load.received[-1] >> 18
        lead = physical - MachineClock().wall_milliseconds()
        assert lead == pytest.approx(AHEAD_MILLISECONDS, abs=60_000)
    finally:
        stop(ahead)
        stop(later)


async def test_a_second_oracle_on_the_same_store_is_refused_and_the_first_continues(
    tmp_path: Path,
) -> None:
    with oracle_running(oracle_process(tmp_path)) as first:
        line = await asyncio.to_thread(refused_start, tmp_path, "oracle")
        assert f"in use by another oracle, the one at {first.address}; with --standby" in line
        async with source_at(first.address) as source:
            assert await source.get() < await source.get()
        assert stop(first) == 0


@contextmanager
def two_oracles(directory: Path) -> Iterator[tuple[ServiceProcess, ServiceProcess]]:
    """Two oracles: the first one leads, the second stands by."""
    processes = []
    for name in ("first", "second"):
        own = directory / name
        own.mkdir()
        arguments = ["--store", str(directory / "store"), "--standby"]
        arguments += ["--leader-silence-seconds", "1"]
        processes.append(ServiceProcess("oracle", "oracle", arguments, logs=own, run=own))
    with oracle_running(processes[0]), oracle_running(processes[1]):
        yield processes[0], processes[1]


async def test_a_standby_replaces_a_paused_oracle_then_a_killed_one_and_continues_above_both(
    network: GrpcNetwork,
    tmp_path: Path,
) -> None:
    with two_oracles(tmp_path) as (first, second):
        world = World(MachineClock(), network, machine_random())
        source = TimestampSource(world, [first.address, second.address])
        ask_first = network.unary(first.address, GET_TIMESTAMPS)
        ask_second = network.unary(second.address, GET_TIMESTAMPS)
        with pytest.raises(errors.NotReady, match=f"the one at {first.address} does"):
            await ask_second(GetTimestampsRequest(count=1), 5)
        load = Load(source)
        await load.more(1_000)
        first.pause()
        # Requested while it is paused: by the time it resumes and answers, it no longer leads.
        late = asyncio.ensure_future(ask_first(GetTimestampsRequest(count=1), READY_SECONDS))
        await load.more(1_000)
        first.resume()
        with pytest.raises(errors.NotReady):
            await late
        await load.more(1_000)
        second.kill()
        await load.more(1_000)
        await load.stop()
        assert len(set(load.received)) == len(load.received)
        await source.close()
        second.start()
        second.wait_ready(READY_SECONDS)


async def test_on_a_full_disk_it_refuses_instead_of_reusing_and_recovers(
    network: GrpcNetwork, tmp_path: Path
) -> None:
    """Linux's /dev/full stands in for the disk: each write to it fails with ENOSPC."""
    mark_path = tmp_path / "store" / "coordinator" / "oracle" / "e1" / "mark"
    full = mark_path.with_name("mark.new")
    with oracle_running(oracle_process(tmp_path, "--window-seconds", "0.5")) as oracle:
        ask = network.unary(oracle.address, GET_TIMESTAMPS)
        received = [(await ask(GetTimestampsRequest(count=1), 10)).first]
        while not full.is_symlink():
            # The oracle may be writing its next mark under this very name at this moment.
            try:
                full.symlink_to("/dev/full")
            except FileExistsError:
                await asyncio.sleep(0.001)

        async def ask_until_refused() -> None:
            while True:
                received.append((await ask(GetTimestampsRequest(count=1), 10)).first)

        with pytest.raises(errors.StoreUnusable) as refused:
            await ask_until_refused()
        assert refused.value.fault is errors.StoreFault.DISK_FULL
        stored = coordinator.decode(mark_path.read_bytes(), "mark")
        durable = Mark.decode(stored, "mark").milliseconds
        assert received[-1] < durable << 18
        with pytest.raises(errors.StoreUnusable):
            await ask(GetTimestampsRequest(count=1), 10)
        full.unlink()
        async with source_at(oracle.address) as source:
            received.append(await source.get())
        assert received == sorted(set(received))


# The lock service as a process: killed, restarted, paused, and sent nonsense.

TTL_SECONDS = 4.0
"""A renewal times out after a third of this, within which even a busy machine answers."""
SHORT_TTL_SECONDS = 1.0
SHORT_LONGEST_TTL_SECONDS = 2.0
TICKS_SECONDS = 0.1
"""More than the service adds to a time to live, because it counts in ticks."""


@pytest.fixture
def longest_ttl_seconds() -> float:
    """How long a restarted service waits for the sessions of its previous run."""
    return 10.0


@pytest.fixture
def service(start: Start, longest_ttl_seconds: float) -> ServiceProcess:
    longest_ttl_milliseconds = round(longest_ttl_seconds * 1000)
    return start("lockservice", "--ttl-milliseconds-max", str(longest_ttl_milliseconds))


@asynccontextmanager
async def client(
    service: ServiceProcess, lost: list[bytes], ttl_seconds: float = TTL_SECONDS
) -> AsyncIterator[Sessions]:
    settings = SessionSettings(description="a test", ttl_seconds=ttl_seconds)
    async with grpc_network() as network:
        world = World(MachineClock(), network, machine_random())
        sessions = Sessions(world, [service.address], settings, on_expired=lost.append)
        try:
            yield sessions
        finally:
            await sessions.close()


async def until(sessions: Sessions, session_id: bytes, expected: Liveness) -> float:
    """Waits until the service reports this liveness. Returns how many seconds that took."""
    started = time.monotonic()
    while await sessions.liveness([session_id]) != [expected]:
        assert time.monotonic() < started + 15
        await asyncio.sleep(0.02)
    return time.monotonic() - started


async def becomes_true(fact: Callable[[], bool]) -> None:
    started = time.monotonic()
    while not fact():
        assert time.monotonic() < started + 15
        await asyncio.sleep(0.01)


async def try_lock(service: ServiceProcess, session_id: bytes, *names: bytes) -> list[bool]:
    async with grpc_network() as network:
        request = locks.TryLockRequest(session_id=session_id, names=names, ttl_milliseconds=2_000)
        return list((await network.unary(service.address, methods.TRY_LOCK)(request, 5)).held)


async def test_after_kill_9_and_restart_a_client_continues_under_its_id(
    service: ServiceProcess,
) -> None:
    lost: list[bytes] = []
    async with client(service, lost) as sessions:
        session_id = await sessions.current()
        assert session_id is not None
        assert await try_lock(service, session_id, b"row 1") == [True]
        service.kill()
        assert await sessions.liveness([session_id]) == [Liveness.UNDECIDED]
        service.start()
        service.wait_ready(START_SECONDS)
        await until(sessions, session_id, Liveness.ALIVE)
        assert sessions.session_id == session_id
        assert lost == []
        # Its locks are gone, and any session can take them.
        async with client(service, lost) as others:
            other = await others.current()
            assert other is not None
            assert await try_lock(service, other, b"row 1") == [True]
            assert await try_lock(service, session_id, b"row 1") == [False]


@pytest.mark.parametrize("longest_ttl_seconds", [SHORT_LONGEST_TTL_SECONDS])
async def test_a_client_that_died_with_the_service_is_dead_only_after_the_longest_ttl(
    service: ServiceProcess,
) -> None:
    """A client that does not return, as if its machine had died at the same moment."""
    async with client(service, [], SHORT_TTL_SECONDS) as sessions:
        died = b"sixteen bytes id"
        started = time.monotonic()
        service.kill()
        service.start()
        service.wait_ready(START_SECONDS)
        await until(sessions, died, Liveness.UNDECIDED)
        with pytest.raises(NotReady):
            await try_lock(service, died, b"row 1")
        await until(sessions, died, Liveness.DEAD)
        assert time.monotonic() - started >= SHORT_LONGEST_TTL_SECONDS
        with pytest.raises(SessionExpired) as caught:
            await try_lock(service, died, b"row 1")
        assert caught.value.session_id == died


async def test_a_service_paused_for_longer_than_its_sessions_live_declares_none_of_them_dead(
    service: ServiceProcess,
) -> None:
    lost: list[bytes] = []
    async with client(service, lost, SHORT_TTL_SECONDS) as sessions:
        session_id = await sessions.current()
        assert session_id is not None
        service.pause()
        # By the client's own count of the time since it sent the last renewal.
        await becomes_true(lambda: sessions.session_id is None)
        over_at = time.monotonic() + TICKS_SECONDS
        await becomes_true(lambda: time.monotonic() >= over_at)
        service.resume()
        await becomes_true(lambda: sessions.session_id is not None)
        assert sessions.session_id == session_id
        assert lost == []
