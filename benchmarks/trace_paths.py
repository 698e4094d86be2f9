"""How much code one operation runs: `make trace-paths`.

Starts a cluster in which every process counts the calls of each Python function, and the client
too. Each operation is run many times, one after the other; then the cluster is left idle. Two
counts are printed of the files of this project that ran:

- all: a function belongs to the operation if it ran in at least every second one, more often than
  in an idle cluster. Functions that both run, such as those that serve any call, are counted.
- own: without every function that runs in an idle cluster, too (heartbeats, renewals, collection,
  and with them the functions that serve any call).

C extensions, generated messages and dependencies are not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from percolator.services import serve

_ROOT = Path(__file__).resolve().parents[1]
_DIRECTORY = "PERCOLATOR_TRACE_DIRECTORY"
_OPERATIONS = 200
_WARM_UP = 50
_IDLE_SECONDS = 12.0
"""Longer than the period of whatever runs by itself in a healthy cluster, but collection."""
_ANSWER_SECONDS = 10.0

Function = tuple[str, int, int, str]
"""File, first and last line, name."""


class Counted(NamedTuple):
    """Calls in one kind of process, and the time in which they were counted."""

    seconds: float
    calls: Counter[Function]


class Calls:
    """Counts the calls of each function of this process, in all of its threads."""

    def __init__(self) -> None:
        self._calls: Counter[CodeType] = Counter()

    def start(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            self._calls[frame.f_code] += 1

    def by_function(self) -> Counter[Function]:
        """Calls of the functions of this project so far."""
        found: Counter[Function] = Counter()
        for code, calls in list(self._calls.items()):
            path = Path(os.path.realpath(code.co_filename))
            if path.is_relative_to(_ROOT):
                name = str(path.relative_to(_ROOT))
                if name.startswith(("percolator/", "services/")):
                    last = max((line for *_, line in code.co_lines() if line), default=0)
                    found[name, code.co_firstlineno, last, code.co_qualname] += calls
        return found


def _serve(name: str, service: str, arguments: list[str]) -> int:
    """Runs a service, which writes its counts to a file at each SIGUSR1."""
    calls = Calls()
    target = Path(os.environ[_DIRECTORY]) / name

    def write(*_: object) -> None:
        unfinished = target.with_suffix(".new")
        # Its own time: the counts of all processes are not taken at once.
        taken = [time.monotonic(), [[*key, n] for key, n in calls.by_function().items()]]
        unfinished.write_text(json.dumps(taken))
        unfinished.rename(target)

    signal.signal(signal.SIGUSR1, write)
    calls.start()
    return serve.main([service, *arguments])


def _main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.trace_paths", description="Code that one operation runs."
    )
    parser.add_argument("--files", action="store_true", help="print the files of each operation")
    parser.add_argument("--functions", action="store_true", help="and their functions")
    options = parser.parse_args()
    # Before the threads of the client are started.
    calls = Calls()
    calls.start()
    with tempfile.TemporaryDirectory() as directory:
        os.environ[_DIRECTORY] = directory
        os.environ["PYTHONPATH"] = str(_ROOT)  # where services find this module
        _measure(Path(directory), calls, options.files, options.functions)


def _measure(directory: Path, calls: Calls, with_files: bool, with_functions: bool) -> None:
    import percolator
    from percolator import Table, codecs
    from percolator.services.local.cluster import LocalCluster

    accounts, others = Table("accounts"), Table("others")
    balance = accounts.column("balance", codecs.integer)
    other = others.column("balance", codecs.integer)

    def counts() -> dict[str, Counted]:
        """By kind of process; the seconds since some fixed instant."""
        found = {"client": Counted(time.monotonic(), calls.by_function())}
        for name, process in cluster.processes.items():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGUSR1)
            end = time.monotonic() + _ANSWER_SECONDS
            while not (directory / name).exists():
                if time.monotonic() > end:
                    raise SystemExit(f"{name} has not written its counts in {_ANSWER_SECONDS} s")
                time.sleep(0.01)
            at, written = json.loads((directory / name).read_text())
            (directory / name).unlink()
            found[name.partition("-")[0]] = Counted(at, Counter({(*f,): n for *f, n in written}))
        return found

    def since(before: Mapping[str, Counted]) -> dict[str, Counted]:
        after = counts()
        return {
            kind: Counted(after[kind].seconds - at, after[kind].calls - calls)
            for kind, (at, calls) in before.items()
        }

    def increment(tx: percolator.Transaction) -> None:
        tx.set("alice", balance, tx.get("alice", balance, 0) + 1)

    def transfer(tx: percolator.Transaction) -> None:
        tx.set("alice", balance, tx.get("alice", balance, 0) - 1)
        tx.set("bob", other, tx.get("bob", other, 0) + 1)

    with (
        LocalCluster(
            directory / "cluster",
            tablet_servers=1,
            program=lambda name, service: ("benchmarks.trace_paths", "serve", name, service),
        ) as cluster,
        percolator.connect(cluster.address) as db,
    ):
        db.create_table(accounts)
        db.create_table(others)
        operations: Mapping[str, Callable[[], object]] = {
            "read-write transaction, one round": lambda: db.run(increment),
            "read-write transaction, two phases over two tables": lambda: db.run(transfer),
            "read": lambda: db.get("alice", balance),
        }
        busy: dict[str, dict[str, Counted]] = {}
        for name, operation in operations.items():
            for _ in range(_WARM_UP):
                operation()
            before = counts()
            for _ in range(_OPERATIONS):
                operation()
            busy[name] = since(before)
        before = counts()
        time.sleep(_IDLE_SECONDS)
        idle = since(before)
    for name, found in busy.items():
        print(name)
        ran = {
            kind: {
                function
                for function, n in calls.items()
                if n - idle[kind].calls[function] * seconds / idle[kind].seconds >= _OPERATIONS / 2
            }
            for kind, (seconds, calls) in found.items()
        }
        own = {kind: {f for f in ran[kind] if not idle[kind].calls[f]} for kind in ran}
        _report("all", ran, with_files, with_functions)
        _report("own", own, with_files, with_functions)


def _report(
    name: str, ran: Mapping[str, set[Function]], with_files: bool, with_functions: bool
) -> None:
    print(f"  {name}: {_size({function for functions in ran.values() for function in functions})}")
    for kind, functions in ran.items():
        if functions:
            print(f"    {kind:14}{_size(functions)}")
        for file in sorted({file for file, *_ in functions}) if with_files else ():
            print(f"      {file}")
            for function_file, first, last, called in sorted(functions) if with_functions else ():
                if function_file == file:
                    print(f"        {first}-{last} {called}")


def _size(functions: set[Function]) -> str:
    files = {file for file, *_ in functions}
    whole = sum(len((_ROOT / file).read_text().splitlines()) for file in files)
    lines = {(file, line) for file, first, last, _ in functions for line in range(first, last + 1)}
    return f"{len(files)} files of {whole:,} lines; {len(lines):,} lines of functions"


if __name__ == "__main__":
    if sys.argv[-3:-2] == ["serve"]:
        sys.exit(_serve(sys.argv[-2], sys.argv[-1], sys.argv[1:-3]))
    else:
        _main()
