"""The store of a cluster: the place where masters and oracles keep what must last."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import structlog
from structlog.stdlib import BoundLogger

from percolator.bigtable.admin import delete_table, has_table, require_table
from percolator.bigtable.connection import Connection
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bucket.bucket import Bucket
from percolator.bucket.port import Attempts, Stored
from percolator.bucket.probe import VERSIONING, Probe, warnings_of
from percolator.bucket.settings import Settings
from percolator.errors import (
    InvalidArgument,
    InvariantViolation,
    PercolatorError,
    PermissionDenied,
    SchemaError,
    StoreFault,
    StoreUnusable,
    WrongCluster,
)
from percolator.limits import Limits
from percolator.rowstore.identity import CLUSTER, IDENTITY, TABLE_ID
from percolator.rowstore.intents import INTENTS_TABLE
from percolator.rowstore.layout import FAMILIES
from percolator.rowstore.patience import steady_scan
from percolator.rowstore.port import Selection
from percolator.services.chassis.coordinator import Coordinator, CoordinatorTimes
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.files import Files, make_durable_directory, refuse_network
from percolator.services.chassis.host import AnyHost, Host
from percolator.services.chassis.process import version
from percolator.services.chassis.record_coordinator import RecordCoordinator
from percolator.services.chassis.records import (
    BucketRecords,
    NoRecords,
    Records,
    RowRecords,
    Seen,
    unusable,
)
from percolator.services.chassis.settings import StoreSettings
from percolator.services.chassis.store_watch import LOOK_SECONDS, STALLED_SECONDS
from percolator.v1.cluster_pb2 import RowStorePlace
from percolator.world import Clock, Network, Random, World

"""If a check takes longer, the store hangs."""


class IdentityWatch:
    """Checks all the time whether a store still answers, and is still that of this cluster.

    Belongs to one event loop; `run` has to run as a task.

    A store that does not answer may come back: until it does, the process reports that it does not
    serve. One that has lost this cluster's identity, or has another, does not come back: somebody
    deleted what was in it, or put another store in its place.
    """

    def __init__(
        self,
        look: Callable[[], Awaitable[ClusterIdentity | None]],
        expected: ClusterIdentity,
        name: str,
        how_lost: str,
        look_seconds: float,
        clock: Clock,
        log: BoundLogger,
        *,
        stalled: Callable[[bool], None],
        gone: Callable[[str], None],
    ) -> None:
        """`how_lost`: what has happened if the identity is not there. It looks every `look_seconds`
        while the store answers. `stalled` is called when it falls silent and when it answers again;
        `gone` once, with the reason."""
        self._look = look
        self._expected = expected
        self._name = name
        self._how_lost = how_lost
        self._look_seconds = look_seconds
        self._clock = clock
        self._log = log
        self._stalled = stalled
        self._gone = gone
        self._silent_since: float | None = None
        self.trouble = ""
        """Why nothing can be written now; empty while it can."""

    async def run(self) -> None:
        """Returns when the store is gone."""
        while True:
            try:
                found = await self._look()
            except StoreUnusable as error:
                self._silent(error)
            else:
                if found != self._expected:
                    whose = "no cluster" if found is None else f"cluster {found.cluster_id}"
                    self._gone(f"{self._name} now belongs to {whose}: {self._how_lost}")
                    return
                self._answered()
            answers = self._silent_since is None
            await self._clock.sleep(self._look_seconds if answers else LOOK_SECONDS)

    def _silent(self, error: StoreUnusable) -> None:
        now = self._clock.monotonic_seconds()
        if self._silent_since is None:
            self._silent_since = now
        elif now - self._silent_since >= STALLED_SECONDS and not self.trouble:
            self._log.error("the store does not answer", store=self._name, error=str(error))
            self.trouble = str(error)
            self._stalled(True)

    def _answered(self) -> None:
        self._silent_since = None
        if self.trouble:
            self.trouble = ""
            self._log.info("the store answers again", store=self._name)
            self._stalled(False)


FILE_NAME = "cluster.json"
STORE_FORMAT = 1
"""The format of the stores that this release makes."""
_FORMATS = (STORE_FORMAT, 2)
"""The formats that it opens. 2 was written where values expire, and differs in nothing else."""

_BYTES_MAX = 4_096
_CLUSTER_ID = re.compile(r"[\x21-\x7e]{1,128}")
_UNFINISHED = FILE_NAME + ".new-"
_IN_NEW_FILE_SYSTEMS = frozenset({"lost+found"})
"""Names that do not make a store root foreign: a new file system is not empty."""


@dataclass(frozen=True)
class ClusterIdentity:
    """The cluster that a store root belongs to: the file `cluster.json` in it.

        {"cluster_id": "9f…", "format": 1, "created_by": "0.3.0"}

    Invariants:
    - The file appears at once with its whole, durable content, or not at all. If several masters
      start at once on an empty root, exactly one writes it; all read the same. It is never
      changed.
    - A root that holds anything but has no identity is refused: it is used for something else, or
      its file was lost, and data of two clusters in one root could never be told apart again.
    - A root of another format is refused: this release would damage what it does not understand.
    """

    cluster_id: str
    format: int


async def establish_identity(files: Files, root: Path, random: Random) -> ClusterIdentity:
    """The identity of the root, created if the root is empty. Also finds out if it is writable."""
    names = await _names(files, root)
    found = FILE_NAME in names
    if not found:
        _refuse_foreign(root, names)
    unfinished = root / f"{_UNFINISHED}{random.getrandbits(64):016x}"
    await _write(files, unfinished, _new_identity(random))
    if not found:
        # Another master may have been faster: then its identity counts.
        with suppress(FileExistsError):
            # Creates exclusively, like O_EXCL, but never shows half a file.
            await files.link(unfinished, root / FILE_NAME)
    await files.unlink(unfinished)
    await files.fsync_directory(root)
    return await read_identity(files, root)


def _new_identity(random: Random) -> dict[str, object]:
    return {
        "cluster_id": f"{random.getrandbits(128):032x}",
        "format": STORE_FORMAT,
        "created_by": version(),
    }


async def read_identity(files: Files, root: Path) -> ClusterIdentity:
    """The identity of a root that has one."""
    path = root / FILE_NAME
    try:
        data = await files.read(path, bytes_max=_BYTES_MAX)
    except FileNotFoundError:
        raise InvalidArgument(
            "store", f"{root} belongs to no cluster yet: start a master on it first"
        ) from None
    return parse_identity(data, str(path), f"store: {root}")


def parse_identity(data: bytes, where: str, store: str) -> ClusterIdentity:
    """The identity in these bytes. `where` names them in errors, and `store` the whole store."""
    try:
        content = json.loads(data)
        cluster_id, number = content["cluster_id"], content["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(where, str(error)) from None
    if not isinstance(cluster_id, str) or not _CLUSTER_ID.fullmatch(cluster_id):
        raise _damaged(where, f"cluster_id is {str(cluster_id)[:64]!r}")
    if type(number) is not int or number < 1:
        raise _damaged(where, f"format is {number!r}")
    if number not in _FORMATS:
        raise WrongCluster(
            f"{store} has format {number}, written by release "
            f"{content.get('created_by', 'unknown')}; this release, {version()}, opens format "
            f"{STORE_FORMAT}: use a release that opens format {number}",
            expected=f"format {STORE_FORMAT}",
            found=f"format {number}",
        )
    return ClusterIdentity(cluster_id, number)


async def check_identity(files: Files, root: Path, cluster_id: str) -> None:
    """Refuses a root of a cluster other than the one to which this process belongs."""
    require_same_cluster(await read_identity(files, root), str(root), cluster_id)


def require_same_cluster(found: ClusterIdentity, store: str, cluster_id: str) -> None:
    """Refuses a store of a cluster other than the one to which this process belongs."""
    if found.cluster_id != cluster_id:
        raise WrongCluster(
            f"store: {store} belongs to cluster {found.cluster_id}, the masters to cluster "
            f"{cluster_id}",
            expected=cluster_id,
            found=found.cluster_id,
        )


async def refuse_other_cluster(files: Files, root: Path, cluster_id: str) -> None:
    """Refuses a root of another cluster or an unknown format, and one of no cluster if there is a
    cluster: an oracle on a mistyped root would lead there, while another one leads on the store.

    Without masters, the cluster's id is empty. Then the root may be a private disk, where no master
    ever wrote an identity.
    """
    if cluster_id:
        await check_identity(files, root, cluster_id)
        return
    try:
        await files.stat(root / FILE_NAME)
    except FileNotFoundError:
        return
    await read_identity(files, root)


async def _write(files: Files, path: Path, content: dict[str, object]) -> None:
    async with await files.create(path) as file:
        await file.append((json.dumps(content) + "\n").encode())
        await file.fsync()


async def _names(files: Files, root: Path) -> list[str]:
    try:
        return await files.list(root)
    except FileNotFoundError:
        # Create only the last directory: a missing parent is often a disk that is not mounted, and
        # a new cluster in its place would be a surprise.
        await files.make_directory(root)
        await files.fsync_directory(root.parent)
        return []


def _refuse_foreign(root: Path, names: list[str]) -> None:
    foreign = [
        name
        for name in names
        if name not in _IN_NEW_FILE_SYSTEMS and not name.startswith(_UNFINISHED)
    ]
    if foreign:
        raise InvalidArgument(
            "store",
            f"{root} is not empty (it holds {foreign[0]!r}), but has no {FILE_NAME}: a cluster "
            "begins in an empty directory",
        )


def _damaged(where: str, reason: str) -> StoreUnusable:
    return StoreUnusable(f"store: {where} is damaged: {reason}", fault=StoreFault.DAMAGED)


EPOCH_BEFORE_MILLISECONDS = 30 * 86_400_000
"""How far before the first master's clock times are counted from: a margin for an oracle whose
clock is right where that master's is fast. Emulators allow two years at most."""
_ATTEMPTS_MAX = 5


@dataclass(frozen=True)
class RowIdentity(ClusterIdentity):
    """The cluster that a row store belongs to: one record, which is never changed.

        row "cluster", column "identity":
        {"cluster_id": "9f…", "format": 1, "created_by": "0.3.0",
         "epoch_milliseconds": 1790000000000}

    If several masters start at once on an empty store, exactly one writes it; all read the same.
    """

    epoch_milliseconds: int = 0
    """Origin of the times of its cells (percolator/rowstore/layout.py)."""


async def establish(records: Records, name: str, world: World) -> RowIdentity:
    """The identity of the store, created if there is none."""
    epoch = max(world.clock.wall_milliseconds() - EPOCH_BEFORE_MILLISECONDS, 0)
    content = {**_new_identity(world.random), "epoch_milliseconds": epoch}
    for _ in range(_ATTEMPTS_MAX):
        found = await read(records, name)
        if found is not None:
            return found
        try:
            # Whether this was the first one does not matter: the next look tells what there is.
            await records.change(
                CLUSTER, Seen(IDENTITY, None), {IDENTITY: json.dumps(content).encode()}
            )
        except StoreUnusable:
            raise
        except PercolatorError:
            continue  # perhaps written
    raise StoreUnusable(
        f"store: {name} does not keep the identity of a new cluster", fault=StoreFault.INPUT_OUTPUT
    )


async def require(records: Records, name: str, cluster_id: str) -> RowIdentity:
    """The identity of a store that has one. `WrongCluster` unless it is that of this cluster."""
    found = await read(records, name)
    if found is None:
        raise InvalidArgument(
            "store", f"{name} belongs to no cluster yet: start a master on it first"
        )
    if cluster_id:
        require_same_cluster(found, name, cluster_id)
    return found


async def read(records: Records, name: str) -> RowIdentity | None:
    """None if the store has no identity."""
    try:
        data = (await records.read(CLUSTER, [IDENTITY])).get(IDENTITY)
    except NoRecords:
        return None  # an emulator that was started again has not even the table
    if data is None:
        return None
    where = f"the identity in {name}"
    known = parse_identity(data, where, f"store: {name}")
    epoch = json.loads(data).get("epoch_milliseconds")
    if type(epoch) is not int or epoch < 0:
        raise StoreUnusable(
            f"store: {where} is damaged: epoch_milliseconds is {epoch!r}", fault=StoreFault.DAMAGED
        )
    return RowIdentity(known.cluster_id, known.format, epoch)


class ClusterStore(Protocol):
    """The store of one cluster, as one process reaches it."""

    silence_seconds: float
    """A leader that is silent for this long is replaced, unless the settings say otherwise."""

    @property
    def name(self) -> str:
        """As `--store` names it."""

    async def establish_identity(self) -> ClusterIdentity:
        """The identity of the store, created if the store is empty."""

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        """Raises unless the store may be that of the cluster. Empty: of any cluster."""

    def coordinator(self, times: CoordinatorTimes) -> Coordinator:
        """Roles, values of leaders and sessions, as all processes on this store see them."""

    def watch(self, host: AnyHost) -> None:
        """Reports that this process does not serve while the store hangs, and ends the process when
        the store is gone."""

    def rows(self) -> RowStorePlace | None:
        """How clients reach the cells, if they are in this store. None: tablet servers have them.
        Known once the identity is."""


class DirectoryStore:
    """A `percolator.services.chassis.cluster_store.ClusterStore`."""

    silence_seconds = 3.0

    def __init__(self, files: Files, root: Path, world: World) -> None:
        self.files = files
        self.root = root
        self._world = world

    @property
    def name(self) -> str:
        return str(self.root)

    async def establish_identity(self) -> ClusterIdentity:
        return await establish_identity(self.files, self.root, self._world.random)

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        await refuse_other_cluster(self.files, self.root, cluster_id)
        # An oracle without masters may have a disk of its own.
        await make_durable_directory(self.files, self.root)

    def coordinator(self, times: CoordinatorTimes) -> DirectoryCoordinator:
        return DirectoryCoordinator(self.files, self._world.clock, self.root, times)

    def watch(self, host: AnyHost) -> None:
        host.watch_store(self.root)

    def rows(self) -> RowStorePlace | None:
        return None


_TABLE_SECONDS = 30.0


class RowClusterStore:
    """A `percolator.services.chassis.cluster_store.ClusterStore`."""

    silence_seconds = 3.0

    def __init__(self, network: Network, place: Place, world: World) -> None:
        """`network` reaches the store; that of `world`, the cluster's servers."""
        self.network = network
        self.place = place
        self.store = BigtableStore(network, place)
        self._world = world
        self._records = RowRecords(self.store, world)
        self._identity: RowIdentity | None = None

    @property
    def name(self) -> str:
        return str(self.place)

    @property
    def identity(self) -> RowIdentity:
        if self._identity is None:
            raise InvariantViolation("the identity of the store is used before it is known")
        return self._identity

    async def establish_identity(self) -> RowIdentity:
        await self.create_table(TABLE_ID)
        await self.create_table(INTENTS_TABLE)
        self._identity = await establish(self._records, self.name, self._world)
        return self._identity

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        try:
            found = await has_table(self.network, self.place, TABLE_ID, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error
        if not found:
            raise InvalidArgument(
                "store", f"{self.name} belongs to no cluster yet: start a master on it first"
            )
        self._identity = await require(self._records, self.name, cluster_id)

    async def create_table(self, table_id: int) -> None:
        """Creates a table, unless there is one of that id. Raises `SchemaError` for one that does
        not have the families of a table of a cluster."""
        try:
            await require_table(self.network, self.place, table_id, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error

    async def has_table(self, table_id: int) -> bool:
        """True if there is a table of that id."""
        try:
            return await has_table(self.network, self.place, table_id, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error

    async def delete_table(self, table_id: int) -> None:
        """Deletes a table with everything in it, if it is there."""
        try:
            await delete_table(self.network, self.place, table_id, _TABLE_SECONDS)
        except PercolatorError as error:
            raise self._named(error) from error

    async def require_empty(self, table_id: int) -> None:
        """Raises `SchemaError` unless a table that is about to be used has nothing in it."""
        try:
            # The store may say for a while that the table is still being created.
            families = [Selection(family) for family in FAMILIES]
            scan = steady_scan(self.store, table_id, families, self._world, Limits(), rows_max=1)
            async with aclosing(scan) as found:
                rows = [row async for row in found]
        except PercolatorError as error:
            raise self._named(error) from error
        if rows:
            name = self.place.table_name(table_id)
            raise SchemaError(
                f"store: {self.name}: the table {name} was made by another program: it has rows, "
                "and no table of this cluster has used it"
            )

    def coordinator(self, times: CoordinatorTimes) -> RecordCoordinator:
        return RecordCoordinator(self._records, self._world, times)

    def watch(self, host: AnyHost) -> None:
        look = partial(read, self._records, self.name)
        how_lost = "its tables were deleted, or an empty emulator was started in its place"
        host.watch(
            partial(
                IdentityWatch,
                look,
                self.identity,
                self.name,
                how_lost,
                LOOK_SECONDS,
                self._world.clock,
                host.log,
            )
        )

    def rows(self) -> RowStorePlace:
        return RowStorePlace(
            address=self.name,
            emulator=self.place.address if self.place.is_emulated else "",
            epoch_milliseconds=self.identity.epoch_milliseconds,
        )

    def _named(self, error: PercolatorError) -> PercolatorError:
        """The error, with the setting that leads there."""
        error.message = f"store: {self.name}: {error.message}"
        return error


_log = structlog.get_logger("percolator.bucket")
_PROBES = "check-"
"""`percolator store check` leaves objects below such a folder if it cannot delete them."""
_ATTEMPT_SECONDS = 1.0
_PATIENCE_SECONDS = 2.0
"""How long a store that does not answer is asked again: as long as callers of an oracle wait."""
_LONG_ATTEMPT_SECONDS = 3.0
"""Much longer than a store takes whose answer is not lost, also one that is 50 ms away; objects
that are large have longer (`percolator/bucket/bucket.py`)."""
_LONG_PATIENCE_SECONDS = 60.0
_BUCKET_LOOK_SECONDS = 20.0
_SESSION_FACTOR = 8
_BEAT_SHARE = 0.4
_POLL_SHARE = 1 / 3


class BucketClusterStore:
    """A `percolator.services.chassis.cluster_store.ClusterStore`.

    The identity is an object that is created once, `cluster.json`, as the file in a directory is:
    of several masters that start at once on an empty prefix, exactly one creates it.

    A bucket is refused, before anything lasting is in it, if it ignores conditions, if rules of its
    lifecycle would remove objects, or if the prefix is inside that of another cluster. Once there
    is a cluster, such a rule is an error in the log and in the master's metrics: the rule works as
    well while nothing serves.
    """

    silence_seconds = 6.0

    def __init__(self, attempts: Attempts, world: World, outer: Sequence[Attempts] = ()) -> None:
        """`attempts` do not give up before they are told to: a long value may take half a
        minute. `outer` reaches the same bucket at each shorter prefix."""
        self._world = world
        self._outer = [
            self._patient(one, _LONG_ATTEMPT_SECONDS, _PATIENCE_SECONDS) for one in outer
        ]
        self.dangers: tuple[str, ...] = ()
        """Rules by which the bucket removes or archives objects, as they were last told."""
        self._told: set[str] = set()
        self._bucket = self._patient(attempts, _ATTEMPT_SECONDS, _PATIENCE_SECONDS)
        long = self._patient(attempts, _LONG_ATTEMPT_SECONDS, _LONG_PATIENCE_SECONDS)
        self.large = long
        """For tablets and large objects, and for calls whose outcome has to be known: a process
        that starts while the store is slow waits rather than fails."""
        self._records = BucketRecords(self._bucket, long, world.random)
        self._identity: ClusterIdentity | None = None

    @property
    def name(self) -> str:
        return self._bucket.name

    async def establish_identity(self) -> ClusterIdentity:
        found = await self._found()
        settings = await self.look_at_settings()
        if found is None:
            await self._refuse_foreign()
            await self._refuse_inner()
            if settings.removing:
                raise InvalidArgument(
                    "store", f"{self.name} would lose objects: {'; '.join(settings.removing)}"
                )
        if found is None or settings.versioning == "Enabled":
            await self._refuse_careless(settings)
        if found is None:
            content = _new_identity(self._world.random)
            # Another master may have been faster: then its identity counts.
            made = await self.large.create(FILE_NAME, (json.dumps(content) + "\n").encode())
            found = self._parsed(made.found)
        if found is None:
            raise StoreUnusable(
                f"store: {self.name} does not keep the identity of a new cluster",
                fault=StoreFault.INPUT_OUTPUT,
            )
        self._identity = found
        return found

    async def refuse_other_cluster(self, cluster_id: str) -> None:
        found = await self._found()
        if found is None:
            raise InvalidArgument(
                "store", f"{self.name} belongs to no cluster yet: start a master on it first"
            )
        if cluster_id:
            require_same_cluster(found, self.name, cluster_id)
        await self.look_at_settings()
        self._identity = found

    async def look_at_settings(self) -> Settings:
        """Settings of the bucket. Logs each danger and warning once."""
        settings = await self.large.settings()
        self.dangers = settings.removing
        for danger in settings.removing:
            if danger not in self._told:
                _log.error("the bucket will lose objects", store=self.name, rule=danger)
        warnings = warnings_of(settings)
        for warning in warnings:
            if warning not in self._told:
                _log.warning("a setting of the bucket", store=self.name, warning=warning)
        self._told = {*settings.removing, *warnings}
        return settings

    def coordinator(self, times: CoordinatorTimes) -> RecordCoordinator:
        """Heartbeats and looks are as rare as the grace period allows: each call is paid for."""
        return RecordCoordinator(
            self._records,
            self._world,
            replace(
                times,
                beat_seconds=max(times.beat_seconds, times.grace_seconds * _BEAT_SHARE),
                poll_seconds=max(times.poll_seconds, times.grace_seconds * _POLL_SHARE),
                session_factor=_SESSION_FACTOR,
            ),
        )

    def watch(self, host: AnyHost) -> None:
        if self._identity is None:
            raise InvariantViolation("the identity of the store is used before it is known")
        how_lost = f"{FILE_NAME} was deleted, or another one was put in its place"
        host.watch(
            partial(
                IdentityWatch,
                self._seen,
                self._identity,
                self.name,
                how_lost,
                _BUCKET_LOOK_SECONDS,
                self._world.clock,
                host.log,
            )
        )

    def rows(self) -> RowStorePlace | None:
        return None

    async def _seen(self) -> ClusterIdentity | None:
        """The identity for the watch. `StoreUnusable` if the store does not say."""
        try:
            return await self._found(self._bucket)
        except StoreUnusable:
            raise
        except PercolatorError as error:
            raise unusable(error, "the bucket") from error

    async def _found(self, bucket: Bucket | None = None) -> ClusterIdentity | None:
        return self._parsed(await (bucket or self.large).read(FILE_NAME))

    def _parsed(self, stored: Stored | None) -> ClusterIdentity | None:
        if stored is None:
            return None
        return parse_identity(stored.data, f"{FILE_NAME} in {self.name}", f"store: {self.name}")

    async def _refuse_foreign(self) -> None:
        """What a list lacks is not found. But who has lost an identity lost it a while ago."""
        listed = await self.large.list("")
        foreign = [
            one.key for one in listed if one.key != FILE_NAME and not one.key.startswith(_PROBES)
        ]
        # Another master may have created it meanwhile, and begun to work.
        if foreign and await self.large.head(FILE_NAME) is None:
            raise InvalidArgument(
                "store",
                f"{self.name} is not empty (it holds {foreign[0]!r}), but has no {FILE_NAME}: a "
                "cluster begins in an empty bucket, or below a prefix of its own",
            )

    async def _refuse_inner(self) -> None:
        for bucket in self._outer:
            try:
                is_there = await bucket.head(FILE_NAME) is not None
            except PermissionDenied:
                continue  # an account for one prefix does not see others
            if is_there:
                raise InvalidArgument(
                    "store",
                    f"{self.name} is inside {bucket.name}, which belongs to a cluster: choose a "
                    "prefix beside it",
                )

    async def _refuse_careless(self, settings: Settings) -> None:
        """Otherwise, two owners of a tablet would both acknowledge what only one of them has."""
        folder = f"{_PROBES}{self._world.random.getrandbits(64):016x}"
        probe = Probe(self.large, self._world.clock, folder)
        try:
            broken = await probe.broken_condition()
        finally:
            await probe.clean_up()
        if broken:
            hint = f". {VERSIONING}" if settings.versioning == "Enabled" else ""
            raise InvalidArgument(
                "store",
                f"{self.name}: {broken}: a cluster would lose data there; `percolator store check` "
                f"tells more{hint}",
            )

    def _patient(self, attempts: Attempts, attempt_seconds: float, seconds: float) -> Bucket:
        return Bucket(
            attempts,
            self._world.clock,
            self._world.random,
            attempt_seconds=attempt_seconds,
            seconds=seconds,
        )


StoreSettingsT = TypeVar("StoreSettingsT", bound=StoreSettings)


def opened_bucket(host: Host[StoreSettingsT]) -> BucketClusterStore:
    """The bucket that the settings name."""
    place = host.settings.bucket
    if place is None:
        raise InvariantViolation(f"{host.settings.store!r} is no bucket")
    try:
        from percolator.bucket.s3 import s3_attempts
    except ModuleNotFoundError as error:
        raise InvalidArgument(
            "store", f"buckets need the extra percolator-store[bucket]: {error}"
        ) from None
    made = partial(s3_attempts, attempt_seconds=_LONG_PATIENCE_SECONDS)
    names = place.prefix.split("/") if place.prefix else []
    outer = ["/".join(names[:count]) for count in range(len(names))]
    return BucketClusterStore(
        made(place), host.world, [made(replace(place, prefix=one)) for one in outer]
    )


@asynccontextmanager
async def opened(host: Host[StoreSettingsT]) -> AsyncIterator[ClusterStore]:
    """The store, which is closed at the end."""
    if host.settings.bucket is not None:
        yield opened_bucket(host)
        return
    place = host.settings.place
    if place is None:
        root = host.settings.store_root
        await refuse_network(host.files, root, host.settings, host.log)
        yield DirectoryStore(host.files, root, host.world)
        return
    connection = Connection(place)
    try:
        yield RowClusterStore(connection.network, place, host.world)
    finally:
        await connection.close()
