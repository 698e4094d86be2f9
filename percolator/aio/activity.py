"""Activity of this process, as its session tells others: see `percolator observers stats`.

The lock service bounds a report, so what matters least is left out: first the cells of observers,
then the cells of the process, then observers, those with the fewest runs first.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from percolator.errors import PercolatorError
from percolator.observers.watched import Counters
from percolator.observers.worker import Worker, known_observers
from percolator.protocol.environment import ContendedCells, Tally
from percolator.v1 import lockservice_pb2 as pb
from percolator.wire.lock_service import LockServiceCalls
from percolator.wire.sessions import ACTIVITY_BYTES_MAX

_CELLS = 8
_CELLS_OF_OBSERVER = 3
_ROW_BYTES = 512
_ASK_SECONDS = 2.0


class ProcessActivity:
    """Counts of one client and of its workers."""

    def __init__(self, lock_services: LockServiceCalls | None = None) -> None:
        """`lock_services`: where other processes tell what they do."""
        self.tally = Tally()
        self.workers: WeakSet[Worker] = WeakSet()
        self.lock_services = lock_services

    def report(self) -> pb.Activity:
        """For the lock service: within its limit."""
        report = pb.Activity(
            commits=self.tally.commits,
            conflicts=self.tally.conflicts,
            cells=_contended(self.tally.cells, _CELLS),
            observers=self._observers(),
        )
        if report.ByteSize() > ACTIVITY_BYTES_MAX:
            for one in report.observers:
                del one.cells[:]
        if report.ByteSize() > ACTIVITY_BYTES_MAX:
            del report.cells[:]
        while report.ByteSize() > ACTIVITY_BYTES_MAX:
            least = min(range(len(report.observers)), key=lambda at: report.observers[at].runs)
            del report.observers[least]
        return report

    async def running_observers(self) -> set[tuple[str, str]] | None:
        """The observers, by table and name, that run in any process of the cluster.

        None if that cannot be known: no answer, or a client that does not report its activity.
        Without a lock service, such as in memory, there is only this process.
        """
        found = {(one.table, one.observer) for one in self._observers()}
        if self.lock_services is None or not self.lock_services.addresses:
            return found
        listed = await self.lock_services.sessions_of_each(_ASK_SECONDS, activity=True)
        clients: list[pb.SessionInfo] = []
        for sessions in listed.values():
            if isinstance(sessions, PercolatorError):
                return None
            clients += [one.info for one in sessions if not one.info.pin]
        if not all(info.HasField("activity") for info in clients):
            return None
        return found.union(
            (one.table, one.observer) for info in clients for one in info.activity.observers
        )

    def _observers(self) -> Iterable[pb.ObserverActivity]:
        """An observer may be run by several workers of one process: they are told apart."""
        found = []
        for worker in list(self.workers):
            known = known_observers(worker) if worker.is_running else ()
            counters, backlog = worker.counters, worker.backlog
            found += [(name, counters[name], backlog[name]) for name in known]
        for name, done, waiting in sorted(found, key=lambda one: one[0]):
            yield _observer(name, done, waiting)


def _observer(name: tuple[str, str], counters: Counters, backlog: int) -> pb.ObserverActivity:
    table, observer = name
    return pb.ObserverActivity(
        table=table,
        observer=observer,
        runs=counters.runs,
        commits=counters.commits,
        conflicts=counters.conflicts,
        postponed=counters.postponed,
        failures=counters.failures,
        dead_letters=counters.dead_letters,
        backlog=backlog,
        latency_milliseconds=round(counters.latency_seconds * 1000),
        cells=_contended(counters.cells, _CELLS_OF_OBSERVER),
    )


def _contended(cells: ContendedCells, number: int) -> Iterable[pb.ContendedCell]:
    for cell, conflicts in cells.most(number):
        yield pb.ContendedCell(
            table_id=cell.table_id,
            row=cell.row[:_ROW_BYTES],
            column=cell.column,
            conflicts=conflicts,
        )
