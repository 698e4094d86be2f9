"""A few seeds of the whole cluster. `make simulate` runs as many as there is time for."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from random import Random

import pytest

from percolator.errors import ExecutionUnknown, NotExecuted
from percolator.formats.records import RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.schema import Table
from percolator.services.chassis.cluster_store import BucketClusterStore
from percolator.services.chassis.directory_coordinator import DirectoryCoordinator
from percolator.services.chassis.rpc import Exposed
from percolator.services.master.collection import CollectionTimes
from percolator.services.oracle.candidate import Candidate, Site
from percolator.services.oracle.oracle import DurableMark, OracleHandler, OracleLimits
from percolator.v1 import oracle_pb2
from percolator.v1.tabletserver_pb2 import MutateRequest, Mutation, StepList
from percolator.wire.methods import MUTATE
from percolator.wire.timestamp_source import TimestampSource
from percolator.world import World
from tests.doubles.memory_files import MemoryDisk, MemoryFiles
from tests.isolation.checker import Report, ViolationKind, WatchedColumns, check
from tests.isolation.history import History, Outcome, Recorder, TransactionRecord
from tests.isolation.store_audit import StoredCommit
from tests.patching import in_place_of
from tests.simulation import __main__ as program
from tests.simulation import programs
from tests.simulation.campaign import EXPECTED, SCENARIOS, SEEDS_FOR_EVERYTHING, minimised
from tests.simulation.cluster import Cluster
from tests.simulation.disruptions import Ambush
from tests.simulation.loop import SimulationLoop, run_simulation
from tests.simulation.network import PERFECT, Envelope, Fault, NetworkFaults, Wire
from tests.simulation.process import Incarnation, SimulatedProcess
from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import scenario_of
from tests.simulation.sessions import left_to_run
from tests.simulation.workloads.catalogue import WORKLOADS

# It only ends what hangs: virtual time takes as long as the machine needs for it.
pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("workload", sorted(WORKLOADS))
def test_nothing_is_wrong_among_faults(workload: str) -> None:
    seed = sorted(WORKLOADS).index(workload) + 700
    verdict = simulate(scenario_of(seed, workload=workload, transactions=80))
    assert verdict.problems == [], f"{verdict.scenario}"
    assert verdict.committed > 0


def test_without_faults_all_is_done_quickly_and_nothing_is_given_up() -> None:
    calm = replace(scenario_of(1, workload="sets"), disruptions=(), network=PERFECT)
    verdict = simulate(calm)
    assert verdict.problems == []
    assert verdict.transactions > calm.transactions
    assert verdict.virtual_seconds < 5


_IDLE_SECONDS = 120.0
_TABLETS = 100


def test_a_cluster_that_leads_by_a_bucket_and_has_no_work_makes_few_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each is paid for. Two masters and two oracles, with the times of a usual cluster."""
    silence = BucketClusterStore.silence_seconds
    monkeypatch.setattr(programs, "_LEASE_SECONDS", silence)
    monkeypatch.setattr(programs, "_BUCKET_SILENCE_SECONDS", silence)
    monkeypatch.setattr(programs, "_COLLECTION", CollectionTimes())
    drawn = scenario_of(1, workload="sets", with_master=True)
    calm = replace(drawn, disruptions=(), network=PERFECT, roles_in_bucket=True)

    async def calls(loop: SimulationLoop) -> Counter[str]:
        cluster = Cluster(loop, calm, WORKLOADS["sets"]())

        async def create(world: World) -> None:
            database = await cluster.connected(world)
            splits = [f"{number:02}" for number in range(1, _TABLETS)]
            await database.create_table(Table("wide"), splits, timeout=30.0)
            await database.close()

        await cluster.start_servers()
        await cluster.visit("loader:1", create)
        await asyncio.sleep(_IDLE_SECONDS)
        assert cluster.bucket is not None
        cluster.bucket.calls.clear()
        await asyncio.sleep(_IDLE_SECONDS)
        await cluster.shut_down()
        return cluster.bucket.calls

    made = run_simulation(calls)
    assert made.total() / _IDLE_SECONDS < 5.0, made
    assert (made["create"] + made["replace"] + made["list"]) / _IDLE_SECONDS < 1.5, made


def test_a_seed_takes_the_same_course_again() -> None:
    first, again = (simulate(scenario_of(5, transactions=60)) for _ in range(2))
    assert first.occurred == again.occurred
    assert first.messages == again.messages
    assert list(map(repr, first.history)) == list(map(repr, again.history))


def test_a_failing_scenario_is_made_small() -> None:
    """Everything that does not matter for the failure is left out."""
    scenario = next(found for found in map(scenario_of, range(100)) if len(found.disruptions) >= 5)
    needed = scenario.disruptions[3]
    small = minimised(scenario, lambda one: needed in one.disruptions and 2 in one.sessions)
    assert small.disruptions == (needed,)
    assert small.sessions == (2,)
    assert small.network is PERFECT
    assert small.transactions_per_session == 1


# An ambush recognises the step of the protocol at which a message is sent.

_WORKER, _SERVER = "worker-0:1", "tablets-0:1"


def _sent(*mutations: Mutation) -> Envelope:
    request = MutateRequest()
    request.batches.add().mutations.extend(mutations)
    return Envelope(_WORKER, _SERVER, MUTATE.path, False, request.SerializeToString())


def _forgetting() -> Mutation:
    return steps.forget_notifications(b"row", b"column", b"observer", [7])


def test_it_recognises_a_worker_that_deletes_the_notifications_it_has_handled() -> None:
    ambush = Ambush(_WORKER, 1, is_reply=False)
    assert ambush.step(_sent(_forgetting())) == "notification deleted"


def test_it_recognises_steps_in_lists() -> None:
    request = MutateRequest()
    request.batches.add().steps.kinds.extend([StepList.KIND_COMMIT_PRIMARY, StepList.KIND_PREWRITE])
    sent = Envelope(_WORKER, _SERVER, MUTATE.path, False, request.SerializeToString())
    ambush = Ambush(_WORKER, 1, is_reply=False, aim="commit of the primary")
    assert ambush.step(sent) == "commit of the primary"


def test_one_that_waits_for_another_step_lets_that_message_pass() -> None:
    ambush = Ambush(_WORKER, 1, is_reply=False, aim="commit of the primary")
    assert ambush.step(_sent(_forgetting())) is None


def test_a_message_of_many_steps_is_named_after_the_furthest() -> None:
    notifying = steps.notify(b"row", b"column", 7, (b"observer",))
    ambush = Ambush(_WORKER, 1, is_reply=False)
    assert ambush.step(_sent(_forgetting(), notifying)) == "notification deleted"


# When `wait_for_observers` has overlooked something: a notification for which nobody ran.

_CELL = ("table", b"row", b"column")


def _run(start: int, outcome: Outcome = Outcome.COMMITTED) -> TransactionRecord:
    return TransactionRecord(
        "worker", 1, start_ts=start, outcome=outcome, observer="tend", triggers=(_CELL,)
    )


def _left(
    timestamp: int,
    *runs: TransactionRecord,
    weak: bool = True,
    on_rows: bool = False,
    changed_at: int = 5,
) -> set[str]:
    watched = WatchedColumns("tend", frozenset({("table", b"column")}), weak=weak)
    found = {_CELL: [("tend", timestamp)]}
    change = StoredCommit(_CELL, changed_at, WriteRecord(changed_at - 1, RecordKind.PUT))
    commits = {_CELL: [change]}
    return left_to_run(found, History(list(runs)), [watched], commits, on_rows=on_rows)


WITHOUT_CONDITION = pytest.mark.parametrize(("weak", "on_rows"), [(True, False), (False, True)])


@WITHOUT_CONDITION
def test_a_weak_notification_or_an_intent_above_all_runs_is_left(weak: bool, on_rows: bool) -> None:
    assert _left(5, weak=weak, on_rows=on_rows) == {"tend"}
    assert _left(5, _run(4), weak=weak, on_rows=on_rows) == {"tend"}
    lost = _run(6, Outcome.ABORTED)
    assert _left(5, _run(4), lost, weak=weak, on_rows=on_rows) == {"tend"}


@WITHOUT_CONDITION
def test_a_late_copy_of_it_is_not_left_once_a_run_began_after_it(weak: bool, on_rows: bool) -> None:
    assert _left(5, _run(6), _run(4), weak=weak, on_rows=on_rows) == set()


@pytest.mark.parametrize("start", [4, 6])
def test_a_notification_of_a_change_is_always_left(start: int) -> None:
    """It is written together with the change, under a condition: no copy of it can come late."""
    assert _left(5, _run(start), weak=False) == {"tend"}


@pytest.mark.parametrize("on_rows", [False, True])
def test_a_backfill_that_is_written_again_is_left_only_if_nobody_ran_since_the_change(
    on_rows: bool,
) -> None:
    def left(*runs: TransactionRecord, changed_at: int = 5) -> set[str]:
        return _left(9, *runs, weak=False, on_rows=on_rows, changed_at=changed_at)

    assert left() == {"tend"}
    assert left(_run(4)) == {"tend"}
    assert left(_run(6, Outcome.ABORTED)) == {"tend"}
    assert left(_run(6)) == set()
    assert left(_run(6), changed_at=7) == {"tend"}


# A run of many seeds goes on while a kind of fault has not occurred, and fails if none ever does.

_LATE = EXPECTED[0]


def _run_of_many_seeds(monkeypatch: pytest.MonkeyPatch, late_from: int | None) -> tuple[int, int]:
    """The exit code and how many seeds were run, if one fault occurs from that seed on only."""
    run: list[int] = []

    @in_place_of(monkeypatch, program, "results")
    def results(seeds: range, jobs: int) -> Iterator[tuple[Verdict, float]]:
        del jobs
        for seed in seeds:
            run.append(seed)
            late = late_from is not None and seed >= late_from
            occurred = Counter(name for name in EXPECTED if late or name != _LATE)
            yield Verdict(scenario_of(seed), occurred=occurred), 0.0

    arguments = ["simulate", "--seeds", str(SEEDS_FOR_EVERYTHING), "--seed", "0"]
    monkeypatch.setattr(sys, "argv", arguments)
    code = program.main()
    assert run == list(range(len(run))), "each seed is run once"
    return code, len(run)


def test_a_run_ends_when_everything_has_occurred(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run_of_many_seeds(monkeypatch, late_from=10) == (0, SEEDS_FOR_EVERYTHING)


def test_a_run_goes_on_until_a_rare_fault_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    code, seeds = _run_of_many_seeds(monkeypatch, late_from=SEEDS_FOR_EVERYTHING + 20)
    assert code == 0
    assert SEEDS_FOR_EVERYTHING + 20 < seeds < 2 * SEEDS_FOR_EVERYTHING


def test_a_run_fails_if_a_fault_never_occurs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _run_of_many_seeds(monkeypatch, late_from=None) == (1, 3 * SEEDS_FOR_EVERYTHING)


# The real oracle and the real timestamp source, among crashes, pauses, power cuts and bad links.
#
# Every transaction here only begins: the checker requires timestamps to be unique and in real-time
# order, across restarts of the oracle and for all clients.

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


async def _forgetful_write(self: DurableMark, milliseconds: int) -> None:
    """An oracle that serves from a window that it never made durable."""
    self._mark = self._mark.__class__(milliseconds, self._mark.cluster_id)


def test_an_oracle_that_does_not_persist_its_mark_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(DurableMark, "write", _forgetful_write)
    wanted = {ViolationKind.REAL_TIME_ORDER, ViolationKind.DUPLICATE_TIMESTAMP}
    assert any(wanted & _simulated(seed)[0].counts.keys() for seed in range(20))


# A failing seed is useful only if it fails again in every process that runs it.

_ROOT = Path(__file__).parents[2]
_HASH_SEEDS = ("1", "2")
_MESSAGES_MIN = 1_000


@pytest.mark.integration
def test_a_seed_takes_the_same_course_in_every_process(tmp_path: Path) -> None:
    """Neither the hashes of strings nor the addresses of objects matter."""
    writers = []
    for hash_seed in _HASH_SEEDS:
        directory = tmp_path / hash_seed
        directory.mkdir()
        command = [sys.executable, "-m", "tests.simulation.campaign", str(directory)]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        writers.append(subprocess.Popen(command, cwd=_ROOT, env=environment))
    assert [writer.wait() for writer in writers] == [0, 0]
    for name in SCENARIOS:
        one, other = ((tmp_path / seed / name).read_text().split("\n") for seed in _HASH_SEEDS)
        assert len(one) > _MESSAGES_MIN, name
        for number, (line, another) in enumerate(zip_longest(one, other)):
            assert line == another, f"{name}, message {number}"
