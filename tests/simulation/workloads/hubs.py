"""Edges between nodes, each of which carries the names of both: a node that many edges share.

Whoever adds an edge reads the names of two nodes and holds a read lock of each. Whoever renames a
node rewrites the names in all of its edges. Snapshots alone would allow an edge to be added with a
name that is being replaced: its cell is new, so the renaming neither reads nor writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tests.simulation.recorded_tx import Cells, RecordedTx
from tests.simulation.sessions import Session
from tests.simulation.workloads.workload import Ending, Workload, loading

_NODES = [b"a", b"h", b"p", b"z"]
_EDGES_MAX = 3
"""Between two nodes, so that there is always an edge to add, and a scan stays short."""


class Hubs(Workload):
    """Each edge carries the names that its nodes have."""

    locks = True

    def __init__(self) -> None:
        self.cells = Cells("hubs", (b"d", b"k"))
        self._name = self.cells.column()

    async def load(self, session: Session) -> None:
        await session.run(loading({node: b"first name of " + node for node in _NODES}, self.cells))

    async def step(self, session: Session) -> None:
        chance = session.random.random()
        if chance < 0.55:
            await self._add_edge(session)
        elif chance < 0.8:
            await self._rename(session)
        elif chance < 0.9:
            await self._remove_edges(session)
        else:
            await self._look(session)

    async def _add_edge(self, session: Session) -> None:
        one, other = sorted(session.random.sample(_NODES, 2))
        edge = b"%s-%s %d" % (one, other, session.random.randrange(_EDGES_MAX))
        reads_first = session.random.random() < 0.5

        async def body(tx: RecordedTx) -> None:
            if not reads_first:
                await self._lock(tx, (one, other))
            names = await tx.get_many([one, other], self._name)
            if reads_first:
                await self._lock(tx, (one, other))
            await tx.set(edge, self._name, _named(names[one], names[other]))

        await session.run(body)

    async def _lock(self, tx: RecordedTx, nodes: Iterable[bytes]) -> None:
        for node in nodes:
            await tx.lock(node, self._name, shared=True)

    async def _rename(self, session: Session) -> None:
        node, name = session.random.choice(_NODES), session.unique()
        locks_first = session.random.random() < 0.3

        async def body(tx: RecordedTx) -> None:
            if locks_first:
                await self._lock(tx, (node,))  # which the write below replaces
            rows = await self._consistent(session, tx)
            names = {row: rows[row] for row in _NODES} | {node: name}
            await tx.set(node, self._name, name)
            for row in rows:
                ends = _ends(row)
                if node in ends:
                    await tx.set(row, self._name, _named(*(names[end] for end in ends)))
                    for end in ends:
                        if end != node:
                            await self._lock(tx, (end,))

        await session.run(body)

    async def _remove_edges(self, session: Session) -> None:
        node = session.random.choice(_NODES)

        async def body(tx: RecordedTx) -> None:
            for row in await self._consistent(session, tx):
                if node in _ends(row):
                    await tx.delete(row, self._name)

        await session.run(body)

    async def _look(self, session: Session) -> None:
        """Reads everything, and with some luck commits nothing but read locks."""
        locked = session.random.sample(_NODES, session.random.randrange(3))

        async def body(tx: RecordedTx) -> None:
            await self._consistent(session, tx)
            await self._lock(tx, locked)

        await session.run(body)

    async def _consistent(self, session: Session, tx: RecordedTx) -> dict[bytes, bytes]:
        rows = {row: cells[b"v"] for row, cells in (await tx.scan(self.cells.table)).items()}
        for wrong in _wrong(rows):
            session.broken(wrong)
        return rows

    def check(self, ending: Ending) -> Iterable[str]:
        rows = ending.tables[self.cells.name]
        return _wrong({row: cells[b"v"] for row, cells in rows.items()})


def _ends(row: bytes) -> list[bytes]:
    """The nodes of an edge; none if the row is a node."""
    return row.partition(b" ")[0].split(b"-") if b"-" in row else []


def _named(one: bytes | None, other: bytes | None) -> bytes:
    return b"%s, %s" % (one or b"", other or b"")


def _wrong(rows: Mapping[bytes, bytes]) -> Iterable[str]:
    for row, names in rows.items():
        ends = _ends(row)
        if ends and names != _named(*(rows[end] for end in ends)):
            yield f"edge {row!r} is named {names!r}, its nodes {[rows[end] for end in ends]}"
