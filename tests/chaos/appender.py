"""A client process that appends to lists: `python -m tests.chaos.appender LIFE`, as JSON.

Its workload says how it reaches the cluster: with the library, or as a program in another language
would, with bare calls of gateways. If a gateway's answer to a commit is lost, it sends the same
commit to the next gateway until it is told the outcome.
"""

from __future__ import annotations

import asyncio
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count
from typing import TypeVar

from google.protobuf.message import Message

from percolator import aio
from percolator.errors import (
    ConflictError,
    ExecutionUnknown,
    NotExecuted,
    OutcomeUnknown,
    PercolatorError,
    Retry,
    SnapshotTooOld,
)
from percolator.v1 import gateway_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork
from percolator.wire.credentials import client_credentials
from percolator.world import Network, Random, UnaryMethod
from tests.chaos.client import Life, connected, life_of_this_process, pacing
from tests.chaos.list_append.judge import (
    Append,
    Entry,
    Outcome,
    Read,
    elements,
    lists,
    loaded,
    plan,
    row_of,
    stored,
)

LIBRARY, BARE = "library", "bare gateway"

RequestT = TypeVar("RequestT", bound=Message)
ResponseT = TypeVar("ResponseT", bound=Message)

_CALL_SECONDS = 5.0
_PATIENCE_SECONDS = 20.0
"""After this, a caller of gateways gives up, and its outcome is unknown."""
_RETRY_SECONDS = 0.05


class Access(ABC):
    """One transaction at a time."""

    unknown: tuple[type[PercolatorError], ...]
    """The errors of a commit that leave it open whether it happened."""

    @abstractmethod
    async def begin(self) -> int: ...

    @abstractmethod
    async def get(self, row: bytes) -> bytes | None: ...

    @abstractmethod
    async def put(self, row: bytes, value: bytes) -> None: ...

    @abstractmethod
    async def commit(self) -> int:
        """The commit timestamp, 0 if nothing was written."""

    @abstractmethod
    def rollback(self) -> None: ...


class ThroughLibrary(Access):
    unknown = (OutcomeUnknown,)

    def __init__(self, database: aio.Database) -> None:
        self._database = database

    async def begin(self) -> int:
        self._transaction = self._database.transaction()
        return await self._transaction.timestamp()

    async def get(self, row: bytes) -> bytes | None:
        return await self._transaction.get(row, elements)

    async def put(self, row: bytes, value: bytes) -> None:
        await self._transaction.set(row, elements, value)

    async def commit(self) -> int:
        return await self._transaction.commit() or 0

    def rollback(self) -> None:
        self._transaction.rollback()


class ThroughBareGateways(Access):
    # Even if the last call was not executed, an earlier attempt may have been.
    unknown = (OutcomeUnknown, ExecutionUnknown, NotExecuted, SnapshotTooOld)

    def __init__(self, network: Network, addresses: list[str], number: int) -> None:
        self._network = network
        self._addresses = addresses
        self._number = number
        self._start = 0
        self._writes: dict[bytes, bytes] = {}

    async def begin(self) -> int:
        self._writes = {}
        self._start = (await self._anywhere(methods.BEGIN, pb.BeginRequest())).start_timestamp
        return self._start

    async def get(self, row: bytes) -> bytes | None:
        if row in self._writes:
            return self._writes[row]
        query = pb.RowQuery(table=lists.name, row=row, columns=[elements.name])
        request = pb.GetRequest(start_timestamp=self._start, rows=[query])
        (found,) = (await self._anywhere(methods.GET, request)).rows
        return found.cells[0].value if found.cells else None

    async def put(self, row: bytes, value: bytes) -> None:
        self._writes[row] = value

    async def commit(self) -> int:
        writes = [
            pb.CellWrite(
                kind=pb.CellWrite.KIND_PUT,
                table=lists.name,
                row=row,
                column=elements.name,
                value=value,
            )
            for row, value in self._writes.items()
        ]
        request = pb.CommitRequest(start_timestamp=self._start, writes=writes)
        return (await self._anywhere(methods.COMMIT, request)).commit_timestamp

    def rollback(self) -> None:
        self._writes = {}

    async def _anywhere(
        self, method: UnaryMethod[RequestT, ResponseT], request: RequestT
    ) -> ResponseT:
        """Makes the same call at one gateway after another until one answers."""
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while True:
            address = self._addresses[self._number % len(self._addresses)]
            try:
                return await self._network.unary(address, method)(request, _CALL_SECONDS)
            except (OutcomeUnknown, ExecutionUnknown, NotExecuted):
                if time.monotonic() > deadline:
                    raise
                self._number += 1
                await asyncio.sleep(_RETRY_SECONDS)


class Appender:
    """One session."""

    def __init__(self, life: Life, number: int, access: Access) -> None:
        self._name = f"{life.name}/{number} life {life.number}"
        # Elements are written and logged over and over, as long as their lists grow.
        self._short_name = f"{life.name.rpartition('-')[2]}.{number}.{life.number}"
        self._random = Random(f"{life.seed} {self._name}")
        self._access = access
        self._elements = count(1)
        self._pace = pacing(life)

    async def work(self, log: Entry) -> None:
        """Runs one transaction. Raises only errors that no client has to expect."""
        try:
            log.began(await self._access.begin())
            await self._operate(log)
        except PercolatorError as error:
            self._access.rollback()
            log.ended(Outcome.ABORTED)
            require_expected(error)
            return
        log.commit_called()
        try:
            commit_ts = await self._access.commit()
        except self._access.unknown:
            log.ended(Outcome.UNKNOWN)
        except PercolatorError as error:
            log.ended(Outcome.ABORTED)
            require_expected(error)
        else:
            log.ended(Outcome.COMMITTED, commit_ts)

    async def _operate(self, log: Entry) -> None:
        for key, appends in plan(self._random, time.monotonic()):
            found = loaded(await self._access.get(row_of(key)))
            log.operations.append(Read(key, found))
            if appends:
                element = f"{self._short_name}.{next(self._elements)}"
                await self._access.put(row_of(key), stored((*found, element)))
                log.operations.append(Append(key, element))

    @property
    def name(self) -> str:
        return self._name

    async def pause(self) -> None:
        await self._pace(self._random)


def require_expected(error: PercolatorError) -> None:
    """Raises an error that no client has to expect."""
    expected = ConflictError | OutcomeUnknown | SnapshotTooOld
    if error.retry is Retry.USELESS and not isinstance(error, expected):
        raise error


@asynccontextmanager
async def accesses(life: Life) -> AsyncIterator[list[Access]]:
    """One for each session."""
    numbers = range(life.sessions)
    if life.workload == LIBRARY:
        async with connected(life) as database:
            yield [ThroughLibrary(database) for _ in numbers]
        return
    network = GrpcNetwork(client_credentials())
    try:
        addresses = life.address.split(",")
        yield [ThroughBareGateways(network, addresses, number) for number in numbers]
    finally:
        await network.close()


async def live(life: Life) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    with life.history.open("a") as log:

        async def work(appender: Appender) -> None:
            for number in count(1):
                if stopped.is_set():
                    return
                await appender.work(Entry(log, appender.name, number))
                await appender.pause()

        async with accesses(life) as found, asyncio.TaskGroup() as tasks:
            for number, access in enumerate(found):
                tasks.create_task(work(Appender(life, number, access)))


if __name__ == "__main__":
    asyncio.run(live(life_of_this_process()))
