"""`python -m tests.simulation.course DIRECTORY`: writes down the courses of a few harsh scenarios.

There is a file for each scenario, and a line for each message: the time, the sender, the receiver,
the content, and the fault. If two processes write different files, something depends on more than
the seed.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation import cluster
from tests.simulation.network import Fault, Link, Wire
from tests.simulation.run import simulate
from tests.simulation.scenario import Kind, Scenario, harsh

_TRANSACTIONS = 60
_OBJECTS_PER_HASH_SEED = 20_011


def _scenario(
    seed: int, *kinds: Kind, workload: str, seconds_max: float, with_master: bool = True
) -> Scenario:
    found = harsh(seed, kinds, workload=workload, seconds_max=seconds_max)
    return replace(found, with_master=with_master, transactions=_TRANSACTIONS)


SCENARIOS = {
    "killed": _scenario(1, Kind.PAUSE, Kind.CRASH, workload="chains", seconds_max=5.0),
    "cut off": _scenario(
        6, Kind.PAUSE, Kind.ONE_WAY, workload="chains", seconds_max=15.0, with_master=False
    ),
    "taken over": _scenario(0, Kind.TAKEOVER, Kind.PAUSE, workload="bank", seconds_max=5.0),
    "everything": _scenario(3, *Kind, workload="loads", seconds_max=3.0),
}
"""Mostly with pauses: a late process gives up much at once, and the order shows in what follows."""


class _WatchedWire(Wire):
    """A wire that writes down everything that it carries."""

    lines: list[str]

    def fate(self, link: Link, path: str, payload: bytes, *, is_reply: bool) -> Fault | None:
        fault = super().fate(link, path, payload, is_reply=is_reply)
        content = f"{len(payload)} bytes {zlib.crc32(payload):08x}"
        self.lines.append(f"{self.loop.now!r} {link} {path} {is_reply=} {content}: {fault}")
        return fault

    def carry(
        self,
        link: Link,
        arrive: Callable[..., None],
        *arguments: object,
        late: bool = False,
        not_before: float = 0.0,
    ) -> float:
        arrival = super().carry(link, arrive, *arguments, late=late, not_before=not_before)
        self.lines.append(f"{self.loop.now!r} {link} {arrive.__name__} at {arrival!r}")
        return arrival


def course(scenario: Scenario) -> list[str]:
    """All messages of a run, and the verdict."""
    lines: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_WatchedWire, "lines", lines, raising=False)
        patch.setattr(cluster, "Wire", _WatchedWire)
        verdict = simulate(scenario)
    return [*lines, *map(repr, verdict.history), *verdict.problems]


def main() -> None:
    directory = Path(sys.argv[1])
    # Otherwise two processes would have the same memory layout, and the same order of their sets.
    held = [object() for _ in range(int(os.environ["PYTHONHASHSEED"]) * _OBJECTS_PER_HASH_SEED)]
    del held[::3]
    for name, scenario in SCENARIOS.items():
        directory.joinpath(name).write_text("\n".join(course(scenario)))


if __name__ == "__main__":
    main()
