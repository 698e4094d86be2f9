"""A valid request for every method, made for the cluster as it is now.

The other inputs are made from these. A method without an entry fails the run.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import AsyncGenerator, Callable
from datetime import timedelta

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from percolator import Table, aio, codecs
from percolator.aio.bulk_load import BulkLoad, LoadPlan
from percolator.aio.connecting import connect_to
from percolator.formats.records import RecordKind, WriteRecord, timestamp_bytes
from percolator.limits import Limits
from percolator.retries import RetryPolicy
from percolator.v1 import bigtable_pb2 as bigtable
from percolator.v1 import cells_pb2 as cells
from percolator.v1 import cluster_pb2 as cluster
from percolator.v1 import frames_pb2 as frames
from percolator.v1 import gateway_pb2 as gateway
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as master
from percolator.v1 import oracle_pb2 as oracle
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.wire.channels import GrpcNetwork
from percolator.world import (
    MachineClock,
    Random,
    RequestT,
    ResponseT,
    StreamCall,
    StreamMethod,
    UnaryCall,
    UnaryMethod,
    World,
    machine_random,
)
from tests.fuzz.scene import COLUMN, INDEX, LOAD, OBSERVED, OBSERVER, SPLIT, Scene
from tests.integration.observed_orders import observers, orders, placed

Make = Callable[[Scene, Random], Message]

_TTL_MILLISECONDS = 5_000
_STORED = "projects/fuzzed/instances/fuzzed/tables/percolator-1"


def _session(scene: Scene, chance: Random) -> bytes:
    return chance.choice(scene.sessions)


def _info(scene: Scene) -> locks.SessionInfo:
    return locks.SessionInfo(
        description="fuzzed",
        ttl_milliseconds=_TTL_MILLISECONDS,
        oldest_start_timestamp=scene.timestamp(),
    )


def _rows(target: tablets.TabletTarget, scene: Scene, chance: Random) -> bytes:
    """A row of the tablet."""
    lower = scene.table.tablets[0].tablet_id == target.tablet_id
    return b"row-%02d" % (chance.randrange(10) + (0 if lower else 10))


def _range(target: tablets.TabletTarget, scene: Scene) -> cells.RowRange:
    for one in scene.table.tablets:
        if one.tablet_id == target.tablet_id:
            return cells.RowRange(start=one.start, end=one.end)
    return cells.RowRange()


def _mutate(scene: Scene, chance: Random) -> Message:
    target, start, commit = scene.table.target(chance), scene.timestamp(), scene.timestamp()
    row = _rows(target, scene, chance)
    record = WriteRecord(start, RecordKind.PUT, b"fuzzed").encode()
    put = tablets.Mutation(row=row, column=COLUMN, not_below=start)
    put.conditions.add(space=cells.SPACE_LOCK, expectation=tablets.Condition.EXPECTATION_ABSENT)
    put.conditions.add(
        space=cells.SPACE_WRITE,
        expectation=tablets.Condition.EXPECTATION_ABSENT,
        from_timestamp=start,
        prefix=timestamp_bytes(start),
    )
    put.changes.add(
        kind=tablets.Change.KIND_PUT, space=cells.SPACE_WRITE, timestamp=commit, value=record
    )
    return tablets.MutateRequest(batches=[tablets.MutationBatch(target=target, mutations=[put])])


def _mutate_together(scene: Scene, chance: Random) -> Message:
    batch = tablets.MutationBatch()
    batch.CopyFrom(_mutate(scene, chance).batches[0])  # type: ignore[attr-defined]
    return tablets.MutateTogetherRequest(batch=batch)


def _roll_forward(scene: Scene, chance: Random) -> Message:
    target, start, commit = scene.table.target(chance), scene.timestamp(), scene.timestamp()
    return tablets.RollForwardRequest(
        target=target,
        start_timestamps=[start],
        commit_timestamps=[commit],
        observed=[tablets.ObservedColumn(column=COLUMN, observers=[b"fuzzed"])],
        row=_rows(target, scene, chance),
    )


def _resolve_locks(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    return tablets.ResolveLocksRequest(
        target=target,
        rows=[_rows(target, scene, chance)],
        columns=[COLUMN],
        start_timestamps=[scene.timestamp()],
        read_at=scene.timestamp(),
        waited_milliseconds=chance.choice((0, 1_000)),
        remove=chance.random() < 0.5,
    )


def _commit_transactions(scene: Scene, chance: Random) -> Message:
    target, start = scene.table.target(chance), scene.timestamp()
    batch = tablets.TransactionBatch(
        target=target,
        start_timestamps=[start],
        cells=[1],
        rows=[_rows(target, scene, chance)],
        columns=[COLUMN],
        kinds=[RecordKind.PUT],
        values=[b"fuzzed"],
        observed=[tablets.ObservedColumn(column=COLUMN, observers=[b"fuzzed"])],
        followed=[0] * chance.randrange(2),
    )
    return tablets.CommitTransactionsRequest(batches=[batch])


def _read(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    read = tablets.RowRead(
        row=_rows(target, scene, chance), columns=[COLUMN], timestamp=scene.timestamp()
    )
    return tablets.ReadRequest(batches=[tablets.ReadBatch(target=target, reads=[read])])


def _scan(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    return tablets.ScanRequest(
        target=target,
        range=_range(target, scene),
        timestamp=scene.timestamp(),
        **chance.choice(({"all_columns": True}, {"column_prefixes": [COLUMN[:1]]})),
    )


def _scan_cells(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    space = chance.choice((cells.SPACE_WRITE, cells.SPACE_LOCK, cells.SPACE_NOTIFY))
    return tablets.ScanCellsRequest(target=target, space=space, range=_range(target, scene))


def _scan_notifications(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    scan = tablets.NotificationScan(
        target=target,
        range=_range(target, scene),
        observers=[OBSERVER.encode()],
        locked_columns=[OBSERVED],
        locks_before=scene.timestamp(),
    )
    return tablets.ScanNotificationsRequest(scans=[scan])


def _watch(scene: Scene, _chance: Random) -> Message:
    watched = tablets.WatchNotificationsRequest.Watched(
        table_id=scene.table.table_id, observers=[OBSERVER.encode()]
    )
    return tablets.WatchNotificationsRequest(watched=[watched])


def _scan_changes(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    after, until = scene.timestamp(), scene.timestamp()
    return tablets.ScanChangesRequest(
        target=target, range=_range(target, scene), after=after, until=until, before=True
    )


def _await_turn(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    return tablets.AwaitTurnRequest(
        target=target,
        row=_rows(target, scene, chance),
        column=COLUMN,
        place=1 + chance.getrandbits(4),
        wait_milliseconds=chance.randrange(50),
        hold_milliseconds=100,
    )


def _end_turn(scene: Scene, chance: Random) -> Message:
    target = scene.table.target(chance)
    return tablets.EndTurnRequest(
        target=target,
        row=_rows(target, scene, chance),
        column=COLUMN,
        place=1 + chance.getrandbits(4),
    )


def _look_for_changes(scene: Scene, chance: Random) -> Message:
    after, until = scene.timestamp(), scene.timestamp()
    look = tablets.ChangesLook(target=scene.table.target(chance), after=after, until=until)
    return tablets.LookForChangesRequest(looks=[look])


def _load(scene: Scene, _chance: Random) -> Message:
    tablet = scene.loading.tablets[0]
    return tablets.LoadRequest(
        target=scene.loading.target_of(tablet),
        name=LOAD,
        start_timestamp=scene.load_run,
        commit_timestamp=scene.load_run + 1,
        rows=[b"loaded"],
        columns=[COLUMN],
        values=[b"value"],
    )


def _fence(scene: Scene, _chance: Random) -> Message:
    tablet = scene.loading.tablets[0]
    return tablets.FenceRequest(
        target=scene.loading.target_of(tablet),
        action=tablets.FenceRequest.ACTION_LOOK,
        fence=scene.fence(),
    )


def _open_tablet(scene: Scene, chance: Random) -> Message:
    one = chance.choice(scene.shaken.tablets)
    return tablets.OpenTabletRequest(
        table_id=one.table_id,
        tablet_id=one.tablet_id,
        epoch=one.epoch,
        schema_version=scene.shaken.schema_version,
        range=cells.RowRange(start=one.start, end=one.end),
        must_exist=True,
        served_epoch=chance.choice((0, one.epoch - 1)),
    )


def _close_tablet(scene: Scene, chance: Random) -> Message:
    one = chance.choice(scene.shaken.tablets)
    return tablets.CloseTabletRequest(tablet_id=one.tablet_id, epoch=one.epoch)


def _raise_safe_points(scene: Scene, chance: Random) -> Message:
    one = chance.choice(scene.shaken.tablets)
    point = tablets.SafePoint(tablet_id=one.tablet_id, epoch=one.epoch, reads=1, transactions=1)
    return tablets.RaiseSafePointsRequest(safe_points=[point])


def _register(scene: Scene, chance: Random) -> Message:
    server = cluster.Server()
    server.CopyFrom(chance.choice(scene.servers))
    return cluster.RegisterRequest(cluster_id=scene.cluster_id, server=server)


def _create_table(scene: Scene, chance: Random) -> Message:
    del scene
    return master.CreateTableRequest(name=f"made-{chance.randrange(6)}", exist_ok=True)


def _change_observers(scene: Scene, _chance: Random) -> Message:
    observer = master.Observer(name=OBSERVER, columns=[OBSERVED])
    return master.ChangeObserversRequest(table=scene.table.name, add=[observer], replace=True)


def _codecs(chance: Random) -> master.Codecs:
    names = ("integer", "text", "model(Fuzzed)")
    return master.Codecs(
        columns=[master.ColumnCodec(column=b"described", codec=chance.choice(names))]
    )


def _split(scene: Scene, _chance: Random) -> Message:
    return master.SplitTabletRequest(tablet_id=scene.shaken.tablets[0].tablet_id, row=b"row-05")


def _follow_changes(scene: Scene, _chance: Random) -> Message:
    after, until = scene.timestamp(), scene.timestamp()
    return gateway.FollowChangesRequest(table=scene.table.name, after=after, until=until)


def _commit(scene: Scene, chance: Random) -> Message:
    write = gateway.CellWrite(
        kind=gateway.CellWrite.KIND_PUT,
        table=scene.table.name,
        row=b"row-%02d" % chance.randrange(20),
        column=OBSERVED,
        value=b"committed",
    )
    return gateway.CommitRequest(start_timestamp=scene.timestamp(), writes=[write])


def _get(scene: Scene, chance: Random) -> Message:
    query = gateway.RowQuery(table=scene.table.name, row=b"row-%02d" % chance.randrange(20))
    return gateway.GetRequest(start_timestamp=scene.timestamp(), rows=[query])


def _resolve(scene: Scene, chance: Random) -> Message:
    cell = gateway.CellName(
        table=scene.table.name, row=b"row-%02d" % chance.randrange(20), column=COLUMN
    )
    return gateway.ResolveRequest(start_timestamp=scene.timestamp(), cells=[cell])


_V1 = "/percolator.v1."
VALID: dict[str, Make] = {
    f"{_V1}OracleService/AdvanceEpoch": lambda s, c: oracle.AdvanceEpochRequest(catalogue_epoch=1),
    f"{_V1}OracleService/CheckTimestamps": lambda s, c: oracle.CheckTimestampsRequest(
        token="shop", timestamps=[s.timestamp()]
    ),
    f"{_V1}OracleService/GetTimestamps": lambda s, c: oracle.GetTimestampsRequest(count=1),
    f"{_V1}LockService/OpenSession": lambda s, c: locks.OpenSessionRequest(info=_info(s)),
    f"{_V1}LockService/RenewSession": lambda s, c: locks.RenewSessionRequest(
        session_id=_session(s, c), info=_info(s)
    ),
    f"{_V1}LockService/EndSession": lambda s, c: locks.EndSessionRequest(session_id=bytes(16)),
    f"{_V1}LockService/CheckSessions": lambda s, c: locks.CheckSessionsRequest(
        session_ids=s.sessions
    ),
    f"{_V1}LockService/ListSessions": lambda s, c: locks.ListSessionsRequest(page_size=10),
    f"{_V1}LockService/TryLock": lambda s, c: locks.TryLockRequest(
        session_id=_session(s, c), names=[b"fuzzed"], ttl_milliseconds=_TTL_MILLISECONDS
    ),
    f"{_V1}LockService/RenewLocks": lambda s, c: locks.RenewLocksRequest(
        session_id=_session(s, c), names=[b"fuzzed"], ttl_milliseconds=_TTL_MILLISECONDS
    ),
    f"{_V1}LockService/Unlock": lambda s, c: locks.UnlockRequest(
        session_id=_session(s, c), names=[b"fuzzed"]
    ),
    f"{_V1}ClusterService/Describe": lambda s, c: cluster.DescribeRequest(),
    f"{_V1}FrameService/OfferFrames": lambda s, c: frames.OfferFramesRequest(),
    f"{_V1}ClusterService/Register": _register,
    f"{_V1}MasterService/CreateTable": _create_table,
    f"{_V1}MasterService/DeleteTable": lambda s, c: master.DeleteTableRequest(
        name=f"made-{c.randrange(6)}", missing_ok=True
    ),
    f"{_V1}MasterService/ListTables": lambda s, c: master.ListTablesRequest(),
    f"{_V1}MasterService/DescribeTable": lambda s, c: master.DescribeTableRequest(
        knows_indexes=True, name=s.table.name
    ),
    f"{_V1}MasterService/ChangeObservers": _change_observers,
    f"{_V1}MasterService/ReportBackfill": lambda s, c: master.ReportBackfillRequest(
        table_id=s.table.table_id, observer=OBSERVER, version=2, row=b"m", cells=c.randrange(9)
    ),
    f"{_V1}MasterService/SetChangeFeed": lambda s, c: master.SetChangeFeedRequest(
        table=s.table.name, change_feed=True
    ),
    f"{_V1}MasterService/SetTtls": lambda s, c: master.SetTtlsRequest(
        table=s.table.name,
        ttls=[tablets.ColumnTtl(column=b"brief", ttl_milliseconds=1 + c.randrange(9))],
    ),
    f"{_V1}MasterService/ChangeIndexes": lambda s, c: master.ChangeIndexesRequest(
        table=s.table.name,
        add=[
            master.Index(
                name="fuzzed", columns=[master.ColumnCodec(column=b"indexed", codec="text")]
            )
        ],
    ),
    f"{_V1}MasterService/DeclareCodecs": lambda s, c: master.DeclareCodecsRequest(
        table_id=s.table.table_id, codecs=_codecs(c)
    ),
    f"{_V1}MasterService/ChangeCodecs": lambda s, c: master.ChangeCodecsRequest(
        table=s.table.name, columns=_codecs(c).columns
    ),
    f"{_V1}MasterService/BeginLoad": lambda s, c: master.BeginLoadRequest(
        table=master.CreateTableRequest(name=f"loaded-{c.randrange(6)}"),
        load="fuzzed",
        run=s.timestamp(),
    ),
    f"{_V1}MasterService/PublishLoads": lambda s, c: master.PublishLoadsRequest(
        loads=[
            master.PublishLoadsRequest.Loaded(
                table_id=s.table.table_id, run=1, commit_timestamp=s.timestamp()
            )
        ]
    ),
    f"{_V1}MasterService/AbandonLoad": lambda s, c: master.AbandonLoadRequest(
        table=f"loaded-{c.randrange(6)}", load="fuzzed", run=s.timestamp()
    ),
    f"{_V1}MasterService/LocateTablets": lambda s, c: master.LocateTabletsRequest(
        knows_indexes=True, table_id=s.table.table_id, range=cells.RowRange(start=SPLIT), limit=2
    ),
    f"{_V1}MasterService/ListTablets": lambda s, c: master.ListTabletsRequest(limit=5),
    f"{_V1}MasterService/DescribeCollection": lambda s, c: master.DescribeCollectionRequest(),
    f"{_V1}MasterService/SplitTablet": _split,
    f"{_V1}MasterService/MoveTablet": lambda s, c: master.MoveTabletRequest(
        tablet_id=c.choice(s.shaken.tablets).tablet_id
    ),
    f"{_V1}MasterService/ListServers": lambda s, c: master.ListServersRequest(),
    f"{_V1}MasterService/DrainServer": lambda s, c: master.DrainServerRequest(
        server=s.address("tabletserver", c), undo=True
    ),
    f"{_V1}TabletServerService/Mutate": _mutate,
    f"{_V1}TabletServerService/CommitTransactions": _commit_transactions,
    f"{_V1}TabletServerService/MutateTogether": _mutate_together,
    f"{_V1}TabletServerService/RollForward": _roll_forward,
    f"{_V1}TabletServerService/ResolveLocks": _resolve_locks,
    f"{_V1}TabletServerService/Read": _read,
    f"{_V1}TabletServerService/AwaitTurn": _await_turn,
    f"{_V1}TabletServerService/EndTurn": _end_turn,
    f"{_V1}TabletServerService/Scan": _scan,
    f"{_V1}TabletServerService/ScanCells": _scan_cells,
    f"{_V1}TabletServerService/ScanNotifications": _scan_notifications,
    f"{_V1}TabletServerService/WatchNotifications": _watch,
    f"{_V1}TabletServerService/ScanChanges": _scan_changes,
    f"{_V1}TabletServerService/LookForChanges": _look_for_changes,
    f"{_V1}TabletServerService/DescribeTablets": lambda s, c: tablets.DescribeTabletsRequest(),
    f"{_V1}TabletServerService/Report": lambda s, c: tablets.ReportRequest(
        newest_timestamp=s.timestamp()
    ),
    f"{_V1}TabletServerService/ProposeSplit": lambda s, c: tablets.ProposeSplitRequest(
        target=s.table.target(c)
    ),
    f"{_V1}TabletServerService/ProposeParts": lambda s, c: tablets.ProposePartsRequest(
        target=s.table.target(c), part_bytes=1 << 20
    ),
    f"{_V1}TabletServerService/Fence": _fence,
    f"{_V1}TabletServerService/Load": _load,
    f"{_V1}TabletServerService/OpenTablet": _open_tablet,
    f"{_V1}TabletServerService/CloseTablet": _close_tablet,
    f"{_V1}TabletServerService/RaiseSafePoints": _raise_safe_points,
    f"{_V1}GatewayService/Begin": lambda s, c: gateway.BeginRequest(),
    f"{_V1}GatewayService/Get": _get,
    f"{_V1}GatewayService/ScanTable": lambda s, c: gateway.ScanTableRequest(
        start_timestamp=s.timestamp(), table=s.table.name, row_limit=5
    ),
    f"{_V1}GatewayService/FindRows": lambda s, c: gateway.FindRowsRequest(
        start_timestamp=s.timestamp(), table=s.table.name, index=INDEX, prefix=b"", row_limit=5
    ),
    f"{_V1}GatewayService/FollowChanges": _follow_changes,
    f"{_V1}GatewayService/Commit": _commit,
    f"{_V1}GatewayService/Resolve": _resolve,
    f"{_V1}RowStoreService/CheckAndMutateRow": lambda s, c: (
        bigtable.BigtableCheckAndMutateRowRequest(table_name=_STORED, row_key=b"row")
    ),
    f"{_V1}RowStoreService/MutateRows": lambda s, c: bigtable.BigtableMutateRowsRequest(
        table_name=_STORED, entries=[bigtable.BigtableMutateRowsRequest.Entry(row_key=b"row")]
    ),
    f"{_V1}RowStoreService/ReadRows": lambda s, c: bigtable.BigtableReadRowsRequest(
        table_name=_STORED, rows=bigtable.BigtableRowSet(row_keys=[b"row"])
    ),
    f"{_V1}RowStoreService/SampleRowKeys": lambda s, c: bigtable.BigtableSampleRowKeysRequest(
        table_name=_STORED
    ),
    "/grpc.health.v1.Health/Check": lambda s, c: health_pb2.HealthCheckRequest(),
    "/grpc.health.v1.Health/List": lambda s, c: health_pb2.HealthListRequest(),
    "/grpc.health.v1.Health/Watch": lambda s, c: health_pb2.HealthCheckRequest(),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": lambda s, c: (
        reflection_pb2.ServerReflectionRequest(list_services="")
    ),
}


# Requests that a client has really sent: a session that uses all of the library, recorded.
#
# What is valid in the protocol of transactions cannot be made from descriptors: conditions, records
# and timestamps that fit each other.

_RECORDED_MAX = 30
_ROWS = 12

played = Table("played", key=codecs.text)
note = played.column("note", codecs.raw)


class Recorded:
    """The latest requests that clients have really sent, by method."""

    def __init__(self) -> None:
        self._by_path: defaultdict[str, deque[bytes]] = defaultdict(
            lambda: deque(maxlen=_RECORDED_MAX)
        )

    def note(self, path: str, request: Message) -> None:
        self._by_path[path].append(request.SerializeToString())

    def of(self, path: str, chance: Random) -> bytes | None:
        found = self._by_path.get(path)
        return chance.choice(found) if found else None


class RecordingNetwork(GrpcNetwork):
    """Notes every request before it is sent."""

    recorded: Recorded

    def unary(
        self, address: str, method: UnaryMethod[RequestT, ResponseT], *, server: str = ""
    ) -> UnaryCall[RequestT, ResponseT]:
        call = super().unary(address, method, server=server)

        async def noted(request: RequestT, timeout: float) -> ResponseT:
            self.recorded.note(method.path, request)
            return await call(request, timeout)

        return noted

    def stream(
        self, address: str, method: StreamMethod[RequestT, ResponseT], *, server: str = ""
    ) -> StreamCall[RequestT, ResponseT]:
        call = super().stream(address, method, server=server)

        async def noted(request: RequestT, timeout: float) -> AsyncGenerator[ResponseT, None]:
            self.recorded.note(method.path, request)
            async for answer in call(request, timeout):
                yield answer

        return noted


async def connected(address: str, network: RecordingNetwork, description: str) -> aio.Database:
    """A database whose calls are recorded."""
    world = World(clock=MachineClock(), network=network, random=machine_random())
    return await connect_to(world, [address], Limits(), RetryPolicy(), description=description)


async def play(database: aio.Database) -> None:
    """Uses everything that a program may use, and ends."""
    await database.create_table(orders, exist_ok=True)
    await database.create_table(played, ["m"], exist_ok=True, retention=timedelta(hours=1))
    await database.register_observers(observers)
    await database.set_many((f"{number:02}", {placed: number}) for number in range(_ROWS))
    await database.run(_transact)
    async with database.snapshot() as snapshot:
        _ = [row.key async for row in snapshot.scan(played)]
        _ = [row.key async for row in snapshot.scan(played, reverse=True)]
    async with database.pin():
        await database.run(_transact)
    await database.wait_for_observers()
    load = BulkLoad(database, LoadPlan("played", "a bulk load", b"zz", b"", notify=False))
    timestamps = await load.begin()
    await load.load([(b"zz1", b"note", b"loaded")], timestamps)
    await load.finish(timestamps)
    engine = database.internal.engine
    await engine.catalog.tables(engine.now() + 5.0)


async def _transact(tx: aio.Transaction) -> None:
    """Reads, puts, deletes and locks, in both tablets."""
    chance = Random("what is played")
    for number in range(4):
        await tx.set(f"{chance.choice('az')}-{number}", note, bytes(10**number))
    await tx.get("a-0", note, default=b"")
    await tx.delete("a-9", note)
    await tx.lock("b-1", note)
