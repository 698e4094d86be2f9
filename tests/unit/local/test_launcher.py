"""The launcher, without starting processes: who owns the data directory, and what it prints.

Requests to a running launcher, and what it does with them.

Which files belong to the observers of a worker, and when they count as changed.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from percolator.services.local.cluster import LocalCluster
from percolator.services.local.command import app, main
from percolator.services.local.directory import running
from percolator.services.local.launcher import Control, Sources, ask
from percolator.services.local.process import LocalClusterError, ServiceProcess
from tests.command_line import CliRunner
from tests.patching import in_place_of

LONG = "a-very-long-name-of-a-directory-without-any-end" * 3


def locked(data: Path) -> IO[str]:
    """A lock as a launcher holds it while it runs or starts."""
    (data / "run").mkdir(parents=True)
    lock = (data / "run" / "lock").open("a+")
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


class Stopped(Exception):
    """Raised in place of starting processes."""


def start_none(monkeypatch: pytest.MonkeyPatch, found: list[object]) -> None:
    @in_place_of(monkeypatch, LocalCluster, "_start_all")
    def look_and_stop(self: LocalCluster) -> None:
        found.append(running(self.data))
        raise Stopped


def test_the_state_of_a_killed_launcher_is_never_told_as_that_of_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may have its id by now, and `down` sends a signal to it."""
    locked(tmp_path).close()
    (tmp_path / "run" / "local.json").write_text(json.dumps({"pid": 1}))
    found: list[object] = []
    start_none(monkeypatch, found)
    with pytest.raises(Stopped):
        LocalCluster(tmp_path).start()
    assert found == [{}]


def test_a_start_is_not_refused_because_of_a_check_whether_a_cluster_is_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher's own parent asks many times a second while it waits."""
    asking = locked(tmp_path)
    monkeypatch.setattr(
        "percolator.services.local.directory.time.sleep", lambda seconds: asking.close()
    )
    start_none(monkeypatch, [])
    with pytest.raises(Stopped):
        LocalCluster(tmp_path).start()


def test_a_data_directory_in_use_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("percolator.services.local.directory.time.sleep", lambda seconds: None)
    with locked(tmp_path), pytest.raises(LocalClusterError, match=r"--data: .* running on"):
        LocalCluster(tmp_path).start()


@pytest.mark.parametrize(
    ("store", "says"),
    [("/srv/data", "--store: expected bigtable://"), ("bigtable://x/y", "--store: project: ")],
)
def test_a_store_that_is_no_row_store_is_refused_before_anything_starts(
    tmp_path: Path, store: str, says: str
) -> None:
    with pytest.raises(LocalClusterError, match=says):
        LocalCluster(tmp_path, store=store, tablet_servers=0)


@pytest.mark.parametrize("command", ["down", "destroy", "up"])
def test_whatever_is_wrong_with_the_data_directory_is_one_line_that_names_it(
    command: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / LONG / "[/red]"
    (data / "run" / "lock").mkdir(parents=True)
    arguments = ["--data", str(data)]
    arguments = arguments if command == "up" else [command, *arguments]
    with pytest.raises(SystemExit) as ended:
        main(arguments, "percolator dev")
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: --data: cannot open ")
    assert "[/red]/run/lock: Is a directory; pass a directory that you may " in lines[0]


def test_paths_are_no_markup(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["down", "--data", str(tmp_path / "[/red]")])
    assert result.exit_code == 0
    assert "[/red]" in result.output


@pytest.mark.parametrize("wrong", [{"workers": 1}, {"observers": ["m:n"]}, {"workers": -1}])
def test_workers_are_nothing_without_observers_and_observers_nothing_without_workers(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    with pytest.raises(LocalClusterError, match="workers and observers: expected both of them"):
        LocalCluster(tmp_path, **wrong)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_cluster_needs_time_to_start(tmp_path: Path, seconds: float) -> None:
    with pytest.raises(LocalClusterError, match="start_seconds: expected more than 0"):
        LocalCluster(tmp_path, start_seconds=seconds)


def test_a_process_has_the_time_to_start_that_the_cluster_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []

    @in_place_of(monkeypatch, ServiceProcess, "wait_ready")
    def wait(self: ServiceProcess, seconds: float, **more: object) -> None:
        waited.append(seconds)
        raise Stopped

    monkeypatch.setattr(ServiceProcess, "start", lambda self: None)

    cluster = LocalCluster(tmp_path, start_seconds=77.0)
    with pytest.raises(Stopped):
        cluster._start_all()
    assert waited == [77.0]


DEEP = "a-directory-whose-name-is-longer-than-the-address-of-a-socket-" * 3


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / DEEP / "run").mkdir(parents=True)
    return tmp_path / DEEP


@contextmanager
def launcher(data: Path, *, requests: int = 1) -> Iterator[list[tuple[str, str]]]:
    """Owns the directory, and answers; a process called "gone" is a mistake."""
    asked: list[tuple[str, str]] = []

    def carry_out(action: str, name: str) -> str:
        asked.append((action, name))
        if name == "gone":
            raise LocalClusterError("there is no process 'gone'")
        return f"done: {action} {name}"

    with (data / "run" / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        control = Control(data)

        def serve() -> None:
            for _ in range(requests):
                control.serve(10, carry_out)

        serving = threading.Thread(target=serve)
        serving.start()
        try:
            yield asked
        finally:
            serving.join()
            control.close()


def test_a_request_is_carried_out_and_answered(data: Path) -> None:
    with launcher(data) as asked:
        assert ask(data, "kill", "tabletserver-2") == "done: kill tabletserver-2"
    assert asked == [("kill", "tabletserver-2")]
    assert not (data / "run" / "control").exists()


def test_a_refused_request_says_why(data: Path) -> None:
    with launcher(data), pytest.raises(LocalClusterError, match="no process 'gone'"):
        ask(data, "kill", "gone")


@pytest.mark.parametrize("nonsense", [b"", b"nonsense\n", b"[]\n", b'{"action": "kill"}\n'])
def test_who_asks_nonsense_or_hangs_up_does_not_stop_the_launcher(
    data: Path, nonsense: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    with launcher(data, requests=2) as asked:
        with socket.socket(socket.AF_UNIX) as stranger:
            monkeypatch.chdir(data / "run")
            stranger.connect("control")
            stranger.sendall(nonsense)
        assert ask(data, "restart", "oracle") == "done: restart oracle"
    assert asked == [("restart", "oracle")]


def test_without_a_launcher_it_says_how_to_start_one(data: Path) -> None:
    with pytest.raises(LocalClusterError, match=r"no cluster is running .* percolator dev|`perc"):
        ask(data, "kill", "oracle")


def test_a_launcher_that_does_not_listen_is_starting_or_stopping(data: Path) -> None:
    with (data / "run" / "lock").open("a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(LocalClusterError, match="it is starting, stopping, or was killed"):
            ask(data, "kill", "oracle")


def test_the_socket_of_a_killed_launcher_is_no_obstacle(data: Path) -> None:
    Control(data)._socket.close()
    assert (data / "run" / "control").exists()
    with launcher(data):
        assert ask(data, "kill", "oracle") == "done: kill oracle"


def write(path: Path, text: str) -> None:
    """A file that is newer than before: two writes may fall into one tick of the file system."""
    before = path.stat().st_mtime_ns if path.exists() else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, ns=(before + 10**9, before + 10**9))


def names(paths: list[Path], here: Path) -> list[str]:
    return [str(path.relative_to(here)) for path in paths]


def test_a_module_and_what_it_imports_from_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "shop.py", "import orders\nfrom percolator import Table\n")
    write(tmp_path / "orders.py", "def f():\n    from money.euro import rate\n")
    write(tmp_path / "money" / "__init__.py", "")
    write(tmp_path / "money" / "euro.py", "rate = 1\n")
    write(tmp_path / "program.py", "import shop\n")
    sources = Sources(["shop:observers"], tmp_path)
    assert sources.changed() == []
    for name in ("shop.py", "orders.py", "money/euro.py"):
        write(tmp_path / name, (tmp_path / name).read_text() + "# changed\n")
        assert names(sources.changed(), tmp_path) == [name]
    assert sources.changed() == []
    write(tmp_path / "program.py", "import shop  # changed\n")
    assert sources.changed() == []


def test_a_package_with_everything_in_it(tmp_path: Path) -> None:
    write(tmp_path / "shop" / "index.py", "")
    sources = Sources(["shop.index:observers"], tmp_path)
    write(tmp_path / "shop" / "deep" / "new.py", "")
    assert names(sources.changed(), tmp_path) == ["shop/deep/new.py"]
    (tmp_path / "shop" / "index.py").unlink()
    assert names(sources.changed(), tmp_path) == ["shop/index.py"]


def test_a_module_that_is_not_there_yet_and_one_that_is_broken(tmp_path: Path) -> None:
    sources = Sources(["shop:observers"], tmp_path)
    write(tmp_path / "shop.py", "def (:\n")
    assert names(sources.changed(), tmp_path) == ["shop.py"]
    write(tmp_path / "orders.py", "")
    write(tmp_path / "shop.py", "import orders\n")
    assert names(sources.changed(), tmp_path) == ["orders.py", "shop.py"]


def test_while_a_module_is_broken_only_what_really_changes_is_named(tmp_path: Path) -> None:
    """Modules that it imported are kept, and a change there is noticed as before."""
    write(tmp_path / "orders.py", "")
    write(tmp_path / "shop.py", "import orders\n")
    sources = Sources(["shop:observers"], tmp_path)
    write(tmp_path / "shop.py", "import orders\ndef (:\n")
    assert names(sources.changed(), tmp_path) == ["shop.py"]
    write(tmp_path / "orders.py", "changed = True\n")
    assert names(sources.changed(), tmp_path) == ["orders.py"]
    write(tmp_path / "shop.py", "import orders, os\n")
    assert names(sources.changed(), tmp_path) == ["shop.py"]


def test_two_modules_that_import_each_other(tmp_path: Path) -> None:
    write(tmp_path / "shop.py", "import orders\n")
    write(tmp_path / "orders.py", "import shop\n")
    sources = Sources(["shop:observers", "orders:observers"], tmp_path)
    write(tmp_path / "orders.py", "import shop, os\n")
    assert names(sources.changed(), tmp_path) == ["orders.py"]


def test_a_module_is_also_found_where_python_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "elsewhere"
    write(elsewhere / "shop.py", "")
    monkeypatch.syspath_prepend(str(elsewhere))
    sources = Sources(["shop:observers"], tmp_path / "here")
    write(elsewhere / "shop.py", "changed = True\n")
    assert names(sources.changed(), elsewhere) == ["shop.py"]
