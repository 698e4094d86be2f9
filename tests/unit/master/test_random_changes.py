"""Changes of tables at random, on masters that die and take over, and on disks that fail.

Whatever happens: no id is given twice, no version of a schema says two things, nothing vanishes
that was acknowledged or that any master has told of, and a request that is repeated is carried out
once. Mistakes against each of these rules are planted, and have to be found.
"""

from __future__ import annotations

import asyncio
import errno
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import Any, NamedTuple

import pytest

from percolator.codecs.indexes import IndexDefinition, indexes_of
from percolator.errors import InvalidArgument, PercolatorError, Retry, SchemaError, StoreUnusable
from percolator.services.master import cluster_map, map_store
from percolator.services.master.cluster_map import Catalogue, ClusterMap
from percolator.services.master.map_store import KEY, StoredMap
from percolator.services.master.master import ROLE
from percolator.services.master.table_changes import Creation, TableChanges
from percolator.v1 import master_pb2 as pb
from percolator.v1.tabletserver_pb2 import ColumnTtl
from percolator.wire import methods
from percolator.world import RequestT, ResponseT, UnaryMethod
from tests.unit.master.cluster_world import MasterProcess, ModelCluster, cluster

# Clients that change tables at random, while masters die and their disks fail, and a model of it.
#
# Each client has its own names, so it knows what each answer has to be. What any master tells,
# leader or standby, is compared with all that was told before.

CLIENTS = 3
NAMES_EACH = 2
CHANGES_EACH = 25
_MASTERS = 3
_PATIENCE_SECONDS = (0.05, 0.5, 4.0)
_GIVES_UP = 0.1
_ANSWER_LOST = 0.2
_REST_SECONDS = 12.0
_SYSTEM_CALLS = ("create", "append", "fsync", "rename", "fsync_directory", "fsync_directory")

STORED_ALL_THE_SAME = "a write of the map failed, and was stored"
NOT_STORED = "a write of the map failed, and was not stored"
TAKEN_OVER = "a master took over"
TOLD_BY_STANDBY = "a standby told of a table"
UNACKNOWLEDGED_TOLD = "a standby told of what was not acknowledged"
REPEATED_ELSEWHERE = "a request was repeated at another master"
OLD_DELETION_REPEATED = "a deletion was repeated when its name was in use again"
POWER_CUT = "the power failed"
EXPECTED = (
    STORED_ALL_THE_SAME,
    NOT_STORED,
    TAKEN_OVER,
    TOLD_BY_STANDBY,
    UNACKNOWLEDGED_TOLD,
    REPEATED_ELSEWHERE,
    OLD_DELETION_REPEATED,
)


class _Identity(NamedTuple):
    """The fields that no two tables have in common."""

    name: str
    created_at: int
    index_of: int


class Schema(NamedTuple):
    """The content of one version of a table's schema."""

    ttls: tuple[tuple[bytes, int], ...]
    change_feed: bool
    indexes: tuple[IndexDefinition, ...]

    @classmethod
    def of(cls, table: pb.Table) -> Schema:
        ttls = ((one.column, one.ttl_milliseconds) for one in table.options.ttls)
        return cls(tuple(ttls), table.options.change_feed, indexes_of(table.indexes))


class Told:
    """Everything that masters have told anybody."""

    def __init__(self) -> None:
        self.tables: dict[int, _Identity] = {}
        self.schemas: dict[tuple[int, int], Schema] = {}
        """The content of each version of a table's schema."""
        self.newest: dict[int, int] = {}

    def note(self, table: pb.Table) -> None:
        """Fails if it contradicts what was told before."""
        key, version = table.table_id, table.schema_version
        identity = _Identity(table.name, table.created_at, table.index_of)
        assert self.tables.setdefault(key, identity) == identity, (
            f"id {key} was given to {self.tables[key]} and to {identity}"
        )
        said = Schema.of(table)
        assert self.schemas.setdefault((key, version), said) == said, (
            f"version {version} of {identity} says {self.schemas[key, version]} and {said}"
        )
        self.newest[key] = max(version, self.newest.get(key, 0))


class Name:
    """A name of a table, and what its client knows of it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_certain = True
        """True if the client has heard what became of its last request."""
        self.table: pb.Table | None = None
        """As it was acknowledged; None without a table, or if that is not certain."""
        self.created_by = b""
        self.deleted_by = b""
        """The id of the last deletion that was acknowledged."""


class RandomChanges:
    """One run: the clients, the faults, and what was told."""

    def __init__(
        self, world: ModelCluster, seed: int, occurred: Counter[str], *, power: bool
    ) -> None:
        self.world = world
        self.chance = Random(f"changes {seed}")
        self.faults = Random(f"faults {seed}")
        self.occurred = occurred
        self.told = Told()
        self.names = [
            [Name(f"t-{client}-{name}") for name in range(NAMES_EACH)] for client in range(CLIENTS)
        ]
        self._power = power
        self._asked_to_delete: set[int] = set()
        self._requests = 0

    async def run(self) -> None:
        """Raises `AssertionError` for a promise that was broken."""
        for _ in range(_MASTERS - len(self.world.masters)):
            self.world.start_master()
        disrupting = asyncio.create_task(self._disrupt())
        clients = [asyncio.create_task(self._client(names)) for names in self.names]
        try:
            await asyncio.gather(*clients)
        except PercolatorError as error:
            raise AssertionError(f"a request was refused for good: {error!r}") from error
        finally:
            for task in (disrupting, *clients):
                task.cancel()
            await asyncio.wait([disrupting, *clients])
        await self._rest()

    # ------------------------------------------------------------------ clients

    async def _client(self, names: list[Name]) -> None:
        for _ in range(CHANGES_EACH):
            name = self.chance.choice(names)
            if not name.is_certain:
                await self._learn(name)
            elif name.table is None:
                await self._create(name)
            else:
                await self.chance.choice(
                    (
                        self._describe,
                        self._change_ttl,
                        self._change_ttl,
                        self._change_feed,
                        self._change_index,
                        self._change_index,
                        self._create_again,
                        self._delete,
                        self._delete,
                        self._delete_again,
                    )
                )(name)
            await asyncio.sleep(self.chance.random() ** 2 * 0.4)

    async def _create(self, name: Name) -> None:
        name.created_by = self._request_id()
        answer = await self._ask(name, methods.CREATE_TABLE, self._creation(name, name.created_by))
        if answer is not None:
            assert answer.created, f"{name.name} was there already"
            self._acknowledged(name, answer.table)

    async def _create_again(self, name: Name) -> None:
        """With the id of the creation it is the same one, and with another it is refused."""
        assert name.table is not None
        again = self._creation(name, name.created_by)
        if self.chance.random() < 0.5:
            answer = await self._ask(name, methods.CREATE_TABLE, again)
            if answer is not None:
                assert answer.created, f"the creation of {name.name} was forgotten"
                self._acknowledged(name, answer.table)
            return
        try:
            answer = await self._ask(
                name, methods.CREATE_TABLE, self._creation(name, self._request_id())
            )
        except InvalidArgument:
            return
        assert answer is None, f"{name.name} was created twice"
        name.is_certain = True  # nothing was to change

    async def _delete(self, name: Name) -> None:
        assert name.table is not None
        self._asked_to_delete.add(name.table.table_id)
        request_id = self._request_id()
        request = pb.DeleteTableRequest(name=name.name, request_id=request_id)
        answer = await self._ask(name, methods.DELETE_TABLE, request)
        if answer is not None:
            assert answer.deleted
            name.table, name.deleted_by = None, request_id

    async def _delete_again(self, name: Name) -> None:
        """A late copy of a deletion spares the table that has the name now."""
        if not name.deleted_by:
            return
        table = name.table
        request = pb.DeleteTableRequest(name=name.name, request_id=name.deleted_by)
        answer = await self._ask(name, methods.DELETE_TABLE, request)
        name.is_certain, name.table = True, table
        if answer is not None:
            self.occurred[OLD_DELETION_REPEATED] += 1
            assert answer.deleted, f"the deletion of {name.name} was forgotten"
        await self._describe(name)

    async def _change_ttl(self, name: Name) -> None:
        ttl = ColumnTtl(column=b"v", ttl_milliseconds=self.chance.randrange(4) * 1000)
        request = pb.SetTtlsRequest(table=name.name, ttls=[ttl])
        answer = await self._ask(name, methods.SET_TTLS, request)
        if answer is not None:
            expected = ((b"v", ttl.ttl_milliseconds),) if ttl.ttl_milliseconds else ()
            assert Schema.of(answer.table).ttls == expected
            self._acknowledged(name, answer.table)

    async def _change_feed(self, name: Name) -> None:
        wanted = self.chance.random() < 0.5
        request = pb.SetChangeFeedRequest(table=name.name, change_feed=wanted)
        answer = await self._ask(name, methods.SET_CHANGE_FEED, request)
        if answer is not None:
            assert answer.table.options.change_feed is wanted
            self._acknowledged(name, answer.table)

    async def _change_index(self, name: Name) -> None:
        """Adds an index, or removes it."""
        assert name.table is not None
        known = {one.name: one for one in name.table.indexes}.get("added")
        if known is None:
            added = pb.ChangeIndexesRequest(table=name.name, add=[_index("added")])
            answer = await self._ask(name, methods.CHANGE_INDEXES, added)
            if answer is not None:
                assert [one.ready_at for one in answer.table.indexes if one.name == "added"] == [0]
                self._acknowledged(name, answer.table)
            return
        removed = pb.RemovedIndex(name=known.name, table_id=known.table_id)
        request = pb.ChangeIndexesRequest(table=name.name, remove=[removed])
        answer = await self._ask(name, methods.CHANGE_INDEXES, request)
        if answer is not None:
            assert "added" not in [one.name for one in answer.table.indexes]
            self._acknowledged(name, answer.table)

    async def _describe(self, name: Name) -> None:
        """Whichever master answers tells of what was acknowledged."""
        table = name.table
        request = pb.DescribeTableRequest(name=name.name, knows_indexes=True)
        answer = await self._ask(name, methods.DESCRIBE_TABLE, request)
        name.is_certain, name.table = True, table
        if answer is not None:
            assert answer.table == table, f"acknowledged: {table}, found: {answer.table}"

    async def _learn(self, name: Name) -> None:
        """Asks what became of a request without an answer, after another one that changes the map:
        before that, the leader may not know itself."""
        former = name.table
        try:
            answer = await self._ask(
                name,
                methods.SET_CHANGE_FEED,
                pb.SetChangeFeedRequest(table=name.name, change_feed=self.chance.random() < 0.5),
            )
        except SchemaError:
            assert former is None or former.table_id in self._asked_to_delete, (
                f"{name.name} has vanished"
            )
            name.table = None
            return
        if answer is not None:
            name.created_by = answer.table.created_by
            self._acknowledged(name, answer.table)

    def _acknowledged(self, name: Name, table: pb.Table) -> None:
        if name.table is not None:
            same = name.table.table_id == table.table_id
            gone = name.table.table_id in self._asked_to_delete
            assert same or gone, f"{name.table} has become {table}"
            assert not same or table.schema_version >= name.table.schema_version
        name.table = table

    def _creation(self, name: Name, request_id: bytes) -> pb.CreateTableRequest:
        declared = [_index("declared")] if name.name.endswith("-0") else []
        return pb.CreateTableRequest(
            name=name.name, splits=[b"m"], request_id=request_id, indexes=declared
        )

    def _request_id(self) -> bytes:
        self._requests += 1
        return b"request %d" % self._requests

    # ------------------------------------------------------------------ calls

    async def _ask(
        self, name: Name, method: UnaryMethod[RequestT, ResponseT], request: RequestT
    ) -> ResponseT | None:
        """Asks masters at random until one answers for good. None if the client gives up before;
        then it is not certain what has happened. Some answers are lost."""
        name.is_certain = False
        asked = ""
        while True:
            process = self.chance.choice(self.world.masters)
            self.occurred[REPEATED_ELSEWHERE] += asked not in ("", process.address)
            asked = process.address
            is_standby = process.master.leader is None
            try:
                answer = await self.world.network.unary(process.address, method)(
                    request, self.chance.choice(_PATIENCE_SECONDS)
                )
            except PercolatorError as error:
                if error.retry is Retry.USELESS:
                    name.is_certain = True
                    raise
                if self.chance.random() < _GIVES_UP:
                    return None
                await asyncio.sleep(self.chance.random() * 0.5)
                continue
            if hasattr(answer, "table"):
                self.told.note(answer.table)
                self.occurred[TOLD_BY_STANDBY] += is_standby
            if self.chance.random() >= _ANSWER_LOST:
                name.is_certain = True
                return answer

    async def _look(self) -> None:
        """Any master lists the tables, as a browser of the cluster would."""
        process = self.chance.choice(self.world.masters)
        is_standby = process.master.leader is None
        try:
            listed = await self._listed(process)
        except PercolatorError:
            return
        known = {one.table.table_id: one.table for row in self.names for one in row if one.table}
        for table in listed:
            self.told.note(table)
            acknowledged = known.get(table.table_id)
            if (is_standby and not table.index_of) and (
                acknowledged is None or acknowledged.schema_version < table.schema_version
            ):
                self.occurred[UNACKNOWLEDGED_TOLD] += 1

    async def _listed(self, process: MasterProcess) -> Iterable[pb.Table]:
        list_tables = self.world.network.unary(process.address, methods.LIST_TABLES)
        return (await list_tables(pb.ListTablesRequest(), 2.0)).tables

    # ------------------------------------------------------------------ faults

    async def _disrupt(self) -> None:
        chance = self.faults
        while True:
            await asyncio.sleep(chance.random() * 0.6)
            leaders = [one for one in self.world.masters if one.master.leader is not None]
            if not leaders:
                continue
            leader, kind = chance.choice(leaders), chance.random()
            if kind < 0.55:
                await self._fail_disk(leader)
            elif kind < 0.65:
                leader.files.faults.kill_at(leader.files.faults.calls + chance.randrange(40))
                await asyncio.sleep(chance.random())
            elif kind < 0.72:
                self.world.kill_master(leader)
            elif kind < 0.8 and self._power:
                await self._cut_power(leader)
            while len(self.world.masters) < _MASTERS:
                self.occurred[TAKEN_OVER] += 1
                self.world.start_master()

    async def _fail_disk(self, leader: MasterProcess) -> None:
        """Around one write of the map, which another client is asked for meanwhile."""
        chance, faults = self.faults, leader.files.faults
        faults.fail(
            chance.choice(_SYSTEM_CALLS),
            nth=chance.randint(1, 3),
            times=chance.randint(1, 3),
            number=chance.choice((errno.EIO, errno.ENOSPC)),
        )
        until = self.world.clock.monotonic_seconds() + chance.random() * 1.5
        while self.world.clock.monotonic_seconds() < until:
            await asyncio.sleep(0.05)
            await self._note_uncertain(leader)
            if chance.random() < 0.3:
                await self._look()
        faults.heal()

    async def _note_uncertain(self, leader: MasterProcess) -> None:
        term = leader.master.leader
        if term is None or term.stored._is_stored or term.stored._changing.locked():
            return
        try:
            stored = await leader.master._coordinator.read(ROLE, KEY)
        except (OSError, PercolatorError):
            return
        own = term.stored._encode(term.stored.current)
        self.occurred[NOT_STORED if stored in (None, own) else STORED_ALL_THE_SAME] += 1

    async def _cut_power(self, leader: MasterProcess) -> None:
        """While a write of the map is uncertain, or soon after: what standbys have told may be gone
        then, and what was acknowledged may not."""
        leader.files.faults.fail("fsync_directory")
        await asyncio.sleep(self.faults.random() * 3)
        self.occurred[POWER_CUT] += 1
        for process in list(self.world.masters):
            self.world.kill_master(process)
        self.world.disk.cut_power(self.faults if self.faults.random() < 0.5 else None)
        self.told = Told()
        for row in self.names:
            for name in row:
                if name.table is not None and name.is_certain:
                    self.told.note(name.table)

    # ------------------------------------------------------------------ the end

    async def _rest(self) -> None:
        """Without another change, all masters soon agree on all that was told, and serve it. The
        last change fails, and is stored all the same."""
        world = self.world
        for process in world.masters:
            process.files.faults.heal()
            process.files.faults.kill_at(-1)
        while len(world.masters) < _MASTERS:
            world.start_master()
        await asyncio.sleep(_REST_SECONDS)
        (leader,) = (one for one in world.masters if one.master.leader is not None)
        leader.files.faults.fail("fsync_directory")
        create = world.network.unary(leader.address, methods.CREATE_TABLE)
        with suppress(StoreUnusable):
            await create(pb.CreateTableRequest(name="last"), 2.0)
        for process in world.masters:
            for table in await self._listed(process):
                self.told.note(table)
        await asyncio.sleep(_REST_SECONDS)
        for process in world.masters:
            self._judge({one.table_id: one for one in await self._listed(process)})
        tablets = (await world.call(methods.LIST_TABLETS)).tablets
        unserved = [one.table for one in tablets if not one.serving]
        assert not unserved, f"nobody serves {unserved}"

    def _judge(self, tables: dict[int, pb.Table]) -> None:
        """Checks the tables that a master lists at the end."""
        for table in tables.values():
            self.told.note(table)
        for key, version in self.told.newest.items():
            if key not in self._asked_to_delete and not self.told.tables[key].index_of:
                assert key in tables, f"{self.told.tables[key]} has vanished"
                found = tables[key].schema_version
                assert found >= version, f"{tables[key].name} is at {found}, and was at {version}"
        by_name = {table.name: table for table in tables.values() if not table.deleting}
        for name in (one for row in self.names for one in row if one.is_certain):
            found_table = by_name.get(name.name)
            assert found_table == name.table, f"{name.name} is {found_table}, not {name.table}"
        used = {table.table_id for table in by_name.values()}
        for table in by_name.values():
            owner, own = table.index_of or table.table_id, table.table_id
            assert owner in used, f"{table.name} has entries for a table that is gone"
            for index in table.indexes:
                entries = tables.get(index.table_id, pb.Table(deleting=True))
                assert entries.index_of == own, f"{table.name} has lost entries of {index.name}"
                assert not entries.deleting, f"{table.name}: {index.name} has deleted entries"


def _index(name: str) -> pb.Index:
    return pb.Index(name=name, columns=[pb.ColumnCodec(column=b"w", codec="text")])


async def run_seed(seed: int, occurred: Counter[str], *, power: bool = False) -> None:
    """One run. Equal seeds take the same course."""
    async with cluster("a:1", "b:1", seed=seed) as world:
        await RandomChanges(world, seed, occurred, power=power).run()


Patch = pytest.MonkeyPatch
SEEDS = 4
SEEDS_WITH_POWER_CUTS = 2
SEEDS_MAX = 10
"""How many seeds may be needed to find a planted mistake."""


async def test_whatever_fails_while_tables_change_all_promises_are_kept() -> None:
    occurred: Counter[str] = Counter()
    for seed in range(SEEDS):
        await run_seed(seed, occurred)
    for seed in range(SEEDS_WITH_POWER_CUTS):
        await run_seed(seed, occurred, power=True)
    missing = [name for name in (*EXPECTED, POWER_CUT) if not occurred[name]]
    assert not missing, "these never happened"


# ---------------------------------------------------------------------- planted mistakes


def the_leader_goes_on_with_its_own_map(patch: Patch) -> None:
    async def wrong(self: StoredMap[ClusterMap]) -> None:
        self._is_stored = True

    patch.setattr(StoredMap, "_take_over", wrong)


def what_is_stored_becomes_the_map_with_the_next_change_only(patch: Patch) -> None:
    async def wrong(self: StoredMap[ClusterMap]) -> None:
        pass

    patch.setattr(StoredMap, "settle", wrong)


def a_change_takes_effect_before_it_is_durable(patch: Patch) -> None:
    correct = StoredMap._put

    async def wrong(self: StoredMap[ClusterMap], changed: ClusterMap) -> None:
        self.current = changed
        await correct(self, changed)

    patch.setattr(StoredMap, "_put", wrong)


def creations_are_known_to_their_leader_only(patch: Patch) -> None:
    correct = cluster_map._table

    def wrong(table: pb.Table) -> Any:
        return replace(correct(table), created_by=b"")

    patch.setattr(cluster_map, "_table", wrong)


def deletions_are_known_to_their_leader_only(patch: Patch) -> None:
    correct = map_store.decoded

    def wrong(stored: bytes | None) -> ClusterMap:
        return replace(correct(stored), deletions=())

    patch.setattr(map_store, "decoded", wrong)


def a_deletion_that_is_repeated_is_another_one(patch: Patch) -> None:
    patch.setattr(Catalogue, "with_deletion", lambda self, request_id: self)


def every_creation_with_an_id_is_ones_own(patch: Patch) -> None:
    correct: Any = TableChanges._decide_creation

    def wrong(self: Any, creation: Creation, current: ClusterMap) -> Any:
        known = current.named(creation.request.name)
        if known is not None and creation.request.request_id:
            return current, (known, True)
        return correct(self, creation, current)

    patch.setattr(TableChanges, "_decide_creation", wrong)


def entries_outlive_their_table(patch: Patch) -> None:
    patch.setattr(Catalogue, "entries", lambda self, table_id: [])


def the_table_of_an_index_is_known_to_its_leader_only(patch: Patch) -> None:
    correct = cluster_map._table

    def wrong(table: pb.Table) -> Any:
        return replace(correct(table), index_of=0)

    patch.setattr(cluster_map, "_table", wrong)


MISTAKES: tuple[tuple[Callable[[Patch], None], int], ...] = (
    (the_leader_goes_on_with_its_own_map, 0),
    (what_is_stored_becomes_the_map_with_the_next_change_only, 0),
    (a_change_takes_effect_before_it_is_durable, 10),
    (creations_are_known_to_their_leader_only, 0),
    (deletions_are_known_to_their_leader_only, 0),
    (a_deletion_that_is_repeated_is_another_one, 0),
    (every_creation_with_an_id_is_ones_own, 0),
    (entries_outlive_their_table, 0),
    (the_table_of_an_index_is_known_to_its_leader_only, 0),
)
"""Each with a seed that shows it, and takes little time."""


@pytest.mark.parametrize(
    ("plant", "first_seed"), MISTAKES, ids=[plant.__name__ for plant, _ in MISTAKES]
)
async def test_a_planted_mistake_is_found(
    plant: Callable[[Patch], None], first_seed: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    for seed in range(first_seed, first_seed + SEEDS_MAX):
        try:
            await run_seed(seed, Counter())
        except AssertionError:
            return
    pytest.fail(f"not found in {SEEDS_MAX} seeds")
