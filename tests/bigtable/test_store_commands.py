"""`percolator store init` and `percolator store check`, as programs, on Google's emulator."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.bigtable.emulator_process import emulator

pytestmark = [pytest.mark.bigtable, pytest.mark.timeout(120)]

STORE = "bigtable://some-project/some-instance"


def _store(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "percolator.cli", "--json", "store", *arguments],
        env={**os.environ, "BIGTABLE_EMULATOR_HOST": address},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_emulator_can_be_prepared_and_keeps_all_promises_that_it_is_asked_for() -> None:
    with emulator() as address:
        for _ in range(2):
            prepared = _store(address, "init", STORE)
            assert prepared.returncode == 0, prepared.stderr
        checked = _store(address, "check", STORE, "--seconds", "0.5", "--in-flight", "8")
    assert checked.returncode == 0, checked.stderr
    shown = json.loads(checked.stdout)
    assert shown["not_kept"] == {}
    assert shown["check_and_mutates_per_second"] > 0
    assert checked.stderr.count("kept: ") == 8
    assert "not tried: scans backwards" in checked.stderr


def test_a_store_that_does_not_answer_is_an_error_in_one_line() -> None:
    for verb in ("init", "check"):
        result = _store("127.0.0.1:1", verb, STORE)
        assert result.returncode == 1
        assert "Traceback" not in result.stderr
