"""The settings and the metrics of the oracle."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from percolator.errors import InvalidArgument
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.settings import load
from percolator.services.oracle.candidate import Candidate, Site
from percolator.services.oracle.oracle import OracleLimits
from percolator.services.oracle.service import OracleMetrics, OracleSettings
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.simulation.virtual_time import VirtualClock
from tests.unit.oracle.ledgers import STORE


def settings(*flags: str) -> OracleSettings:
    return load(OracleSettings, ["--store", "/store", *flags], {})


def test_the_defaults_of_the_settings_are_those_of_the_core() -> None:
    assert settings().limits() == OracleLimits()


def test_every_limit_can_be_set() -> None:
    flags = {
        "--window-seconds": "1.5",
        "--count-max": "10",
        "--wait-seconds-max": "1",
        "--clock-jump-seconds-max": "5",
        "--leading-speed": "0.5",
    }
    given = [part for flag in flags.items() for part in flag]
    assert settings(*given, "--follow-clock-jumps").limits() == OracleLimits(
        window_seconds=1.5,
        count_max=10,
        wait_seconds_max=1,
        jump_seconds_max=5,
        leading_speed=0.5,
        follow_jumps=True,
    )


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--window-seconds", "3"),  # as long as locks live: a crash would expire fresh ones
        ("--window-seconds", "0.1"),
        ("--count-max", "0"),
        ("--request-bytes-max", "1048577"),
        ("--wait-seconds-max", "0"),
        ("--wait-seconds-max", "2"),  # the caller would have given up before it hears the reason
        ("--clock-jump-seconds-max", "-1"),
        ("--leading-speed", "0"),  # time would stand still, and no lock expire
        ("--leading-speed", "1"),  # leads would add up over restarts
        ("--store", ""),
    ],
)
def test_a_bad_value_is_refused_by_name_in_one_line(
    flag: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        settings(flag, value)
    assert exited.value.code == 2
    said = capsys.readouterr().err
    assert flag.removeprefix("--").replace("-", "_") in said
    assert len(said.splitlines()) == 1


def test_the_store_has_to_be_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        load(OracleSettings, [], {})
    assert "store" in capsys.readouterr().err


async def test_the_metrics_count_what_happened_under_stable_names() -> None:
    files = MemoryFiles(MemoryDisk())
    clock = VirtualClock(asyncio.get_running_loop())
    files.disk.make_durable_directory(STORE)
    site = Site(clock, str(STORE), "me:1", "", OracleLimits())
    candidate = Candidate(site, DirectoryCoordinator(files, clock, STORE))
    registry = CollectorRegistry()
    registry.register(OracleMetrics(candidate, files))
    assert collected(registry)[("percolator_oracle_leading",)] == 0
    await candidate.lead_within(1)
    oracle = candidate.candidacy.serving()
    await oracle.get_timestamps(1000)
    with pytest.raises(InvalidArgument):
        await oracle.get_timestamps(0)
    clock.set_wall_back(10_000)
    await oracle.get_timestamps(1)
    assert collected(registry) == {
        ("percolator_oracle_timestamps_total",): 1001,
        ("percolator_oracle_mark_extensions_total",): 1,
        ("percolator_oracle_mark_extension_failures_total",): 0,
        ("percolator_oracle_fsyncs_total",): files.fsyncs,
        ("percolator_oracle_waits_total",): 0,
        ("percolator_oracle_refused_total", "InvalidArgument"): 1,
        ("percolator_oracle_leading",): 1,
        ("percolator_oracle_wall_clock_lead_seconds",): -10,
        ("percolator_oracle_mark_timestamp_seconds",): 1_800_000_002.9,
    }


def collected(registry: CollectorRegistry) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *sample.labels.values()): sample.value
        for metric in registry.collect()
        for sample in metric.samples
    }
