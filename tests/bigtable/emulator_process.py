"""Google's emulator as a process of a test."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

EMULATOR = Path(__file__).parents[2] / "var/bigtable/emulator"
_END_SECONDS = 10.0


@contextmanager
def emulator() -> Iterator[str]:
    """Starts an empty one, and yields its address."""
    if not EMULATOR.exists():
        raise FileNotFoundError(f"{EMULATOR} is missing: run `make emulator`")
    process = subprocess.Popen([EMULATOR, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True)
    try:
        if process.stdout is None:
            raise RuntimeError("the emulator has no output")
        address = process.stdout.readline().strip()
        if not address:
            raise RuntimeError(f"the emulator ended with {process.wait()}")
        yield address
    finally:
        process.terminate()
        process.wait(_END_SECONDS)
        if process.stdout is not None:
            process.stdout.close()
