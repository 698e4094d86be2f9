"""The Python processes that Spark starts, as far as the library knows them."""

from __future__ import annotations

import gc
import os

_RUNTIME, _PYTHON_WORKER = "SPARK_PYTHON_RUNTIME", "PYTHON_WORKER"
"""What Spark sets in their environment."""


def leave_out_of_collections() -> None:
    """Garbage collections skip everything that exists by now, if this is a process of Spark's.

    Spark collects all garbage of such a process after each task, and after each step of planning.
    That takes 20 to 40 ms, nearly all of it for code that stays.
    """
    if os.environ.get(_RUNTIME) == _PYTHON_WORKER:
        gc.freeze()
