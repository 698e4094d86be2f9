"""A tablet server as a process, and plain writes and reads on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from percolator.formats.records import RecordKind, WriteRecord
from percolator.services.local.process import ServiceProcess
from percolator.v1 import cells_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire import methods
from percolator.wire.channels import GrpcNetwork

CALL_SECONDS = 20.0
READY_SECONDS = 40.0
TABLE_ID = 3
COLUMN = b"c"
START = 1_760_000_000_000 << 18
COMMIT = START + 1
LATER = COMMIT + 1


class TabletServer:
    """One process on a store root that others may share. Each of its tablets covers all rows."""

    def __init__(self, name: str, directory: Path, store: Path, *flags: str) -> None:
        store.mkdir(exist_ok=True)
        self.store = store
        self.process = ServiceProcess(
            name,
            "tabletserver",
            ["--store", str(store), *flags],
            logs=directory,
            run=directory,
        )
        self._network: GrpcNetwork | None = None

    async def start(self) -> None:
        await self._disconnect()
        self.process.start()
        self.process.wait_ready(READY_SECONDS)
        self._network = GrpcNetwork()

    def kill(self) -> None:
        """Kills it as `kill -9` does; unanswered requests fail."""
        self.process.kill()

    async def stop(self) -> int:
        self.process.ask_to_stop()
        code = self.process.wait_stopped()
        await self._disconnect()
        return code

    async def open(self, tablet: int, epoch: int) -> pb.TabletDescription:
        request = pb.OpenTabletRequest(
            table_id=TABLE_ID, tablet_id=tablet, epoch=epoch, schema_version=1
        )
        call = self.network.unary(self.process.address, methods.OPEN_TABLET)
        return (await call(request, CALL_SECONDS)).tablet

    async def close(self, tablet: int, epoch: int) -> None:
        call = self.network.unary(self.process.address, methods.CLOSE_TABLET)
        await call(pb.CloseTabletRequest(tablet_id=tablet, epoch=epoch), CALL_SECONDS)

    async def describe(self) -> list[pb.TabletDescription]:
        call = self.network.unary(self.process.address, methods.DESCRIBE_TABLETS)
        return list((await call(pb.DescribeTabletsRequest(), CALL_SECONDS)).tablets)

    async def report(self) -> pb.ReportResponse:
        call = self.network.unary(self.process.address, methods.REPORT)
        return await call(pb.ReportRequest(), CALL_SECONDS)

    async def mutate(self, *batches: pb.MutationBatch) -> list[pb.MutationBatchResult]:
        call = self.network.unary(self.process.address, methods.MUTATE)
        return list((await call(pb.MutateRequest(batches=batches), CALL_SECONDS)).batches)

    async def put(self, tablet: int, epoch: int, rows: dict[bytes, bytes]) -> None:
        """Commits the rows; fails unless every one is acknowledged."""
        (result,) = await self.mutate(puts(tablet, epoch, rows))
        assert acknowledged(result) == len(rows), result

    async def rows(self, tablet: int, epoch: int) -> dict[bytes, bytes]:
        """All rows of the tablet, with their values."""
        call = self.network.stream(self.process.address, methods.SCAN)
        request = pb.ScanRequest(target=target(tablet, epoch), all_columns=True, timestamp=LATER)
        found: dict[bytes, bytes] = {}
        async for page in call(request, CALL_SECONDS):
            assert not page.HasField("error"), page.error
            found.update(zip(page.found.rows, page.found.values, strict=True))
        return found

    async def read(self, tablet: int, epoch: int, row: bytes) -> pb.ReadBatchResult:
        call = self.network.unary(self.process.address, methods.READ)
        read = pb.RowRead(row=row, columns=[COLUMN], timestamp=LATER)
        batch = pb.ReadBatch(target=target(tablet, epoch), reads=[read])
        return (await call(pb.ReadRequest(batches=[batch]), CALL_SECONDS)).batches[0]

    @property
    def network(self) -> GrpcNetwork:
        assert self._network is not None, "not started"
        return self._network

    async def _disconnect(self) -> None:
        if self._network is not None:
            await self._network.close()
            self._network = None


@asynccontextmanager
async def tablet_server(
    directory: Path, *flags: str, name: str = "server", store: Path | None = None
) -> AsyncIterator[TabletServer]:
    """A running tablet server; stopped at the end, whatever happens in between."""
    server = TabletServer(name, directory, store or directory / "store", *flags)
    try:
        await server.start()
        yield server
    finally:
        await server.stop()


async def said(server: TabletServer, event: str) -> None:
    """Waits until the server has logged the event."""
    while f'"{event}"' not in server.process.log.read_text():  # noqa: ASYNC110  # another process
        await asyncio.sleep(0.1)


def target(tablet: int, epoch: int) -> pb.TabletTarget:
    return pb.TabletTarget(tablet_id=tablet, epoch=epoch, schema_version=1)


def puts(tablet: int, epoch: int, rows: dict[bytes, bytes]) -> pb.MutationBatch:
    """Unconditional commits of these rows."""
    return pb.MutationBatch(
        target=target(tablet, epoch),
        mutations=[
            pb.Mutation(
                row=row,
                column=COLUMN,
                changes=[
                    pb.Change(
                        kind=pb.Change.KIND_PUT,
                        space=cells_pb2.SPACE_WRITE,
                        timestamp=COMMIT,
                        value=WriteRecord(START, RecordKind.PUT, value).encode(),
                    )
                ],
            )
            for row, value in rows.items()
        ],
    )


def acknowledged(result: pb.MutationBatchResult) -> int:
    """How many mutations of the batch were reported durable."""
    return result.mutations - len(result.unapplied)
