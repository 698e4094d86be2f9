"""A failing seed is useful only if it fails again in every process that runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import zip_longest
from pathlib import Path

import pytest

from tests.simulation.course import SCENARIOS

_ROOT = Path(__file__).parents[2]
_HASH_SEEDS = ("1", "2")
_MESSAGES_MIN = 1_000


@pytest.mark.integration
def test_a_seed_takes_the_same_course_in_every_process(tmp_path: Path) -> None:
    """Neither the hashes of strings nor the addresses of objects matter."""
    writers = []
    for hash_seed in _HASH_SEEDS:
        directory = tmp_path / hash_seed
        directory.mkdir()
        command = [sys.executable, "-m", "tests.simulation.course", str(directory)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        writers.append(subprocess.Popen(command, cwd=_ROOT, env=environment))
    assert [writer.wait() for writer in writers] == [0, 0]
    for name in SCENARIOS:
        one, other = ((tmp_path / seed / name).read_text().split("\n") for seed in _HASH_SEEDS)
        assert len(one) > _MESSAGES_MIN, name
        for number, (line, another) in enumerate(zip_longest(one, other)):
            assert line == another, f"{name}, message {number}"
