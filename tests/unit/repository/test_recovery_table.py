"""The guide for operators shows the recovery times that were measured, and none is too long."""

from __future__ import annotations

from pathlib import Path

from tests.chaos import recovery
from tests.chaos.catalogue import streams
from tests.chaos.recovery import Figure, Struck

RECOVERY_SECONDS_MAX = 30.0


def test_the_table_of_recovery_times_is_the_recorded_one() -> None:
    assert recovery.shown() == recovery.table(recovery.record_of()), "run `make recovery`"


def test_every_kind_of_strike_was_measured_and_none_took_too_long() -> None:
    found = recovery.record_of()
    kinds = {fault.name for faults in streams(full_disk=True).values() for fault in faults}
    assert {one.kind for one in found} == kinds
    assert max(one.seconds for one in found) <= RECOVERY_SECONDS_MAX


def test_strikes_count_as_beside_each_other_if_they_overlap() -> None:
    struck = [
        Struck("kill", 0.0, 3.0, 2.0),
        Struck("pause", 2.5, 7.0, 1.0),
        Struck("cut", 7.5, 9.0, 0.5),
    ]
    assert [one.beside for one in recovery.figures(struck)] == [1, 1, 0]


def test_a_cell_of_the_table_has_the_median_and_the_worst() -> None:
    found = [Figure("kill", 0, 1.0), Figure("kill", 0, 2.0), Figure("kill", 0, 9.0)]
    found += [Figure("kill", 5, 4.0), Figure("cut", 2, 0.5)]
    assert recovery.table(found).splitlines()[2:] == [
        "| cut | 1 |  | 0.5, 0.5 |  |",
        "| kill | 4 | 2.0, 9.0 |  | 4.0, 4.0 |",
    ]


def test_recording_takes_the_waiting_runs_and_keeps_what_is_recorded_without_them(
    tmp_path: Path,
) -> None:
    runs, recorded = tmp_path / "runs", tmp_path / "recovery.json"
    recovery.write_run("1", [Struck("kill", 0.0, 3.0, 2.0)], runs)
    recovery.write_run("2", [Struck("kill", 0.0, 3.0, 1.0)], runs)
    expected = [Figure("kill", 0, 1.0), Figure("kill", 0, 2.0)]
    assert recovery.record(runs, recorded) == expected
    assert recovery.record(runs, recorded) == expected
    assert not list(runs.iterdir())
