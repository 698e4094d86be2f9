"""`percolator dev` and `percolator certs` without starting anything: their errors and output."""

from __future__ import annotations

import errno
import fcntl
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from percolator.cli import app
from percolator.process import private_opener
from percolator.services import serve
from percolator.services.local import command, launcher
from percolator.services.local.directory import Ownership, delete, running, write_state
from percolator.services.local.process import LocalClusterError, ServiceProcess
from tests.command_line import CliRunner
from tests.patching import in_place_of


def dev(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, ["dev", *arguments])


def refused(*arguments: str) -> str:
    """The one line that it prints instead of starting."""
    result = dev(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    @in_place_of(monkeypatch, ServiceProcess, "start")
    def start(self: ServiceProcess) -> None:
        raise AssertionError("a process was started")

    monkeypatch.chdir(tmp_path)
    return tmp_path


def is_free(port: int) -> bool:
    with socket.socket() as tried:
        try:
            tried.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


@contextmanager
def used_port() -> Iterator[int]:
    """A port that is in use, while the one 10 below, which goes with it, is not."""
    while True:
        with socket.socket() as other:
            other.bind(("127.0.0.1", 0))
            other.listen()
            port = other.getsockname()[1]
            if is_free(port - 10):
                yield port
                return


def test_a_used_port_is_named_with_what_to_do() -> None:
    with used_port() as port:
        gateways = f", the gateway's ({port - 10} + 10),"
        for option, whose in ((port, ""), (port - 10, gateways)):
            assert refused("--temporary", "--port", str(option)) == (
                f"error: --port: {port}{whose} is in use by another program: stop that, or pass "
                "another port; --port 0 takes free ones"
            )


def test_a_directory_that_cannot_be_written_is_named_with_what_to_do(here: Path) -> None:
    (here / "file").touch()
    line = refused("--data", str(here / "file"))
    assert line.startswith(f"error: --data: cannot make {here / 'file'}/")
    assert line.endswith("; pass a directory that you may write to")


def test_a_second_one_in_a_directory_says_how_to_stop_the_first(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("percolator.services.local.directory.time.sleep", lambda seconds: None)
    first = Ownership(here / ".percolator", print)
    for detached in ([], ["--detach"]):
        line = refused("--port", "0", *detached)
        assert line.startswith("error: --data: a cluster is already running on ")
        assert "`percolator dev down` stops it" in line
    first.release()


def test_without_what_the_services_need_it_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "pydantic" else name)
    assert refused("--temporary") == (
        "error: `percolator dev` needs pydantic: pip install 'percolator-store[server]'"
    )


def test_temporary_has_its_own_directory_and_its_own_end(here: Path) -> None:
    for other in (["--data", "x"], ["--detach"]):
        assert refused("--temporary", *other).startswith("error: --temporary: ")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("command", [["kill", "oracle"], ["restart", "oracle"], ["ps"]])
def test_without_a_cluster_there_is_nothing_to_hurt(command: list[str]) -> None:
    assert refused(*command).startswith("error: no cluster is running on .percolator")


@pytest.mark.parametrize("arguments", [["--json", "dev", "ps"], ["dev", "ps", "--json"]])
def test_processes_are_shown_as_json_to_programs(here: Path, arguments: list[str]) -> None:
    processes = [{"name": "master", "pid": 7, "address": "127.0.0.1:7100", "exit_code": None}]
    data = here / ".percolator"
    ownership = Ownership(data, lambda _: None)
    try:
        write_state(data, {"pid": 1, "processes": processes})
        result = CliRunner().invoke(app.app, app.json_first(arguments))
    finally:
        ownership.release()
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == processes


def test_processes_that_a_killed_launcher_has_left_are_waited_for(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have the store and the ports until they end by themselves."""
    killed = Ownership(here, print)
    left = (here / "run" / "processes").open()
    said: list[str] = []
    with (here / "run" / "processes").open() as process:
        killed.release()
        fcntl.flock(process, fcntl.LOCK_EX)
        monkeypatch.setattr(
            "percolator.services.local.directory.time.sleep", lambda seconds: process.close()
        )
        Ownership(here, said.append).release()
    left.close()
    assert said == ["waiting for processes that a killed launcher has left"]


def test_processes_that_do_not_end_are_named(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ownership(here, print).release()
    gone = {"name": "oracle", "pid": 2**22 + 1}
    (here / "run" / "local.json").write_text(json.dumps({"processes": [gone]}))
    monkeypatch.setattr("percolator.services.local.directory.STOP_SECONDS", 0.0)
    monkeypatch.setattr("percolator.services.local.directory.time.sleep", lambda seconds: None)
    with (here / "run" / "processes").open() as process:
        fcntl.flock(process, fcntl.LOCK_EX)
        with pytest.raises(LocalClusterError, match=r"still run on .*: unknown to it; end them"):
            Ownership(here, print)
    assert running(here) is None


def test_a_cluster_in_a_project_is_not_a_part_of_it(here: Path) -> None:
    Ownership(here / ".percolator", print).release()
    assert (here / ".percolator" / ".gitignore").read_text() == "*\n"
    Ownership(here, print).release()
    assert not (here / ".gitignore").exists()


def test_deletion_leaves_nothing_of_a_cluster_and_all_that_was_there_before(here: Path) -> None:
    for data in (here / ".percolator", here):
        Ownership(data, print).release()
        delete(data)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("part", ["store", "logs", "run"])
def test_files_of_another_program_are_neither_joined_nor_deleted(here: Path, part: str) -> None:
    for made in ("store", "run", part):
        (here / made).mkdir(exist_ok=True)
    precious = here / part / "precious"
    precious.touch()
    where = here / part
    said = f"error: --data: {where} has files of another program; pass another directory"
    for options in ([], ["--detach"]):
        assert refused("--data", str(here), *options) == said
    line = refused("destroy", "--data", str(here), "--yes")
    assert line == f"error: {here} does not hold a local cluster"
    assert precious.exists()


@pytest.mark.parametrize("command", [[], ["ps"], ["down"], ["destroy", "--yes"]])
def test_an_empty_directory_name_does_not_mean_this_directory(
    here: Path, command: list[str]
) -> None:
    Ownership(here, print).release()
    line = refused(*command, "--data", "")
    assert line == "error: --data: is empty: give a value, or leave it out"
    assert (here / "store").exists()


def test_a_store_that_was_brought_along_is_joined(here: Path) -> None:
    (here / "store").mkdir()
    (here / "store" / "cluster.json").touch()
    Ownership(here, print).release()


STATE: dict[str, Any] = {
    "address": "127.0.0.1:7100",
    "gateway_address": "127.0.0.1:7110",
    "observers": [],
    "processes": [
        {"name": "master", "pid": 11, "address": "127.0.0.1:7100", "exit_code": None},
        {"name": "tabletserver-1", "pid": 12, "address": "127.0.0.1:5", "exit_code": -9},
        {"name": "worker", "pid": 13, "address": None, "exit_code": None},
    ],
}


def test_the_next_steps_have_options_only_where_needed() -> None:
    usual = command.next_steps(STATE, Path(".percolator"), stopped_by="Ctrl-C stops it.")
    assert "    percolator status\n" in usual
    assert "    percolator dev kill tabletserver-1\n" in usual
    other = {**STATE, "address": "127.0.0.1:9", "observers": ["shop:observers"]}
    unusual = command.next_steps(other, Path("/a b"), stopped_by="")
    assert "    percolator --address 127.0.0.1:9 status\n" in unusual
    assert "    percolator dev restart tabletserver-1 --data '/a b'\n" in unusual
    assert "--observers" not in unusual


def test_a_plan_survives_the_way_to_the_background() -> None:
    plan = launcher.Plan("", 2, 0, 3, ["shop:a", "shop:b"], 0, Path("c"), 90.0)
    assert plan.options() == [
        *("--tablet-servers", "2", "--gateways", "0", "--workers", "3", "--port", "0"),
        *("--observers=shop:a", "--observers=shop:b", "--certificates", "c"),
        *("--start-timeout", "90.0"),
    ]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (None, "observers: module 'stock' cannot be imported: ModuleNotFoundError: "),
        ("1 / 0", "observers: module 'stock' cannot be imported: ZeroDivisionError: "),
        ("observer = []", "observers: module 'stock' has no 'observers'; did you mean 'observer'?"),
        ("observers = []", "stock:observers: is empty: "),
    ],
)
def test_in_the_background_observers_that_cannot_run_are_refused_before_anything_starts(
    here: Path, monkeypatch: pytest.MonkeyPatch, text: str | None, reason: str
) -> None:
    """In a terminal, the worker's exit is told, and the corrected module runs."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    if text is not None:
        (here / "stock.py").write_text(text)
    try:
        line = refused("--port", "0", "--detach", "--observers", "stock:observers")
    finally:
        sys.modules.pop("stock", None)
    assert line.startswith(f"error: {reason}")
    assert not (here / ".percolator").exists()


def test_workers_are_one_if_there_are_observers(monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[int] = []

    @in_place_of(monkeypatch, launcher, "run")
    def run(where: Path, plan: launcher.Plan, *rest: object) -> dict[str, int]:
        counts.append(plan.workers)
        return {}

    for arguments in ([], ["--observers", "a:b", "--observers", "c:d"], ["--workers", "2"]):
        assert dev("--temporary", *arguments).exit_code == 0
    assert counts == [0, 1, 2]


def test_an_option_before_a_subcommand_is_refused_and_not_ignored(here: Path) -> None:
    # Ignored, it would have deleted the cluster in the usual directory.
    kept = here / ".percolator"
    Ownership(kept, print).release()
    for option in (["--data", "other"], ["--temporary"], ["--port", "7100"]):
        line = refused(*option, "destroy", "--yes")
        assert line == (
            f"error: {option[0]}: belongs to starting a cluster; what destroy takes comes after "
            "it: `percolator dev destroy --help`"
        )
        assert kept.exists()
    assert dev("destroy", "--yes").exit_code == 0
    assert not kept.exists()


def certs(*arguments: str) -> Result:
    return CliRunner().invoke(app.app, ["certs", *arguments])


def contents(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_certs_are_written_once_and_replaced_only_if_that_is_confirmed(here: Path) -> None:
    first = certs("made")
    assert first.exit_code == 0, first.output
    assert "percolator dev --certificates made" in first.stdout
    made = contents(here)
    assert here / "made" / "cluster" / "key.pem" in made
    again = certs("made")
    assert again.exit_code == 2
    assert "not confirmed: Replace all certificates below made?" in again.stderr
    assert contents(here) == made
    replaced = CliRunner().invoke(app.app, ["--json", "certs", "made", "--yes"])
    assert json.loads(replaced.stdout) == {"directory": "made", "client_env": "made/client.env"}
    assert contents(here).keys() == made.keys()
    assert [path.name for path, now in contents(here).items() if now == made[path]] == [
        "client.env"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([""], "error: directory: is empty: give a value, or leave it out"),
        (["file"], "error: directory: cannot write file: File exists"),
        (["file/made"], "error: directory: cannot write file/made: Not a directory"),
    ],
)
def test_certs_name_a_directory_that_cannot_be_written(
    here: Path, arguments: list[str], said: str
) -> None:
    (here / "file").touch()
    result = certs(*arguments)
    assert (result.exit_code, result.stderr) == (2, f"{said}\n")


def test_certs_that_cannot_all_be_written_leave_the_former_ones(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert certs("made").exit_code == 0
    made = contents(here)
    full = OSError(errno.ENOSPC, "No space left on device", "made/client.env.new")

    def out_of_space(path: str, flags: int) -> int:
        if "client.env" in path:
            raise full
        return private_opener(path, flags)

    monkeypatch.setattr("percolator.services.local.authority.private_opener", out_of_space)
    result = certs("made", "--yes")
    assert (result.exit_code, result.stderr) == (
        2,
        "error: directory: cannot write made/client.env.new: No space left on device\n",
    )
    assert contents(here) == made


def test_certs_without_what_they_need_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None)
    assert certs("made").stderr == (
        "error: `percolator certs` needs cryptography: pip install 'percolator-store[server]'\n"
    )
