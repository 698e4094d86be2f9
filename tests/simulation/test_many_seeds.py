"""A run of many seeds goes on while a kind of fault has not struck, and fails if none ever does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation import __main__ as program
from tests.simulation.expected import EXPECTED, SEEDS_FOR_EVERYTHING
from tests.simulation.run import Verdict
from tests.simulation.scenario import scenario_of

_LATE = EXPECTED[0]


def _run(monkeypatch: pytest.MonkeyPatch, late_from: int | None) -> tuple[int, int]:
    """The exit code and how many seeds were run, if one fault strikes from that seed on only."""
    run: list[int] = []

    def results(seeds: range, jobs: int) -> Iterator[tuple[Verdict, float]]:
        del jobs
        for seed in seeds:
            run.append(seed)
            late = late_from is not None and seed >= late_from
            struck = Counter(name for name in EXPECTED if late or name != _LATE)
            yield Verdict(scenario_of(seed), struck=struck), 0.0

    monkeypatch.setattr(program, "results", results)
    arguments = ["simulate", "--seeds", str(SEEDS_FOR_EVERYTHING), "--seed", "0"]
    monkeypatch.setattr(sys, "argv", arguments)
    code = program.main()
    assert run == list(range(len(run))), "each seed is run once"
    return code, len(run)


def test_a_run_ends_when_everything_has_struck(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, late_from=10) == (0, SEEDS_FOR_EVERYTHING)


def test_a_run_goes_on_until_a_rare_fault_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    code, seeds = _run(monkeypatch, late_from=SEEDS_FOR_EVERYTHING + 20)
    assert code == 0
    assert SEEDS_FOR_EVERYTHING + 20 < seeds < 2 * SEEDS_FOR_EVERYTHING


def test_a_run_fails_if_a_fault_never_strikes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run(monkeypatch, late_from=None) == (1, 3 * SEEDS_FOR_EVERYTHING)
