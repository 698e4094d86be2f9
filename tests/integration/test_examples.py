"""Each example runs with one command, and leaves nothing behind.

The bank's other test is test_bank.py; the client in Rust is run by tests/rust.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import typer

import percolator
from examples.demo.__main__ import main
from examples.webindex import initial, tables
from examples.webindex.crawl import Crawl
from examples.webindex.definition import served
from examples.webindex.documents import Document
from examples.webindex.served import served_table
from percolator import Database
from percolator.errors import UsageError
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.directory import Ownership, running

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shared:
    """The output of one run of `python -m examples`, and the effects of examples in it."""

    directory: Path
    done: subprocess.CompletedProcess[str]

    def of(self, example: str, kind: str) -> str:
        return (self.directory / f"{example}.{kind}").read_text()


@pytest.mark.parametrize(
    ("example", "ends_with"),
    [
        ("bank", "12,000 in all accounts together: nothing was made or lost"),
        ("counter_view", "the view is what all orders add up to"),
    ],
)
def test_an_example_runs_on_its_own_cluster(example: str, ends_with: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"examples.{example}", "--seconds", "0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "examples", *command],
        cwd=ROOT,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, _complaints(done.stderr)) == (0, [])
    assert done.stdout.splitlines()[-1] == ends_with
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Examples one after another on one cluster: to start one takes longer than they do."""
    directory = tmp_path_factory.mktemp("shared")
    command = (
        'for one in unique_numbers phrase_counts inverted_index; do "$PYTHON" -m examples.$one '
        '> "$OUT/$one.out" 2> "$OUT/$one.err"; echo $? > "$OUT/$one.code"; '
        # Two of them make a table with the same name.
        '[ $one != phrase_counts ] || percolator tables delete documents --yes > "$OUT/dropped"; '
        "done; "
        "echo $PERCOLATOR_GATEWAY; exit 7"
    )
    done = subprocess.run(
        [sys.executable, "-m", "examples", "bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "OUT": str(directory), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Shared(directory, done)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("example", "ends_with"),
    [
        ("unique_numbers", "different numbers, as plain Python counts them"),
        ("phrase_counts", "pairs of words, as plain Python counts them"),
        ("inverted_index", "words, as plain Python finds them"),
    ],
)
def test_an_example_of_recipes_agrees_with_plain_python(
    example: str, ends_with: str, shared: Shared
) -> None:
    assert shared.done.stderr == ""
    assert (shared.of(example, "code"), _complaints(shared.of(example, "err"))) == ("0\n", [])
    assert shared.of(example, "out").endswith(f"{ends_with}\n")


def test_the_shop_agrees_with_plain_python() -> None:
    command = ["--observers", "examples.shop:observers", sys.executable, "-m", "examples.shop"]
    done = subprocess.run(
        [sys.executable, "-m", "examples", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, _complaints(done.stderr)) == (0, [])
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["dishes", "drinks"]
    assert all(line.endswith("as plain Python finds in all orders") for line in lines)


def _complaints(stderr: str) -> list[str]:
    """Lines of a program's standard error, but for transactions that a busy machine slows."""
    slow = re.compile(r"slow transaction: |\d+ more slow transactions were not logged")
    return [line for line in stderr.splitlines() if not slow.match(line)]


def test_the_commands_of_the_makefile_run_the_examples() -> None:
    recipes = (ROOT / "Makefile").read_text()
    for example in ("bank", "counter_view", "shop", "webindex.load"):
        assert re.search(rf"-m examples .*?python -m examples\.{example}\b", recipes, re.DOTALL)


@pytest.mark.timeout(120)
def test_the_exit_code_of_a_failing_command_is_passed_on(shared: Shared) -> None:
    assert shared.done.returncode == 7
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", shared.done.stdout)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["--foo", "true"], "there is no command '--foo'"),
        (["/no/such/command"], "there is no command '/no/such/command'"),
        (["--observers", "nope:x", "true"], "observers: module 'nope' cannot be imported"),
        (["--observers", "examples.webindex.observers:nope", "true"], "has no 'nope'"),
    ],
)
def test_a_command_that_cannot_run_starts_no_cluster(
    command: list[str], problem: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples", *command],
        cwd=ROOT,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert problem in done.stderr


@pytest.mark.parametrize("example", ["bank", "counter_view", "webindex.load"])
def test_an_example_without_a_cluster_says_in_one_line_how_to_start_one(example: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"examples.{example}", "--address", "127.0.0.1:1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: no master or gateway answered: 127.0.0.1:1: ")
    assert "start one with `percolator dev`" in line


# The document pipeline on a cluster of processes, as in docs/webindex.md, and under kills.

GUIDE = ROOT / "docs" / "webindex.md"
WAIT_SECONDS = 120.0
_LOOK_SECONDS = 0.05
"""Between two looks at how far a loader, which is another process, has come."""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        tmp_path_factory.mktemp("cluster"),
        tablet_servers=2,
        workers=2,
        observers=["examples.webindex.observers:observers"],
    ) as started:
        yield started


@pytest.fixture(scope="module")
def db(cluster: LocalCluster) -> Iterator[Database]:
    with percolator.connect(cluster.address) as database:
        yield database


def load(cluster: LocalCluster, *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "examples.webindex.load", "--address", cluster.address, *options],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )


def crawled(db: Database) -> list[Document]:
    with db.snapshot() as snapshot:
        rows = snapshot.scan(tables.documents, columns=[tables.body])
        return [Document(row.key, row[tables.body]) for row in rows]


def crawl_among_kills(
    cluster: LocalCluster, db: Database, *options: str, loaded: int, killed: Sequence[str]
) -> list[Document]:
    """Loads a crawl, kills these processes when that many documents are there, and compares what
    is served in the end with its definition. Returns the documents."""
    # At no more than this rate, so that it is still at work when they are killed.
    with load(cluster, "--rate", "60", *options) as loading:
        deadline = time.monotonic() + WAIT_SECONDS
        while len(crawled(db)) < loaded:
            assert time.monotonic() < deadline
            time.sleep(_LOOK_SECONDS)
        assert loading.poll() is None, "everything was written before anything was killed"
        for name in killed:
            cluster.processes[name].kill()
        for name in killed:
            cluster.restart(name)
        _, told = loading.communicate(timeout=WAIT_SECONDS)
        assert loading.returncode == 0, told
    quiet = db.wait_for_observers(timeout=WAIT_SECONDS)
    assert not quiet.dead_letters
    documents = crawled(db)
    assert served_table(db) == served(documents)
    return documents


@pytest.mark.timeout(240)
def test_a_crawl_is_served_although_a_worker_and_a_tablet_server_are_killed_in_the_middle(
    cluster: LocalCluster, db: Database
) -> None:
    tables.create_tables(db, ["http://site1", "http://site2"])
    options = ("--documents", "180", "--updates", "60", "--deletions", "30")
    killed = ("worker", "tabletserver-1")
    documents = crawl_among_kills(cluster, db, *options, loaded=80, killed=killed)
    assert 150 < len(documents) < 180


@pytest.mark.timeout(240)
def test_the_program_in_the_guide_shows_what_is_served(cluster: LocalCluster, db: Database) -> None:
    with load(cluster, "--documents", "20", "--seed", "7") as loading:
        _, told = loading.communicate(timeout=WAIT_SECONDS)
    assert loading.returncode == 0, told
    (program,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    shown = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
        env={**os.environ, "PERCOLATOR_ADDRESS": cluster.address},
    ).stdout.splitlines()
    urls = [line.split()[0] for line in shown]
    assert urls == sorted(served_table(db))[:5]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--rate", "0"], "must be above 0"),
        (["--documents", "0", "--forever"], "only synthetic documents can change"),
        (["--text", "no-such-file"], "no-such-file"),
        (["--text", str(GUIDE)], "a document begins with"),
    ],
)
def test_the_loader_says_what_is_wrong(
    cluster: LocalCluster, options: list[str], told: str
) -> None:
    with load(cluster, *options) as loading:
        _, errors = loading.communicate(timeout=WAIT_SECONDS)
    assert loading.returncode
    assert told in errors
    assert "Traceback" not in errors


# A large repository is loaded at once into a running cluster.


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


# `make demo` when something goes wrong; .ci/run runs the whole demo.

SECONDS_MAX = 100


def demo_until_its_cluster_runs(
    data: Path, hurt: Callable[[int, dict[str, int]], None]
) -> tuple[int, str, list[int]]:
    """Returns its exit code, its output from then on, and the processes of its cluster.

    `hurt` receives the demo's process group, and its cluster's process ids by name.
    """
    demo = subprocess.Popen(
        [sys.executable, "-m", "examples.demo", "--data", str(data)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    started: dict[str, str] = {}
    with demo:
        assert demo.stdout is not None
        for line in demo.stdout:
            if "tablet servers; 2 workers run" in line:
                break
            if "with their process ids" in line:
                started = dict(re.findall(r"([a-z]+(?:-\d)?) (\d+)(?:,|$)", line))
        pids = {name: int(pid) for name, pid in started.items()}
        assert len(pids) == 8
        hurt(demo.pid, pids)
        said, _ = demo.communicate(timeout=SECONDS_MAX)
    return demo.returncode, said, list(pids.values())


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS_MAX * 2)
def test_ctrl_c_stops_every_process_and_the_demo_can_run_again_on_its_data(tmp_path: Path) -> None:
    def ctrl_c(group: int, pids: dict[str, int]) -> None:
        os.killpg(group, signal.SIGINT)  # as a terminal does

    code, said, pids = demo_until_its_cluster_runs(tmp_path / "demo", ctrl_c)
    assert (code, said.splitlines()[-1].endswith("everything is stopped")) == (130, True), said
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert running(tmp_path / "demo") is None
    log = (tmp_path / "demo" / "logs" / "tabletserver-1.log").read_text()
    assert '"event": "stopped"' in log.splitlines()[-1], "it did not drain before it stopped"


@pytest.mark.parametrize(("is_stopped", "said"), [(True, "is stopped"), (False, "stops")])
def test_interrupted_while_it_stops_its_cluster_it_does_not_say_that_it_has(
    is_stopped: bool,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    owned: list[Ownership] = []

    def interrupted(*_: object) -> None:
        owned.append(Ownership(tmp_path, print))
        if is_stopped:
            owned.pop().release()
        raise KeyboardInterrupt

    monkeypatch.setattr("examples.demo.__main__._run", interrupted)
    with pytest.raises(typer.Exit) as ended:
        main(data=tmp_path)
    for still in owned:
        still.release()
    assert ended.value.exit_code == 130
    assert capsys.readouterr().out.endswith(f"interrupted: everything {said}\n")


@pytest.mark.chaos
@pytest.mark.timeout(SECONDS_MAX * 2)
def test_a_process_that_dies_by_itself_is_a_failure(tmp_path: Path) -> None:
    def kill_a_worker(group: int, pids: dict[str, int]) -> None:
        os.kill(pids["worker-2"], signal.SIGKILL)

    code, said, pids = demo_until_its_cluster_runs(tmp_path / "demo", kill_a_worker)
    assert code == 1, said
    assert "wrong: worker-2 has ended with -9" in said
    assert str(tmp_path / "demo" / "logs") in said
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_a_directory_with_other_contents_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "precious").write_text("precious")
    with pytest.raises(typer.Exit) as ended:
        main(data=tmp_path)
    assert ended.value.exit_code == 2
    assert "does not hold a local cluster" in capsys.readouterr().out
    assert [one.name for one in tmp_path.iterdir()] == ["precious"]


@pytest.mark.integration
def test_a_directory_on_which_a_cluster_runs_is_refused_with_the_command_that_stops_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with LocalCluster(tmp_path, tablet_servers=0) as cluster:
        with pytest.raises(typer.Exit) as ended:
            main(data=tmp_path)
        assert cluster.processes["master"].exit_code is None
    assert ended.value.exit_code == 2
    assert f"make cluster-down DATA={tmp_path}" in capsys.readouterr().out.replace("\n", "")
