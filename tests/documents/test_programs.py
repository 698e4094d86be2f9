"""The programs in README and the guides do what these say, against a cluster of processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import percolator
from percolator import Table, codecs
from percolator.schema import INTERNAL_PREFIX
from percolator.services.local.cluster import LocalCluster
from tests.documents.commands import (
    DATA,
    PROGRAMS,
    ROOT,
    SHOWN,
    Block,
    all_blocks,
    documents,
    problems,
)

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


# ---------------------------------------------------------------------------- README's observer

SECONDS_MAX = 60.0
ROWS_BEFORE = 3_000
"""So many that a worker is killed while it is notified of them."""


class Overdrafts:
    """README's first two programs in a directory, and processes that run there."""

    def __init__(self, cluster: LocalCluster, here: Path) -> None:
        self._here = here
        self._environment = {
            **os.environ,
            "PERCOLATOR_ADDRESS": cluster.address,
            "PYTHONPATH": f"{here}:{ROOT}",
            "PYTHONUNBUFFERED": "1",
            "COLUMNS": "200",
        }
        self.commands = {
            "percolator worker": ["-m", "percolator.cli", "worker"],
            # As compose.yaml and `percolator dev` start it.
            "percolator serve worker": [
                *("-m", "percolator.cli", "serve", "worker", "--masters", cluster.address),
                *("--listen", "127.0.0.1:0", "--metrics-listen="),
            ],
        }
        for block in all_blocks():
            path = block.told("file:")
            if block.document == "README.md" and path:
                (here / path).write_text(block.text.replace("localhost:7100", cluster.address))
        self._running: list[subprocess.Popen[bytes]] = []

    def run(self, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            cwd=self._here,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start_worker(self, kind: str, *, until: str) -> subprocess.Popen[bytes]:
        """Starts a worker, and returns when it has said this."""
        log = self._here / f"worker-{len(self._running)}.log"
        with log.open("wb") as file:
            worker = subprocess.Popen(
                [sys.executable, *self.commands[kind], "--observers", "overdrafts:observers"],
                cwd=self._here,
                env=self._environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        self._running.append(worker)
        deadline = time.monotonic() + SECONDS_MAX
        while until not in log.read_text():
            assert worker.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.02)
        return worker

    def wait(self) -> None:
        assert "nothing left to do" in self.run(
            *("-m", "percolator.cli", "wait", "--timeout", str(SECONDS_MAX))
        )

    def overdrawn(self, db: percolator.Database) -> dict[str, bool]:
        table = Table("accounts")
        column = table.column("overdrawn", codecs.boolean)
        with db.snapshot() as snapshot:
            return {row.key: row[column] for row in snapshot.scan(table, columns=[column])}

    def end(self) -> None:
        for worker in self._running:
            worker.kill()
            worker.wait()


@pytest.fixture
def overdrafts(cluster: LocalCluster, tmp_path: Path) -> Iterator[Overdrafts]:
    made = Overdrafts(cluster, tmp_path)
    try:
        yield made
    finally:
        made.end()


@pytest.fixture
def db(cluster: LocalCluster) -> Iterator[percolator.Database]:
    with percolator.connect(cluster.address) as database:
        database.drop_table(Table("accounts"), missing_ok=True)
        yield database


RUNNING = {
    "percolator worker": "running flag of accounts",
    "percolator serve worker": "running an observer",
}


@pytest.mark.timeout(3 * SECONDS_MAX)
@pytest.mark.parametrize("kind", ["percolator worker", "percolator serve worker"])
@pytest.mark.parametrize("order", ["worker before table", "worker after data", "two workers"])
def test_an_observer_handles_everything_in_whatever_order_programs_start(
    overdrafts: Overdrafts, db: percolator.Database, kind: str, order: str
) -> None:
    if order == "worker before table":
        overdrafts.start_worker(kind, until="will be created with the observers flag")
        overdrafts.run("bank.py")
    else:
        overdrafts.run("bank.py")
        if order == "two workers":
            with ThreadPoolExecutor() as threads:
                start = partial(overdrafts.start_worker, kind, until=RUNNING[kind])
                list(threads.map(lambda _: start(), range(2)))
        else:
            overdrafts.start_worker(kind, until="it also handles the cells that are there already")
    overdrafts.wait()
    assert overdrafts.overdrawn(db) == {"bob": True, "joe": False}


@pytest.mark.timeout(3 * SECONDS_MAX)
def test_a_worker_that_is_killed_during_the_backfill_is_followed_by_another(
    overdrafts: Overdrafts, db: percolator.Database
) -> None:
    overdrafts.run("bank.py")
    balance = Table("accounts").column("balance", codecs.integer)
    db.set_many((f"account {number:04}", {balance: number}) for number in range(ROWS_BEFORE))
    worker = overdrafts.start_worker("percolator worker", until=RUNNING["percolator worker"])
    deadline = time.monotonic() + SECONDS_MAX
    while not overdrafts.overdrawn(db):
        assert time.monotonic() < deadline
    worker.kill()
    worker.wait()
    assert len(overdrafts.overdrawn(db)) < ROWS_BEFORE, "the worker was killed too late"
    overdrafts.start_worker("percolator serve worker", until=RUNNING["percolator serve worker"])
    overdrafts.wait()
    assert len(overdrafts.overdrawn(db)) == ROWS_BEFORE + 2


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


# Every block of the documents is checked, or says why it is not.

NOT_RUN_MAX = 29
"""Raise this only for blocks that really cannot be run here."""

BLOCKS = all_blocks()
NOT_RUN = [block for block in BLOCKS if block.told("not run:")]


def test_every_block_says_what_it_is() -> None:
    known = PROGRAMS | DATA | SHOWN
    assert [block.place for block in BLOCKS if block.language not in known] == []


def test_what_a_comment_asks_for_is_something_that_is_done() -> None:
    done = ("file:", "in another terminal", "run by", "not run:")
    unknown = [
        f"{block.place}: {block.directive}"
        for block in BLOCKS
        if block.directive and not any(block.told(one) for one in done)
    ]
    assert unknown == []


def test_blocks_that_another_test_runs_are_named_in_it() -> None:
    missing = [
        block.place
        for block in BLOCKS
        if (test := block.told("run by"))
        and not (
            (ROOT / test).is_file() and block.document.split("/")[-1] in (ROOT / test).read_text()
        )
    ]
    assert missing == []


def test_blocks_that_are_not_run_are_few_and_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        for block in NOT_RUN:
            print(f"\nnot run: {block.place}: {block.told('not run:')}", end="")
    assert [block.place for block in NOT_RUN if len(block.told("not run:").split()) < 3] == []
    assert len(NOT_RUN) <= NOT_RUN_MAX


@pytest.mark.parametrize(
    "block", [block for block in NOT_RUN if block.language == "sh"], ids=lambda block: block.place
)
def test_commands_that_are_not_run_exist_with_their_options(block: Block) -> None:
    assert problems(block.text) == []


def test_commands_that_are_named_in_the_text_exist_with_their_options() -> None:
    wrong = []
    for document in documents():
        for code in re.findall(r"`((?:make|percolator|python -m) [^`]+)`", document.read_text()):
            command = re.sub(r"[…\[].*|, `.*", "", " ".join(code.split()))
            wrong += [f"{document.name}: {problem}" for problem in problems(command)]
    assert wrong == []


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("make no-such-target", "no such target: no-such-target"),
        ("make test-spark SEEDS=1", ""),
        ("percolator tablets slpit 7", "No such command"),
        ("percolator tablets split 7 --rows g", "No such option"),
        ("percolator serve worker --master host:7100", "no such option: --master"),
        ("percolator serve worker --masters host:7100", ""),
        ("percolator serve clerk", "no such service: clerk"),
        ("percolator serve tabletserver dump PATH --jsno", "no such option: --jsno"),
        ("python -m examples.missing", "no such module"),
        ("percolate", "not a command"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(command: str, wrong: str) -> None:
    found = problems(command)
    assert len(found) == (1 if wrong else 0)
    assert all(wrong in one for one in found)


def test_data_is_well_formed() -> None:
    for block in BLOCKS:
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "yaml":
            assert isinstance(yaml.safe_load(block.text), dict)
