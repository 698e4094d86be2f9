"""Files that `make release` has built."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VERSION = str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@pytest.fixture
def wheel() -> Path:
    return ROOT / "dist" / f"percolator_store-{VERSION}-py3-none-any.whl"


@pytest.fixture
def sdist() -> Path:
    return ROOT / "dist" / f"percolator_store-{VERSION}.tar.gz"
