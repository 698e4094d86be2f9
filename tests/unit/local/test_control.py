"""Requests to a running launcher, and what it does with them."""

from __future__ import annotations

import fcntl
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from percolator.services.local.launcher import Control, ask
from percolator.services.local.process import LocalClusterError

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
