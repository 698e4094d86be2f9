"""The version is said in one place, and the changelog and the kept wheel agree with it."""

from __future__ import annotations

import re
import tomllib
from datetime import date
from pathlib import Path

import percolator

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = str(PROJECT["version"])


def test_the_newest_section_of_the_changelog_is_this_version_with_a_date() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    version, _, day = sections[1].partition(" - ")
    assert version == VERSION
    assert date.fromisoformat(day) >= date(2026, 11, 23)


def test_the_package_knows_its_version() -> None:
    assert percolator.__version__ == VERSION
    assert "__version__" in dir(percolator)


def test_the_kept_wheel_is_of_this_minor_version_or_of_the_one_before() -> None:
    """Masters let no server of any other version register."""
    (wheel,) = (ROOT / "tests/compatibility/previous").glob("*.whl")
    major, minor, _ = map(int, wheel.name.split("-")[1].split("."))
    this_major, this_minor, _ = map(int, VERSION.split("."))
    assert major == this_major
    assert minor in {this_minor - 1, this_minor}


def test_the_supported_pythons_are_those_of_the_metadata() -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    support = (ROOT / "SECURITY.md").read_text()
    assert pythons
    assert all(f"{one}" in support for one in pythons)
