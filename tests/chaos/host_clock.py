"""The wall clock of a pretended host, which can be set wrong while its processes run.

    python -m tests.chaos.host_clock [ARGUMENT...] --program=PROGRAM --host-clock=FILE

runs a service, or a module that stands in for one, with the other arguments. `MachineClock`, which
is all that the product knows of the time of day, shows it with what the file says added. The
monotonic clock stays right, as it does when someone sets the time of a machine. So does
`time.time`: gRPC subtracts it from deadlines for which its C core has read the machine's clock
itself.
"""

from __future__ import annotations

import mmap
import runpy
import struct
import sys
import time
from pathlib import Path

from percolator.services.serve import SERVICES, main

_FORMAT = struct.Struct("<q")


class HostClock:
    """The clock of one host, from outside."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.write_bytes(_FORMAT.pack(0))

    def set_ahead(self, milliseconds: int) -> None:
        """Sets it ahead of the real time, or back if negative, for all processes at once."""
        with self.file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as shared:
            _FORMAT.pack_into(shared, 0, milliseconds * 1_000_000)


def live_by(file: Path) -> None:
    """From now on, this process has the wall clock of that host."""
    with file.open("rb") as opened:
        shared = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    really = time.time_ns

    def time_ns() -> int:
        return really() + int(_FORMAT.unpack_from(shared)[0])

    time.time_ns = time_ns


def taken(name: str) -> str:
    """Takes an argument of this module out of those of the program."""
    (argument,) = (one for one in sys.argv if one.startswith(f"--{name}="))
    sys.argv.remove(argument)
    return argument.partition("=")[2]


if __name__ == "__main__":
    live_by(Path(taken("host-clock")))
    program = taken("program")
    if program in SERVICES:
        sys.exit(main([program, *sys.argv[1:]]))
    runpy.run_module(program, run_name="__main__", alter_sys=True)
