"""Traces: which change has caused each run, directly or through others, and what it has cost."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from percolator import aio, observes
from percolator.cli.app import app
from percolator.errors import InvalidArgument
from percolator.observers.trace import Trace, logger, read_trace, trace_to

from .observed_cluster import Observed, copy, observed, source, total


@observes(source, name="first")
async def first(tx: aio.Transaction, row: str) -> None:
    value = await tx.get(row, source, 0)
    if value < 10:
        await tx.set(row, copy, value)
    else:
        await tx.lock(row, copy)


@observes(copy, name="second")
async def second(tx: aio.Transaction, row: str) -> None:
    await tx.get("another", source)
    await tx.set(row, total, 1)
    await tx.set("sum", total, 1)


@pytest.fixture
def traced(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "trace"
    trace_to(path)
    yield path
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


async def run_all(world: Observed, **changes: int) -> list[int]:
    async with world.db.run_observers([first, second]):
        commits = [await world.put(row, value) for row, value in changes.items()]
        await world.db.wait_for_observers()
    return commits


def read(path: Path) -> Trace:
    with path.open() as lines:
        return read_trace({"trace": lines})


async def test_runs_belong_to_the_change_that_has_caused_them(traced: Path) -> None:
    async with observed() as world:
        a, b = await run_all(world, a=1, b=2)
    found = read(traced)
    assert sorted(found.origins) == [a, b]
    for change, row in ((a, "a"), (b, "b")):
        committed = [one for one in found.origins[change] if one.ended == "committed"]
        assert [(one.observer, one.row) for one in committed] == [("first", row), ("second", row)]
        assert found.parent(committed[0]) is None
        assert found.parent(committed[1]) == committed[0]


async def test_a_run_says_what_it_has_read_and_written(traced: Path) -> None:
    async with observed() as world:
        await run_all(world, a=1)
    by_observer = {one.observer: one for one in read(traced).runs}
    assert (by_observer["first"].written, by_observer["first"].locked) == (1, 0)
    assert (by_observer["second"].written, by_observer["second"].rows_read) == (2, 2)
    assert by_observer["second"].round_trips > by_observer["first"].round_trips


async def test_a_run_that_only_locks_is_without_effect(traced: Path) -> None:
    async with observed() as world:
        await run_all(world, a=10)
    (run,) = read(traced).runs
    assert run.is_without_effect
    assert (run.written, run.locked) == (0, 1)


async def test_nothing_is_written_without_a_trace(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with observed() as world:
        await run_all(world, a=1)
    assert not [one for one in caplog.records if one.name == logger.name]


LINE: dict[str, Any] = {
    "table": "docs",
    "observer": "first",
    "row": "a",
    "changes": [5],
    "start": 7,
    "commit": 9,
    "ended": "committed",
    "rows_read": 1,
    "round_trips": 3,
    "written": 1,
    "locked": 0,
    "seconds": 0.1,
    "cpu_seconds": 1.0,
}


def lines(*changes: dict[str, Any]) -> list[str]:
    return [json.dumps(LINE | change) for change in changes]


def test_runs_of_several_workers_are_put_together_and_a_repeated_one_counts_twice() -> None:
    one = lines({}, {"changes": [11], "commit": 13, "cpu_seconds": 4.0})
    other = lines(
        {"changes": [9], "ended": "conflicted", "commit": None}, {"changes": [9], "commit": 12}
    )
    found = read_trace({"one": one, "other": other})
    assert {origin: len(runs) for origin, runs in found.origins.items()} == {5: 3, 11: 1}
    assert [run.is_repeated for run in found.origins[5]] == [False, True, False]
    assert found.cpu_seconds == 3.0


def test_a_run_for_several_changes_belongs_to_the_oldest_and_all_are_counted() -> None:
    found = read_trace({"one": lines({"changes": [4, 5]})})
    assert {origin: len(runs) for origin, runs in found.origins.items()} == {4: 1, 5: 0}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "one, line 2.*is not JSON"),
        ("[]", "one, line 2.*is not a line of a trace"),
        (lines({"commit": "9"})[0], "one, line 2.*commit is missing or wrong"),
        (json.dumps({"table": "docs"}), "one, line 2.*observer is missing or wrong"),
        (lines({"changes": ["x"]})[0], "one, line 2.*changes are not timestamps"),
    ],
)
def test_what_is_not_a_trace_is_refused_with_file_and_line(line: str, problem: str) -> None:
    with pytest.raises(InvalidArgument, match=problem):
        read_trace({"one": [*lines({}), line]})


def test_the_command_shows_what_a_change_costs(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    again = {"changes": [9], "observer": "second", "ended": "conflicted", "commit": None}
    path.write_text(
        "\n".join(lines({}, again, {"changes": [9], "observer": "second", "commit": 12}))
    )
    shown = CliRunner().invoke(app, ["observers", "trace", str(path)], env={"COLUMNS": "150"})
    assert shown.exit_code == 0, shown.output
    assert "1 changes; CPU of the workers: 0.0 ms per change" in shown.output
    rows = [line.split() for line in shown.output.splitlines()]
    assert ["second", "2.00", "1.00", "0.00", "2.00", "6.00", "2.00", "0.00"] in rows
    assert ["0", "ms", "second", "of", "a", "conflicted", "1", "3", "1", "0"] in rows
    found = json.loads(CliRunner().invoke(app, ["--json", "observers", "trace", str(path)]).output)
    assert found["per_change"]["runs"] == 3
    missing = CliRunner().invoke(app, ["observers", "trace", str(tmp_path / "none")])
    assert missing.exit_code
    assert "none" in missing.output
