"""A power cut at every single call to the disk: no timestamp is handed out twice.

The wall clock is an hour back at the restart, so that only the mark can prevent it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percolator.errors import PercolatorError
from percolator.testing.virtual_time import VirtualClock, run_virtually
from services.chassis.files import Files
from services.oracle import ledger as ledger_module
from services.oracle.ledger import Ledger
from services.oracle.oracle import Oracle, OracleLimits
from tests.unit.oracle.memory_files import Crash, MemoryFiles, Unsynced

STORE = Path("/store")
NOON = 1_800_000_000_000
HOUR = 3_600_000
LIVES_SECONDS = 7.0
"""Long enough for three extensions."""

Replace = Callable[[Files, Path, bytes], Awaitable[None]]


async def live(files: MemoryFiles, wall_milliseconds: int) -> tuple[int, int]:
    """Serves until the machine crashes or the time is over: the lowest and highest timestamp."""
    clock = VirtualClock(asyncio.get_running_loop(), wall_milliseconds=wall_milliseconds)
    served: list[int] = []
    extending: asyncio.Future[None] | None = None
    try:
        ledger = await Ledger.open(files, STORE, holder="me", cluster_id="c")
        oracle = Oracle(clock, ledger, ledger.is_still_ours, OracleLimits())
        await oracle.extend()
        extending = asyncio.ensure_future(oracle.keep_extended())
        while clock.monotonic_seconds() < LIVES_SECONDS and not extending.done():
            served.append(await oracle.get_timestamps(1000))
            await asyncio.sleep(0.05)
    except Crash:
        pass
    finally:
        if extending is not None:
            extending.cancel()
            await asyncio.gather(extending, return_exceptions=True)
    return (served[0], served[-1] + 999) if served else (0, 0)


def crash_and_restart(files: MemoryFiles, unsynced: Unsynced) -> tuple[int, int]:
    """The highest timestamp before the power cut, and the lowest after it."""
    _, highest = run_virtually(live(files, NOON))
    lowest, _ = run_virtually(live(files.after_power_cut(unsynced), NOON - HOUR))
    return highest, lowest


def calls_of_an_undisturbed_life() -> list[str]:
    files = MemoryFiles()
    run_virtually(live(files, NOON))
    return files.calls


CALLS = calls_of_an_undisturbed_life()


def failures_of_every_crash() -> list[str]:
    found = []
    for number, name in enumerate(CALLS):
        for unsynced in Unsynced:
            for when in ("before", "after"):
                files = MemoryFiles()
                setattr(files, f"crash_{when}", number)
                here = f"{when} call {number} ({name}), {unsynced.value}"
                try:
                    highest, lowest = crash_and_restart(files, unsynced)
                except PercolatorError as error:
                    found.append(f"{here}: {error}")
                else:
                    if lowest <= highest:
                        found.append(f"{here}: {lowest} after {highest}")
    return found


def test_the_undisturbed_life_extends_the_mark_several_times() -> None:
    """Else the crashes would strike nothing."""
    assert CALLS.count("rename") >= 4


def test_no_crash_at_any_call_makes_a_timestamp_come_twice_or_a_start_impossible() -> None:
    assert failures_of_every_crash() == []


@given(
    st.lists(
        st.tuples(
            st.integers(0, len(CALLS)),
            st.sampled_from(Unsynced),
            st.integers(-10 * HOUR, 10 * HOUR),
        ),
        min_size=2,
        max_size=6,
    )
)
@settings(max_examples=50, deadline=None)
def test_timestamps_increase_over_any_number_of_crashes_and_clocks(
    lives: list[tuple[int, Unsynced, int]],
) -> None:
    files, highest_ever = MemoryFiles(), 0
    for crash_before, unsynced, clock_offset in lives:
        files.crash_before = crash_before
        lowest, highest = run_virtually(live(files, NOON + clock_offset))
        if lowest:
            assert lowest > highest_ever
            highest_ever = highest
        files = files.after_power_cut(unsynced)


async def _without_fsync_of_the_file(files: Files, path: Path, data: bytes) -> None:
    temporary = path.with_name("mark.new")
    async with await files.create(temporary, exclusive=False) as file:
        await file.append(data)
    await files.rename(temporary, path)
    await files.fsync_directory(path.parent)


async def _without_fsync_of_the_directory(files: Files, path: Path, data: bytes) -> None:
    temporary = path.with_name("mark.new")
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
    monkeypatch.setattr(ledger_module, "replace_durably", careless)
    assert failures_of_every_crash() != []
