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
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from percolator import Table, aio, codecs
from percolator.errors import PercolatorError, SchemaError, WrongCluster
from percolator.formats.records import RecordKind, WriteRecord
from percolator.limits import Limits
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1 import cells_pb2, master_pb2
from percolator.v1 import cluster_pb2 as pb
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.v1.errors_pb2 import TabletLocation
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.world import RequestT, ResponseT, UnaryMethod

pytestmark = pytest.mark.integration

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
        assert process.wait_stopped() == 0


async def described(address: str) -> pb.DescribeResponse:
    network = GrpcNetwork()
    try:
        return await network.unary(address, methods.DESCRIBE)(pb.DescribeRequest(), 5)
    finally:
        await network.close()


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


async def test_a_server_of_another_cluster_or_release_is_refused(
    start: Start, tmp_path: Path
) -> None:
    process = start("master", "--store", str(tmp_path / "store"))
    network = GrpcNetwork()
    register = network.unary(process.address, methods.REGISTER)
    stranger = pb.Server(
        kind=pb.SERVICE_KIND_ORACLE, server_id="x", address="host:1", version="9.0.0"
    )
    with pytest.raises(WrongCluster, match="another"):
        await register(pb.RegisterRequest(cluster_id="another", server=stranger), 5)
    with pytest.raises(WrongCluster, match=r"9\.0\.0"):
        await register(pb.RegisterRequest(server=stranger), 5)
    await network.close()


def of_another_user(store: Path) -> None:
    store.mkdir()
    (store / "thesis.odt").touch()


def of_a_newer_release(store: Path) -> None:
    store.mkdir()
    newer = {"cluster_id": "abc", "format": 99, "created_by": "7.1.0"}
    (store / "cluster.json").write_text(json.dumps(newer))


@pytest.mark.parametrize(
    ("prepare", "named"),
    [
        (of_another_user, "thesis.odt"),
        (of_a_newer_release, "7.1.0"),
        (Path.touch, "directory"),
    ],
)
def test_an_unusable_store_root_is_one_line_and_exit_code_2(
    tmp_path: Path, prepare: Callable[[Path], None], named: str
) -> None:
    store = tmp_path / "store"
    prepare(store)
    command = [
        sys.executable,
        "-m",
        "percolator.cli",
        "serve",
        "master",
        "--store",
        str(store),
        "--log-format=json",
    ]
    command += ["--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("master: ")
    assert named in line


def test_a_master_does_not_accept_addresses_of_masters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "percolator.cli", "serve", "master", "--store", str(tmp_path)]
    command += ["--masters", "localhost:7100"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)
    assert done.returncode == 2
    assert "masters" in done.stderr


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
    """Whether the server answers a read without any master running."""
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
            """Whether each tablet knows exactly how many cells belong to it."""
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
