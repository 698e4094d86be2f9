"""An observer that is registered in the midst of the trouble, and that no worker runs.

Once its registration has returned, every commit of its columns has to notify it, whichever client
sends it and whatever that client knows. Since no worker runs it, all its notifications are still
there at the end.
"""

from __future__ import annotations

from collections.abc import Iterator

from percolator.aio import Database
from percolator.aio.observing import worker_context
from percolator.errors import PercolatorError
from percolator.formats.records import RecordKind
from percolator.observers.definition import Observer
from percolator.v1 import master_pb2
from percolator.world import World
from tests.isolation.stored_cells import StoredCells

NAME = "late"
_AGAIN_SECONDS = 0.2
_CHANGES = (RecordKind.PUT, RecordKind.PUT_IN_DATA, RecordKind.DELETE)


class LateObserver:
    """An observer of everything that these observers observe."""

    def __init__(self, observers: list[Observer]) -> None:
        strong = [one for one in observers if not one.weak]
        self._table = strong[0].table.name
        self._columns = {
            column.name
            for one in strong
            for column in one.columns
            if column.table.name == self._table
        }
        self._since: int | None = None
        """A timestamp that was taken after the registration had returned."""
        self._problem: PercolatorError | None = None
        """Why the last attempt failed."""

    async def register(self, world: World, database: Database) -> None:
        """Tries until it succeeds. The observer is paused, so that nothing waits for it."""
        context = worker_context(database.internal.engine)
        observer = master_pb2.Observer(name=NAME, columns=sorted(self._columns))
        request = master_pb2.ChangeObserversRequest(table=self._table, add=[observer], pause=[NAME])
        while self._since is None:
            try:
                await context.catalog.change_observers(request, context.deadline())
                self._since = await context.env.timestamps.get(timeout_seconds=10.0)
            except PercolatorError as error:
                self._problem = error
                await world.clock.sleep(_AGAIN_SECONDS)

    def missed(self, stored: StoredCells) -> Iterator[str]:
        """Changes after the registration that did not notify it."""
        if self._since is None:
            yield f"an observer is not registered on a healed cluster, last {self._problem!r}"
            return
        for key, commits in stored.commits.items():
            if key[0] != self._table or key[2] not in self._columns:
                continue
            notified = set(stored.notifications.get(key, ()))
            for commit in commits:
                is_late = commit.commit_ts > self._since and commit.record.kind in _CHANGES
                if is_late and (NAME, commit.commit_ts) not in notified:
                    yield (
                        f"{key} was changed at {commit.commit_ts}, after an observer was "
                        f"registered at {self._since}, and did not notify it"
                    )
