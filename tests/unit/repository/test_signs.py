"""Every room has a sign at its door."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
LINES_MIN, LINES_MAX = 5, 20

ROOMS = sorted(
    door.parent.relative_to(ROOT)
    for top in ("percolator", "services")
    for door in (ROOT / top).rglob("__init__.py")
    if door.parent != ROOT / "percolator" / "v1"  # generated
)


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_sign_says_in_five_to_twenty_lines_what_is_in_the_room(room: Path) -> None:
    sign = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    assert LINES_MIN <= len(sign.splitlines()) <= LINES_MAX


def test_every_folder_with_code_is_a_room_with_a_door() -> None:
    without = {
        str(file.parent.relative_to(ROOT))
        for top in ("percolator", "services")
        for file in (ROOT / top).rglob("*.py")
        if not (file.parent / "__init__.py").exists()
    }
    assert without <= {"percolator/v1"}


@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_the_files_that_a_sign_names_are_in_the_room(room: Path) -> None:
    sign = ast.get_docstring(ast.parse((ROOT / room / "__init__.py").read_text())) or ""
    named = re.findall(r"(?<![\w/])(\w+\.py|\w+/)(?![\w/])", sign)
    there = {f"{path.name}/" if path.is_dir() else path.name for path in (ROOT / room).rglob("*")}
    assert set(named) - {"conftest.py"} <= there  # that one is the reader's
