"""What disturbs a soak run at intervals: restarts, kills and moves, as in the life of any cluster.

Only some processes are restarted. The others live as long as the run, and see all the comings and
goings, connections and sessions of dead peers, from which leaks come.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator

from percolator.services.local.cluster import LocalCluster
from percolator.world import Random
from tests.soak.client import TABLES

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
