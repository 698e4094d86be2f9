"""`python -m tests.soak [--minutes 30]`: does everything level off under a steady load?

A cluster of processes works for this long, while memory, descriptors, tasks and threads of each
process, the files of LevelDB and the latencies of all operations are sampled. History is kept for
seconds, so that what is stored has a size. The exit code is 1 if a series grows (`series.py`
says what that means), if the client read what it must not read, or if a process logged a bug.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table as Screen

from percolator.services.local.cluster import LocalCluster
from percolator.world import Random
from tests.soak import client
from tests.soak.client import TABLES
from tests.soak.series import Judged, Sampler, Samples, growing, write_verdict

# What disturbs a soak run at intervals: restarts, kills and moves, as in the life of any cluster.
#
# Only some processes are restarted. The others live as long as the run, and see all the comings and
# goings, connections and sessions of dead peers, from which leaks come.

RESTARTED = ("tabletserver-3", "gateway-2", "worker-2", "master-2", "oracle-2")
_COMMAND_SECONDS = 60.0


class NoEffect(Exception):
    """A disturbance was refused."""


class Disturbances:
    """Faults one after another, in the same order in every run."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._random = Random("disturbances")
        self.injected: Counter[str] = Counter()
        self._next = self._turns()

    def inject(self) -> None:
        """The next disturbance. Returns when what was restarted serves again. It blocks."""
        name, disturb = next(self._next)
        disturb()
        self.injected[name] += 1

    def missing(self) -> list[str]:
        """The kinds that have not occurred."""
        return [kind for kind in ("move", "restart", "kill -9") if not self.injected[kind]]

    def _turns(self) -> Iterator[tuple[str, Callable[[], None]]]:
        victims = itertools.cycle(RESTARTED)
        while True:
            yield "move", self._move
            yield "restart", lambda: self._restart(next(victims))
            yield "move", self._move
            yield "kill -9", lambda: self._kill(next(victims))

    def _restart(self, name: str) -> None:
        process = self._cluster.processes[name]
        process.ask_to_stop()
        process.wait_stopped()
        self._cluster.restart(name)

    def _kill(self, name: str) -> None:
        self._cluster.processes[name].kill()
        self._cluster.restart(name)

    def _move(self) -> None:
        """Moves some tablet between the two tablet servers that are never restarted."""
        servers = [self._cluster.processes[f"tabletserver-{n}"].address for n in (1, 2)]
        names = [table.name for table, _ in TABLES]
        tablet = self._random.choice(
            [
                one
                for one in self._asked("tablets")
                if one["table"] in names and one["address"] in servers
            ]
        )
        (target,) = (one for one in servers if one != tablet["address"])
        self._asked("tablets", "move", str(tablet["tablet_id"]), "--to", target)

    def _asked(self, *arguments: str) -> list[dict[str, str]]:
        done = subprocess.run(
            [
                *(sys.executable, "-m", "percolator.cli", "--json"),
                *("--address", self._cluster.address, "--timeout", "30", *arguments),
            ],
            capture_output=True,
            text=True,
            timeout=_COMMAND_SECONDS,
            check=False,
        )
        if done.returncode:
            raise NoEffect(f"percolator {' '.join(arguments)}: {done.stderr or done.stdout}")
        found: list[dict[str, str]] = json.loads(done.stdout)
        return found


SETTINGS = {
    "PERCOLATOR_MASTER_COLLECTION_SECONDS": "2",
    "PERCOLATOR_MASTER_RETENTION_SECONDS": "10",
    "PERCOLATOR_MASTER_RETENTION_MIN_SECONDS": "1",
    "PERCOLATOR_LOCKSERVICE_TTL_MILLISECONDS_MAX": "5000",
    # What fills up slowly by design is made small, so that it is full soon.
    "PERCOLATOR_GATEWAY_TRANSACTIONS_REMEMBERED_MAX": "1000",
    # A tablet's buffer, and LevelDB's log of it, would take minutes to fill after each move.
    "PERCOLATOR_TABLETSERVER_WRITE_BUFFERS_BYTES": str(128 << 10),
    "PERCOLATOR_TABLETSERVER_BLOCK_CACHES_BYTES": str(2 << 20),
}
OUT = Path(__file__).parents[2] / "var" / "soak"
SAMPLES = 300
SAMPLE_SECONDS_MIN = 1.0
DISTURBANCES = 40
DISTURBANCE_SECONDS_MIN = 10.0
CLIENT_STOP_SECONDS = 60.0
_BUGS = ("InvariantViolation", "never retrieved", "Fatal Python error")

console = Console(width=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if not 1 <= given.minutes < math.inf:  # which nan is not, either
        parser.error(f"--minutes: expected a number from 1 on, got {given.minutes:g}")
    given.out.mkdir(parents=True, exist_ok=True)
    os.environ.update(SETTINGS)
    with tempfile.TemporaryDirectory(prefix="percolator-soak-") as data:
        return Soak(Path(data), given.out, given.minutes * 60).run()


class Soak:
    """One run."""

    def __init__(self, data: Path, out: Path, seconds: float) -> None:
        self._out = out
        self._seconds = seconds
        self._interval = max(SAMPLE_SECONDS_MIN, seconds / SAMPLES)
        self._report = data / "client.jsonl"
        self._samples = Samples()
        self._problems: list[str] = []
        self._cluster = LocalCluster(
            data / "cluster",
            tablet_servers=3,
            masters=2,
            oracles=2,
            gateways=2,
            workers=2,
            observers=["tests.soak.client:observers"],
        )
        self._disturbances = Disturbances(self._cluster)

    def run(self) -> int:
        """Returns the exit code."""
        with self._cluster as cluster:
            asyncio.run(client.prepare(cluster.address))
            cluster.wait_workers()
            began = time.monotonic()
            sampler = Sampler(cluster, self._report, self._samples, began)
            with self._working() as process:
                self._watch(sampler, process, began)
        self._problems += self._bugs()
        judged = self._samples.judged()
        self._problems += growing(judged)
        self._tell(sampler, judged)
        return 1 if self._problems else 0

    @contextlib.contextmanager
    def _working(self) -> Iterator[subprocess.Popen[bytes]]:
        """The client process; its end is judged as well."""
        settings = client.Settings(
            self._cluster.address, self._cluster.gateway_address, str(self._report), self._interval
        )
        log = self._out / "client.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.client", settings.argument()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        try:
            yield process
            process.terminate()
            code = process.wait(CLIENT_STOP_SECONDS)
        finally:
            process.kill()
            process.wait()
        if code:
            lines = log.read_text(errors="replace").splitlines()
            # The last line of a group of exceptions is only its frame.
            words = [line.strip(" |") for line in lines if any(map(str.isalpha, line))]
            self._problems.append(f"the client exited with {code}: {''.join(words[-1:])}")

    def _watch(self, sampler: Sampler, process: subprocess.Popen[bytes], began: float) -> None:
        """Samples and disturbs until the time is up, or the client has ended by itself."""
        pause = max(DISTURBANCE_SECONDS_MIN, self._seconds / DISTURBANCES)
        next_fault, number = began + 2 * pause, 0
        while (now := time.monotonic()) < began + self._seconds and process.poll() is None:
            sampler.sample(now - began)
            if now >= next_fault:
                next_fault += pause
                try:
                    self._disturbances.inject()
                except NoEffect as error:
                    console.print(f"[dim]{escape(str(error))}[/dim]")
            number = max(number + 1, round((time.monotonic() - began) / self._interval))
            time.sleep(max(0.0, began + number * self._interval - time.monotonic()))
        sampler.sample(time.monotonic() - began)
        self._problems += [f"no {kind} has occurred" for kind in self._disturbances.missing()]

    def _bugs(self) -> Iterator[str]:
        for name, text in self._cluster.logs().items():
            for line in text.splitlines():
                if any(words in line for words in _BUGS):
                    yield f"{name}: {line[:300]}"

    def _tell(self, sampler: Sampler, judged: list[Judged]) -> None:
        self._samples.write_csv(self._out / "samples.csv")
        write_verdict(self._out / "verdict.json", judged, self._problems)
        screen = Screen("series", "samples", "middle third", "last third", "", box=None)
        for one in judged:
            found = one.judgement
            if found.is_judged:
                verdict = "grows" if found.grows else "levels off"
                figures = (f"{found.middle:,.1f}", f"{found.last:,.1f}", verdict)
            else:
                figures = ("", "", "too few to judge")
            screen.add_row(str(one.key), str(found.points), *figures)
        console.print(screen)
        console.print(f"done: {dict(sampler.done)}")
        console.print(f"refused by a cluster that was disturbed: {dict(sampler.failed)}")
        console.print(f"disturbances: {dict(self._disturbances.injected)}")
        console.print(f"samples without an answer: {dict(sampler.unanswered)}")
        console.print(f"{len(self._samples):,} samples: {self._out}")
        for problem in self._problems:
            console.print(f"[red]{escape(problem)}[/red]")


if __name__ == "__main__":
    sys.exit(main())
