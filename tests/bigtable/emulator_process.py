"""Google's emulator as a process of a test.

`python -m tests.bigtable.emulator_process COMMAND ...` starts an empty one, runs the command, which
finds it by BIGTABLE_EMULATOR_HOST, and stops it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
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
    # Ctrl-C is for those that use it; it ends when they have.
    process = subprocess.Popen(
        [EMULATOR, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
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


def main(command: list[str]) -> int:
    """Returns the exit code of the command."""
    if not command:
        sys.stderr.write(f"{__doc__}\n")
        return 2
    with emulator() as address:
        # A terminal's Ctrl-C reaches the command as well, and that decides when to end.
        signal.signal(signal.SIGINT, lambda *_: None)
        environment = {**os.environ, "BIGTABLE_EMULATOR_HOST": address}
        with subprocess.Popen(command, env=environment) as running:
            signal.signal(signal.SIGTERM, lambda *_: running.terminate())
            return running.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
