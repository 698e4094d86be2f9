"""A large repository is loaded at once into a running cluster."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

import percolator
from examples.webindex import initial
from examples.webindex.crawl import Crawl
from examples.webindex.definition import served
from examples.webindex.served import served_table
from percolator.errors import UsageError
from percolator.services.local.cluster import LocalCluster

pytestmark = pytest.mark.integration


def test_what_is_loaded_is_served_and_a_second_load_is_refused(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, tablet_servers=1) as cluster:
        command = [sys.executable, "-m", "examples.webindex.initial"]
        command += ["--documents", "1000", "--seed", "3", "--address", cluster.address]
        loading = subprocess.run(command, capture_output=True, text=True, timeout=50)
        assert loading.returncode == 0, loading.stderr
        with percolator.connect(cluster.address) as db:
            assert served_table(db) == served(Crawl(1000, seed=3))
        with pytest.raises(UsageError, match="table 'documents' is not empty"):
            asyncio.run(initial.load_crawl(cluster.address, Crawl(10), tablets=1))
