"""The real oracle and the real timestamp source, among crashes, pauses, power cuts and bad links.

Every transaction here only begins: the checker requires timestamps to be unique and in real-time
order, across restarts of the oracle and for all clients.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from percolator.errors import ExecutionUnknown, NotExecuted
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.rpc import Exposed
from percolator.services.oracle.candidate import Candidate, Site
from percolator.services.oracle.oracle import Ledger, OracleHandler, OracleLimits
from percolator.v1 import oracle_pb2
from percolator.wire.timestamp_source import TimestampSource
from tests.doubles.memory_disk import MemoryDisk
from tests.doubles.memory_files import MemoryFiles
from tests.isolation.checker import Report, ViolationKind, check
from tests.isolation.history import Recorder
from tests.simulation.loop import SimulationLoop, run_simulation
from tests.simulation.network import PERFECT, Fault, NetworkFaults, Wire
from tests.simulation.process import Incarnation, SimulatedProcess

ORACLES = ["oracle:7001", "oracle-2:7001"]
STORE = Path("/store")
CLIENTS = 3
SECONDS = 40.0
BAD = NetworkFaults(
    slow=0.02,
    duplicate=0.05,
    drop_request=0.02,
    drop_reply=0.02,
    break_connection=0.02,
)


class _Cluster:
    """Two oracles on one disk, clients that ask them, and faults."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self.random = Random(seed)
        self.wire = Wire(loop, self.random)
        self.recorder = Recorder(itertools.count().__next__)
        self.disk = MemoryDisk()
        self.disk.make_durable_directory(STORE)
        self.oracles = [SimulatedProcess(one, self.wire, self.random) for one in ORACLES]
        self.clients = [
            SimulatedProcess(f"client-{number}:1", self.wire, self.random)
            for number in range(CLIENTS)
        ]

    async def serve(self, incarnation: Incarnation) -> None:
        files = MemoryFiles(self.disk)
        incarnation.life.at_end(files.kill)
        clock = incarnation.world.clock
        site = Site(clock, str(STORE), incarnation.address, "", OracleLimits())
        candidate = Candidate(site, DirectoryCoordinator(files, clock, STORE))
        service = oracle_pb2.DESCRIPTOR.services_by_name["OracleService"]
        incarnation.listen([Exposed(service, OracleHandler(candidate.candidacy))])
        await candidate.run()

    async def ask(self, incarnation: Incarnation) -> None:
        world = incarnation.world
        source = TimestampSource(world, ORACLES)

        async def session(name: str) -> None:
            while True:
                await world.clock.sleep(world.random.random())
                transaction = self.recorder.begin(name)
                with suppress(NotExecuted, ExecutionUnknown):
                    transaction.began(await source.get(timeout_seconds=1.0))

        names = [f"{incarnation.life.name} {letter}" for letter in "ab"]
        await asyncio.gather(*map(session, names))

    async def disrupt(self) -> None:
        """One fault, and its end."""
        chance = self.random
        process = chance.choice([*self.oracles, *self.clients])
        await asyncio.sleep(chance.uniform(0, 2))
        match chance.randrange(5):
            case 0:
                process.crash(machine=chance.random() < 0.5)
            case 1:
                for oracle in self.oracles:
                    oracle.crash(machine=True)
                self.disk.cut_power(chance)
            case 2:
                process.pause()
            case 3:
                self.wire.links.isolate(process.address, [p.address for p in self._all()])
            case _:
                process.clock.set_wall_back(chance.randint(-90_000, 90_000))
        await asyncio.sleep(chance.uniform(0, 3))
        self.wire.links.heal()
        for one in self._all():
            one.resume()
            if not one.alive:
                await one.restart()

    def _all(self) -> list[SimulatedProcess]:
        return [*self.oracles, *self.clients]

    async def run(self) -> None:
        for oracle in self.oracles:
            oracle.start(self.serve)
        for client in self.clients:
            client.start(self.ask)
        self.wire.faults = BAD
        while self.wire.loop.time() < SECONDS:
            await self.disrupt()
        self.wire.faults = PERFECT
        for process in self._all():
            process.crash()
            await process.ended()


def _simulated(seed: int) -> tuple[Report, _Cluster]:
    async def main(loop: SimulationLoop) -> _Cluster:
        cluster = _Cluster(loop, seed)
        await cluster.run()
        return cluster

    cluster = run_simulation(main)
    assert cluster.wire.unexpected == []
    return check(cluster.recorder.history), cluster


def test_timestamps_are_unique_and_in_real_time_order_whatever_happens() -> None:
    counts: dict[Fault, int] = {}
    given = 0
    for seed in range(10):
        report, cluster = _simulated(seed)
        assert report, f"seed {seed}: {report}"
        assert [client.exits for client in cluster.clients] == [[]] * CLIENTS
        given += sum(1 for record in cluster.recorder.history if record.start_ts)
        for fault, count in cluster.wire.counts.items():
            counts[fault] = counts.get(fault, 0) + count
    assert given > 1_000, f"only {given} timestamps were given"
    assert set(Fault) - counts.keys() <= {Fault.SLOW_LINK}, "some faults never occurred"


def test_a_seed_is_run_in_the_same_way_again() -> None:
    first, second = (_simulated(3)[1].recorder.history for _ in range(2))
    assert [str(record) for record in first] == [str(record) for record in second]


async def _forgetful_write(self: Ledger, milliseconds: int) -> None:
    """An oracle that serves from a window that it never made durable."""
    self._mark = self._mark.__class__(milliseconds, self._mark.cluster_id)


def test_an_oracle_that_does_not_persist_its_mark_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Ledger, "write", _forgetful_write)
    wanted = {ViolationKind.REAL_TIME_ORDER, ViolationKind.DUPLICATE_TIMESTAMP}
    assert any(wanted & _simulated(seed)[0].counts.keys() for seed in range(20))
