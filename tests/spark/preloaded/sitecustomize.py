"""What a daemon of Spark's imports before it forks. Python runs this file when it starts.

By itself, a daemon imports nothing, and each process that it forks imports the same again: two
thirds of what they cost in these tests, where most do little, and a step that fails ends its
process. Spark starts these daemons itself, so this folder is on the path of a session instead
(sessions.py). The processes of streaming sources are not forked, so nothing is imported for them.

What these tests show stays the same, for importing connects to nothing. The session with executors
of their own does without it: it shows that processes work that have imported nothing.
"""

from __future__ import annotations

import importlib
import os
import sys

DAEMON = "pyspark.daemon"
TASKS = "pyspark.worker"
USED_ONCE = ("pyspark.sql.worker.lookup_data_sources",)
"""Such a step finds the registered data sources, and imports none of them."""


def main() -> None:
    *_, worker = sys.orig_argv
    # Only a process with one thread forks safely. These two libraries would start more.
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"
    importlib.import_module(worker)
    if worker not in USED_ONCE:
        importlib.import_module("tests.spark.gated_source")
        importlib.import_module("percolator.spark.connections")
    if worker == TASKS:
        importlib.import_module("pandas")  # which those that write import by `pa.array`
    threads = len(os.listdir("/proc/self/task")) if sys.platform == "linux" else 1
    if threads != 1:
        raise SystemExit(f"{worker} would be forked from a process of {threads} threads")


if DAEMON in sys.orig_argv:
    main()
