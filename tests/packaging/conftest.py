"""The wheel that `make wheel` built, and environments that hold it and what it needs, only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel() -> Path:
    (built,) = (ROOT / "dist").glob("percolator_store-*.whl")
    return built


@pytest.fixture(scope="module")
def constraints(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked versions, and that of this wheel."""
    lock = (ROOT / "requirements" / "dev.lock").read_text()
    locked = re.findall(r"^([\w.-]+==[^ ;\\]+)", lock, re.MULTILINE)
    path = tmp_path_factory.mktemp("constraints") / "constraints.txt"
    path.write_text("\n".join([*locked, f"percolator-store=={wheel.name.split('-')[1]}"]))
    return path


def empty_environment(directory: Path) -> Path:
    """A new environment, and the directory of its programs."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    return directory / "bin"
