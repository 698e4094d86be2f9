"""`make demo` when something goes wrong; .ci/run runs the whole demo."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import typer

from examples.demo.__main__ import main
from percolator.services.local.cluster import LocalCluster
from percolator.services.local.directory import Ownership, running

ROOT = Path(__file__).parents[2]
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
