"""One service of a local cluster, as a process that can be stopped, killed and started again.

A service announces that it is ready, and on which ports, in a file that it writes atomically once
it serves. The file holds the process id, so that a file left by a killed predecessor is never
mistaken for the successor's.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from percolator.errors import PercolatorError
from percolator.process import private_opener
from percolator.services.serve import SERVICES

_HOST = "127.0.0.1"


class ReservedPort:
    """A port that stays free for a process while it does not run, so that it finds it again.

    It is given back when this object is forgotten.

    A socket of the launcher is bound to the port and never listens. Linux gives such a port to no
    one who asks for any free one, neither to listen nor to dial, but lets a process listen there
    that asks for this very port and reuses addresses, as gRPC and the metrics endpoint do.
    """

    def __init__(self) -> None:
        with socket.socket() as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind((_HOST, 0))
            self.address = f"{_HOST}:{bound.getsockname()[1]}"
            # Other systems would refuse the port to the process, too: there it is only chosen.
            if sys.platform == "linux":
                weakref.finalize(self, os.close, bound.detach())


_ROOT = Path(__file__).parents[3]
"""The directory that holds this very package `percolator`."""

COMMAND_LINE = "percolator.cli"
"""The module that runs the same as the script `percolator`, which need not be on the path."""

POLL_SECONDS = 0.01
TELL_SECONDS = 5.0
"""How often a start that takes long is reported."""
STILL_STARTING = "is still starting"
STOP_SECONDS = 30.0
"""Longer than a service takes with default settings: at most 20 s to drain and 6 s to close."""


class LocalClusterError(PercolatorError):
    """A process of a local cluster did not start, or did not stop, as it should."""


class NotReadyInTime(LocalClusterError):
    """A process runs, but does not serve yet."""


@dataclass(frozen=True)
class Ready:
    """The announcement of a service that serves."""

    address: str
    frames_address: str
    """Empty if it takes no frames."""
    metrics_address: str
    server_id: str
    pid: int


class ServiceProcess:
    """`percolator serve SERVICE` with its log and its ready file."""

    def __init__(
        self,
        name: str,
        program: str,
        arguments: list[str],
        *,
        logs: Path,
        run: Path,
        inherited: Sequence[int] = (),
    ) -> None:
        """The program is a service such as "oracle", or a module that stands in for one. The
        process keeps the `inherited` descriptors open for as long as it lives."""
        self.name = name
        self.log = logs / f"{name}.log"
        self._program = [COMMAND_LINE, "serve", program] if program in SERVICES else [program]
        self._arguments = arguments
        self._inherited = inherited
        self._ready_file = run / f"{name}.ready.json"
        self._process: subprocess.Popen[bytes] | None = None
        self._listen = ""
        self._log_start = 0
        """The size of the log at the last start."""
        self._ports: list[ReservedPort] = []
        """Kept for all of its lives: another process could take a port while it does not run."""
        self.ready: Ready | None = None

    @property
    def address(self) -> str:
        if self.ready is None:
            raise LocalClusterError(f"{self.name} was never ready")
        return self.ready.address

    @property
    def serves(self) -> bool:
        """True if it was found to serve since it was last started."""
        return self.ready is not None and self.ready.pid == self.pid

    @property
    def pid(self) -> int:
        if self._process is None:
            raise LocalClusterError(f"{self.name} was never started")
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code: None while it runs; the negative signal number if a signal ended it."""
        return None if self._process is None else self._process.poll()

    def listen_on(self, address: str) -> None:
        """Sets a fixed address instead of a port of its own; only before the first start."""
        self._listen = address

    def start(self) -> None:
        """Starts it, on the ports of the previous process, so that its callers find it again."""
        if self._process is not None and self._process.poll() is None:
            raise LocalClusterError(f"{self.name} is already running, as process {self.pid}")
        if self._process is not None and self._process.stdin is not None:
            # The previous process ended by itself, and was not waited for.
            self._process.stdin.close()
        if not self._ports:
            self._ports = [ReservedPort(), ReservedPort()]
        own, metrics = self._ports
        # -P: a folder called "percolator" in the working directory is somebody else's.
        command = [sys.executable, "-P", "-m", *self._program]
        command += ["--listen", self._listen or own.address, "--metrics-listen", metrics.address]
        command += ["--ready-file", str(self._ready_file), "--stop-with-stdin", "--log-format=json"]
        # Last, because the last value of a flag wins.
        command += self._arguments
        with open(self.log, "ab", opener=private_opener) as log:
            self._log_start = log.tell()
            # The pipe to stdin closes when this launcher dies, however it dies: no orphans.
            # In a separate process group, so that Ctrl-C in a terminal does not reach it: it would
            # be told to stop twice, by the terminal and by the launcher, and not drain.
            self._process = subprocess.Popen(  # noqa: S603 - our own module, and no shell
                command,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,
                pass_fds=self._inherited,
                env=environment(),
            )

    def wait_ready(
        self,
        seconds: float,
        *,
        idle_seconds: float = inf,
        say: Callable[[str], None] = lambda _: None,
    ) -> Ready:
        """Waits until it serves; an early exit is reported with the last line of its log.

        It has at most `seconds`, and less if it neither used the processor nor logged anything for
        `idle_seconds`: on a busy machine, a process that works needs time, and one that hangs needs
        none. A start that takes long is reported every few seconds.
        """
        began = worked = told = time.monotonic()
        progress = self._progress()
        while (now := time.monotonic()) < began + seconds:
            if self.exit_code is not None:
                raise LocalClusterError(
                    f"{self.name} exited with {self.exit_code} while starting: {self.last_words()}"
                )
            if self.is_ready() and self.ready is not None:
                return self.ready
            if (newest := self._progress()) != progress:
                progress, worked = newest, now
            elif now - worked > idle_seconds:
                raise NotReadyInTime(
                    f"{self.name} is not ready, and has done nothing for {idle_seconds:g} s: "
                    f"{self.last_words()}"
                )
            if now - told > TELL_SECONDS:
                told = now
                say(
                    f"{self.name} {STILL_STARTING} after {now - began:.0f} s, "
                    f"{progress[0]:.1f} s of them on the processor: {self.last_words()}"
                )
            time.sleep(POLL_SECONDS)
        raise NotReadyInTime(f"{self.name} was not ready within {seconds:g} s: {self.last_words()}")

    def _progress(self) -> tuple[float, int]:
        """CPU seconds to the hundredth, and the size of its log."""
        size = self.log.stat().st_size if self.log.exists() else 0
        try:
            # The Linux clock of another process's CPU time.
            return round(time.clock_gettime((~self.pid << 3) | 2), 2), size
        except OSError:
            return 0.0, size  # it has ended, which its exit code tells

    def is_ready(self) -> bool:
        """True if it serves by now. A predecessor's readiness does not count."""
        announced = self._announced()
        if announced is not None:
            self.ready = announced
        return announced is not None

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Kills it with SIGKILL, and waits until it is gone."""
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
        """Waits for its exit, and kills it if that takes too long. Returns the exit code."""
        if self._process is None:
            return 0
        try:
            self._wait(seconds)
        except LocalClusterError:
            self.kill()
            raise
        return self._process.returncode

    def end_at_once(self) -> None:
        """Kills it if it runs, and does not wait; may be called by a handler of signals."""
        if self._process is not None:
            self._process.kill()

    def last_words(self) -> str:
        """The last line that it has logged since it was last started: one of a process before would
        say that it has stopped."""
        if not self.log.exists():
            return "it logged nothing"
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            lines = log.read().decode(errors="replace").strip().splitlines()
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
            # A process of a former release does not announce it.
            frames_address=announced.get("frames_address", ""),
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


def environment() -> dict[str, str]:
    """The launcher's environment, in which the process finds the same installation."""
    paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
