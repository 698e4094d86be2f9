"""The launcher, without starting processes: who owns the data directory, and what it prints."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import IO, Any

import pytest

from percolator.services.local.cluster import LocalCluster
from percolator.services.local.command import app, main
from percolator.services.local.directory import running
from percolator.services.local.process import LocalClusterError, ServiceProcess
from tests.command_line import CliRunner

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
    def look_and_stop(self: LocalCluster) -> None:
        found.append(running(self.data))
        raise Stopped

    monkeypatch.setattr(LocalCluster, "_start_all", look_and_stop)


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

    def wait(self: ServiceProcess, seconds: float, **more: object) -> None:
        waited.append(seconds)
        raise Stopped

    monkeypatch.setattr(ServiceProcess, "start", lambda self: None)
    monkeypatch.setattr(ServiceProcess, "wait_ready", wait)
    cluster = LocalCluster(tmp_path, start_seconds=77.0)
    with pytest.raises(Stopped):
        cluster._start_all()
    assert waited == [77.0]
