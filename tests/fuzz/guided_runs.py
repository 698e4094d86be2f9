"""Runs the guided targets, each in its own process: libFuzzer ends the process that it is in."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.findings import Input, Record
from tests.fuzz.guided import HAS_ATHERIS, bodies

_LATE_SECONDS = 120.0
_UNITS = re.compile(r"number_of_executed_units: (\d+)")
_COVERED = re.compile(r"DONE +cov: (\d+)")
_SAID_CHARACTERS_MAX = 500


def run_guided(directory: Path, record: Record, *, seconds: int, seed: int) -> Iterator[str]:
    """Runs all of them at the same time. Yields what was measured, in sentences."""
    running = {}
    for name in bodies():
        folder = directory / name
        folder.mkdir(parents=True)
        command = [sys.executable, "-m", "tests.fuzz.guided", name, "--folder", str(folder)]
        command += ["--seconds", str(seconds), "--seed", str(seed)]
        log = (folder / "log").open("wb")
        running[name] = subprocess.Popen(command, stdout=log, stderr=log), folder, log
    for name, (process, folder, log) in running.items():
        try:
            code = process.wait(seconds + _LATE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        log.close()
        said = (folder / "log").read_text(errors="replace")
        _take(name, folder, code, said, record)
        units = int((_UNITS.findall(said) or ["0"])[-1])
        record.sent[f"guided {name}", "guided" if HAS_ATHERIS else "damaged"] += units
        record.accepted[f"guided {name}"] += units
        covered = (_COVERED.findall(said) or ["not counted"])[-1]
        yield f"guided {name}: {units:,} inputs, branches reached: {covered}"


def _take(name: str, folder: Path, code: int, said: str, record: Record) -> None:
    kept = [path for path in folder.iterdir() if path.name.partition("-")[0] in _ARTIFACTS]
    if code == 0 and not kept:
        return
    why = said.partition("=== Uncaught Python exception: ===")[2] or said[-_SAID_CHARACTERS_MAX:]
    data = kept[0].read_bytes() if kept else b""
    one = Input("guided", name, data) if kept else None
    record.wrong(f"guided {name}, exit code {code}: {why.strip()[:_SAID_CHARACTERS_MAX]}", one)


_ARTIFACTS = ("crash", "timeout", "oom", "leak")


def replay_guided(one: Input, record: Record) -> None:
    """Gives one input to the code that failed, without guidance."""
    asyncio.set_event_loop(asyncio.new_event_loop())
    try:
        bodies()[one.kind]()(one.data)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        record.wrong(f"guided {one.kind}: {type(error).__name__}: {error}", one)
