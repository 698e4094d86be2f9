"""The public API is typed: mistakes are found before the program runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@pytest.fixture(scope="module")
def complaints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """Lines that mypy rejects, by file."""
    # In another directory, because the project's settings exclude the file that must be rejected.
    copies = tmp_path_factory.mktemp("programs")
    for name in ("accepted.py", "rejected.py"):
        (copies / name).write_text((HERE / name).read_text())
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-error-summary"),
            *("--enable-error-code", "unused-awaitable"),
            *("--config-file", "", "--follow-untyped-imports", "--ignore-missing-imports"),
            *(str(copies / "accepted.py"), str(copies / "rejected.py")),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={"MYPYPATH": str(ROOT), "PATH": ""},
    )
    found: dict[str, set[int]] = {"accepted.py": set(), "rejected.py": set()}
    for line in done.stdout.splitlines():
        match = re.match(r".*?(\w+\.py):(\d+): error:", line)
        if match and match[1] in found:
            found[match[1]].add(int(match[2]))
    assert done.stdout, done.stderr
    return found


def test_correct_programs_are_accepted(complaints: dict[str, set[int]]) -> None:
    assert complaints["accepted.py"] == set()


def test_each_mistake_is_rejected_and_nothing_else(complaints: dict[str, set[int]]) -> None:
    lines = (HERE / "rejected.py").read_text().splitlines()
    marked = {number for number, line in enumerate(lines, start=1) if "# rejected" in line}
    assert complaints["rejected.py"] == marked
