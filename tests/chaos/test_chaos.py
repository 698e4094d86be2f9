"""`make chaos`: a cluster of real processes is hurt in every way, in many ways at the same time.

    CHAOS_SECONDS=900 CHAOS_SEED=7 CHAOS_WORKLOAD=mixed CHAOS_TOGETHER=10 make chaos

With STORE=bucket, the cluster's data is in a bucket of a Ceph of three OSDs and two gateways, which
are killed and stopped like everything else. Everything has to work again CHAOS_RECOVERY_SECONDS
(30) after each fault, and its repair; only a machine that others use needs more.

Each role has a stream of faults of its own, whose order the seed decides; CHAOS_TOGETHER limits how
many occur at once. A kind of fault without a proven effect fails the run. At the end, the library's
checker sees the whole history of half of the clients, a judge that knows nothing of it sees that of
the others, the audit sees everything that is stored, every order must have been handled once by
each observer, and recipes must hold what plain Python makes of what was committed.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import percolator
from percolator import Table, Timestamp, aio, codecs
from percolator.aio import Database, Transaction
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect
from percolator.backup import export_files, exporter, importer
from percolator.bucket.place import UNFINISHED
from percolator.errors import NotReady, PercolatorError, SchemaError
from percolator.services.local.cluster import LocalCluster
from percolator.world import Random
from tests.bucket.ceph import Ceph
from tests.chaos import appender, in_bucket
from tests.chaos.catalogue import bucket_streams, streams
from tests.chaos.client import Life
from tests.chaos.clients import Clients, Shop
from tests.chaos.compaction import WRITE_BUFFERS_BYTES, Filler
from tests.chaos.host_clock import HostClock
from tests.chaos.killed_backup import EXPORT, IMPORT, PIN_TTL
from tests.chaos.list_append.judge import SPLITS, judge_lists, lists
from tests.chaos.recipes import at_work
from tests.chaos.recipes.client import PROGRAM as RECIPES
from tests.chaos.recipes.client import judge_recipes
from tests.chaos.scene import Scene
from tests.chaos.streams import Streams
from tests.chaos.supervisor import (
    RECOVERY_SECONDS_MAX,
    Pulse,
    Supervisor,
    supervising,
    write_run,
)
from tests.doubles.s3_server import set_credentials
from tests.integration.recipes_at_work import FILE_VARIABLE
from tests.mounted_file_system import MAY_MOUNT, FileSystem

SECONDS = float(os.environ.get("CHAOS_SECONDS", "90"))
SEED = int(os.environ.get("CHAOS_SEED", "0")) or secrets.randbelow(1_000_000) + 1
WORKLOAD = os.environ.get("CHAOS_WORKLOAD", "mixed")
TOGETHER = int(os.environ.get("CHAOS_TOGETHER", "100"))
IN_BUCKET = os.environ.get("STORE", "") == "bucket"
HOSTS = 3
SESSIONS = 3
PACE_SECONDS = 0.03
"""Clients leave the machine to the servers most of the time: what is measured is recovery."""
RECIPES_PACE_SECONDS = 0.2
COMMITS_PER_FAULT_MIN = 4
"""Commits of the clients that the library's checker judges: fewer would prove nothing."""
DISK_BYTES = 3 << 30
_THREADS = 32

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(SECONDS * 2 + 420)]

console = Console(highlight=False, markup=False, soft_wrap=True)


@pytest.fixture(name="disk")
def _disk(tmp_path: Path) -> Iterator[FileSystem | None]:
    if IN_BUCKET or not MAY_MOUNT:
        yield None
        return
    found = FileSystem(tmp_path, bytes_max=DISK_BYTES)
    found.make()
    found.mount()
    try:
        yield found
    finally:
        found.unmount_in_any_case()


@pytest.fixture(name="chaos_ceph")
def _chaos_ceph(request: pytest.FixtureRequest) -> Ceph | None:
    """What the store is on, unless it is a directory."""
    found: Ceph | None = request.getfixturevalue("ceph") if IN_BUCKET else None
    return found


@pytest.fixture(name="clocks")
def _clocks(tmp_path: Path) -> list[HostClock]:
    return [HostClock(tmp_path / f"clock-{host}") for host in range(HOSTS)]


@pytest.fixture(name="exports")
def _exports(tmp_path: Path) -> Path:
    """The file to which workers export."""
    return tmp_path / "exports.jsonl"


@pytest.fixture(name="cluster")
def _cluster(
    tmp_path: Path,
    exports: Path,
    disk: FileSystem | None,
    chaos_ceph: Ceph | None,
    clocks: list[HostClock],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[LocalCluster]:
    def program(name: str, service: str) -> list[str]:
        run, more = service, list[str]()
        if service == "tabletserver":
            more = ["--write-buffers-bytes", str(WRITE_BUFFERS_BYTES)]
        if chaos_ceph is not None:
            run = in_bucket.MODULE
            more += [f"--service={service}", *chaos_ceph.nearest(place, name, service)]
        elif service == "tabletserver":
            run = "tests.chaos.tablet_server"
        clock = clocks[cluster.host_of[name]].file
        return ["tests.chaos.host_clock", *more, f"--program={run}", f"--host-clock={clock}"]

    monkeypatch.setenv(FILE_VARIABLE, str(exports))
    store = ""
    if chaos_ceph is not None:
        monkeypatch.setenv(UNFINISHED, "1")
        set_credentials(monkeypatch, chaos_ceph.account.access_key_id, chaos_ceph.account.secret)
        place = chaos_ceph.new_bucket()
        store = str(place)
    data = tmp_path / "cluster"
    if disk is not None:
        (disk.point / "store").mkdir()
        data.mkdir()
        (data / "store").symlink_to(disk.point / "store")
    cluster = LocalCluster(
        data,
        store=store,
        tablet_servers=3,
        masters=2,
        oracles=2,
        gateways=2,
        workers=2,
        observers=[
            "tests.integration.observed_orders:observers",
            "tests.chaos.recipes.at_work:observers",
        ],
        links=True,
        hosts=HOSTS,
        program=program,
    )
    with cluster:
        yield cluster


def lives(cluster: LocalCluster, clocks: list[HostClock], directory: Path) -> list[Life]:
    """Clients of each kind: with the library, directly and through gateways, and without it; and
    one that uses recipes."""
    direct, gateways = cluster.address, cluster.gateway_address
    first = Life(
        direct, "client-1", 1, WORKLOAD, SESSIONS, str(directory), SEED, pace_seconds=PACE_SECONDS
    )
    appends = replace(first, workload=appender.LIBRARY, program="tests.chaos.appender")
    bare = replace(appends, address=gateways, workload=appender.BARE)
    return [
        replace(first, host_clock=str(clocks[0].file)),
        replace(first, name="client-2", address=gateways, host_clock=str(clocks[1].file)),
        replace(appends, name="appender-1", host_clock=str(clocks[2].file)),
        replace(appends, name="appender-2", address=gateways, host_clock=str(clocks[0].file)),
        replace(bare, name="appender-3", host_clock=str(clocks[1].file)),
        replace(
            first,
            name="recipes",
            program=RECIPES,
            # Each of its transactions writes to six tables, and wakes three observers.
            sessions=2,
            pace_seconds=RECIPES_PACE_SECONDS,
            host_clock=str(clocks[2].file),
        ),
    ]


async def test_no_promise_is_broken_whatever_faults_meet(
    cluster: LocalCluster,
    clocks: list[HostClock],
    disk: FileSystem | None,
    chaos_ceph: Ceph | None,
    tmp_path: Path,
    exports: Path,
) -> None:
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(_THREADS))
    console.print(f"\nCHAOS_SEED={SEED} CHAOS_WORKLOAD={WORKLOAD} CHAOS_SECONDS={SECONDS:g}")
    async with (
        supervising(cluster, WORKLOAD, tmp_path) as supervisor,
        aio.connect(cluster.gateway_address, description="supervisor") as through_gateways,
    ):
        shop = Shop(supervisor.database)
        await shop.open()
        await at_work.create(supervisor.database)
        await asyncio.to_thread(cluster.wait_workers)
        await supervisor.database.create_table(lists, SPLITS)
        clients = Clients(lives(cluster, clocks, tmp_path / "clients"))
        try:
            pulse = Pulse(probes(supervisor, through_gateways, shop, clients), RECOVERY_SECONDS_MAX)
            filler = await Filler.of(supervisor.database)
            scene = Scene(cluster, clients, supervisor, filler, pulse, clocks, disk, chaos_ceph)
            kinds = bucket_streams() if chaos_ceph else streams(full_disk=disk is not None)
            faults = Streams(scene, kinds, seed=SEED, together=TOGETHER)
            async with scene.watched():
                await faults.run(SECONDS)
                await scene.recovered_since(time.monotonic())
            await asyncio.to_thread(clients.stop)
        finally:
            clients.kill()
        problems = await judge_lists(supervisor.database, clients, tmp_path / "clients")
        problems += await shop.problems()
        problems += await judge_recipes(supervisor.database, clients, exports)
        verdict = await supervisor.judge(clients)
        verdict.problems += problems
    faults.show(verdict, shop)
    verdict.require_clean(tmp_path)
    if IN_BUCKET:
        assert in_bucket.swept(cluster.logs()) > 0
    else:
        write_run(f"{SEED}-{TOGETHER}", faults.injected)
    assert faults.never_injected() == [], faults.missed
    assert verdict.committed > COMMITS_PER_FAULT_MIN * len(faults.injected)


def probes(
    supervisor: Supervisor, through_gateways: aio.Database, shop: Shop, clients: Clients
) -> dict[str, Callable[[], Awaitable[None]]]:
    async def orders() -> None:
        await shop.handled(await shop.place())

    return {
        "every tablet, directly": supervisor.recovered,
        "every tablet, through a gateway": lambda: supervisor.recovered(through_gateways),
        "an order and its observers": orders,
        "every client commits": clients.all_commit,
    }


# A million cells are exported while they are written, collected, split and moved, and servers and
# the export itself are killed. Imported elsewhere, they are as they were at that time.

CELLS = 1_000_000
SPARE = 20_000
"""Rows that may be deleted."""
TABLETS = 8
WRITERS = 4
TRIP_PIN_TTL = 15.0
SETTINGS = {
    "PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX": "15000",
    "PERCOLATOR_MASTER_COLLECTION_SECONDS": "1",
    "PERCOLATOR_MASTER_RETENTION_SECONDS": "5",
    "PERCOLATOR_MASTER_RETENTION_MIN_SECONDS": "1",
}
TRIP_SECONDS = 240.0
items = Table("items", key=codecs.raw)
a, b = items.column("a", codecs.raw), items.column("b", codecs.raw)

trip_console = Console()


@pytest.fixture(name="source")
def _source(tmp_path: Path) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        with LocalCluster(tmp_path / "source", tablet_servers=2) as started:
            yield started


@pytest.fixture(name="target")
def _target(tmp_path: Path) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path / "target", tablet_servers=1) as started:
        yield started


@pytest.mark.timeout(900)
async def test_a_million_cells_come_back_as_of_one_timestamp(
    source: LocalCluster, target: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "export"
    async with connect(source.address) as db:
        await fill(db)
        async with Writers(db) as writers, db.pin(ttl=TRIP_PIN_TTL) as pin:
            before = writers.commits
            seconds = await exported(source, directory, pin.at)
            wanted, cells = await scan_hash(db, pin.at)
            pin.check()
        commits = writers.commits - before
        now, _ = await scan_hash(db)
    assert now != wanted
    assert commits > 10
    trip_console.print(f"\n{cells:,} cells exported in {seconds:.1f} s, beside {commits:,} commits")
    made = await asyncio.to_thread(importer.verify, directory)
    assert made.cells == cells >= CELLS
    seconds = await imported(target, directory)
    async with connect(target.address) as db:
        assert await scan_hash(db) == (wanted, cells)
    trip_console.print(f"imported in {seconds:.1f} s")


async def fill(db: Database) -> None:
    rows = CELLS // 2 + SPARE
    await db.create_table(items, [b"%09d" % (rows * part // TABLETS) for part in range(1, TABLETS)])
    load = BulkLoad(db, LoadPlan(items.name, "fill", b"", b"", notify=False))
    timestamps = await load.begin()
    for start in range(0, rows, 10_000):
        cells = [
            (b"%09d" % row, column, b"%050d" % row)
            for row in range(start, min(start + 10_000, rows))
            for column in (b"a", b"b")
        ]
        await load.load(cells, timestamps)
    await load.finish(timestamps)


class Writers:
    """Writers that overwrite, delete and add cells while the block runs."""

    def __init__(self, db: Database) -> None:
        self._db = db
        self._random = Random("writers")
        self._tasks: list[asyncio.Task[None]] = []
        self.commits = 0

    async def _write(self) -> None:
        while True:
            try:
                await self._db.run(self._change)
                self.commits += 1
            except PercolatorError:
                continue  # its server has just been killed

    async def _change(self, tx: Transaction) -> None:
        rows = CELLS // 2
        for _ in range(5):
            row, value = self._random.randrange(rows), self._random.randbytes(40)
            await tx.set(b"%09d" % row, self._random.choice([a, b]), value)
        await tx.delete(b"%09d" % (rows + self._random.randrange(SPARE)), a)
        await tx.set(b"new %09d" % self._random.randrange(1 << 29), b, b"")

    async def __aenter__(self) -> Writers:
        self._tasks = [asyncio.create_task(self._write()) for _ in range(WRITERS)]
        await until(lambda: self.commits > 20)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


# ---------------------------------------------------------------------------- killed, and resumed


async def exported(cluster: LocalCluster, directory: Path, at: Timestamp) -> float:
    """Exports while faults occur. Returns how long it took."""
    began = time.monotonic()
    arguments = ("export", "--at", str(int(at)), "--pin-ttl", str(TRIP_PIN_TTL), str(directory))

    def some_parts() -> bool:
        return len(list(directory.glob("*/part-*.json"))) >= 2

    async with command(cluster, *arguments) as first:
        await until(some_parts)
        first.kill()
        assert await first.wait() == -signal.SIGKILL
    assert not (directory / export_files.MANIFEST).exists()
    async with command(cluster, *arguments) as second:
        tablets = await asked(cluster, "tablets")
        last = [one for one in tablets if one["table"] == items.name][-1]
        await asked(cluster, "tablets", "split", str(last["tablet_id"]))
        server = cluster.processes["tabletserver-1"]
        server.kill()
        await asyncio.to_thread(cluster.restart, server.name)
        assert await asyncio.wait_for(second.wait(), TRIP_SECONDS) == 0
    return time.monotonic() - began


async def imported(cluster: LocalCluster, directory: Path) -> float:
    began = time.monotonic()
    noted = directory / importer.NAME

    def some_parts() -> bool:
        return noted.exists() and noted.read_bytes().count(b'"part"') >= 2

    async with command(cluster, "import", str(directory)) as first:
        await until(some_parts)
        first.kill()
        assert await first.wait() == -signal.SIGKILL
    async with command(cluster, "import", str(directory)) as second:
        assert await asyncio.wait_for(second.wait(), TRIP_SECONDS) == 0
    return time.monotonic() - began


@asynccontextmanager
async def command(cluster: LocalCluster, *arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "percolator.cli", "--address", cluster.address, "--timeout", "30", "--json"),
        *arguments,
        stdout=asyncio.subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def asked(cluster: LocalCluster, *arguments: str) -> Any:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "percolator.cli", "--address", cluster.address, "--json"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(), TRIP_SECONDS)
    assert process.returncode == 0
    return json.loads(output)


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TRIP_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def scan_hash(db: Database, at: Timestamp | None = None) -> tuple[str, int]:
    """The hash of all rows, columns and values, and the number of cells."""
    digest, cells = sha256(), 0
    async with db.snapshot(at, timeout=60.0) as snapshot:
        async for page in snapshot.scan_cells(items):
            cells += len(page.rows)
            for cell in zip(page.rows, page.columns, page.values, strict=True):
                digest.update(repr(cell).encode())
    return digest.hexdigest(), cells


# Exports and imports are killed at every step, and resumed: nothing is lost, and no part is seen
# before the whole.

first = Table("first", key=codecs.raw)
second = Table("second", key=codecs.raw)
value = first.column("value", codecs.raw)
other = second.column("other", codecs.raw)
ROWS = 300

Content = list[tuple[bytes, bytes, bytes]]


@pytest.fixture(scope="module", name="backup_cluster")
def _backup_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX", "4000")
        with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=2) as started:
            backup_fill(started.address)
            yield started


@pytest.fixture(scope="module", name="backup_target")
def _backup_target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("target"), tablet_servers=1) as started:
        yield started


@pytest.fixture(name="exported")
def _exported(backup_cluster: LocalCluster, tmp_path: Path) -> Path:
    directory = tmp_path / "whole"

    async def whole() -> None:
        async with connect(backup_cluster.address) as db:
            await exporter.export(db, directory, pin_ttl_seconds=PIN_TTL)

    asyncio.run(whole())
    return directory


def backup_fill(address: str) -> None:
    with percolator.connect(address) as db:
        db.create_table(first, splits=[b"\x40", b"\x80", b"\xc0"])
        db.create_table(second, splits=[b"\x80"])
        for column in (value, other):
            db.set_many(
                (bytes([row % 256, row // 256]), {column: b"v" * row}) for row in range(ROWS)
            )


async def content(db: Database, table: Table[bytes]) -> Content:
    found: Content = []
    async with db.snapshot(timeout=1.0) as snapshot:
        async for page in snapshot.scan_cells(table):
            found += zip(page.rows, page.columns, page.values, strict=True)
    return found


async def killed(backup_cluster: LocalCluster, directory: Path, point: str) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.chaos.killed_backup",
        backup_cluster.address,
        str(directory),
        point,
    )
    assert await asyncio.wait_for(process.wait(), 50) == -signal.SIGKILL


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", EXPORT)
async def test_an_export_that_was_killed_can_be_resumed_at_its_own_timestamp(
    point: str, backup_cluster: LocalCluster, tmp_path: Path
) -> None:
    directory = tmp_path / "copy"
    await killed(backup_cluster, directory, point)
    async with connect(backup_cluster.address) as db:
        with pytest.raises(PercolatorError):
            importer.verify(directory)
        made = await exporter.export(db, directory, pin_ttl_seconds=PIN_TTL)
        assert importer.verify(directory) == made
        assert made.cells == 2 * ROWS
        assert not list(directory.rglob("*.partial"))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", IMPORT)
async def test_an_import_that_was_killed_shows_no_part_of_a_table_and_is_gone_on_with(
    point: str, backup_cluster: LocalCluster, backup_target: LocalCluster, exported: Path
) -> None:
    async with connect(backup_cluster.address) as db:
        wanted = {table.name: await content(db, table) for table in (first, second)}
    async with connect(backup_target.address) as db:
        for table in (first, second):
            await db.drop_table(table, missing_ok=True)
        await killed(backup_target, exported, point)
        seen = [await visible(db, table) for table in (first, second)]
        assert all(cells in (None, []) or cells == wanted[name] for name, cells in seen)
        # No client sees one without the other.
        assert len({bool(cells) for _, cells in seen if cells is not None}) <= 1
        await importer.import_tables(db, exported)
        for table in (first, second):
            assert await content(db, table) == wanted[table.name]
        assert not (exported / importer.NAME).exists()


async def visible(db: Database, table: Table[bytes]) -> tuple[str, Content | None]:
    """The state of a table and its content; None if the content is not visible."""
    try:
        return table.name, await content(db, table)
    except (NotReady, SchemaError):
        return table.name, None
    except PercolatorError as error:
        assert "closed for the bulk load" in str(error)  # noqa: PT017 - one of several ways
        return table.name, None


@pytest.mark.timeout(240)
@pytest.mark.parametrize("point", ["two parts are noted", "one table is open"])
async def test_an_import_from_where_nothing_can_be_noted_begins_anew(
    point: str,
    backup_cluster: LocalCluster,
    backup_target: LocalCluster,
    exported: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connect(backup_target.address) as db:
        for table in (first, second):
            await db.drop_table(table, missing_ok=True)
        await killed(backup_target, exported, point)
        # As if it had never existed and could not be created: now it is a directory.
        noted = exported / importer.NAME
        noted.unlink()
        noted.mkdir()
        if point == "one table is open":
            with pytest.raises(PercolatorError, match="'first' is not empty"):
                await importer.import_tables(db, exported)
            await importer.import_tables(db, exported, tables=["second"])
        else:
            await importer.import_tables(db, exported)
        assert "progress cannot be written down" in caplog.text
        assert len(await content(db, first)) == len(await content(db, second)) == ROWS
