"""Lists that grow at the end, in one cell each: the order of all commits can be read from them."""

from __future__ import annotations

from collections.abc import Iterable

from tests.isolation.history import Put
from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload

_ROWS = [b"list-%d" % number for number in range(4)]


class Appends(Workload):
    """A list holds exactly what was committed, in the order of commit."""

    def __init__(self) -> None:
        self.cells = Cells("appends", (_ROWS[2],))
        self._list = self.cells.column()

    async def step(self, session: Session) -> None:
        rows = session.random.sample(_ROWS, session.random.randint(1, 3))
        appends = session.random.random() < 0.75
        element = b"%x;" % session.random.getrandbits(32)

        async def body(tx: RecordedTx) -> None:
            lists = await tx.get_many(rows, self._list)
            if appends:
                for row, before in lists.items():
                    await tx.set(row, self._list, (before or b"") + element)

        await session.run(body)

    def check(self, ending: Ending) -> Iterable[str]:
        expected: dict[bytes, bytes] = dict.fromkeys(_ROWS, b"")
        commits = sorted(ending.committed(), key=lambda record: record.commit_ts)
        for record in commits:
            for operation in record.operations:
                if isinstance(operation, Put) and operation.key[0] == self.cells.name:
                    last = (
                        operation.value.rindex(b";", 0, -1) + 1
                        if b";" in operation.value[:-1]
                        else 0
                    )
                    expected[operation.key[1]] += operation.value[last:]
        for row, elements in expected.items():
            found = ending.tables[self.cells.name].get(row, {}).get(b"v", b"")
            if found != elements:
                yield f"{row!r} holds {found!r}, and {elements!r} was appended"
