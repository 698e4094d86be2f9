"""The cluster that is fuzzed, and what a request needs to be meant for something in it.

Calls come from a caller with the certificate of the cluster, who may do everything. They leave
tables fenced, frozen, moved or gone, so the scene makes new ones every few seconds, and notes where
they are. The canary's tables stay out of reach of whatever may legitimately destroy them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message

from percolator.errors import InvalidArgument, NotExecuted, TabletLocation, TabletMoved
from percolator.services.local.cluster import LocalCluster
from percolator.v1 import cells_pb2, cluster_pb2, lockservice_pb2, master_pb2, oracle_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.world import Random, UnaryMethod
from tests.fuzz.messages import Vocabulary

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
    """What is known of the cluster at this moment."""

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
        table = await self._create(f"fuzzed-{number}", [SPLIT], change_feed=True)
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
        self, name: str, splits: Iterable[bytes], *, change_feed: bool = False
    ) -> FuzzTable:
        options = master_pb2.TableOptions(change_feed=change_feed)
        made = master_pb2.CreateTableRequest(
            name=name, splits=splits, options=options, exist_ok=True
        )
        await self.call(self._master, methods.CREATE_TABLE, made)
        return await self._located(name)

    async def _located(self, name: str) -> FuzzTable:
        asked = master_pb2.DescribeTableRequest(name=name)
        table = (await self.call(self._master, methods.DESCRIBE_TABLE, asked)).table
        where = master_pb2.LocateTabletsRequest(table_id=table.table_id)
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
