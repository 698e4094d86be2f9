"""Gates at which Spark's processes halt: files in one directory, which the test makes and removes.

`PAGES.halt` halts whatever comes to the gate `PAGES`, until the file is gone. Whoever comes there
leaves `PAGES.reached`, with the number of its process. Files reach all processes that Spark starts,
and outlive those that are killed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

GATES = "PERCOLATOR_TEST_GATES"
"""The variable of the environment that names the directory."""
_SECONDS = 0.01


def gate(name: str) -> None:
    """Says that it was reached, and halts here if a test wants that."""
    directory = Path(os.environ[GATES])
    made = directory / f"{name}.{os.getpid()}"
    made.write_text(str(os.getpid()))
    made.rename(directory / f"{name}.reached")
    while (directory / f"{name}.halt").exists():
        time.sleep(_SECONDS)


class Gates:
    """The same gates, for the test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def close(self, name: str) -> None:
        (self.directory / f"{name}.halt").touch()

    def open(self, name: str) -> None:
        (self.directory / f"{name}.halt").unlink()

    def reached(self, name: str) -> bool:
        return (self.directory / f"{name}.reached").exists()

    def forget(self, name: str) -> None:
        """Whoever has reached the gate has died: only others count from now on."""
        (self.directory / f"{name}.reached").unlink()

    def wait(self, name: str, go_on: Callable[[], object]) -> int:
        """The process that has reached the gate. `go_on` raises when none will."""
        while not self.reached(name):
            go_on()
            time.sleep(_SECONDS)  # for a process of Spark's, which can tell only by a file
        return int((self.directory / f"{name}.reached").read_text())
