"""Cost of a simulated call: `python -m benchmarks.simulated_network [CALLS]`.

Sixteen callers and one server in one process, first on a good network, then on a bad one. CPU time
is measured, since a simulation never waits.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from random import Random
from typing import Any

from google.protobuf.descriptor import ServiceDescriptor

from benchmarks.report import Report
from percolator.errors import PercolatorError
from percolator.v1 import oracle_pb2
from percolator.v1.oracle_pb2 import GetTimestampsRequest, GetTimestampsResponse
from percolator.wire.methods import GET_TIMESTAMPS
from tests.simulation.loop import SimulationLoop, run_simulation
from tests.simulation.network import PERFECT, NetworkFaults, Wire
from tests.simulation.process import Incarnation, SimulatedProcess

CALLS = 50_000
CALLERS = 16
BAD = NetworkFaults(
    slow=0.01, duplicate=0.01, drop_request=0.005, drop_reply=0.005, break_connection=0.01
)


@dataclass(frozen=True)
class _Oracle:
    descriptor: ServiceDescriptor = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]

    @property
    def handler(self) -> _Oracle:
        return self

    async def get_timestamps(self, request: GetTimestampsRequest) -> GetTimestampsResponse:
        return GetTimestampsResponse(first=1, count=request.count)


async def _serve(incarnation: Incarnation) -> None:
    incarnation.listen([_Oracle()])
    await asyncio.Event().wait()


async def _run(loop: SimulationLoop, calls: int, faults: NetworkFaults) -> None:
    random = Random(1)
    wire = Wire(loop, random)
    wire.faults = faults
    SimulatedProcess("oracle:1", wire, random).start(_serve)
    done = loop.create_future()

    async def call_on(incarnation: Incarnation) -> None:
        get_timestamps = incarnation.world.network.unary("oracle:1", GET_TIMESTAMPS)
        for _ in range(calls // CALLERS):
            try:
                await get_timestamps(GetTimestampsRequest(count=1), 5.0)
            except PercolatorError:
                continue

    async def program(incarnation: Incarnation) -> None:
        await asyncio.gather(*(call_on(incarnation) for _ in range(CALLERS)))
        done.set_result(None)

    SimulatedProcess("client:1", wire, random).start(program)
    await done


def _microseconds(calls: int, faults: NetworkFaults) -> float:
    def main(loop: SimulationLoop) -> Coroutine[Any, Any, None]:
        return _run(loop, calls, faults)

    begun = time.process_time()
    run_simulation(main)
    return (time.process_time() - begun) / calls * 1e6


def main() -> int:
    """Measures and reports."""
    calls = int(sys.argv[1]) if len(sys.argv) > 1 else CALLS
    shown = Report("simulated_network")
    for name, faults in (("good", PERFECT), ("bad", BAD)):
        cost = _microseconds(calls, faults)
        shown.add(f"a call on a {name} network", cost, "µs of CPU")
        shown.add(f"a hop on a {name} network", cost / 2, "µs of CPU")
    return shown.finish()


if __name__ == "__main__":
    raise SystemExit(main())
