"""Refuses `saveAsTable`, `writeTo(...).create()` and the like, before a row is written.

They make a table in Spark's own catalog as well, which cannot be read: Spark keeps none of its
options. Spark 4.3 gives a data source the same options, schema and mode for them as for `save()`.
One thing differs: they run the write as a second execution inside that of their command, and tasks
are told both (`SQLExecution.EXECUTION_ROOT_ID_KEY`). A task fails here, so the job writes nothing,
and Spark removes the table that it had begun.

A batch of `foreachBatch` runs inside the execution of its query, too. So nothing is refused there.
"""

from __future__ import annotations

from pyspark import TaskContext

from percolator.errors import UsageError

_EXECUTION = "spark.sql.execution.id"
_ROOT_EXECUTION = "spark.sql.execution.root.id"
_STREAMING_QUERY = "sql.streaming.queryId"


def refuse_created_table() -> None:
    """Raises `UsageError` in a task that writes for more than `save()`."""
    task = TaskContext.get()
    if task is None or task.getLocalProperty(_STREAMING_QUERY) is not None:
        return
    own, root = task.getLocalProperty(_EXECUTION), task.getLocalProperty(_ROOT_EXECUTION)
    if own is None or root is None or own == root:
        return
    raise UsageError(
        "nothing was written: saveAsTable and create() also make a table in Spark's catalog, which "
        "could not be read, because Spark does not keep the options of a Python data source there; "
        'use write.format("percolator").options(...).mode("append").save()'
    )
