"""Executors that are processes of their own, on two hosts: killed, and raced by speculation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
import pytest

import percolator
from percolator.services.local.cluster import LocalCluster
from tests.spark.drivers import Driver, killed
from tests.spark.gates import Gates
from tests.spark.tables import CATALOG, Pages, Rows, keys

pytestmark = [
    pytest.mark.spark,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

ROWS = 400


def _plan(pages: Pages, cluster: LocalCluster) -> dict[str, Any]:
    rows = [(key, f"new {key}", 1) for key in keys(ROWS)]
    options = {"address": cluster.address, "table": pages.name, "catalog": CATALOG}
    return {"rows": rows, "mode": "overwrite", "options": options}


def _new() -> Rows:
    return {key: (f"new {key}", 1) for key in keys(ROWS)}


def _executor_of(worker: int) -> psutil.Process:
    """The executor that has started this Python worker."""
    parents = psutil.Process(worker).parents()
    return next(one for one in parents if "CoarseGrainedExecutorBackend" in " ".join(one.cmdline()))


def test_jobs_are_whole_though_tasks_run_twice_and_an_executor_is_killed(
    gates: Gates, db: percolator.Database, cluster: LocalCluster, tmp_path: Path
) -> None:
    """A task of the first job halts for good: speculation runs it again. When both tasks of the
    second job have locked some rows, the executor of one is killed."""
    slow, struck = Pages(db, 8), Pages(db, 8)
    first = f"{slow.name}.middle.0.0"
    tasks = [f"{struck.name}.middle.{task}" for task in (0, 1)]
    for gate in (first, f"{tasks[0]}.0", f"{tasks[1]}.0"):
        gates.close(gate)
    plans = [_plan(slow, cluster), _plan(struck, cluster)]
    with Driver(gates, tmp_path, writes=plans, cluster=True) as driver:
        attempts = {driver.halted(first), driver.halted(f"{slow.name}.middle.0.1")}
        assert len(attempts) == 2
        executors = [_executor_of(driver.halted(f"{task}.0")) for task in tasks]
        assert executors[0] != executors[1]
        assert killed(executors[1])
        gates.forget(f"{tasks[1]}.0")
        for task in tasks:
            gates.open(f"{task}.0")
        assert driver.ended() == {slow.name: "", struck.name: ""}
    # It ran again as attempt 1, or as attempt 0 of the whole stage, whose input was lost.
    assert gates.reached(f"{tasks[1]}.0") or gates.reached(f"{tasks[1]}.1")
    for pages in (slow, struck):
        assert pages.stored() == _new()
        assert len(driver.moments[pages.name]) == 2 * ROWS
        assert len(set(driver.moments[pages.name])) == 1
