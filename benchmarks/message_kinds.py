"""make bench-messages: what a message and its answer cost, in each way that Python offers.

These figures are why there are frames (docs/decisions.md, 40). A message of 200 bytes, client and
server in two processes of one core each. "Latency" is the median from a call to its answer; CPU is
that of each side for a call. If uvloop is installed, some ways are also measured with its event
loop on both sides.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import TypeVar

from benchmarks.message_ways import (
    Frames,
    GrpcIterated,
    GrpcStream,
    GrpcThreads,
    GrpcUnary,
    Streams,
    Way,
)
from benchmarks.report import Report
from benchmarks.tablet_traffic import process_clock

R = TypeVar("R")

IN_FLIGHT = (1, 8, 64)
MESSAGE = bytes(200)
CALLS = 4_000
WARM_UP = 200

WAYS: dict[str, type[Way]] = {
    "gRPC, asyncio, unary": GrpcUnary,
    "gRPC, asyncio, unary, Unix socket": GrpcUnary,
    "gRPC, asyncio, one stream, read and write": GrpcStream,
    "gRPC, asyncio, one stream, iterators": GrpcIterated,
    "gRPC, threads, unary": GrpcThreads,
    "asyncio's Protocol, frames": Frames,
    "asyncio's streams, frames": Streams,
}
WITH_UVLOOP = ("gRPC, asyncio, unary", "asyncio's Protocol, frames", "asyncio's streams, frames")


@dataclass(frozen=True)
class Measured:
    """Microseconds for each call."""

    latency: float
    client: float
    server: float


def run(work: Awaitable[R], *, uvloop: bool) -> R:
    async def main() -> R:
        return await work

    with asyncio.Runner(
        loop_factory=import_module("uvloop").new_event_loop if uvloop else None
    ) as runner:
        return runner.run(main())


# ---------------------------------------------------------------------------------- server


async def serve(name: str, path: str) -> None:
    """Answers until its standard input is closed."""
    way = WAYS[name]()  # kept to the end: gRPC stops a server that nothing refers to
    print(await way.serve(path), flush=True)
    await asyncio.to_thread(sys.stdin.read)


@contextmanager
def served(name: str, path: str, *, uvloop: bool) -> Iterator[tuple[int, str]]:
    """The process id of a server, and its address."""
    command = [sys.executable, "-m", "benchmarks.message_kinds", "--serve", name, "--path", path]
    server = subprocess.Popen(
        [*command, "--uvloop"] if uvloop else command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        port = server.stdout.readline().strip()
        yield server.pid, f"unix:{path}" if "Unix" in name else f"127.0.0.1:{port}"
        server.terminate()


# ---------------------------------------------------------------------------------- client


async def measure(name: str, address: str, server: int) -> list[Measured]:
    """For each number of calls in flight."""
    way = WAYS[name]()
    await way.open(address)
    calling = in_threads if isinstance(way, GrpcThreads) else in_tasks
    await calling(way, WARM_UP, 1)
    clock, found = process_clock(server), []
    for in_flight in IN_FLIGHT:
        client, served_for = time.process_time(), time.clock_gettime(clock)
        seconds = await calling(way, CALLS, in_flight)
        client = time.process_time() - client
        served_for = time.clock_gettime(clock) - served_for
        each = 1e6 / len(seconds)
        found.append(Measured(median(seconds) * 1e6, client * each, served_for * each))
    return found


async def in_tasks(way: Way, calls: int, in_flight: int) -> list[float]:
    seconds: list[float] = []

    async def caller() -> None:
        for _ in range(calls // in_flight):
            began = time.perf_counter()
            await way.call(MESSAGE)
            seconds.append(time.perf_counter() - began)

    await asyncio.gather(*(caller() for _ in range(in_flight)))
    return seconds


async def in_threads(way: Way, calls: int, in_flight: int) -> list[float]:
    assert isinstance(way, GrpcThreads)
    unary = way.unary

    def caller(_: int) -> list[float]:
        seconds = []
        for _ in range(calls // in_flight):
            began = time.perf_counter()
            unary(MESSAGE)
            seconds.append(time.perf_counter() - began)
        return seconds

    with ThreadPoolExecutor(in_flight) as pool:
        return [one for share in pool.map(caller, range(in_flight)) for one in share]


def fill_in(report: Report, name: str, measured: list[Measured]) -> None:
    for in_flight, one in zip(IN_FLIGHT, measured, strict=True):
        report.add(f"{name}, {in_flight} in flight: latency", one.latency, "µs")
        report.add("    CPU of the client", one.client, "µs")
        report.add("    CPU of the server", one.server, "µs")


def on_core(number: int) -> None:
    """Keeps this process on one core, as far as there are several."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[number % len(cores)]})


def main(arguments: Callable[[], argparse.Namespace]) -> int:
    asked = arguments()
    if asked.serve:
        on_core(0)
        run(serve(asked.serve, asked.path), uvloop=asked.uvloop)
        return 0
    report = Report("message_kinds")
    wanted = [(name, False) for name in WAYS]
    if find_spec("uvloop"):
        wanted += [(name, True) for name in WITH_UVLOOP]
    with tempfile.TemporaryDirectory() as directory:
        for number, (name, uvloop) in enumerate(wanted):
            title = f"{name}, uvloop" if uvloop else name
            print(f"measuring: {title}", flush=True)
            path = str(Path(directory) / f"{number}.sock")
            with served(name, path, uvloop=uvloop) as (server, address):
                all_cores = os.sched_getaffinity(0)
                on_core(1)
                fill_in(report, title, run(measure(name, address, server), uvloop=uvloop))
                os.sched_setaffinity(0, all_cores)
    return report.finish()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measure ways of sending a message.")
    parser.add_argument("--serve", choices=WAYS, help="be the server of this way")
    parser.add_argument("--path", default="", help="the server's Unix socket")
    parser.add_argument("--uvloop", action="store_true", help="run the server under uvloop")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main(_arguments))
