"""python -m tests.simulation --seeds 1000 [--seed 7] [--jobs 2]: simulates that many clusters.

Without --seed it starts at a different seed each time, and prints it. If some kind of fault has not
occurred although there were enough seeds, it goes on, up to three times as many. The exit code is 1
if a seed has failed, or if some kind of fault has not occurred even then.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tests.simulation.campaign import Totals, minimised, missing, results
from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import scenario_of

_FAILURES_MAX = 3
_PROBLEMS_SHOWN = 8
_RECORDS_SHOWN = 60
_CHARACTERS_MAX = 400
_FIRST_SEED_BITS = 31
_SEEDS_PER_LINE = 100
_SEEDS_MORE = 50
_TIMES_AS_MANY = 3


def main() -> int:
    arguments = _arguments()
    console = Console(highlight=False)
    first = arguments.seed
    if first is None:
        first = secrets.randbits(_FIRST_SEED_BITS)
    console.print(f"{arguments.seeds} seeds from {first} on")
    totals = Totals()
    finished = True
    try:
        _run(range(first, first + arguments.seeds), arguments.jobs, totals, console)
        _go_on_until_all_occurred(first, arguments, totals, console)
    except KeyboardInterrupt:
        # Show what was found so far all the same.
        finished = False
        console.print("[red]interrupted[/red]")
    _print_totals(totals, console)
    never = missing(totals.occurred, totals.seeds)
    for name in never:
        console.print(f"[red]never occurred: {name}[/red]")
    return 0 if finished and not totals.failed and not never else 1


def _run(seeds: range, jobs: int, totals: Totals, console: Console) -> None:
    for verdict, cpu_seconds in _with_progress(seeds, jobs, console):
        totals.add(verdict, cpu_seconds)
        if verdict.failed:
            _explain(verdict.scenario.seed, console)
            if len(totals.failed) >= _FAILURES_MAX:
                console.print("[red]no further seeds are run[/red]")
                return


def _go_on_until_all_occurred(
    first: int, arguments: argparse.Namespace, totals: Totals, console: Console
) -> None:
    """A rare fault can be absent by chance. More seeds tell that from one that cannot occur."""
    most = _TIMES_AS_MANY * arguments.seeds
    for begin in range(arguments.seeds, most, _SEEDS_MORE):
        never = missing(totals.occurred, totals.seeds)
        if not never or totals.failed:
            return
        console.print(f"going on, since this has not occurred yet: {', '.join(never)}")
        end = min(begin + _SEEDS_MORE, most)
        _run(range(first + begin, first + end), arguments.jobs, totals, console)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make simulate", description=__doc__)
    parser.add_argument("--seeds", type=int, default=100, help="how many")
    parser.add_argument("--seed", type=int, default=None, help="the first one")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    arguments = parser.parse_args()
    if arguments.seeds < 1 or arguments.jobs < 1:
        parser.error("--seeds and --jobs have to be at least 1")
    return arguments


def _with_progress(seeds: range, jobs: int, console: Console) -> Iterator[tuple[Verdict, float]]:
    columns = (
        TextColumn("simulating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("seeds", total=len(seeds), speed="")
        began = time.monotonic()
        transactions = 0
        for done, result in enumerate(results(seeds, jobs), 1):
            seconds = time.monotonic() - began
            transactions += result[0].transactions
            speed = f"{done / seconds:.1f} seeds/s, {transactions} transactions"
            progress.update(task, advance=1, speed=speed)
            if not console.is_terminal and done % _SEEDS_PER_LINE == 0:
                # If no progress bar can be drawn, as in a log.
                console.print(f"{done} of {len(seeds)} seeds: {speed}")
            yield result


def _explain(seed: int, console: Console) -> None:
    """Prints everything that helps to find the cause."""
    console.rule(f"[red]seed {seed} failed")
    console.print(f"again: make simulate SEEDS=1 SEED={seed}")
    small = minimised(scenario_of(seed), lambda scenario: simulate(scenario).failed)
    verdict = simulate(small)
    console.print("minimised to", style="bold")
    console.print(str(small), markup=False)
    for problem in verdict.problems[:_PROBLEMS_SHOWN]:
        console.print(f"- {problem[:_CHARACTERS_MAX]}", markup=False)
    records = sorted(verdict.history, key=lambda record: record.start_ts)
    for record in records[-_RECORDS_SHOWN:]:
        operations = ", ".join(str(operation) for operation in record.operations)
        line = f"{record}: {record.outcome.value} at {record.commit_ts}: {operations}"
        console.print(line[:_CHARACTERS_MAX], markup=False)
    console.rule()


def _print_totals(totals: Totals, console: Console) -> None:
    for name, count in sorted(totals.occurred.items()):
        console.print(f"{count:10}  {name}")
    cpu = max(totals.cpu_seconds, 1e-9)
    console.print(
        f"{totals.seeds} seeds, {totals.transactions} transactions checked, of which "
        f"{totals.committed} committed; {totals.messages} messages, "
        f"{totals.virtual_seconds:.0f} virtual seconds"
    )
    console.print(
        f"per second and core: {totals.seeds / cpu:.1f} seeds, "
        f"{totals.transactions / cpu:.0f} transactions"
    )
    failed = ", ".join(map(str, totals.failed))
    console.print(f"[red]failed: {failed}[/red]" if failed else "[green]no seed failed[/green]")


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of strings must not differ from one run of a seed to the next.
        command = [sys.executable, "-m", "tests.simulation", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONHASHSEED": "0"})
    sys.exit(main())
