"""Tables whose content is known, and which nothing that is fuzzed may harm.

One is written once and read again and again; in the other, a counter is raised by transactions all
the time. At the end both are read a last time. Requests that would destroy them legitimately, such
as a DeleteTable of their name, are not sent.
"""

from __future__ import annotations

import asyncio
from hashlib import sha256

from google.protobuf.message import DecodeError

from percolator import Table, aio, codecs
from percolator.errors import OutcomeUnknown, PercolatorError
from percolator.v1 import master_pb2
from percolator.wire import methods
from tests.fuzz.findings import Record
from tests.fuzz.messages import mentions
from tests.fuzz.methods import Method
from tests.fuzz.scene import Scene

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
        "TabletServerService/Read",
        "TabletServerService/Scan",
        "TabletServerService/ScanCells",
        "TabletServerService/ScanNotifications",
        "TabletServerService/WatchNotifications",
        "TabletServerService/DescribeTablets",
        "TabletServerService/ProposeSplit",
        "TabletServerService/ProposeParts",
        "GatewayService/Get",
        "GatewayService/ScanTable",
        "MasterService/DescribeTable",
        "MasterService/LocateTablets",
        "MasterService/ListTablets",
        "MasterService/MoveTablet",
        "MasterService/CreateTable",
    )
)
"""What may be done to the canary's tables: it must bear all of that."""

_forbidden: dict[str, frozenset[object]] = {}


def forbidden_for_canary(method: Method, data: bytes) -> bool:
    """Whether this call would be right to destroy a canary."""
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
            asked = master_pb2.DescribeTableRequest(name=table.name)
            found = await scene.call(scene.cluster.address, methods.DESCRIBE_TABLE, asked)
            ids.append(found.table.table_id)
            located = await scene.call(
                scene.cluster.address,
                methods.LOCATE_TABLETS,
                master_pb2.LocateTabletsRequest(table_id=found.table.table_id),
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
