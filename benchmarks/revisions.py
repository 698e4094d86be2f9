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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.report import Report

ROOT = Path(__file__).parents[1]
GENERATOR = ROOT / ".venv/protos/bin/python"
PROGRAMS = Path(__file__).parent / "any_revision"
REVISION = "27d3539"
"""The last one before losers took turns, and before commits in one round."""
ROUNDS = 3
DOCUMENTS = 20_000
LEAST_DOCUMENTS = 4_000
"""any_revision/webindex.py changes so many different ones."""
STORM_CPU_MUST = 0.25
CHAIN_RATE_MUST = 1.5
WEB_INDEX_RATE_MUST = 3.0
_LIMIT_SECONDS = 600.0

Measured = dict[str, float]


@dataclass(frozen=True)
class Part:
    """One program of both revisions."""

    program: str
    what: str
    arguments: Sequence[str] = ()
    cpu_must: float | None = None
    """At most this much of the earlier revision's CPU for each."""
    rate_must: float | None = None
    """At least this many times the earlier revision's rate."""


def parts(documents: int) -> list[Part]:
    web_index = f"change of the web index, {documents:,} documents"
    return [
        Part("storm", "increment of 5 cells, 20 threads", cpu_must=STORM_CPU_MUST),
        Part("chain", "run of an observer, chain of three", rate_must=CHAIN_RATE_MUST),
        Part("webindex", web_index, (str(documents),), rate_must=WEB_INDEX_RATE_MUST),
    ]


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
            [GENERATOR, "-m", "grpc_tools.protoc", "-Iprotos", "--python_out=.", *protos],
            cwd=path,
            check=True,
        )
        yield path


def run(part: Part, release: Path) -> Measured:
    """Figures of the program with the library in that directory, and with the services there.

    Services are started from that directory, too: those of earlier revisions look for their code in
    the working directory first, so they would be this revision's if we stayed here.
    """
    done = subprocess.run(
        [sys.executable, "-P", PROGRAMS / f"{part.program}.py", *part.arguments],
        cwd=release,
        env={**os.environ, "PYTHONPATH": f"{release}{os.pathsep}{PROGRAMS}"},
        capture_output=True,
        text=True,
        timeout=_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{part.program} with {release} failed:\n{done.stderr}")
    found: Measured = json.loads(done.stdout)
    return found


def compare(report: Report, part: Part, revision: str, earlier: Path) -> None:
    """Adds the figures of both sides, and their ratios."""
    sides = {f"revision {revision}": earlier, "this revision": ROOT}
    what = part.what
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(ROUNDS):
        for side, release in sides.items():
            print(f"measuring: {part.program}, {side}", flush=True)
            found[side].append(run(part, release))
    rates, costs = [], []
    for side, rounds in found.items():
        rates.append(median(one["operations"] / one["seconds"] for one in rounds))
        costs.append(median(one["cpu_seconds"] / one["operations"] for one in rounds))
        runs = median(one["runs"] / one["operations"] for one in rounds)
        report.add(f"{what}, {side}", rates[-1], "/s")
        report.add("    runs for each commit", runs, "times")
        report.add("    CPU of all processes, for each", costs[-1] * 1e6, "µs")
    report.add(
        f"CPU: {what}, this revision / {revision}",
        costs[1] / costs[0],
        "×",
        must=part.cpu_must,
    )
    report.add(
        f"rate: {what}, this revision / {revision}",
        rates[1] / rates[0],
        "×",
        must=part.rate_must,
        at_least=part.rate_must is not None,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.revisions", description=__doc__)
    parser.add_argument("--revision", default=REVISION, help=f"the earlier one ({REVISION})")
    parser.add_argument(
        "--documents", type=int, default=DOCUMENTS, help="in the web index (%(default)s)"
    )
    names = [part.program for part in parts(DOCUMENTS)]
    parser.add_argument("--only", choices=names, help="this program, and write no file")
    options = parser.parse_args()
    if options.documents < LEAST_DOCUMENTS:
        parser.error(f"--documents: expected {LEAST_DOCUMENTS} or more, found {options.documents}")
    report = Report("revisions")
    with checked_out(options.revision) as earlier:
        for part in parts(options.documents):
            if options.only in (None, part.program):
                compare(report, part, options.revision, earlier)
    return report.show() if options.only else report.finish()


if __name__ == "__main__":
    sys.exit(main())
