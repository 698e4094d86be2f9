"""Writing weak notifications: those that a program asks for, without a change of the cell.

They are written for the observers that the table has at the timestamp: whoever was registered
before it has to hear of them. A client may know an older schema. A tablet compares versions, as it
does when a cell is committed. A row store cannot, but a timestamp comes with the catalogue's epoch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from percolator.errors import CellAddress, PercolatorError
from percolator.protocol import steps
from percolator.protocol.environment import Environment
from percolator.protocol.statistics import Statistics
from percolator.routing.cells import CellMutation


async def notify_weak_observers(
    env: Environment,
    cells: Sequence[CellAddress],
    timestamp: int,
    deadline: float,
    statistics: Statistics,
) -> None:
    """Notifies the weak observers of these cells, at a timestamp that this client has received.
    Tries until the deadline: what was written before is written again, and is the same."""
    backoff = env.backoff()
    await learn_schemas(env, (cell.table_id for cell in cells), deadline)
    while True:
        requests = []
        for table_id, row, column in cells:
            schema = await env.schema(table_id, deadline)
            observers = schema.weak_observers.get(column, ())
            if observers:
                step = steps.notify(row, column, timestamp, observers)
                requests.append(CellMutation(table_id, step, schema.version))
        if not requests:
            return
        statistics.round_trips += 1
        answers = await env.cells.mutate(requests, deadline)
        problem = next((one for one in answers if isinstance(one, PercolatorError)), None)
        if problem is None:
            return
        await env.refresh_schemas(requests, answers, deadline)
        if not await backoff.pause(deadline):
            raise problem


async def learn_schemas(env: Environment, table_ids: Iterable[int], deadline: float) -> None:
    """Asks for the schemas that may be older than the highest epoch of the catalogue that has come
    with a timestamp."""
    for table_id in set(table_ids):
        if not is_current(env, table_id):
            epoch = env.catalogue_epoch()
            await env.schemas.refresh(table_id, deadline)
            env.schemas_as_of[table_id] = max(epoch, env.schemas_as_of.get(table_id, 0))


def is_current(env: Environment, table_id: int) -> bool:
    """True if the schema is as young as the highest epoch that has come with a timestamp."""
    return env.schemas_as_of.get(table_id, 0) >= env.catalogue_epoch()
