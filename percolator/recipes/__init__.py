"""Recipes: what pipelines need beyond observers, made of transactions and observers only.

Each method is written once, as a private coroutine; `percolator/decorators.py` runs it for both
APIs. Read that first.

    combine_queue.py      values that many writers combine, without conflicts
    sharded_counter.py    counters without a worker, with few conflicts
    export_queue.py       values that leave the store, in order; with effects exactly once, in files
                          and in PostgreSQL
    index.py              secondary indexes

`queue.py` is the base of queues, with their rows.

A recipe has a table of its own. Nothing here is part of the protocol: a recipe does nothing that a
program could not do.
"""

from percolator.recipes.combine_queue import CombineQueue, KeyChange
from percolator.recipes.export_queue import Export, ExportedOnce, ExportFile, ExportQueue
from percolator.recipes.index import Index
from percolator.recipes.sharded_counter import ShardedCounter

__all__ = [
    "CombineQueue",
    "Export",
    "ExportFile",
    "ExportQueue",
    "ExportedOnce",
    "Index",
    "KeyChange",
    "ShardedCounter",
]
