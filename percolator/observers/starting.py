"""Starts a worker that may be earlier than its tables: it waits for what may come.

Its tables are created with its observers, so it misses nothing that is written before it notices
them.

Who deploys an application starts its programs in any order. So a worker is not refused because the
program that creates its tables has not run yet, or because no master answers right now. What no
waiting mends, such as another observer with the same name, is refused.
"""

from __future__ import annotations

from collections.abc import Callable

from percolator.errors import ExecutionUnknown, NotExecuted, SchemaError
from percolator.observers.worker import Worker, start_in_advance
from percolator.world import Clock

_AGAIN_SECONDS = 0.25


async def start_when_ready(worker: Worker, clock: Clock, say: Callable[[str], None]) -> None:
    """Returns when the worker runs. Meanwhile, `say` gets each new reason why it does not."""
    said = ""
    while True:
        try:
            await start_in_advance(worker)
        except (SchemaError, NotExecuted, ExecutionUnknown) as error:
            if str(error) != said:
                said = str(error)
                say(said)
            await clock.sleep(_AGAIN_SECONDS)
        else:
            return
