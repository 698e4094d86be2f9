"""A store that another process has open is refused, and the error names that process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from percolator.errors import StoreUnusable
from percolator.services.chassis.files import DiskThreads
from percolator.services.tabletserver.leveldb_storage import LevelDBStorage

pytestmark = [pytest.mark.integration, pytest.mark.timeout(60)]

HOLD = "import plyvel, sys; db = plyvel.DB(sys.argv[1], create_if_missing=True); print(); input()"


def test_the_process_that_has_a_tablet_open_is_named(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout
        holder.stdout.readline()
        with pytest.raises(StoreUnusable, match=f"{tmp_path}: process {holder.pid} has it open"):
            LevelDBStorage(tmp_path, DiskThreads(0, "none"))
        holder.communicate(b"\n")
