"""make bench-oracle: timestamps per second, and what one costs.

One oracle process and several client processes on one machine, with a real disk and real gRPC. Each
client keeps one request in flight, as `TimestampSource` always does; "awaited" is the number of
tasks that each wait for a timestamp at any time. For comparison, the same server also answers empty
calls in the same run: `grpc.health.v1.Health/Check`, one in flight per client process. Every figure
is the median of five runs, in which the scenarios take turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import psutil

from benchmarks.oracle_client import Measured, Order
from benchmarks.report import Report
from percolator.services.local.process import ServiceProcess

RUNS = 5
SECONDS = 1.2
MEBIBYTE = 1 << 20
AWAITED = 2_000
BLOCK = 1_000
BLOCK_AWAITED = 32
BLOCK_IN_FLIGHT = 16
CLIENTS = 2
"""Equal on every machine, because figures are compared by their names."""


@dataclass(frozen=True)
class Scenario:
    """The calls of the clients during one slice of time."""

    name: str
    clients: int
    order: Order

    @property
    def timestamps(self) -> int:
        """Timestamps per operation; an empty call counts as one."""
        return self.order.count

    @property
    def unit(self) -> str:
        return "call" if self.order.what == "empty" else "timestamp"


def scenarios(clients: int) -> list[Scenario]:
    """Everything that is measured."""
    return [
        Scenario(
            f"count={BLOCK}, {clients} clients, {BLOCK_AWAITED} awaited each, requests shared",
            clients,
            Order("await", BLOCK_AWAITED, BLOCK, SECONDS),
        ),
        Scenario(
            f"count={BLOCK}, {clients} clients, {BLOCK_IN_FLIGHT} requests each in flight",
            clients,
            Order("request", BLOCK_IN_FLIGHT, BLOCK, SECONDS),
        ),
        Scenario(
            f"single, {clients} clients, {AWAITED} awaited each",
            clients,
            Order("await", AWAITED, 1, SECONDS),
        ),
        Scenario(
            f"single, 1 client, {AWAITED} awaited",
            1,
            Order("await", AWAITED, 1, SECONDS),
        ),
        Scenario("single, 1 client, 1 awaited", 1, Order("await", 1, 1, SECONDS)),
        Scenario(f"single, {clients} clients, 1 awaited", clients, Order("await", 1, 1, SECONDS)),
        Scenario(f"empty call, {clients} clients", clients, Order("empty", 1, 1, SECONDS)),
    ]


class Client:
    """One client process."""

    def __init__(self, address: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.oracle_client", address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=20)

    def begin(self, order: Order) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(order)) + "\n")
        self._process.stdin.flush()

    def end(self) -> Measured:
        assert self._process.stdout is not None
        return Measured(**json.loads(self._process.stdout.readline()))


@dataclass(frozen=True)
class Run:
    """One slice of time, summed over its clients."""

    rate: float
    per_request: float
    client_micros: float
    server_micros: float
    p50_milliseconds: float
    p99_milliseconds: float


def run_once(scenario: Scenario, clients: list[Client], server: psutil.Process) -> Run:
    cpu_before = _cpu_seconds(server)
    for client in clients[: scenario.clients]:
        client.begin(scenario.order)
    found = [client.end() for client in clients[: scenario.clients]]
    server_cpu = _cpu_seconds(server) - cpu_before
    timestamps = sum(one.operations for one in found) * scenario.timestamps
    latencies = sorted(latency for one in found for latency in one.latencies)
    return Run(
        rate=sum(one.operations * scenario.timestamps / one.seconds for one in found),
        per_request=timestamps / sum(one.requests for one in found),
        client_micros=sum(one.cpu_seconds for one in found) / timestamps * 1e6,
        server_micros=server_cpu / timestamps * 1e6,
        p50_milliseconds=latencies[len(latencies) // 2] * 1e3,
        p99_milliseconds=latencies[len(latencies) * 99 // 100] * 1e3,
    )


def _cpu_seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def _fsyncs(metrics_address: str) -> float:
    with urllib.request.urlopen(f"http://{metrics_address}/metrics", timeout=10) as answer:
        for line in answer.read().decode().splitlines():
            if line.startswith("percolator_oracle_fsyncs_total "):
                return float(line.split()[1])
    raise LookupError("the oracle's metrics have no percolator_oracle_fsyncs_total")


def measure(directory: Path, clients: int) -> Report:
    report = Report("oracle")
    oracle = ServiceProcess(
        "oracle",
        "oracle",
        ["--store", str(directory)],
        logs=directory,
        run=directory,
    )
    runs: defaultdict[str, list[Run]] = defaultdict(list)
    oracle.start()
    with ExitStack() as stack:
        stack.callback(oracle.wait_stopped)
        stack.callback(oracle.ask_to_stop)
        ready = oracle.wait_ready(30)
        started = [stack.enter_context(Client(ready.address)) for _ in range(clients)]
        server = psutil.Process(oracle.pid)
        fsyncs, began = _fsyncs(ready.metrics_address), time.monotonic()
        for _ in range(RUNS):
            for scenario in scenarios(clients):
                runs[scenario.name].append(run_once(scenario, started, server))
        rss = server.memory_info().rss
        fsyncs_per_second = (_fsyncs(ready.metrics_address) - fsyncs) / (time.monotonic() - began)
    for scenario in scenarios(clients):
        _add(report, scenario, runs[scenario.name])
    _compare(report, runs, clients)
    report.add("fsyncs while serving", fsyncs_per_second, "1/s")
    report.add("oracle: resident memory", rss / MEBIBYTE, "MiB")
    return report


def _add(report: Report, scenario: Scenario, runs: list[Run]) -> None:
    name, unit = scenario.name, scenario.unit
    report.add(name, _median(runs, "rate"), f"{unit}s/s")
    report.add(f"{name}: client CPU", _median(runs, "client_micros"), f"µs/{unit}")
    report.add(f"{name}: oracle CPU", _median(runs, "server_micros"), f"µs/{unit}")
    if scenario.order.what == "await":
        report.add(f"{name}: timestamps per RPC", _median(runs, "per_request"), "")
    report.add(f"{name}: p50", _median(runs, "p50_milliseconds"), "ms")
    report.add(f"{name}: p99", _median(runs, "p99_milliseconds"), "ms")


def _compare(report: Report, runs: dict[str, list[Run]], clients: int) -> None:
    """One timestamp per request compared with an empty call: the same traffic, another answer."""
    single = runs[f"single, {clients} clients, 1 awaited"]
    empty = runs[f"empty call, {clients} clients"]
    for side in ("server_micros", "client_micros"):
        report.add(
            f"request of one timestamp / empty call: {side.partition('_')[0]} CPU",
            _median(single, side) / _median(empty, side),
            "×",
        )


def _median(runs: list[Run], field: str) -> float:
    return float(statistics.median(getattr(run, field) for run in runs))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.oracle", description=__doc__)
    parser.add_argument(
        "--clients", type=int, default=CLIENTS, help="client processes (default: %(default)s)"
    )
    parser.add_argument(
        "--directory", type=Path, help="where the oracle keeps its mark (default: temporary)"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-oracle-", dir=options.directory) as directory:
        return measure(Path(directory), options.clients).finish()


if __name__ == "__main__":
    sys.exit(main())
