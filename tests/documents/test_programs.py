"""The programs in README and the guides do what these say, against a cluster of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import percolator
from percolator import Table
from percolator.schema import INTERNAL_PREFIX
from services.local.cluster import LocalCluster
from tests.documents.blocks import PROGRAMS, ROOT, Block, all_blocks

pytestmark = pytest.mark.integration

DRIVER = Path(__file__).parent / "driver.py"


def _steps(document: str) -> list[dict[str, Any]]:
    """The steps that a reader of the document takes, in order."""
    steps = []
    shown = False
    for block in all_blocks():
        if block.document != document:
            continue
        kind = _kind(block)
        if kind == "output" and not shown:
            kind = ""
        shown = kind in {"python", "sh"}
        if kind:
            steps.append(_step(block, kind))
    return steps


def _kind(block: Block) -> str:
    if block.told("run by") or block.told("not run:"):
        return ""
    if block.told("file:"):
        return "file"
    if block.told("in another terminal"):
        return "terminal"
    return block.language if block.language in {*PROGRAMS, "output"} else ""


def _step(block: Block, kind: str) -> dict[str, Any]:
    return {
        "kind": kind,
        "document": block.document,
        "line": block.line,
        "path": block.told("file:"),
        "text": block.text,
    }


HUNG_SECONDS = 150
"""Only tells a reader that hangs from a starved machine: the longest document starts so many
processes that it takes 18 s of CPU."""

DOCUMENTS = sorted(
    {
        block.document
        for block in all_blocks()
        if block.language in PROGRAMS and not (block.told("run by") or block.told("not run:"))
    }
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    data = tmp_path_factory.mktemp("cluster")
    with LocalCluster(data, tablet_servers=2, gateways=1) as started:
        yield started


@pytest.mark.timeout(HUNG_SECONDS + 10)
@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_programs_of_a_document_do_what_it_says(
    cluster: LocalCluster, document: str, tmp_path: Path
) -> None:
    with percolator.connect(cluster.address) as db:
        for name in db.tables():
            if not name.startswith(INTERNAL_PREFIX):
                db.drop_table(Table(name))
    text = json.dumps(_steps(document))
    # The addresses of a cluster that is started by hand.
    text = text.replace("localhost:7100", cluster.address)
    text = text.replace("localhost:7110", cluster.gateway_address)
    steps = tmp_path / "steps.json"
    steps.write_text(text)
    here = tmp_path / "here"
    here.mkdir()
    environment = {
        **os.environ,
        "PERCOLATOR_ADDRESS": cluster.address,
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    code, said = _drive(steps, here, environment)
    assert code == 0, said


def _drive(steps: Path, here: Path, environment: dict[str, str]) -> tuple[int, str]:
    """Runs a reader in a separate session, so that its other terminals always end with it."""
    reader = subprocess.Popen(
        [sys.executable, str(DRIVER), str(steps)],
        cwd=here,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, said = reader.communicate(timeout=HUNG_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(reader.pid, signal.SIGKILL)
        _, said = reader.communicate()
        raise AssertionError(f"still running; so far:\n{said}") from None
    return reader.returncode, said


def test_documents_with_programs_are_found() -> None:
    assert {"README.md", "docs/observers.md", "docs/tutorial.md"} <= set(DOCUMENTS)


@pytest.mark.parametrize(
    ("kind", "text", "told"),
    [
        ("python", "print(1 / 0)", "ZeroDivisionError"),
        ("sh", "false; true", "exit code 1"),
        ("output", "something", "expected"),
    ],
)
def test_a_block_that_does_not_do_what_it_says_fails_with_its_place(
    tmp_path: Path, kind: str, text: str, told: str
) -> None:
    block = Block("guide.md", 17, kind, text, "")
    steps = tmp_path / "steps.json"
    steps.write_text(json.dumps([_step(block, kind)]))
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(steps)], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1
    assert done.stderr.startswith("guide.md:17\n")
    assert told in done.stderr
