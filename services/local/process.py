"""One service of a local cluster, as a process that can be stopped, killed and started again.

A service tells that it is ready, and on which ports, through a file that it writes atomically once
it serves. The file carries the process id, so that one left over by a killed predecessor is never
mistaken for the answer of its successor.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from percolator.errors import PercolatorError

ANY_PORT = "127.0.0.1:0"
POLL_SECONDS = 0.01
STOP_SECONDS = 30.0
"""Above what a service takes at most with default settings: 20 s to drain, 6 s to close."""


class LocalClusterError(PercolatorError):
    """A process of a local cluster did not start, or did not stop, as it should."""


@dataclass(frozen=True)
class Ready:
    """What a service announces when it serves."""

    address: str
    metrics_address: str
    server_id: str
    pid: int


class ServiceProcess:
    """`python -m services.X` with its log and its ready file."""

    def __init__(
        self, name: str, module: str, arguments: list[str], *, logs: Path, run: Path
    ) -> None:
        self.name = name
        self.log = logs / f"{name}.log"
        self._module = module
        self._arguments = arguments
        self._ready_file = run / f"{name}.ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._listen = ANY_PORT
        self._metrics_listen = ANY_PORT
        self.ready: Ready | None = None

    @property
    def address(self) -> str:
        if self.ready is None:
            raise LocalClusterError(f"{self.name} was never ready")
        return self.ready.address

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LocalClusterError(f"{self.name} was never started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; the negative signal number if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def listen_on(self, address: str) -> None:
        """Before the first start: a fixed address instead of a free port."""
        self._listen = address

    def start(self) -> None:
        """Starts it; on the ports of its last life, so that whoever knew it finds it again."""
        if self._process is not None and self._process.poll() is None:
            raise LocalClusterError(f"{self.name} is running already, as process {self.pid}")
        command = [sys.executable, "-m", self._module]
        command += ["--listen", self._listen, "--metrics-listen", self._metrics_listen]
        command += ["--ready-file", str(self._ready_file), "--stop-with-stdin", "--log-format=json"]
        # Last: what is asked for wins.
        command += self._arguments
        with self.log.open("ab") as log:
            # The pipe to stdin closes when this launcher dies, however it dies: no orphans.
            # In a group of its own, Ctrl-C in a terminal does not reach it: it would be told to
            # stop twice, by the terminal and by the launcher, and not drain.
            self._process = subprocess.Popen(  # noqa: S603 (the command is made above)
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def wait_ready(self, seconds: float) -> Ready:
        """Waits until it serves; an early exit is reported with the last line of its log."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.exit_code is not None:
                raise LocalClusterError(
                    f"{self.name} exited with {self.exit_code} while starting: {self.last_words()}"
                )
            announced = self._announced()
            if announced is not None:
                self.ready = announced
                if self._listen == ANY_PORT:
                    self._listen = announced.address
                self._metrics_listen = announced.metrics_address or self._metrics_listen
                return announced
            time.sleep(POLL_SECONDS)
        raise LocalClusterError(
            f"{self.name} was not ready within {seconds:g} s: {self.last_words()}"
        )

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and waits until it is gone."""
        self.send_signal(signal.SIGKILL)
        self._wait(10)

    def pause(self) -> None:
        self.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.send_signal(signal.SIGCONT)

    def ask_to_stop(self) -> None:
        """Asks it to drain and exit, and does not wait."""
        if self._process is not None and self._process.poll() is None:
            self.resume()
            self.send_signal(signal.SIGTERM)

    def wait_stopped(self, seconds: float = STOP_SECONDS) -> int:
        """Waits for its exit, and kills it when that takes too long. Returns the exit code."""
        if self._process is None:
            return 0
        try:
            self._wait(seconds)
        except LocalClusterError:
            self.kill()
            raise
        return self._process.returncode

    def last_words(self) -> str:
        """The last line of its log."""
        if not self.log.exists():
            return "it logged nothing"
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it logged nothing"

    def _announced(self) -> Ready | None:
        try:
            announced = json.loads(self._ready_file.read_text())
        except FileNotFoundError:
            return None
        if announced["pid"] != self.pid:
            return None
        return Ready(
            address=announced["address"],
            metrics_address=announced["metrics_address"],
            server_id=announced["server_id"],
            pid=announced["pid"],
        )

    def _wait(self, seconds: float) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise LocalClusterError(
                f"{self.name} (process {self.pid}) did not exit within {seconds:g} s"
            ) from None
        if self._process.stdin is not None:
            self._process.stdin.close()
