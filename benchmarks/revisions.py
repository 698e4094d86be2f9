"""make bench-revisions: this revision and an earlier one, in turns on the same machine.

The earlier one is checked out into a temporary directory. Both run the same programs
(benchmarks/any_revision), each on a cluster of its own processes; medians of several rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks.report import Report

ROOT = Path(__file__).parents[1]
PROGRAMS = Path(__file__).parent / "any_revision"
REVISION = "27d3539"
"""The last one before losers took turns, and before commits in one round."""
PROGRAM_NAMES = {
    "storm": "increment of 5 cells, 20 threads",
    "chain": "run of an observer, chain of three",
}
ROUNDS = 3
STORM_CPU_MUST = 0.25
CHAIN_RATE_MUST = 1.5
_LIMIT_SECONDS = 200.0

Measured = dict[str, float]


@contextmanager
def checked_out(revision: str) -> Iterator[Path]:
    """The sources of a revision, with its protos compiled."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "earlier"
        archive = subprocess.run(
            ["git", "archive", revision], cwd=ROOT, check=True, capture_output=True
        ).stdout
        path.mkdir()
        subprocess.run(["tar", "-x"], cwd=path, check=True, input=archive)
        protos = sorted(str(one.relative_to(path)) for one in path.glob("protos/percolator/v1/*"))
        subprocess.run(
            [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "--python_out=.", *protos],
            cwd=path,
            check=True,
        )
        yield path


def run(program: str, release: Path) -> Measured:
    """What the program measures with the library in that directory, and with the services there.

    Services are started from that directory, too: those of earlier revisions look for their code in
    the working directory first, so they would be this revision's if we stayed here.
    """
    done = subprocess.run(
        [sys.executable, "-P", PROGRAMS / f"{program}.py"],
        cwd=release,
        env={**os.environ, "PYTHONPATH": f"{release}{os.pathsep}{PROGRAMS}"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{program} with {release} failed:\n{done.stderr}")
    found: Measured = json.loads(done.stdout)
    return found


def compare(report: Report, program: str, what: str, revision: str, earlier: Path) -> None:
    """Adds the figures of both sides, and their ratios."""
    sides = {f"revision {revision}": earlier, "this revision": ROOT}
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, release in sides.items():
            print(f"measuring: {program}, {side}", flush=True)
            found[side].append(run(program, release))
    rates, costs = [], []
    for side, rounds in found.items():
        rates.append(median(one["operations"] / one["seconds"] for one in rounds))
        costs.append(median(one["cpu_seconds"] / one["operations"] for one in rounds))
        runs = median(one["runs"] / one["operations"] for one in rounds)
        report.add(f"{what}, {side}", rates[-1], "/s")
        report.add("    runs for each commit", runs, "times")
        report.add("    CPU of all processes, for each", costs[-1] * 1e6, "µs")
    is_storm = program == "storm"
    report.add(
        f"CPU: {what}, this revision / {revision}",
        costs[1] / costs[0],
        "×",
        must=STORM_CPU_MUST if is_storm else None,
    )
    report.add(
        f"rate: {what}, this revision / {revision}",
        rates[1] / rates[0],
        "×",
        must=None if is_storm else CHAIN_RATE_MUST,
        at_least=not is_storm,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("--revision", default=REVISION, help=f"the earlier one ({REVISION})")
    parser.add_argument("--only", choices=PROGRAM_NAMES, help="this program, and write no file")
    options = parser.parse_args()
    report = Report("revisions")
    with checked_out(options.revision) as earlier:
        for program, what in PROGRAM_NAMES.items():
            if options.only in (None, program):
                compare(report, program, what, options.revision, earlier)
    return report.show() if options.only else report.finish()


if __name__ == "__main__":
    sys.exit(main())
