"""How Python processes of a local session import less. Python runs this file when it starts.

Spark puts a zip of PySpark before all else on their path. It holds no bytecode, so each process
would compile whatever it imports of PySpark, which is most of what such a process costs. The same
files are installed in a folder, with bytecode.

By itself, a daemon imports nothing, and each process that it forks imports the same again: two
thirds of what they cost in these tests, where most do little, and a step that fails ends its
process. So a daemon imports before it forks. Spark starts these daemons itself, so this folder is
on the path of a session instead (sessions.py). The processes of streaming sources are not forked,
so nothing is imported for them.

What these tests show stays the same, for importing connects to nothing. The session with executors
of their own does without it: it shows that processes work as Spark starts them.
"""

from __future__ import annotations

import importlib
import os
import sys

DAEMON = "pyspark.daemon"
TASKS = "pyspark.worker"
EARLY = (
    "percolator.spark.connections",
    "percolator.spark.reader",
    "percolator.spark.writers",
    "tests.spark.gates",
    "uvloop",
)
EARLY_IN_TASKS = (
    "pandas",  # which those that write import by `pa.array`
    "pyarrow.pandas_compat",
    "pyspark.sql.worker.plan_data_source_read",
)
USED_ONCE = ("pyspark.sql.worker.lookup_data_sources",)
"""Such a step finds the registered data sources, and imports none of them."""
ZIPS = "/pyspark/python/lib/"
"""Where PySpark's zip is, and that of Py4J."""


def leave_out_zips() -> None:
    sys.path[:] = [entry for entry in sys.path if ZIPS not in entry]


def import_early() -> None:
    *_, worker = sys.orig_argv
    # Only a process with one thread forks safely. These two libraries would start more.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    ours = () if worker in USED_ONCE else EARLY
    for name in (worker, *ours, *(EARLY_IN_TASKS if worker == TASKS else ())):
        importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    if threads != 1:
        raise SystemExit(f"{worker} would be forked from a process of {threads} threads")


leave_out_zips()
if DAEMON in sys.orig_argv:
    import_early()
