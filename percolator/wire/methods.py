"""Every remote procedure, by service, with its types. A test compares them with the protos."""

from __future__ import annotations

import functools
import re

from percolator.v1 import bigtable_pb2 as bigtable
from percolator.v1 import cluster_pb2 as cluster
from percolator.v1 import frames_pb2 as frames
from percolator.v1 import gateway_pb2 as gateway
from percolator.v1 import lockservice_pb2 as locks
from percolator.v1 import master_pb2 as master
from percolator.v1 import oracle_pb2 as oracle
from percolator.v1 import tabletserver_pb2 as tablets
from percolator.world import StreamMethod, UnaryMethod

_WORD_START = re.compile(r"(?<!^)(?=[A-Z])")


@functools.cache
def method_name(rpc: str) -> str:
    """The name of the handler method that answers an RPC: "GetTimestamps" → "get_timestamps"."""
    return _WORD_START.sub("_", rpc).lower()


# Oracle
GET_TIMESTAMPS = UnaryMethod(
    "/percolator.v1.OracleService/GetTimestamps",
    oracle.GetTimestampsRequest,
    oracle.GetTimestampsResponse,
)

CHECK_TIMESTAMPS = UnaryMethod(
    "/percolator.v1.OracleService/CheckTimestamps",
    oracle.CheckTimestampsRequest,
    oracle.CheckTimestampsResponse,
)
ADVANCE_EPOCH = UnaryMethod(
    "/percolator.v1.OracleService/AdvanceEpoch",
    oracle.AdvanceEpochRequest,
    oracle.AdvanceEpochResponse,
)

# Lock service
OPEN_SESSION = UnaryMethod(
    "/percolator.v1.LockService/OpenSession", locks.OpenSessionRequest, locks.OpenSessionResponse
)
RENEW_SESSION = UnaryMethod(
    "/percolator.v1.LockService/RenewSession",
    locks.RenewSessionRequest,
    locks.RenewSessionResponse,
)
END_SESSION = UnaryMethod(
    "/percolator.v1.LockService/EndSession", locks.EndSessionRequest, locks.EndSessionResponse
)
CHECK_SESSIONS = UnaryMethod(
    "/percolator.v1.LockService/CheckSessions",
    locks.CheckSessionsRequest,
    locks.CheckSessionsResponse,
)
LIST_SESSIONS = UnaryMethod(
    "/percolator.v1.LockService/ListSessions",
    locks.ListSessionsRequest,
    locks.ListSessionsResponse,
)
TRY_LOCK = UnaryMethod(
    "/percolator.v1.LockService/TryLock", locks.TryLockRequest, locks.TryLockResponse
)
RENEW_LOCKS = UnaryMethod(
    "/percolator.v1.LockService/RenewLocks", locks.RenewLocksRequest, locks.RenewLocksResponse
)
UNLOCK = UnaryMethod("/percolator.v1.LockService/Unlock", locks.UnlockRequest, locks.UnlockResponse)

# Cluster
DESCRIBE = UnaryMethod(
    "/percolator.v1.ClusterService/Describe", cluster.DescribeRequest, cluster.DescribeResponse
)
REGISTER = UnaryMethod(
    "/percolator.v1.ClusterService/Register", cluster.RegisterRequest, cluster.RegisterResponse
)

# Oracles and tablet servers
OFFER_FRAMES = UnaryMethod(
    "/percolator.v1.FrameService/OfferFrames",
    frames.OfferFramesRequest,
    frames.OfferFramesResponse,
)

# Tablet server
MUTATE = UnaryMethod(
    "/percolator.v1.TabletServerService/Mutate", tablets.MutateRequest, tablets.MutateResponse
)
COMMIT_TRANSACTIONS = UnaryMethod(
    "/percolator.v1.TabletServerService/CommitTransactions",
    tablets.CommitTransactionsRequest,
    tablets.CommitTransactionsResponse,
)
MUTATE_TOGETHER = UnaryMethod(
    "/percolator.v1.TabletServerService/MutateTogether",
    tablets.MutateTogetherRequest,
    tablets.MutateTogetherResponse,
)
ROLL_FORWARD = UnaryMethod(
    "/percolator.v1.TabletServerService/RollForward",
    tablets.RollForwardRequest,
    tablets.RollForwardResponse,
)
RESOLVE_LOCKS = UnaryMethod(
    "/percolator.v1.TabletServerService/ResolveLocks",
    tablets.ResolveLocksRequest,
    tablets.ResolveLocksResponse,
)
READ = UnaryMethod(
    "/percolator.v1.TabletServerService/Read", tablets.ReadRequest, tablets.ReadResponse
)
AWAIT_TURN = UnaryMethod(
    "/percolator.v1.TabletServerService/AwaitTurn",
    tablets.AwaitTurnRequest,
    tablets.AwaitTurnResponse,
)
END_TURN = UnaryMethod(
    "/percolator.v1.TabletServerService/EndTurn",
    tablets.EndTurnRequest,
    tablets.EndTurnResponse,
)
SHORT_SCAN_ROWS_MAX = 512


SCAN = StreamMethod(
    "/percolator.v1.TabletServerService/Scan",
    tablets.ScanRequest,
    tablets.ScanResponse,
    # Few rows may match, and many pages be empty before them.
    is_short=lambda scan: 0 < scan.row_limit <= SHORT_SCAN_ROWS_MAX and not scan.HasField("filter"),
)
SCAN_CELLS = StreamMethod(
    "/percolator.v1.TabletServerService/ScanCells",
    tablets.ScanCellsRequest,
    tablets.ScanCellsResponse,
)
SCAN_NOTIFICATIONS = UnaryMethod(
    "/percolator.v1.TabletServerService/ScanNotifications",
    tablets.ScanNotificationsRequest,
    tablets.ScanNotificationsResponse,
)
WATCH_NOTIFICATIONS = StreamMethod(
    "/percolator.v1.TabletServerService/WatchNotifications",
    tablets.WatchNotificationsRequest,
    tablets.WatchNotificationsResponse,
)
SCAN_CHANGES = StreamMethod(
    "/percolator.v1.TabletServerService/ScanChanges",
    tablets.ScanChangesRequest,
    tablets.ScanChangesResponse,
)
LOOK_FOR_CHANGES = UnaryMethod(
    "/percolator.v1.TabletServerService/LookForChanges",
    tablets.LookForChangesRequest,
    tablets.LookForChangesResponse,
)
DESCRIBE_TABLETS = UnaryMethod(
    "/percolator.v1.TabletServerService/DescribeTablets",
    tablets.DescribeTabletsRequest,
    tablets.DescribeTabletsResponse,
)
REPORT = UnaryMethod(
    "/percolator.v1.TabletServerService/Report", tablets.ReportRequest, tablets.ReportResponse
)
PROPOSE_SPLIT = UnaryMethod(
    "/percolator.v1.TabletServerService/ProposeSplit",
    tablets.ProposeSplitRequest,
    tablets.ProposeSplitResponse,
)
PROPOSE_PARTS = UnaryMethod(
    "/percolator.v1.TabletServerService/ProposeParts",
    tablets.ProposePartsRequest,
    tablets.ProposePartsResponse,
)
FENCE = UnaryMethod(
    "/percolator.v1.TabletServerService/Fence", tablets.FenceRequest, tablets.FenceResponse
)
LOAD = UnaryMethod(
    "/percolator.v1.TabletServerService/Load", tablets.LoadRequest, tablets.LoadResponse
)
OPEN_TABLET = UnaryMethod(
    "/percolator.v1.TabletServerService/OpenTablet",
    tablets.OpenTabletRequest,
    tablets.OpenTabletResponse,
)
CLOSE_TABLET = UnaryMethod(
    "/percolator.v1.TabletServerService/CloseTablet",
    tablets.CloseTabletRequest,
    tablets.CloseTabletResponse,
)
RAISE_SAFE_POINTS = UnaryMethod(
    "/percolator.v1.TabletServerService/RaiseSafePoints",
    tablets.RaiseSafePointsRequest,
    tablets.RaiseSafePointsResponse,
)

# Master
CREATE_TABLE = UnaryMethod(
    "/percolator.v1.MasterService/CreateTable",
    master.CreateTableRequest,
    master.CreateTableResponse,
)
DELETE_TABLE = UnaryMethod(
    "/percolator.v1.MasterService/DeleteTable",
    master.DeleteTableRequest,
    master.DeleteTableResponse,
)
LIST_TABLES = UnaryMethod(
    "/percolator.v1.MasterService/ListTables", master.ListTablesRequest, master.ListTablesResponse
)
DESCRIBE_TABLE = UnaryMethod(
    "/percolator.v1.MasterService/DescribeTable",
    master.DescribeTableRequest,
    master.DescribeTableResponse,
)
CHANGE_OBSERVERS = UnaryMethod(
    "/percolator.v1.MasterService/ChangeObservers",
    master.ChangeObserversRequest,
    master.ChangeObserversResponse,
)
REPORT_BACKFILL = UnaryMethod(
    "/percolator.v1.MasterService/ReportBackfill",
    master.ReportBackfillRequest,
    master.ReportBackfillResponse,
)
SET_CHANGE_FEED = UnaryMethod(
    "/percolator.v1.MasterService/SetChangeFeed",
    master.SetChangeFeedRequest,
    master.SetChangeFeedResponse,
)
SET_TTLS = UnaryMethod(
    "/percolator.v1.MasterService/SetTtls",
    master.SetTtlsRequest,
    master.SetTtlsResponse,
)
CHANGE_INDEXES = UnaryMethod(
    "/percolator.v1.MasterService/ChangeIndexes",
    master.ChangeIndexesRequest,
    master.ChangeIndexesResponse,
)
DECLARE_CODECS = UnaryMethod(
    "/percolator.v1.MasterService/DeclareCodecs",
    master.DeclareCodecsRequest,
    master.DeclareCodecsResponse,
)
BEGIN_LOAD = UnaryMethod(
    "/percolator.v1.MasterService/BeginLoad",
    master.BeginLoadRequest,
    master.BeginLoadResponse,
)
PUBLISH_LOADS = UnaryMethod(
    "/percolator.v1.MasterService/PublishLoads",
    master.PublishLoadsRequest,
    master.PublishLoadsResponse,
)
ABANDON_LOAD = UnaryMethod(
    "/percolator.v1.MasterService/AbandonLoad",
    master.AbandonLoadRequest,
    master.AbandonLoadResponse,
)
CHANGE_CODECS = UnaryMethod(
    "/percolator.v1.MasterService/ChangeCodecs",
    master.ChangeCodecsRequest,
    master.ChangeCodecsResponse,
)
LOCATE_TABLETS = UnaryMethod(
    "/percolator.v1.MasterService/LocateTablets",
    master.LocateTabletsRequest,
    master.LocateTabletsResponse,
)
LIST_TABLETS = UnaryMethod(
    "/percolator.v1.MasterService/ListTablets",
    master.ListTabletsRequest,
    master.ListTabletsResponse,
)
SPLIT_TABLET = UnaryMethod(
    "/percolator.v1.MasterService/SplitTablet",
    master.SplitTabletRequest,
    master.SplitTabletResponse,
)
MOVE_TABLET = UnaryMethod(
    "/percolator.v1.MasterService/MoveTablet", master.MoveTabletRequest, master.MoveTabletResponse
)
LIST_SERVERS = UnaryMethod(
    "/percolator.v1.MasterService/ListServers",
    master.ListServersRequest,
    master.ListServersResponse,
)
DRAIN_SERVER = UnaryMethod(
    "/percolator.v1.MasterService/DrainServer",
    master.DrainServerRequest,
    master.DrainServerResponse,
)
DESCRIBE_COLLECTION = UnaryMethod(
    "/percolator.v1.MasterService/DescribeCollection",
    master.DescribeCollectionRequest,
    master.DescribeCollectionResponse,
)

# Gateway
BEGIN = UnaryMethod(
    "/percolator.v1.GatewayService/Begin", gateway.BeginRequest, gateway.BeginResponse
)
GET = UnaryMethod("/percolator.v1.GatewayService/Get", gateway.GetRequest, gateway.GetResponse)
SCAN_TABLE = StreamMethod(
    "/percolator.v1.GatewayService/ScanTable", gateway.ScanTableRequest, gateway.ScanTableResponse
)
FIND_ROWS = StreamMethod(
    "/percolator.v1.GatewayService/FindRows", gateway.FindRowsRequest, gateway.FindRowsResponse
)
FOLLOW_CHANGES = StreamMethod(
    "/percolator.v1.GatewayService/FollowChanges",
    gateway.FollowChangesRequest,
    gateway.FollowChangesResponse,
)
COMMIT = UnaryMethod(
    "/percolator.v1.GatewayService/Commit", gateway.CommitRequest, gateway.CommitResponse
)
RESOLVE = UnaryMethod(
    "/percolator.v1.GatewayService/Resolve", gateway.ResolveRequest, gateway.ResolveResponse
)

# Gateway, where a row store has the cells
CHECK_AND_MUTATE_ROW = UnaryMethod(
    "/percolator.v1.RowStoreService/CheckAndMutateRow",
    bigtable.BigtableCheckAndMutateRowRequest,
    bigtable.BigtableCheckAndMutateRowResponse,
)
MUTATE_ROWS = StreamMethod(
    "/percolator.v1.RowStoreService/MutateRows",
    bigtable.BigtableMutateRowsRequest,
    bigtable.BigtableMutateRowsResponse,
)
READ_ROWS = StreamMethod(
    "/percolator.v1.RowStoreService/ReadRows",
    bigtable.BigtableReadRowsRequest,
    bigtable.BigtableReadRowsResponse,
)
SAMPLE_ROW_KEYS = StreamMethod(
    "/percolator.v1.RowStoreService/SampleRowKeys",
    bigtable.BigtableSampleRowKeysRequest,
    bigtable.BigtableSampleRowKeysResponse,
)

READING = frozenset(
    method.path
    for method in (
        GET_TIMESTAMPS,
        CHECK_SESSIONS,
        LIST_SESSIONS,
        DESCRIBE,
        OFFER_FRAMES,
        READ,
        AWAIT_TURN,
        END_TURN,
        SCAN,
        SCAN_CELLS,
        SCAN_NOTIFICATIONS,
        WATCH_NOTIFICATIONS,
        DESCRIBE_TABLETS,
        PROPOSE_SPLIT,
        PROPOSE_PARTS,
        LIST_TABLES,
        DESCRIBE_TABLE,
        LOCATE_TABLETS,
        LIST_TABLETS,
        DESCRIBE_COLLECTION,
        LIST_SERVERS,
        BEGIN,
        GET,
        SCAN_TABLE,
        FIND_ROWS,
        READ_ROWS,
        SAMPLE_ROW_KEYS,
    )
)
"""The paths of procedures that change nothing: with its answer lost, it does not matter whether one
was executed."""
