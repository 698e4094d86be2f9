"""A few seeds of the whole cluster. `make simulate` runs as many as there is time for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from percolator.formats.records import RecordKind, WriteRecord
from percolator.protocol import steps
from percolator.v1.tabletserver_pb2 import MutateRequest, Mutation, StepList
from percolator.wire.methods import MUTATE
from tests.isolation.checker import WatchedColumns
from tests.isolation.history import History, Outcome, TransactionRecord
from tests.isolation.stored_cells import StoredCommit
from tests.simulation import __main__ as program
from tests.simulation.campaign import EXPECTED, SEEDS_FOR_EVERYTHING, minimised
from tests.simulation.disruptions import Ambush
from tests.simulation.network import PERFECT, Envelope
from tests.simulation.observing import left_to_run
from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import scenario_of
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
        "worker", 1, start_ts=start, outcome=outcome, observer="tend", trigger=_CELL
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


def test_a_backfill_that_is_written_again_is_left_only_if_nobody_ran_since_the_change() -> None:
    assert _left(9, weak=False) == {"tend"}
    assert _left(9, _run(4), weak=False) == {"tend"}
    assert _left(9, _run(6, Outcome.ABORTED), weak=False) == {"tend"}
    assert _left(9, _run(6), weak=False) == set()
    assert _left(9, _run(6), weak=False, changed_at=7) == {"tend"}


# A run of many seeds goes on while a kind of fault has not occurred, and fails if none ever does.

_LATE = EXPECTED[0]


def _run_of_many_seeds(monkeypatch: pytest.MonkeyPatch, late_from: int | None) -> tuple[int, int]:
    """The exit code and how many seeds were run, if one fault occurs from that seed on only."""
    run: list[int] = []

    def results(seeds: range, jobs: int) -> Iterator[tuple[Verdict, float]]:
        del jobs
        for seed in seeds:
            run.append(seed)
            late = late_from is not None and seed >= late_from
            occurred = Counter(name for name in EXPECTED if late or name != _LATE)
            yield Verdict(scenario_of(seed), occurred=occurred), 0.0

    monkeypatch.setattr(program, "results", results)
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
