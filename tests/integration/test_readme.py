"""What README.md shows does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.local.cluster import LocalCluster

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


def test_the_program_in_the_readme_runs_against_a_local_cluster(tmp_path: Path) -> None:
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(programs) == 1
    with LocalCluster(tmp_path, tablet_servers=1) as cluster:
        done = subprocess.run(
            [sys.executable, "-c", programs[0]],
            env={**os.environ, "PERCOLATOR_ADDRESS": cluster.address},
            capture_output=True,
            text=True,
            timeout=40,
        )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["bob -7", "joe 7"]
