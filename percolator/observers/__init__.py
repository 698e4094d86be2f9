"""Observers: functions that the store runs when a column they watch has changed.

@observes(contents)
async def index(tx, row): ...

async with db.run_observers([index]): ...
"""

from percolator.observers.definition import Observer, observes
from percolator.observers.loading import load
from percolator.observers.worker import Worker, WorkerLimits

__all__ = ["Observer", "Worker", "WorkerLimits", "load", "observes"]
