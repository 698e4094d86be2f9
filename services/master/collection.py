"""Collection of old versions: in rounds, in the only order that loses nothing.

1. Decide how far: as far as each table's retention allows, but nothing that a session or pin needs.
2. Write the decision down, and look at the sessions again. A pin that was set meanwhile wins: the
   tables whose history it would lose are left alone.
3. Only now is anything collected: by tablets (tablet_collection.py), or row by row
   (row_term.py).

A round that fails at any step has deleted nothing that is needed, and the next one starts over.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import structlog

from percolator.errors import NotReady, PercolatorError
from percolator.protocol.environment import Timestamps
from percolator.services.chassis.coordinator import Leadership, Trouble
from percolator.services.master.cluster_map import Table
from percolator.services.master.map_store import StoredMap
from percolator.services.master.registry import Registry
from percolator.timestamps import SEQUENCE_BITS, Timestamp, seconds_between
from percolator.v1 import cluster_pb2, master_records_pb2
from percolator.v1 import lockservice_pb2 as pb
from percolator.v1.cluster_pb2 import ServiceKind
from percolator.v1.lockservice_pb2 import HistoryLimits
from percolator.v1.oracle_pb2 import AdvanceEpochRequest
from percolator.wire import methods
from percolator.wire.liveness import Liveness
from percolator.wire.methods import ADVANCE_EPOCH
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import Network, World


@dataclass(frozen=True)
class TableCollected:
    """The state of the collection of one table."""

    below: int = 0
    """Everything is collected below it."""
    history_bytes: int = 0
    """The size of superseded versions that are kept; 0 where nobody counts it."""
    cells: int = 0
    bytes: int = 0


class Collecting(Protocol):
    """Gives up history, where it is."""

    @property
    def locks_resolved(self) -> int:
        """How many older locks were resolved so far."""

    async def collect(self, ordered: ClusterSafePoints) -> None:
        """Collects all tables. `ordered` is written down, and no session needs what is below it.
        Raises what prevents it; by then, nothing that is needed is gone."""

    def collected(self, table_id: int) -> TableCollected: ...

    async def close(self) -> None: ...


class NoOwners:
    """No sessions: a master owns no locks, and asks no owner of an old lock whether it is alive."""

    session_id = None

    async def liveness(self, session_ids: Sequence[bytes]) -> list[Liveness]:
        return [Liveness.UNDECIDED] * len(session_ids)


_CALL_SECONDS = 5.0


@dataclass(frozen=True)
class HistoryNeeds:
    """The history that all sessions together need."""

    oldest: int = 0
    """0 if no session needs history."""
    session_id: bytes = b""
    description: str = ""
    """The description of the session that needs the oldest history."""
    ttl_seconds_max: float = 0.0
    """The longest that a session may live without a renewal."""


async def history_needs(
    network: Network, lock_services: Sequence[str], limits: pb.HistoryLimits | None = None
) -> HistoryNeeds:
    """Asks all lock services, one after another. Pins beyond the limits are ended, and sessions
    beyond them get no history.

    Raises `NotReady` if there is none, or if one has restarted so recently that sessions may still
    report to it. Any other error is raised too: nothing may be collected unless all have answered.
    """
    if not lock_services:
        raise NotReady("no lock service is known that could say which history is needed")
    needs, ttl_milliseconds_max = HistoryNeeds(), 0
    for address in lock_services:
        list_sessions = network.unary(address, methods.LIST_SESSIONS)
        page_token: bytes | None = b""
        while page_token is not None:
            request = pb.ListSessionsRequest(page_token=page_token, limits=limits)
            page = await list_sessions(request, _CALL_SECONDS)
            if page.settling:
                raise NotReady(
                    f"the lock service at {address} restarted; sessions may still report"
                )
            ttl_milliseconds_max = max(ttl_milliseconds_max, page.ttl_milliseconds_max)
            for session in page.sessions:
                if session.too_old:
                    continue
                oldest = session.info.oldest_start_timestamp
                if oldest and (not needs.oldest or oldest < needs.oldest):
                    needs = HistoryNeeds(oldest, session.session_id, session.info.description)
            page_token = page.next_page_token or None
    return replace(needs, ttl_seconds_max=ttl_milliseconds_max / 1000)


KEY = "safe-points"


@dataclass(frozen=True)
class ClusterSafePoints:
    """The safe points of all tables: how far history may have been collected.

    They are durable before any tablet is told.

    Safe points are never lowered: a tablet that has heard of one refuses everything below it
    forever. So a pin, which holds history back, reads the safe points *after* its session is known
    to the lock service, and the leader looks at the sessions again after it has written the safe
    points. Otherwise each could miss the other, and history that a pin relies on would be
    collected.
    """

    reads: Mapping[int, int] = field(default_factory=dict)
    """By table: no snapshot below it is answered."""
    transactions: int = 0
    """No transaction below it prewrites or commits, in any table."""

    def raised(self, reads: Mapping[int, int]) -> ClusterSafePoints:
        """Raised to `reads` where those are higher. Tables that are not in `reads` are dropped."""
        joined = {table: max(at, self.reads.get(table, 0)) for table, at in reads.items()}
        return ClusterSafePoints(joined, max([self.transactions, *joined.values()]))

    def allowed_by(self, oldest: int) -> ClusterSafePoints:
        """Only those that keep history from `oldest` on; all of them if `oldest` is 0.

        Transactions that began at `oldest` can continue in all tables. Tablets that were told of a
        higher safe point before keep it.
        """
        if not oldest:
            return self
        reads = {table: at for table, at in self.reads.items() if at <= oldest}
        return ClusterSafePoints(reads, max(reads.values(), default=0))


async def load(leadership: Leadership) -> ClusterSafePoints:
    """The safe points that the previous leader left."""
    record = master_records_pb2.SafePointsRecord.FromString(await leadership.get(KEY) or b"")
    return ClusterSafePoints(
        {one.table_id: one.reads for one in record.tables}, record.transactions
    )


async def store(leadership: Leadership, safe_points: ClusterSafePoints) -> None:
    """Returns when they are durable, so that a successor finds them."""
    record = master_records_pb2.SafePointsRecord(
        tables=[
            master_records_pb2.SafePointsRecord.OfTable(table_id=table_id, reads=reads)
            for table_id, reads in sorted(safe_points.reads.items())
        ],
        transactions=safe_points.transactions,
    )
    await leadership.put(KEY, record.SerializeToString(deterministic=True))


_ASK_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_AGAIN_SECONDS = 0.2
_SECONDS_MIN = 0.001

_log = structlog.get_logger("percolator.master")


class OracleTime:
    """The oracle's time, as the leading master knows it and passes it on to the tablet servers.

    `run` has to run while this master leads.

    Otherwise a tablet server that has just started and cannot reach the oracle would know no
    timestamp, and would have to refuse all of them.
    """

    def __init__(self, world: World, registry: Registry) -> None:
        self._world = world
        self._registry = registry
        self._addresses: list[str] = []
        self._source: TimestampSource | None = None
        self._trouble = Trouble(
            _log, "the oracle does not answer this master", "the oracle answers again"
        )
        self.newest = 0
        """A timestamp about a second old at most; 0 before the oracle has answered."""
        self._heard_at = 0.0

    @property
    def lead_milliseconds(self) -> int | None:
        """How far timestamps are ahead of this master's wall clock; None before they are known."""
        if not self.newest:
            return None
        clock = self._world.clock
        elapsed = (clock.monotonic_seconds() - self._heard_at) * 1000
        now = Timestamp(self.newest).physical_milliseconds + elapsed
        return round(now - clock.wall_milliseconds())

    def source(self) -> TimestampSource:
        """Timestamps for this master. Raises `NotReady` while no oracle is known."""
        self._addresses[:] = [
            one.address
            for one in self._registry.servers()
            if one.kind == ServiceKind.SERVICE_KIND_ORACLE
        ] or self._addresses
        if not self._addresses:
            raise NotReady("no oracle is known")
        if self._source is None:
            self._source = TimestampSource(self._world, self._addresses)
        return self._source

    async def raise_epoch(self, deadline: float) -> None:
        """Returns when the catalogue's epoch is higher than any that a client can have seen before
        this call. Raises `NotReady` if no oracle says so in time.

        The epoch is asked for only now. So whoever has seen a higher one, be it because of another
        call, has seen it after what this call's caller has made durable.
        """
        clock, problem = self._world.clock, "none has answered"
        source = self.source()
        await source.get(timeout_seconds=max(deadline - clock.monotonic_seconds(), _SECONDS_MIN))
        request = AdvanceEpochRequest(catalogue_epoch=source.catalogue_epoch + 1)
        while clock.monotonic_seconds() < deadline:
            for address in list(self._addresses):
                advance = self._world.network.unary(address, ADVANCE_EPOCH)
                left = max(deadline - clock.monotonic_seconds(), _SECONDS_MIN)
                try:
                    await advance(request, min(left, _ANSWER_SECONDS))
                except PercolatorError as error:  # a standby, or one that is gone
                    problem = str(error)
                else:
                    return
            await clock.sleep(_AGAIN_SECONDS)
            self.source()  # others may have been reported meanwhile
        raise NotReady(f"the oracle was not told of the change: {problem}")

    async def run(self) -> None:
        """Runs until cancelled."""
        try:
            while True:
                try:
                    await self._ask()
                except PercolatorError as error:
                    self._trouble.lasts(error)
                else:
                    self._trouble.is_over()
                await self._world.clock.sleep(_ASK_SECONDS)
        finally:
            if self._source is not None:
                await self._source.close()

    async def _ask(self) -> None:
        self.newest = await self.source().get(timeout_seconds=_ANSWER_SECONDS)
        self._heard_at = self._world.clock.monotonic_seconds()


_TIMESTAMP_SECONDS = 5.0


@dataclass(frozen=True)
class CollectionTimes:
    """How much history is kept."""

    round_seconds: float = 60.0
    retention_seconds: float = 3600.0
    """For tables without a value of their own."""
    retention_min_seconds: float = 60.0
    """No table may keep less. Longer than any transaction may take."""
    client_held_seconds_max: float = 3 * 86_400.0
    """How much older than the longest retention the history is that a session or pin may hold
    back. Also for those of servers, which act for clients."""
    admin_held_seconds_max: float = 0.0
    """As `client_held_seconds_max`, for administrators; 0 means no limit."""


class Collection:
    """`run` has to run while this master leads."""

    def __init__(
        self,
        world: World,
        store: StoredMap[Any],
        registry: Registry,
        oracle_time: OracleTime,
        times: CollectionTimes,
        collecting: Callable[[Timestamps], Collecting],
    ) -> None:
        """`collecting` makes what collects: it resolves old locks with these timestamps."""
        self._world = world
        self._store = store
        self._registry = registry
        self.times = times
        self._oracle_time = oracle_time
        self._lock_services: list[str] = []
        self._missed_since: dict[str, float] = {}
        """Lock services that have gone, by address, and when that was noticed."""
        self._began_at = world.clock.monotonic_seconds()
        self._make_collecting = collecting
        self._collecting: Collecting | None = None
        self._safe_points: ClusterSafePoints | None = None
        self._wanted: dict[int, int] = {}
        """The tables' safe points if no session or pin needed history."""
        self.now = 0
        """The oracle's time when the last round began."""
        self.needs = HistoryNeeds()
        self.error: PercolatorError | None = None
        """Why the last round failed; None if it succeeded."""
        self.finished_at: float | None = None
        self.rounds = 0
        self.failures = 0

    @property
    def safe_points(self) -> ClusterSafePoints:
        """As they are written down. Raises `NotReady` before they have been read: a caller that was
        told that there are none would believe that all history is still there."""
        if self._safe_points is None:
            raise NotReady(
                "this master has just begun to lead: it is still reading the safe points"
            )
        return self._safe_points

    def known_safe_point(self, table_id: int) -> int:
        """0 if none of the table's history has been given up, or if it is not known yet."""
        return 0 if self._safe_points is None else self._safe_points.reads.get(table_id, 0)

    @property
    def held_seconds(self) -> float:
        """By how much the history that a session or pin needs is older than what any table would
        keep without it."""
        newest = max(self._wanted.values(), default=0)
        return seconds_between(self.needs.oldest, newest) if 0 < self.needs.oldest < newest else 0.0

    @property
    def held(self) -> bool:
        """True if a session or pin holds back history that a table's retention would give up."""
        return self.held_seconds > 0

    @property
    def old_locks_resolved(self) -> int:
        return 0 if self._collecting is None else self._collecting.locks_resolved

    def collected(self, table_id: int) -> TableCollected:
        """The state of the collection of a table."""
        found = self._collecting
        return TableCollected() if found is None else found.collected(table_id)

    async def run(self) -> None:
        """Runs until cancelled."""
        self._safe_points = await load(self._store.leadership)
        try:
            while True:
                await self._world.clock.sleep(self.times.round_seconds)
                try:
                    await self.collect()
                except PercolatorError as error:
                    self.error = error
                    self.failures += 1
                    _log.info("history not collected", error=str(error))
        finally:
            await self._close()

    async def collect(self) -> None:
        """One round."""
        self._learn_lock_services()
        timestamps = self._oracle_time.source()
        self.now = await timestamps.get(timeout_seconds=_TIMESTAMP_SECONDS)
        decided = await self._decide()
        await store(self._store.leadership, decided)
        self._safe_points = decided
        self.needs = needs = await self._needs()
        ordered = decided.allowed_by(needs.oldest)
        if decided.reads and not ordered.reads:
            who = needs.description or "a session"
            raise NotReady(f"{who} needs history since {needs.oldest}, in all tables")
        if self._collecting is None:
            self._collecting = self._make_collecting(timestamps)
        await self._collecting.collect(ordered)
        self.error = None
        self.rounds += 1
        self.finished_at = self._world.clock.monotonic_seconds()

    async def _decide(self) -> ClusterSafePoints:
        """Never below an earlier decision, even one that no tablet heard of."""
        self._wanted = {
            table.table_id: self._ago(self._retention_seconds(table))
            for table in self._store.current.tables.values()
        }
        self.needs = needs = await self._needs()
        self._require_all_reported(needs.ttl_seconds_max)
        oldest = needs.oldest or self.now
        return self.safe_points.raised({one: min(at, oldest) for one, at in self._wanted.items()})

    async def _needs(self) -> HistoryNeeds:
        times = self.times
        tables = self._store.current.tables.values()
        longest = max(map(self._retention_seconds, tables), default=times.retention_seconds)
        limits = HistoryLimits(clients_since=self._ago(longest + times.client_held_seconds_max))
        if times.admin_held_seconds_max:
            limits.admins_since = self._ago(longest + times.admin_held_seconds_max)
        return await history_needs(self._world.network, self._lock_services, limits)

    def _retention_seconds(self, table: Table) -> float:
        return table.retention_milliseconds / 1000 or self.times.retention_seconds

    def _ago(self, seconds: float) -> int:
        """The timestamp of so long before this round."""
        return max(0, self.now - (int(seconds * 1000) << SEQUENCE_BITS))

    # ------------------------------------------------------------------------- servers

    def _learn_lock_services(self) -> None:
        present = [
            one.address
            for one in self._registry.servers()
            if one.kind == cluster_pb2.SERVICE_KIND_LOCK_SERVICE
        ]
        now = self._world.clock.monotonic_seconds()
        for address in self._lock_services:
            if address not in present:
                self._missed_since[address] = now
        for address in present:
            self._missed_since.pop(address, None)
        self._lock_services[:] = present

    def _require_all_reported(self, ttl_seconds_max: float) -> None:
        """Living sessions of a lost lock service report to another one within the longest time to
        live. A leader that has just begun does not know which lock services were lost before."""
        now = self._world.clock.monotonic_seconds()
        for address, since in list(self._missed_since.items()):
            if now - since < ttl_seconds_max:
                raise NotReady(
                    f"the lock service at {address} is gone: its sessions may still report to "
                    "another one"
                )
            del self._missed_since[address]
        if now - self._began_at < ttl_seconds_max:
            raise NotReady(
                "this master has just begun to lead: sessions of a lock service that was lost "
                "before may still report to another one"
            )

    async def _close(self) -> None:
        if self._collecting is not None:
            await self._collecting.close()
