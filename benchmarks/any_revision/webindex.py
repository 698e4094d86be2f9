"""Changed documents of a loaded web index, written as fast as possible, until all that follows from
them is done. Run by benchmarks/revisions.py with the library and the pipeline of any revision in
PYTHONPATH, so it uses only what all of them have. Takes the number of documents; prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

from examples.webindex.crawl import Crawl
from examples.webindex.load import Crawling
from percolator import aio
from percolator.services.local.cluster import LocalCluster

CHANGES = 4_000
"""Work for many seconds: that all of it is done is noticed up to a second late."""
TABLETS = 4
OBSERVERS = "examples.webindex.observers:observers"


def load(address: str, documents: int) -> None:
    """Loads the repository, as observers would leave it, in a process that may use much memory."""
    command = [sys.executable, "-P", "-m", "examples.webindex.initial", "--address", address]
    command += ["--documents", str(documents), "--tablets", str(TABLETS)]
    subprocess.run(command, check=True, stdout=sys.stderr)


async def change(address: str, documents: int, cpu: Callable[[], float]) -> tuple[float, float]:
    """The seconds until all is done, and the CPU of these."""
    crawl = Crawl(documents)
    numbers = Random(1).sample(range(documents), CHANGES)
    changed = [crawl.document(number, 1) for number in numbers]
    async with aio.connect(address) as db:
        used, began = cpu(), time.perf_counter()
        await Crawling(db, None).write_all((one.url, one.body) for one in changed)
        quiet = await db.wait_for_observers()
        seconds, used = time.perf_counter() - began, cpu() - used
    if quiet.dead_letters:
        raise RuntimeError(f"observers failed: {dict(quiet.dead_letters)}")
    return seconds, used


def main() -> int:
    documents = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as directory:
        cluster = LocalCluster(Path(directory), tablet_servers=1, workers=1, observers=[OBSERVERS])
        with cluster:
            worker = cluster.processes["worker"]
            worker.kill()
            load(cluster.address, documents)
            worker.start()
            cluster.wait_workers()
            clocks = [~one.pid << 3 | 2 for one in cluster.processes.values()]
            seconds, cpu = asyncio.run(
                change(cluster.address, documents, lambda: sum(map(time.clock_gettime, clocks)))
            )
    measured = {
        "operations": CHANGES,
        "runs": CHANGES,
        "seconds": seconds,
        "cpu_seconds": cpu,
    }
    print(json.dumps(measured))
    return 0


if __name__ == "__main__":
    sys.exit(main())
