"""A leak is seen; noise, peaks, teeth, steps and rises that slow down are not taken for one."""

from __future__ import annotations

import csv
import json
import os
import sys
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from random import Random

import pytest

from percolator.services.local.cluster import LocalCluster
from tests.soak.__main__ import main
from tests.soak.series import (
    POINTS_MIN,
    Key,
    Sampler,
    Samples,
    Tolerance,
    growing,
    judge,
    leveldb_files,
    write_verdict,
)

POINTS = 120
LEVEL = 100.0
TOLERANCE = Tolerance(share=0.03, floor=1.0)
SEEDS = range(100)
Shape = Callable[[float, Random], float]
"""A value at a moment between 0 and 1, and some chance."""


def seen(shape: Shape, points: int = POINTS) -> int:
    """In how many of a hundred runs the series is said to grow."""
    found = 0
    for seed in SEEDS:
        chance = Random(seed)
        values = [shape(number / points, chance) for number in range(points)]
        found += judge(values, TOLERANCE).grows
    return found


@pytest.mark.parametrize(
    ("shape", "points"),
    [
        pytest.param(lambda at, _: LEVEL + 15 * at, POINTS, id="steady"),
        pytest.param(lambda at, _: LEVEL + 10 * at, POINTS, id="just above the tolerance"),
        pytest.param(lambda at, _: 5.0 * at, POINTS, id="near zero, above the floor"),
        *(
            pytest.param(lambda at, chance: LEVEL + 20 * at + chance.gauss(0, 2), points)
            for points in (60, 120, 360)
        ),
        pytest.param(
            lambda at, chance: LEVEL + 30 * max(0.0, at - 0.4) + chance.gauss(0, 0.5),
            POINTS,
            id="begins late",
        ),
        pytest.param(
            lambda at, chance: LEVEL + 20 * at + 10 * (at * 40 % 1) + chance.gauss(0, 1),
            POINTS,
            id="under the teeth of a collector",
        ),
        pytest.param(lambda at, _: float(20 + int(30 * at)), POINTS, id="a descriptor at a time"),
    ],
)
def test_a_leak_is_seen(shape: Shape, points: int) -> None:
    assert seen(shape, points) >= 95


def noise(deviation: float) -> Shape:
    return lambda _, chance: LEVEL + chance.gauss(0, deviation)


def teeth(count: int) -> Shape:
    return lambda at, chance: LEVEL + 30 * (at * count % 1) + chance.gauss(0, 1)


def step(moment: float) -> Shape:
    return lambda at, chance: LEVEL + 20 * (at > moment) + chance.gauss(0, 1)


@pytest.mark.parametrize(
    ("shape", "at_most"),
    [
        *(pytest.param(noise(one), 2, id=f"noise of {one}") for one in (0.0, 1.0, 10.0, 50.0)),
        *(pytest.param(teeth(count), 2, id=f"{count} teeth") for count in (3, 10, 40)),
        *(
            pytest.param(step(at), 2, id=f"a step at {at}")
            for at in (0.2, 0.4, 0.5, 0.6, 0.7, 0.95)
        ),
        pytest.param(
            lambda _, chance: LEVEL + (500 if chance.random() < 0.1 else 0), 0, id="peaks"
        ),
        pytest.param(lambda at, _: LEVEL * (1 - exp(-8 * at)), 0, id="what fills up and is full"),
        pytest.param(
            # As a heap that fragments: each doubling of the time adds as much as the one before.
            lambda at, chance: LEVEL + 3 * log(1 + 100 * at) + chance.gauss(0, 0.2),
            0,
            id="a rise that slows down",
        ),
        pytest.param(lambda at, _: LEVEL - 50 * at, 0, id="what falls"),
        pytest.param(lambda at, _: LEVEL + 8 * at, 0, id="a rise within the tolerance"),
        pytest.param(lambda at, _: 2.5 * at, 0, id="near zero, below the floor"),
    ],
)
def test_what_levels_off_is_not_a_leak(shape: Shape, at_most: int) -> None:
    assert seen(shape) <= at_most


def test_noise_that_remembers_is_hardly_ever_a_leak() -> None:
    """As load that comes and goes: each value is close to the last one."""
    found = 0
    for seed in SEEDS:
        chance, value, values = Random(seed), 0.0, []
        for _ in range(POINTS):
            value = 0.9 * value + chance.gauss(0, 2)
            values.append(LEVEL + value)
        found += judge(values, TOLERANCE).grows
    assert found <= 6


def test_what_is_too_short_is_not_judged() -> None:
    values = [float(number) for number in range(POINTS_MIN)]
    assert judge(values, TOLERANCE).grows
    short = judge(values[:-1], TOLERANCE)
    assert not short.is_judged
    assert not short.grows


# A run's verdict names the process and the series that grows.

LEAKING = Key("tabletserver-2", 1, "memory")
SERIES_LEVEL = Key("master", 1, "memory")


def a_run() -> Samples:
    samples = Samples()
    for number in range(60):
        samples.add(LEAKING, float(number), 80.0 + number / 4)
        samples.add(SERIES_LEVEL, float(number), 60.0 + number % 2)
    return samples


def test_what_grows_is_named_with_figures() -> None:
    (told,) = growing(a_run().judged())
    assert told.startswith("tabletserver-2: memory grows: 87.4 in the middle third, 92.4 in the")


def test_the_longest_life_of_a_process_is_judged() -> None:
    samples = a_run()
    for number in range(40):
        samples.add(Key("tabletserver-3", 2, "memory"), 100.0 + number, 80.0 + number)
    for number in range(10):
        samples.add(Key("tabletserver-3", 1, "memory"), float(number), 80.0)
    found = {str(one.key): one.judgement for one in samples.judged()}
    assert set(found) == {"tabletserver-2: memory", "master: memory", "tabletserver-3 #2: memory"}
    assert found["tabletserver-3 #2: memory"].grows


def test_the_verdict_and_the_samples_are_written(tmp_path: Path) -> None:
    samples = a_run()
    judged = samples.judged()
    write_verdict(tmp_path / "verdict.json", judged, list(growing(judged)))
    verdict = json.loads((tmp_path / "verdict.json").read_text())
    assert [one["series"] for one in verdict["series"] if one["grows"]] == [str(LEAKING)]
    assert len(verdict["problems"]) == 1
    samples.write_csv(tmp_path / "samples.csv")
    with (tmp_path / "samples.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(samples) == 120
    assert rows[0] == {
        "source": "tabletserver-2",
        "life": "1",
        "quantity": "memory",
        "seconds": "0.00",
        "value": "80.0000",
    }


# What is sampled besides metrics: the files of LevelDB, and what the client reports.

REPORT = {
    "at": 110.0,
    "memory": 50.0,
    "descriptors": 20,
    "tasks": 30,
    "threads": 8,
    "milliseconds": {"read": {"median": 1.5, "p99": 9.0}, "table": {"median": 80.0}},
    "done": {"read": 100, "table": 1},
    "failed": {"read: Unavailable": 2},
}


def test_a_file_that_a_clone_shares_counts_once(tmp_path: Path) -> None:
    for directory in ("e1.sealed", "e2"):
        (tmp_path / "3" / "7" / directory).mkdir(parents=True)
    table = tmp_path / "3" / "7" / "e1.sealed" / "000005.ldb"
    table.write_bytes(b"x" * 1000)
    os.link(table, tmp_path / "3" / "7" / "e2" / "000005.ldb")
    (tmp_path / "3" / "7" / "e2" / "000006.log").write_bytes(b"x" * 10)
    (tmp_path / "3" / "7" / "e2" / "MANIFEST-000002").write_bytes(b"x")
    (tmp_path / "cluster.json").write_bytes(b"x" * 100)
    assert leveldb_files(tmp_path) == (3, 1011)


def test_a_report_of_the_client_is_read_once_and_only_when_it_is_whole(tmp_path: Path) -> None:
    report, samples = tmp_path / "client.jsonl", Samples()
    (tmp_path / "cluster" / "store").mkdir(parents=True)
    sampler = Sampler(LocalCluster(tmp_path / "cluster"), report, samples, began=100.0)
    line = json.dumps(REPORT) + "\n"
    sampler.sample(0.0)
    report.write_text(line + line[:50])
    sampler.sample(1.0)
    report.write_text(line + line)
    sampler.sample(2.0)
    found = {str(one.key): one.points for one in samples.judged()}
    assert found["read: p99"] == [(10.0, 9.0)] * 2
    assert found["table: median"] == [(10.0, 80.0)] * 2
    assert found["client: tasks"] == [(10.0, 30)] * 2
    assert found["store: files"] == [(0.0, 0), (1.0, 0), (2.0, 0)]
    assert sampler.failed == {"read: Unavailable": 2}


# How long a soak runs must be a number of minutes.


@pytest.mark.parametrize("minutes", ["nan", "inf", "0.5", "-1"])
def test_minutes_that_are_no_time_are_refused_before_anything_starts(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", f"--minutes={minutes}"])
    with pytest.raises(SystemExit):
        main()
    assert "--minutes: expected a number from 1 on, got" in capsys.readouterr().err
