"""The data directory of a local cluster: who owns it, and what it says about the cluster.

    DATA/store      the cluster's store root
    DATA/logs       a log per process
    DATA/run        ready files, locks, and local.json: which process runs where

One launcher at a time owns DATA: it holds a lock on DATA/run/lock while it lives. It and all its
processes hold a lock on DATA/run/processes, which is free once the last of them has ended. So the
launcher after one that was killed knows when nothing of the old cluster is left.
"""

from __future__ import annotations

import fcntl
import json
import shlex
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from percolator.process import PRIVATE_DIRECTORY_MODE, make_private, private_opener
from percolator.services.local.process import STOP_SECONDS, LocalClusterError

State = dict[str, Any]

DEFAULT_DATA = Path(".percolator")
_PARTS = ("store", "logs", "run")

_GITIGNORE = ".gitignore"
_NOTHING = "*\n"
"""Its content: nothing here belongs to the project."""

_LOCK_ATTEMPTS = 20
_LOCK_RETRY_SECONDS = 0.02
"""A check whether a cluster is running holds its lock briefly."""


class Ownership:
    """The right to run a cluster on a data directory."""

    def __init__(self, data: Path, progress: Callable[[str], None]) -> None:
        """Takes it. Waits for processes that a killed launcher has left: they end by themselves,
        but until then they have the store and the ports."""
        make_data_directory(data)
        self._run = data / "run"
        lock = _open_lock(self._run / "lock")
        for attempt in range(_LOCK_ATTEMPTS):
            if _is_locked(lock):
                break
            if attempt + 1 == _LOCK_ATTEMPTS:
                lock.close()
                raise LocalClusterError(already_running(data))
            time.sleep(_LOCK_RETRY_SECONDS)
        self._lock = lock
        self._processes = _open_lock(self._run / "processes")
        try:
            self._wait_for_the_last(data, progress)
        except BaseException:
            self.release()
            raise
        # Left by a launcher that was killed: another process may have its id by now.
        (self._run / "local.json").unlink(missing_ok=True)

    @property
    def shared(self) -> int:
        """The descriptor that every process of the cluster inherits."""
        return self._processes.fileno()

    def release(self) -> None:
        self._processes.close()
        self._lock.close()

    def _wait_for_the_last(self, data: Path, progress: Callable[[str], None]) -> None:
        deadline = time.monotonic() + STOP_SECONDS
        said = False
        while not _is_locked(self._processes):
            if not said:
                progress("waiting for processes that a killed launcher has left")
                said = True
            if time.monotonic() > deadline:
                left = ", ".join(_left_over(read_state(data), self._run)) or "unknown to it"
                raise LocalClusterError(
                    f"--data: processes that a killed launcher has left still run on {data}: "
                    f"{left}; end them with kill -9"
                )
            time.sleep(_LOCK_RETRY_SECONDS)


def _left_over(state: State, run: Path) -> list[str]:
    """The processes of a state that are still those, with their ids."""
    found = []
    for process in state.get("processes", ()):
        try:
            command = Path(f"/proc/{process['pid']}/cmdline").read_bytes()
        except OSError:
            continue
        if str(run).encode() in command:
            found.append(f"{process['name']} (process {process['pid']})")
    return found


def running(data: Path) -> State | None:
    """The state of the cluster that runs on this data directory; None if none does.

    This takes the lock for an instant to see whether it is free: a launcher that starts at this
    very time would find it taken.
    """
    lock = data / "run" / "lock"
    if not lock.exists():
        return None
    with _open_lock(lock) as opened:
        if _is_locked(opened):
            # The lock was free: any state that is there was left by a killed launcher.
            return None
    return read_state(data)


def read_state(data: Path) -> State:
    """The state that the last launcher wrote; empty while one starts or stops."""
    state_file = data / "run" / "local.json"
    try:
        state: State = json.loads(state_file.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise LocalClusterError(f"--data: cannot read {state_file}: {error}") from None
    return state


def write_state(data: Path, state: State) -> None:
    """Writes the state, which appears at once with its whole content."""
    state_file = data / "run" / "local.json"
    temporary = state_file.with_name("local.json.tmp")
    _write(temporary, json.dumps(state, indent=2) + "\n")
    temporary.rename(state_file)


def forget_state(data: Path) -> None:
    """Removes the state: the cluster stops, or has stopped."""
    (data / "run" / "local.json").unlink(missing_ok=True)


def require_stopped(data: Path) -> None:
    """Raises `LocalClusterError` unless the directory holds a cluster that is not running."""
    if running(data) is not None:
        raise LocalClusterError(f"a cluster is running on {data}: stop it first")
    if not (data / "store").is_dir() or not (data / "run" / "lock").exists():
        raise LocalClusterError(f"{data} does not hold a local cluster")


def delete(data: Path) -> None:
    """Deletes everything that a stopped cluster has left, and nothing else."""
    require_stopped(data)
    for part in _PARTS:
        try:
            shutil.rmtree(data / part)
        except OSError as error:
            raise LocalClusterError(f"--data: cannot delete {data / part}: {error}") from None
    mark = data / _GITIGNORE
    if list(data.iterdir()) == [mark] and mark.read_text() == _NOTHING:
        mark.unlink()  # the directory is this cluster's, too
        data.rmdir()


def already_running(data: Path) -> str:
    """The error, and what to do, if another launcher owns the directory."""
    return (
        f"--data: a cluster is already running on {data}: `percolator dev down{data_option(data)}` "
        "stops it; or pass another directory"
    )


def data_option(data: Path) -> str:
    """The option that names a data directory, after a space; empty if it is the usual one."""
    if data.absolute() == DEFAULT_DATA.absolute():
        return ""
    return f" --data {shlex.quote(str(data))}"


def make_data_directory(data: Path) -> None:
    """Makes the data directory, and those in it. Raises `LocalClusterError` if one of these is
    there and has something of another program: `delete` would take it for the cluster's."""
    if not data.exists():
        _make_directory(data)
        # A cluster in the folder of a project is not a part of it.
        _write(data / _GITIGNORE, _NOTHING)
    is_own = (data / "run" / "lock").exists() or (data / "store" / "cluster.json").is_file()
    for part in _PARTS:
        if not is_own and (data / part).is_dir() and any((data / part).iterdir()):
            raise LocalClusterError(
                f"--data: {data / part} has files of another program; pass another directory"
            )
    for part in _PARTS:
        _make_directory(data / part)
        # One that was made for everybody is closed. One of another user is used as it is.
        with suppress(OSError):
            make_private(data / part)
    _open_lock(data / "run" / "lock").close()


def _make_directory(path: Path) -> None:
    try:
        path.mkdir(mode=PRIVATE_DIRECTORY_MODE, parents=True, exist_ok=True)
    except OSError as error:
        raise LocalClusterError(
            f"--data: cannot make {path}: {error.strerror}; pass a directory that you may write to"
        ) from None


def _write(path: Path, text: str) -> None:
    with open(path, "w", encoding="utf-8", opener=private_opener) as file:
        file.write(text)


def _open_lock(path: Path) -> IO[str]:
    try:
        return open(path, "a+", opener=private_opener)
    except OSError as error:
        raise LocalClusterError(
            f"--data: cannot open {path}: {error.strerror}; pass a directory that you may write to"
        ) from None


def _is_locked(file: IO[str]) -> bool:
    """Tries to lock it. Returns whether it is locked by us; False if another process holds it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise LocalClusterError(f"--data: cannot lock {file.name}: {error.strerror}") from None
    return True
