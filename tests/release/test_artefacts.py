"""Wheel, source distribution and image are of one version, and the first two hold the same."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.release.conftest import ROOT, VERSION

pytestmark = pytest.mark.timeout(300)
IMAGE = "percolator:local"


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def test_dist_holds_one_wheel_and_one_source_distribution_and_nothing_else(
    wheel: Path, sdist: Path
) -> None:
    assert sorted((ROOT / "dist").iterdir()) == sorted([wheel, sdist])


def test_the_wheel_that_is_built_from_the_source_distribution_is_the_same(
    wheel: Path, sdist: Path, tmp_path: Path
) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    built = tmp_path / "built"
    subprocess.run([*pip, "--wheel-dir", str(built), str(source)], check=True)
    (again,) = built.iterdir()
    assert (again.name, _names(again)) == (wheel.name, _names(wheel))


@pytest.mark.parametrize(
    ("command", "printed"),
    [
        (["percolator", "--version"], VERSION),
        (["percolator", "serve", "tabletserver", "--help"], "--listen"),
        (["percolator", "dev", "--help"], "--temporary"),
    ],
)
def test_the_image_is_of_this_version_and_holds_the_services(
    command: list[str], printed: str
) -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", IMAGE, *command], capture_output=True, text=True, check=True
    )
    assert printed in done.stdout


def test_the_changelog_has_nothing_that_is_not_released() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, _, unreleased = text.partition("## Unreleased\n")
    assert unreleased.lstrip().startswith(f"## {VERSION} - "), "move its entries below a version"
