"""The cluster that is fuzzed, and what a request needs to be meant for something in it.

Calls come from a caller with the certificate of the cluster, who may do everything. They leave
tables fenced, frozen, moved or gone, so the scene makes new ones every few seconds, and notes where
they are. The canary's tables stay out of reach of whatever may legitimately destroy them.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import ssl
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import psutil
from google.protobuf.message import DecodeError, Message

from percolator import Table, aio, codecs
from percolator.errors import (
    InvalidArgument,
    NotExecuted,
    OutcomeUnknown,
    PercolatorError,
    TabletLocation,
    TabletMoved,
)
from percolator.services.local.authority import files_in
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.process import ServiceProcess
from percolator.v1 import cells_pb2, cluster_pb2, lockservice_pb2, master_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.v1.frames_pb2 import FramesHello
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import SCHEME
from percolator.wire.frames import CALL_HEAD, HEADER, PREAMBLE, Kind, frame
from percolator.world import Random, UnaryMethod
from tests.fuzz.findings import Record
from tests.fuzz.messages import METHODS, Method, Vocabulary, mentions
from tests.unfinished import Unfinished

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

CALL_SECONDS = 5.0
_ATTEMPTS = 20
_AGAIN_SECONDS = 0.1
_REGISTERED_SECONDS = 10.0
"""A server that registers every second must be known again long before this."""
_LOOPBACK = "127.0.0.1:"
_TIMESTAMPS_AT_ONCE = 500
_SESSION_MILLISECONDS = 30_000
_ROWS = tuple(b"row-%02d" % number for number in range(20))
SPLIT = b"row-10"
COLUMN = b"c"
INDEX = "found"
OBSERVED = b"observed"
OBSERVER = "watcher"
LOAD = "a load"


@dataclass(frozen=True)
class FuzzTable:
    """A table that is there to be damaged."""

    name: str
    table_id: int
    schema_version: int
    tablets: tuple[TabletLocation, ...]

    def target(self, chance: Random) -> pb.TabletTarget:
        one = chance.choice(self.tablets)
        return self.target_of(one)

    def target_of(self, one: TabletLocation) -> pb.TabletTarget:
        return pb.TabletTarget(
            tablet_id=one.tablet_id, epoch=one.epoch, schema_version=self.schema_version
        )


@dataclass
class Scene:
    """The present knowledge of the cluster."""

    cluster: LocalCluster
    network: GrpcNetwork
    vocabulary: Vocabulary = field(default_factory=Vocabulary)
    cluster_id: str = ""
    servers: list[cluster_pb2.Server] = field(default_factory=list)
    table: FuzzTable = field(init=False)
    shaken: FuzzTable = field(init=False)
    """The table whose tablets are moved, closed and split."""
    loading: FuzzTable = field(init=False)
    load_run: int = 0
    sessions: list[bytes] = field(default_factory=list)
    owners: dict[int, str] = field(default_factory=dict)
    """The address of the server of each tablet."""
    _timestamps: list[int] = field(default_factory=list)
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def living(self) -> list[cluster_pb2.Server]:
        """The listed servers that are processes of the cluster. Others are listed, too, since any
        server may register: calls to them get no answer, however long one waits."""
        addresses = {
            process.address
            for process in self.cluster.processes.values()
            if process.ready is not None
        }
        return [one for one in self.servers if one.address in addresses]

    def address(self, kind: str, chance: Random) -> str:
        """The address of one of the processes of a kind."""
        return chance.choice(
            [
                process.address
                for name, process in self.cluster.processes.items()
                if name.partition("-")[0] == kind and process.ready is not None
            ]
        )

    async def call(
        self, address: str, method: UnaryMethod[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        return await self.network.unary(address, method)(request, CALL_SECONDS)

    @property
    def _master(self) -> str:
        return self.cluster.address

    def timestamp(self) -> int:
        """A timestamp that was handed out; different ones until the supply is used up."""
        return self._timestamps.pop() if len(self._timestamps) > 1 else self._timestamps[0]

    async def learn(self) -> None:
        """Looks at the cluster again: timestamps, sessions, servers, tablets."""
        await self._take_timestamps()
        await self._open_session()
        described = await self.call(self._master, methods.DESCRIBE, cluster_pb2.DescribeRequest())
        self.cluster_id, self.servers = described.cluster_id, list(described.servers)
        self.table = await self._located(self.table.name)
        self.shaken = await self._located(self.shaken.name)
        self.loading = await self._located(self.loading.name)
        self._tell()

    async def _take_timestamps(self) -> None:
        oracle = self.cluster.processes["oracle"].address
        asked = oracle_pb2.GetTimestampsRequest(count=_TIMESTAMPS_AT_ONCE)
        block = await self.call(oracle, methods.GET_TIMESTAMPS, asked)
        # Taken from the end: the smallest first.
        self._timestamps = list(range(block.first, block.first + block.count))[::-1]

    async def _open_session(self) -> None:
        info = lockservice_pb2.SessionInfo(
            description="a fuzzer", ttl_milliseconds=_SESSION_MILLISECONDS
        )
        service = self.cluster.processes["lockservice"].address
        opened = await self.call(
            service, methods.OPEN_SESSION, lockservice_pb2.OpenSessionRequest(info=info)
        )
        self.sessions = [*self.sessions[-2:], opened.session_id]

    async def renew(self) -> None:
        """New tables in place of those that were damaged, and every server may have tablets."""
        for name, process in self.cluster.processes.items():
            if name.startswith("tabletserver"):
                await self._take_tablets_again(process.address)
        former = [getattr(self, one, None) for one in ("table", "shaken", "loading")]
        number = next(self._numbers)
        index = master_pb2.Index(name=INDEX, columns=[{"column": b"found", "codec": "text"}])
        table = await self._create(f"fuzzed-{number}", [SPLIT], change_feed=True, indexes=[index])
        observer = master_pb2.Observer(name=OBSERVER, columns=[OBSERVED])
        await self.call(
            self._master,
            methods.CHANGE_OBSERVERS,
            master_pb2.ChangeObserversRequest(table=table.name, add=[observer]),
        )
        # Only now do inputs use it: one could add another observer of this name first.
        self.table = table
        self.shaken = await self._create(f"shaken-{number}", [SPLIT])
        self.loading = await self._create(f"loaded-{number}", [])
        await self._take_timestamps()
        await self._fenced()
        for old in former:
            if old is not None:
                gone = master_pb2.DeleteTableRequest(name=old.name, missing_ok=True)
                await self.call(self._master, methods.DELETE_TABLE, gone)
        await self.learn()

    async def _take_tablets_again(self, server: str) -> None:
        """Undoes what an input may have asked of a tablet server: to give its tablets away.

        Another input may have registered a second process at its address. The master takes the
        first for gone then, until it registers again: every second or so.
        """
        undo = master_pb2.DrainServerRequest(server=server, undo=True)
        loop = asyncio.get_running_loop()
        waiting_until = loop.time() + _REGISTERED_SECONDS
        while True:
            try:
                await self.call(self._master, methods.DRAIN_SERVER, undo)
            except InvalidArgument as error:
                if "is alive" not in str(error) or loop.time() > waiting_until:
                    raise
                await asyncio.sleep(_AGAIN_SECONDS)
            else:
                return

    async def _create(
        self,
        name: str,
        splits: Iterable[bytes],
        *,
        change_feed: bool = False,
        indexes: Sequence[master_pb2.Index] = (),
    ) -> FuzzTable:
        made = master_pb2.CreateTableRequest(
            name=name,
            splits=splits,
            options=master_pb2.TableOptions(change_feed=change_feed),
            exist_ok=True,
            indexes=indexes,
            knows_indexes=True,
        )
        await self.call(self._master, methods.CREATE_TABLE, made)
        return await self._located(name)

    async def _located(self, name: str) -> FuzzTable:
        asked = master_pb2.DescribeTableRequest(knows_indexes=True, name=name)
        table = (await self.call(self._master, methods.DESCRIBE_TABLE, asked)).table
        where = master_pb2.LocateTabletsRequest(knows_indexes=True, table_id=table.table_id)
        found = await self.call(self._master, methods.LOCATE_TABLETS, where)
        tablets = tuple(
            TabletLocation(
                table_id=one.table_id,
                tablet_id=one.tablet_id,
                epoch=one.epoch,
                start=one.range.start,
                end=one.range.end,
                address=one.address,
            )
            for one in found.locations
        )
        return FuzzTable(name, table.table_id, table.schema_version, tablets)

    async def _fenced(self) -> None:
        """Closes the table for loads, whose tablet may be on its way to another server."""
        for _ in range(_ATTEMPTS):
            try:
                await self._raise_fence()
            except (TabletMoved, NotExecuted):
                await asyncio.sleep(_AGAIN_SECONDS)
                self.loading = await self._located(self.loading.name)
            else:
                return

    async def _raise_fence(self) -> None:
        self.load_run = self.timestamp()
        tablet = self.loading.tablets[0]
        raised = pb.FenceRequest(
            target=self.loading.target_of(tablet),
            action=pb.FenceRequest.ACTION_RAISE,
            fence=self.fence(),
        )
        await self.call(tablet.address, methods.FENCE, raised)

    def fence(self) -> pb.LoadFence:
        """The fence of the load that is under way in the table for loads."""
        return pb.LoadFence(name=LOAD, run=self.load_run, range=cells_pb2.RowRange())

    def _tell(self) -> None:
        """Puts what a request may mean into the vocabulary."""
        tables = (self.table, self.shaken, self.loading)
        tablets = [one for table in tables for one in table.tablets]
        self.owners = {one.tablet_id: one.address for one in tablets if one.address}
        words = self.vocabulary
        words.put("table_id", [table.table_id for table in tables])
        words.put("table", [table.name for table in tables])
        words.put("tablet_id", [one.tablet_id for one in tablets])
        words.put("epoch", [one.epoch for one in tablets])
        words.put("schema_version", [table.schema_version for table in tables])
        words.put("timestamp", [*self._timestamps[:5], *self._timestamps[-5:]])
        words.put("session_id", self.sessions)
        words.put("row", _ROWS)
        words.put("start", [b"", *_ROWS[:3]])
        words.put("end", [b"", *_ROWS[-3:]])
        words.put("column", [COLUMN, OBSERVED, b"\0ack"])
        words.put("observer", [OBSERVER, OBSERVER.encode()])
        words.put("qualifier", [b"", OBSERVER.encode()])
        words.put("cluster_id", [self.cluster_id, ""])
        words.put("server_id", [one.server_id for one in self.servers])
        words.put("version", [one.version for one in self.servers])
        words.put("server", [one.address for one in self.servers])
        # Nothing but this machine, and what cannot be dialled at all.
        dialled = [one.address for one in self.servers if one.address.startswith(_LOOPBACK)]
        refused = ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "127.0.0.1:1", ":", "[::1:2"]
        words.put("address", [*dialled, *refused])
        # Their own as well: otherwise no request that describes one of them would be sent.
        own = [one.metrics_address for one in self.servers]
        metrics = [one for one in own if one.startswith(_LOOPBACK)]
        words.put("metrics_address", [*dialled[:2], *metrics, *refused])


# The processes of the cluster from outside: alive, small, quiet in their logs, done at the end.

GROWTH_BYTES_MAX = 384 << 20
"""By how much the memory of a process may grow above what it had at the start."""
_DONE_SECONDS = 30.0
_LOOK_SECONDS = 0.5
_IN_FLIGHT = re.compile(r"^percolator_rpc_in_flight\{(.*)\} ([0-9.]+)$", re.MULTILINE)
_SHOWN_MAX = 400

EXPECTED_ERRORS: dict[str, str] = {}
"""Events that a process may log as errors while it is fuzzed, with the reason."""


class Processes:
    """Looks at all processes of a cluster."""

    def __init__(self, cluster: LocalCluster, context: ssl.SSLContext, record: Record) -> None:
        self._cluster = cluster
        self._context = context
        self._record = record
        self._at_first = self._memory()
        self.most = dict(self._at_first)

    @property
    def _all(self) -> Mapping[str, ServiceProcess]:
        return self._cluster.processes

    def _memory(self) -> dict[str, int]:
        return {
            name: psutil.Process(process.pid).memory_info().rss
            for name, process in self._all.items()
            if process.exit_code is None
        }

    async def watch(self) -> None:
        """Looks at memory and life until it is cancelled."""
        while True:
            self.look()
            await asyncio.sleep(_LOOK_SECONDS)

    def look(self) -> None:
        for name, process in self._all.items():
            if process.exit_code is not None:
                self._record.broke(
                    f"{name} exited with {process.exit_code}: {process.last_words()[-_SHOWN_MAX:]}"
                )
        for name, rss in self._memory().items():
            self.most[name] = max(self.most[name], rss)
            if rss > self._at_first[name] + GROWTH_BYTES_MAX:
                self._record.wrong(f"{name} grew above {GROWTH_BYTES_MAX >> 20} MiB more memory")

    def growth(self) -> dict[str, tuple[int, int]]:
        """The memory at the start and the most there was, in MiB."""
        return {name: (self._at_first[name] >> 20, most >> 20) for name, most in self.most.items()}

    # ------------------------------------------------------------------------------- at the end

    async def require_done(self, usual: Mapping[str, int]) -> None:
        """Every call ends after its caller has gone: none is left that was not there before."""
        deadline = asyncio.get_running_loop().time() + _DONE_SECONDS
        while True:
            found = await self.in_flight()
            left = {
                one: calls
                for one, calls in found.items()
                if calls > max(usual.get(one, 0), _of_worker(one))
            }
            if not left:
                return
            if asyncio.get_running_loop().time() > deadline:
                self._record.wrong(f"calls that never end: {left}")
                return
            await asyncio.sleep(_LOOK_SECONDS)

    async def in_flight(self) -> dict[str, int]:
        """The calls in progress, by process and method."""
        return await asyncio.to_thread(self._in_flight)

    def _in_flight(self) -> dict[str, int]:
        found = {}
        for name, process in self._all.items():
            if process.ready is None or process.exit_code is not None:
                continue
            url = f"https://{process.ready.metrics_address}/metrics"
            with urllib.request.urlopen(url, timeout=10, context=self._context) as answer:
                text = answer.read().decode()
            for labels, calls in _IN_FLIGHT.findall(text):
                found[f"{name} {labels}"] = int(float(calls))
        return found

    def judge_logs(self) -> None:
        """No line of any log shows an exception, or an error that is not expected."""
        for name, text in self._cluster.logs().items():
            for line in text.splitlines():
                problem = _problem(line)
                if problem:
                    self._record.wrong(f"{name}: {problem}")


def _of_worker(calls: str) -> int:
    """The calls of the worker, which watches a server from the moment it has a tablet on."""
    return int('method="WatchNotifications"' in calls)


def _problem(line: str) -> str:
    try:
        entry = json.loads(line)
    except ValueError:
        return line[:_SHOWN_MAX] if "Traceback" in line or "Error" in line else ""
    event = str(entry.get("event", ""))
    if event in EXPECTED_ERRORS:
        return ""
    if entry.get("level") in ("error", "critical") or "exception" in entry:
        trace = str(entry.get("exception", entry.get("error", "")))
        return f"{event}: {entry.get('rpc', '')} {trace[-_SHOWN_MAX:]}"
    return ""


# Tables whose content is known, and which nothing that is fuzzed may harm.
#
# One is written once and read again and again; in the other, a counter is raised by transactions
# all the time. At the end both are read a last time. Requests that would destroy them legitimately,
# such as a DeleteTable of their name, are not sent.

ROWS = 120
_LONG_BYTES = 20_000
_PAUSE_SECONDS = 0.1
_WITHIN_SECONDS = 30.0

birds = Table("canary", key=codecs.text)
song = birds.column("song", codecs.raw)
counters = Table("canary.counter")
count = counters.column("count", codecs.integer)

_ANYBODY = frozenset(
    f"/percolator.v1.{one}"
    for one in (
        "TabletServerService/ResolveLocks",
        "TabletServerService/Read",
        "TabletServerService/AwaitTurn",
        "TabletServerService/EndTurn",
        "TabletServerService/Scan",
        "TabletServerService/ScanCells",
        "TabletServerService/ScanNotifications",
        "TabletServerService/WatchNotifications",
        "TabletServerService/DescribeTablets",
        "TabletServerService/ProposeSplit",
        "TabletServerService/ProposeParts",
        "GatewayService/Get",
        "GatewayService/ScanTable",
        "GatewayService/FindRows",
        "MasterService/DescribeTable",
        "MasterService/LocateTablets",
        "MasterService/ListTablets",
        "MasterService/MoveTablet",
        "MasterService/CreateTable",
    )
)
"""Calls that may be made for the canary's tables: it must bear all of them."""

_forbidden: dict[str, frozenset[object]] = {}


def forbidden_for_canary(method: Method, data: bytes) -> bool:
    """True if this call would be right to destroy a canary."""
    if method.path in _ANYBODY or not method.own:
        return False
    try:
        request = method.request.FromString(data)
    except DecodeError:
        return False
    return mentions(request, _forbidden)


def _content() -> dict[str, bytes]:
    """Short values, which are in the write record, and long ones, which are not."""
    found = {}
    for number in range(ROWS):
        value = sha256(b"%d" % number).digest()
        found[f"bird-{number:03}"] = value * (_LONG_BYTES // 32) if number % 10 == 0 else value
    return found


class Canary:
    """Watches both tables while the cluster is fuzzed."""

    def __init__(self, database: aio.Database, record: Record) -> None:
        self._database = database
        self._record = record
        self._known = _content()
        self._acknowledged = 0
        self._unknown = 0
        self.reads = 0
        self.longest_seconds = 0.0

    async def hatch(self, scene: Scene) -> None:
        """Creates and fills the tables, and puts them out of reach."""
        database = self._database
        await database.create_table(birds, ["bird-040", "bird-080"], exist_ok=True)
        await database.create_table(counters, exist_ok=True)
        await database.set_many((row, {song: value}) for row, value in self._known.items())
        ids, tablet_ids = [], []
        for table in (birds, counters):
            asked = master_pb2.DescribeTableRequest(knows_indexes=True, name=table.name)
            found = await scene.call(scene.cluster.address, methods.DESCRIBE_TABLE, asked)
            ids.append(found.table.table_id)
            located = await scene.call(
                scene.cluster.address,
                methods.LOCATE_TABLETS,
                master_pb2.LocateTabletsRequest(knows_indexes=True, table_id=found.table.table_id),
            )
            tablet_ids += [one.tablet_id for one in located.locations]
        names = frozenset({birds.name, counters.name})
        _forbidden.update(
            table_id=frozenset(ids),
            tablet_id=frozenset(tablet_ids),
            tablet_ids=frozenset(tablet_ids),
            origin_tablet_id=frozenset(tablet_ids),
            table=names,
            name=names,
        )
        scene.vocabulary.put("canary", sorted(names))

    async def sing(self, deadline: float) -> None:
        """Reads and writes until then. It is not cancelled: a commit that is cancelled in the
        middle may still take effect, and would be missing from the expected count."""
        loop = asyncio.get_running_loop()
        while (began := loop.time()) < deadline:
            await self._listen()
            await self._raise_counter()
            seconds = loop.time() - began
            self.longest_seconds = max(self.longest_seconds, seconds)
            await asyncio.sleep(_PAUSE_SECONDS)

    async def judge(self) -> None:
        """The last look, after fuzzing has ended."""
        await self._listen()
        try:
            async with self._database.snapshot() as snapshot:
                found = await snapshot.get("it", count, default=0)
        except PercolatorError as error:
            self._record.wrong(f"the canary's counter cannot be read: {error}")
            return
        if not self._acknowledged <= found <= self._acknowledged + self._unknown:
            self._record.wrong(
                f"the canary's counter is {found} after {self._acknowledged} acknowledged and "
                f"{self._unknown} unknown commits"
            )

    async def _listen(self) -> None:
        found: dict[str, bytes] = {}
        try:
            async with asyncio.timeout(_WITHIN_SECONDS), self._database.snapshot() as snapshot:
                async for row in snapshot.scan(birds):
                    found[row.key] = row[song]
        except (PercolatorError, TimeoutError) as error:
            self._record.wrong(f"the canary cannot be read: {type(error).__name__}: {error}")
            return
        self.reads += 1
        if found != self._known:
            differ = sorted(
                row
                for row in found.keys() | self._known.keys()
                if found.get(row) != self._known.get(row)
            )
            self._record.wrong(f"the canary is hurt: {len(differ)} rows, such as {differ[0]}")

    async def _raise_counter(self) -> None:
        try:
            await self._database.run(_raise)
        except OutcomeUnknown:
            self._unknown += 1
        except PercolatorError as error:
            self._record.wrong(f"the canary cannot write: {type(error).__name__}: {error}")
        else:
            self._acknowledged += 1


async def _raise(tx: aio.Transaction) -> None:
    await tx.set("it", count, await tx.get("it", count, default=0) + 1)


# Noise on the ports themselves: no TLS, half a handshake, no HTTP, requests without an end.

_SOCKETS_PAUSE_SECONDS = 0.05
_ANSWER_SECONDS = 0.2
_FRAMES_SECURE = 0.9
"""The share of what the port for frames gets that passes the handshake, or the hello."""
_UNFINISHED_SHARE = 0.1
_STREAMS_MAX = 40
_REQUEST_BYTES = (1, 100_000, 1 << 20, 16 << 20, 31 << 20)
_OPEN = (
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
_NOISE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"GET /metrics?name[]=%00 HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 64,
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"",
)


class Sockets:
    """Connects to the ports of all processes, and writes what they do not expect."""

    def __init__(
        self, cluster: LocalCluster, certificates: Path, record: Record, seed: int
    ) -> None:
        self._token = (certificates / "client" / "client.token").read_text().strip()
        self._admin = (certificates / "client" / "admin.token").read_text().strip()
        self._cluster = cluster
        self._record = record
        self._chance = Random(f"sockets {seed}")
        files = files_in(certificates / "client")
        self._tls = ssl.create_default_context(cafile=files.ca)
        self._tls.load_cert_chain(files.certificate, files.key)
        self._tls.check_hostname = False
        self._tls.set_alpn_protocols(["h2"])

    async def go_on(self, deadline: float) -> None:
        loop = asyncio.get_running_loop()
        while loop.time() < deadline:
            process = self._chance.choice(
                [one for one in self._cluster.processes.values() if one.ready is not None]
            )
            ready = process.wait_ready(_ANSWER_SECONDS)
            if self._chance.random() < _UNFINISHED_SHARE:
                await self._unfinished(ready.address)
                continue
            ports = {"calls": ready.address, "metrics": ready.metrics_address}
            if ready.frames_address:
                ports["frames"] = ready.frames_address
            port = self._chance.choice(list(ports))
            address = ports[port]
            secure = self._chance.random() < (_FRAMES_SECURE if port == "frames" else 0.5)
            kind = f"{'TLS' if secure else 'plain'} to the port of {port}"
            noise = self._chance.choice((*_NOISE, self._chance.randbytes(300)))
            if port == "frames" and self._chance.random() < _FRAMES_SECURE:
                noise = hostile(self._chance, ready.server_id, self._token)
            try:
                outcome = await self._connect(address, noise, secure=secure)
            except ConnectionRefusedError:
                outcome = "wrong"
                self._record.wrong(f"{process.name} no longer listens on {address}")
            self._record.count("sockets", kind, outcome)
            await asyncio.sleep(_SOCKETS_PAUSE_SECONDS)

    async def _unfinished(self, address: str) -> None:
        """Begins requests, of all kinds of callers, and leaves without their ends."""
        token = self._chance.choice(("", "unknown", self._token, self._admin))
        metadata = [("authorization", f"{SCHEME}{token}")] if token else []
        path = self._chance.choice((*METHODS, *_OPEN))
        paths = [path] * self._chance.randrange(1, _STREAMS_MAX)
        try:
            async with Unfinished(address, self._tls) as caller:
                await caller.begin(paths, self._chance.choice(_REQUEST_BYTES), metadata)
                outcome = "answered" if caller.answers else "no answer"
        except (OSError, ssl.SSLError):
            outcome = "closed"
        self._record.count("sockets", "unfinished requests", outcome)

    async def _connect(self, address: str, noise: bytes, *, secure: bool) -> str:
        host, _, port = address.rpartition(":")
        context = self._tls if secure else None
        try:
            reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
        except ConnectionRefusedError:
            raise
        except (ssl.SSLError, ConnectionError):
            # A server that was busy for long ends a handshake that has taken too long.
            return "no handshake"
        try:
            writer.write(noise)
            async with asyncio.timeout(_ANSWER_SECONDS):
                await writer.drain()
                answer = await reader.read(1024)
        except (TimeoutError, OSError):
            return "no answer"
        finally:
            writer.transport.abort()
        return "accepted" if answer else "closed"


# Hostile bytes for the port for frames: what is nearly a hello, and then what is nearly a call.

_FRAMES_MAX = 40
_NUMBERS = 4
"""Few, so that calls collide and cancel each other."""


def hostile(chance: Random, server_id: str, token: str) -> bytes:
    """A connection's worth of bytes, most of which get past the hello."""
    sent = PREAMBLE + frame(Kind.HELLO, 0, _hello(chance, server_id, token))
    sent += b"".join(_frame(chance) for _ in range(chance.randrange(_FRAMES_MAX)))
    if chance.random() < 0.3:
        sent = sent[: chance.randrange(len(sent))]
    if chance.random() < 0.2:
        at = chance.randrange(len(sent) + 1)
        sent = sent[:at] + chance.randbytes(chance.randrange(1, 9)) + sent[at:]
    return sent


def _hello(chance: Random, server_id: str, token: str) -> bytes:
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(50))
    authorization = chance.choice(
        (SCHEME + token, SCHEME + token, SCHEME + "x", "", "\x00" * 2_000)
    )
    return FramesHello(server_id=server_id, authorization=authorization).SerializeToString()


def _frame(chance: Random) -> bytes:
    number = chance.randrange(_NUMBERS)
    match chance.choice(("call", "call", "call", "cancel", "ping", "kind", "size")):
        case "call":
            head = CALL_HEAD.pack(
                chance.choice((0, 0, 1, 2, 3, 255)), chance.choice((0, 1, 100, 2**32 - 1))
            )
            return frame(Kind.CALL, number, head + chance.randbytes(chance.randrange(60)))
        case "cancel":
            return frame(Kind.CANCEL, number)
        case "ping":
            return frame(Kind.PING, number, chance.randbytes(chance.randrange(9)))
        case "kind":
            return HEADER.pack(0, chance.randrange(256), number)
    return HEADER.pack(chance.choice((2**32 - 1, 2**24 + 6, 5, 1)), Kind.CALL, number)
