"""Questions that a command asks before it destroys something."""

from __future__ import annotations

import io

import pytest
from typer import Exit

from percolator.cli.connection import confirm


@pytest.mark.parametrize("answer", ["", "n\n"])
def test_a_question_that_no_terminal_answers_names_the_option(
    answer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(answer))
    with pytest.raises(Exit):
        confirm("Clear 3 dead letters?")
    assert "Without a terminal, answer with --yes" in capsys.readouterr().err
