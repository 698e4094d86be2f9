"""The driver, connected by TLS to a server of this process that checks who calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import NamedTuple

from percolator.bigtable.channel import BigtableNetwork
from percolator.bigtable.place import Place
from percolator.bigtable.store import BigtableStore
from percolator.bigtable.tables import create_table
from percolator.bigtable.tokens import Token, Tokens
from percolator.rowstore.layout import WRITES
from percolator.rowstore.port import Check, Selection, SetCell
from tests.doubles.bigtable_service import BigtableService, served

TABLE = 7
SECONDS = 10.0
NOTHING = Check((Selection(WRITES),), found=False)


class Account:
    """Gives the tokens that a test wants."""

    def __init__(self) -> None:
        self.tokens = ["valid"]
        self.asked = 0

    def __call__(self) -> Token:
        self.asked += 1
        return Token(self.tokens[0] if len(self.tokens) == 1 else self.tokens.pop(0), 3600.0)


class Connected(NamedTuple):
    service: BigtableService
    account: Account
    network: BigtableNetwork
    place: Place
    store: BigtableStore

    async def put(self, row: bytes, value: bytes = b"value") -> bool:
        change = SetCell(WRITES, b"ca", 1000, value)
        return await self.store.check_and_mutate(TABLE, row, NOTHING, (change,), SECONDS)

    def names(self, name: str) -> int:
        """How many calls of that name have arrived."""
        return sum(called == name for called, _ in self.service.calls)

    async def rows(self) -> list[bytes]:
        scan = self.store.scan(
            TABLE,
            b"",
            b"",
            (Selection(WRITES),),
            rows_max=0,
            reverse=False,
            timeout_seconds=SECONDS,
        )
        async with aclosing(scan) as rows:
            return [row.key async for row in rows]


@asynccontextmanager
async def connected() -> AsyncIterator[Connected]:
    service, account = BigtableService(), Account()
    async with served(service) as (address, certificate):
        network = BigtableNetwork(Tokens(account), certificate)
        place = Place(address, "my-project", "my-instance", "one_cluster")
        await create_table(network, place, TABLE, SECONDS)
        yield Connected(service, account, network, place, BigtableStore(network, place))
        await network.close()
