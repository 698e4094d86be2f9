"""A kill or a power cut at every call to the disk: no timestamp is handed out twice.

The wall clock is an hour slow at the restart, so only the mark can prevent it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import PercolatorError
from percolator.services.chassis import directory_coordinator
from percolator.services.chassis.files import Files
from percolator.services.oracle.oracle import Oracle, OracleLimits
from tests.doubles.memory_files import MemoryDisk, MemoryFiles, run_until_killed
from tests.simulation.virtual_time import VirtualClock, run_virtually
from tests.unit.oracle.ledgers import open_ledger

NOON = 1_800_000_000_000
HOUR = 3_600_000
LIVES_SECONDS = 5.0
"""Long enough for two extensions."""

Replace = Callable[[Files, Path, bytes], Awaitable[None]]


async def live(files: MemoryFiles, wall_milliseconds: int) -> tuple[int, int]:
    """Serves until the process dies or its time is up; the lowest and highest timestamp."""
    served: list[int] = []
    await run_until_killed(files, serve(files, wall_milliseconds, served))
    return (served[0], served[-1] + 999) if served else (0, 0)


async def serve(files: MemoryFiles, wall_milliseconds: int, served: list[int]) -> None:
    clock = VirtualClock(asyncio.get_running_loop(), wall_milliseconds=wall_milliseconds)
    ledger = await open_ledger(files, clock, cluster_id="c")
    oracle = Oracle(clock, ledger, ledger.leadership.stands, OracleLimits())
    await oracle.extend()
    extending = asyncio.ensure_future(oracle.keep_extended())
    try:
        while clock.monotonic_seconds() < LIVES_SECONDS and not extending.done():
            served.append(await oracle.get_timestamps(1000))
            await asyncio.sleep(0.05)
    finally:
        extending.cancel()
        await asyncio.gather(extending, return_exceptions=True)


class Crash(NamedTuple):
    """How a process ends, and what happens to data that it had not made durable."""

    kill_at: int
    """The number of the first system call that it does not make."""
    seed: int
    """KILLED: the machine goes on; ALL_LOST: nothing survives; otherwise random, torn anywhere."""


KILLED, ALL_LOST = -2, -1
SEEDS = range(KILLED, 3)


def after(disk: MemoryDisk, seed: int) -> MemoryFiles:
    """What the next process finds."""
    if seed != KILLED:
        disk.cut_power(None if seed == ALL_LOST else random.Random(seed))
    return MemoryFiles(disk)


def crash_and_restart(crash: Crash) -> tuple[int, int]:
    """The highest timestamp before the crash, and the lowest after it."""
    files = MemoryFiles(MemoryDisk())
    files.faults.kill_at(crash.kill_at)
    _, highest = run_virtually(live(files, NOON))
    files.kill()
    lowest, _ = run_virtually(live(after(files.disk, crash.seed), NOON - HOUR))
    return highest, lowest


def calls_of_a_life_without_faults() -> list[str]:
    files = MemoryFiles(MemoryDisk())
    run_virtually(live(files, NOON))
    return files.faults.operations


CALLS = calls_of_a_life_without_faults()


def moments_of_change(calls: list[str]) -> list[int]:
    """Before and after each call that changes something; other moments make no difference."""
    changes = [number for number, call in enumerate(calls) if call not in ("stat", "read", "list")]
    return sorted({*changes, *(number + 1 for number in changes)})


def failures_of_every_crash() -> Iterator[str]:
    for number in moments_of_change(calls_of_a_life_without_faults()):
        for seed in SEEDS:
            crash = Crash(number, seed)
            try:
                highest, lowest = crash_and_restart(crash)
            except PercolatorError as error:
                yield f"{crash}: {error}"
            else:
                if lowest <= highest:
                    yield f"{crash}: {lowest} after {highest}"


def test_a_life_without_faults_extends_the_mark_several_times() -> None:
    """Otherwise the crashes would have nothing to hit."""
    assert CALLS.count("fsync") >= 5


def test_no_crash_at_any_call_repeats_a_timestamp_or_prevents_a_start() -> None:
    assert list(failures_of_every_crash()) == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(CALLS)),
            st.sampled_from(SEEDS),
            st.integers(-10 * HOUR, 10 * HOUR),
        ),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_timestamps_increase_over_any_number_of_crashes_and_clocks(
    lives: list[tuple[int, int, int]],
) -> None:
    files, highest_ever = MemoryFiles(MemoryDisk()), 0
    for kill_at, seed, clock_offset in lives:
        files.faults.kill_at(kill_at)
        lowest, highest = run_virtually(live(files, NOON + clock_offset))
        if lowest:
            assert lowest > highest_ever
            highest_ever = highest
        files.kill()
        files = after(files.disk, seed)


async def _without_fsync_of_the_file(files: Files, path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
    await files.rename(temporary, path)
    await files.fsync_directory(path.parent)


async def _without_fsync_of_the_directory(files: Files, path: Path, data: bytes) -> None:
    temporary = path.with_name(path.name + ".new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
        await file.fsync()
    await files.rename(temporary, path)


async def _in_place(files: Files, path: Path, data: bytes) -> None:
    async with await files.create(path, exclusive=False) as file:
        await file.append(data)
        await file.fsync()
    await files.fsync_directory(path.parent)


async def _later(files: Files, path: Path, data: bytes) -> None:
    """Serves from the window before its mark is durable."""


@pytest.mark.parametrize(
    "careless",
    [_without_fsync_of_the_file, _without_fsync_of_the_directory, _in_place, _later],
)
def test_every_careless_way_to_write_the_mark_is_caught(
    careless: Replace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, the test above might be unable to fail."""
    monkeypatch.setattr(directory_coordinator, "replace_durably", careless)
    assert any(failures_of_every_crash())
