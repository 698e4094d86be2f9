"""Accounts among which money moves, and audits that must always find the same sum.

Audited by reading every account and by scanning, in transactions that also write and in ones that
only read. An emptied account is closed: its row is deleted, and another transfer opens it again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload, loading

ACCOUNTS = [b"account-%02d" % number for number in range(12)]
OPENING = 10
TOTAL = OPENING * len(ACCOUNTS)


class Bank(Workload):
    """Money is neither made nor lost."""

    def __init__(self) -> None:
        self.cells = Cells("bank", (ACCOUNTS[4], ACCOUNTS[8]))
        self._balance = self.cells.column()

    async def load(self, session: Session) -> None:
        await session.run(loading(dict.fromkeys(ACCOUNTS, b"%d" % OPENING), self.cells))

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        if chance < 0.7:
            await self._transfer(session)
        elif chance < 0.85:
            await self._audit(session, by_scan=False)
        else:
            await self._audit(session, by_scan=True)

    async def _transfer(self, session: Session) -> None:
        source, target = session.random.sample(ACCOUNTS, 2)
        amount = session.random.randint(1, 5)

        async def body(tx: RecordedTx) -> None:
            balances = await tx.get_many([source, target], self._balance)
            has = int(balances[source] or b"0")
            moved = min(amount, has)
            if not moved:
                return
            if has == moved:
                await tx.delete(source, self._balance)
            else:
                await tx.set(source, self._balance, b"%d" % (has - moved))
            await tx.set(target, self._balance, b"%d" % (int(balances[target] or b"0") + moved))

        await session.run(body)

    async def _audit(self, session: Session, *, by_scan: bool) -> None:
        async def body(tx: RecordedTx) -> None:
            if by_scan:
                rows = await tx.scan(self.cells.table, reverse=session.random.random() < 0.3)
                found = sum(int(value) for row in rows.values() for value in row.values())
            else:
                found = _sum(await tx.get_many(ACCOUNTS, self._balance))
            if found != TOTAL:
                session.broken(f"an audit found {found} of {TOTAL}")

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        found = sum(int(row[b"v"]) for row in ending.tables[self.cells.name].values())
        if found != TOTAL:
            yield f"at the end the bank holds {found} of {TOTAL}"


def _sum(values: Mapping[bytes, bytes | None]) -> int:
    return sum(int(value or b"0") for value in values.values())
