"""README shows what the benchmarks have measured last."""

from __future__ import annotations

from benchmarks import figures


def test_the_figures_in_the_readme_are_those_of_the_last_results() -> None:
    assert figures.shown() == figures.table(), "run `make figures`"
