"""python -m tests.fuzz --seconds 60 [--seed 7] | --replay var/fuzz/FILE: `make fuzz`.

Without --seed it takes another one each time, and prints it. The exit code is 1 if anything was
found, if a method was never called with a request that got past all checks, or if some kind of
input was never made. A failing input is kept in var/fuzz.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys
import tempfile
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.fuzz.calls import KINDS
from tests.fuzz.findings import Input, Record
from tests.fuzz.methods import METHODS
from tests.fuzz.run import fuzz, replay, replay_guided, run_guided
from tests.fuzz.targets import TARGETS, fuzz_files, judged

_SEED_BITS = 31
_WIDTH = 140
_GUIDED_SHARE, _FILES_SHARE = 0.2, 0.15
"""Shares of the time; the cluster has the rest."""

_ON_ROWS = "the cluster has tablet servers; judging.py gives these to one on a row store"
UNREACHED = {
    f"/percolator.v1.{name}": _ON_ROWS
    for name in (
        "MasterService/BeginLoad",
        "MasterService/PublishLoads",
        "MasterService/AbandonLoad",
        "RowStoreService/CheckAndMutateRow",
        "RowStoreService/MutateRows",
        "RowStoreService/ReadRows",
        "RowStoreService/SampleRowKeys",
    )
}
"""Methods that no request gets past all checks of, with the reason."""


def main() -> int:
    arguments = _arguments()
    console = Console(highlight=False, width=_WIDTH)
    record = Record()
    with tempfile.TemporaryDirectory(prefix="percolator-fuzz-") as temporary:
        directory = Path(temporary)
        if arguments.replay:
            _replay(arguments.replay, directory, record)
        else:
            seed = secrets.randbits(_SEED_BITS) if arguments.seed is None else arguments.seed
            console.print(f"again: make fuzz FUZZ_SECONDS={arguments.seconds} FUZZ_SEED={seed}")
            _run(arguments.seconds, seed, directory, record, console)
            _show(record, console)
            _require_all(record)
    for what, file in record.keep().items():
        console.print(f"found: {what}", style="red", markup=False)
        if file is not None:
            console.print(f"  again: .venv/bin/python -m tests.fuzz --replay {file}")
    if not record.found:
        console.print("[green]nothing was found[/green]")
    return 1 if record.found else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="how long, start and end apart")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--replay", type=Path, metavar="FILE", help="one kept input")
    arguments = parser.parse_args()
    if arguments.seconds < 1:
        parser.error("--seconds has to be at least 1")
    return arguments


def _run(seconds: int, seed: int, directory: Path, record: Record, console: Console) -> None:
    share = max(1, round(seconds * _GUIDED_SHARE))
    for said in run_guided(directory / "guided", record, seconds=share, seed=seed):
        console.print(said)
    files = directory / "files"
    files.mkdir()
    fuzz_files(files, record, seconds=seconds * _FILES_SHARE, seed=seed)
    rest = seconds * (1 - _GUIDED_SHARE - _FILES_SHARE)
    for said in asyncio.run(fuzz(directory, record, seconds=rest, seed=seed)):
        console.print(said)


def _replay(file: Path, directory: Path, record: Record) -> None:
    several = [Input.from_json(line) for line in file.read_text().splitlines()]
    one = several[0]
    if one.target in TARGETS:
        judged(TARGETS[one.target](directory), one, record)
    elif one.target == "guided":
        replay_guided(one, record)
    else:
        asyncio.run(replay(directory, record, several))


def _show(record: Record, console: Console) -> None:
    total: Counter[str] = Counter()
    kinds: Counter[str] = Counter()
    for (of, kind), count in record.sent.items():
        total[of] += count
        kinds[kind if of in METHODS else f"{of}: {kind}"] += count
    table = Table("given to", "inputs", "accepted", "refused with", box=None)
    for of, count in sorted(total.items()):
        refused = ", ".join(f"{name} {n}" for name, n in record.refused[of].most_common())
        table.add_row(
            of.removeprefix("/percolator.v1."), str(count), str(record.accepted[of]), refused
        )
    console.print(table)
    console.print("kinds: " + ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items())))
    accepted = sum(record.accepted.values())
    console.print(f"{sum(total.values()):,} inputs, of which {accepted:,} got past all checks")


def _require_all(record: Record) -> None:
    """Every method was reached, and every kind of input was made."""
    for path in METHODS:
        if not record.accepted[path] and path not in UNREACHED:
            record.wrong(f"no request got past all checks of {path}")
    made = {kind for of, kind in record.sent if of in METHODS}
    for kind in KINDS:
        if kind not in made:
            record.wrong(f"no call of the kind {kind!r} was made")


if __name__ == "__main__":
    sys.exit(main())
