"""How long a soak runs must be a number of minutes."""

from __future__ import annotations

import sys

import pytest

from tests.soak.__main__ import main


@pytest.mark.parametrize("minutes", ["nan", "inf", "0.5", "-1"])
def test_minutes_that_are_no_time_are_refused_before_anything_starts(
    minutes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["soak", f"--minutes={minutes}"])
    with pytest.raises(SystemExit):
        main()
    assert "--minutes: expected a number from 1 on, got" in capsys.readouterr().err
