"""Bugs that a simulation has to find, each planted from outside into the code of the product.

The product knows nothing of them. Each is a mistake with which systems of this kind have been
shipped. Those that show only in one order of system calls among very many are planted where every
order is tried: `test_planted_takeover_bugs.py`.
"""

from __future__ import annotations

import re

import pytest

from tests.simulation import planted_bucket_bugs as bucket_bugs
from tests.simulation import planted_index_bugs as index_bugs
from tests.simulation import planted_observer_bugs as observer_bugs
from tests.simulation import planted_protocol_bugs as protocol_bugs
from tests.simulation import planted_server_bugs as server_bugs
from tests.simulation import planted_shared_bugs as shared_bugs
from tests.simulation.bug import FIRST_SEEDS, Bug
from tests.simulation.network import PERFECT, NetworkFaults
from tests.simulation.run import Verdict, simulate
from tests.simulation.scenario import FEW_ROWS, Kind

Patch = pytest.MonkeyPatch


BUGS = (
    Bug(protocol_bugs.no_rollback_marker, (Kind.PAUSE, Kind.SLOW_LINKS), seconds_max=3.0),
    Bug(protocol_bugs.new_commit_timestamp_after_a_time_out),
    Bug(protocol_bugs.read_ignores_locks, is_quickly_caught=True),
    Bug(
        protocol_bugs.commit_leaves_out_writes_whose_table_is_not_known_yet,
        is_quickly_caught=True,
    ),
    Bug(
        server_bugs.oracle_without_persistence,
        (Kind.CRASH_ORACLE, Kind.CLOCK_BACK),
        is_quickly_caught=True,
    ),
    *(
        Bug(plant, kinds, with_master=with_master, seconds_max=6.0, is_quickly_caught=quickly)
        for plant, kinds, with_master, quickly in server_bugs.CLOCK_BUGS
    ),
    *(
        Bug(
            plant,
            (Kind.PAUSE, Kind.STALL),
            workload=workload,
            with_master=True,
            in_bucket=True,
            seconds_max=4.0,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, workload, quickly in server_bugs.BUCKET_BUGS
    ),
    Bug(
        server_bugs.oracle_begins_before_the_epoch_of_the_store,
        workload="sequential",
        on_rows=True,
        is_quickly_caught=True,
    ),
    Bug(protocol_bugs.secondaries_decided_without_the_primary),
    Bug(server_bugs.mirror_after_the_snapshot),
    Bug(protocol_bugs.rollback_deletes_a_foreign_lock, is_quickly_caught=True),
    Bug(protocol_bugs.commit_ignores_min_commit_ts),
    Bug(
        protocol_bugs.heartbeat_raises_the_lock_whatever_it_is,
        (Kind.PAUSE, Kind.SLOW_LINKS),
        is_quickly_caught=True,
    ),
    Bug(
        protocol_bugs.abort_not_primary_first,
        workload="lock order",
        doubled_share=0.5,
        seeds_max=300,
    ),
    # Mostly one of two committers is refused while a commit is being written, and gives up.
    Bug(
        server_bugs.refusal_answered_before_its_batch_is_durable,
        (Kind.POWER, Kind.SLOW_DISK),
        workload="bank",
        doubled_share=0.6,
        seconds_max=3.0,
        seeds_max=200,
    ),
    *(
        Bug(plant, kinds, seeds_max=500, is_quickly_caught=quickly)
        for plant, kinds, quickly in server_bugs.DURABILITY_BUGS
    ),
    *(
        Bug(
            plant,
            workload="bank",
            one_round_share=0.0,
            restricted=True,
            is_quickly_caught=True,
        )
        for plant in server_bugs.RESTRICTED_BUGS
    ),
    Bug(server_bugs.read_without_the_after_check, (Kind.TAKEOVER,)),
    Bug(server_bugs.write_without_the_after_check, (Kind.TAKEOVER,), is_quickly_caught=True),
    *(
        Bug(
            plant,
            server_bugs.KINDS,
            # What is rarely caught needs the transactions that show most.
            workload=None if quickly else "long fork",
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, quickly in server_bugs.STORE_BUGS
    ),
    *(
        Bug(
            plant,
            kinds,
            tablets_in_bucket=True,
            with_master=with_master,
            seconds_max=2.0,
            seeds_max=300,
            is_quickly_caught=True,
        )
        for plant, kinds, with_master in bucket_bugs.BUGS
    ),
    Bug(protocol_bugs.commit_timestamp_before_the_prewrites),
    Bug(protocol_bugs.prewrite_ignores_newer_commits),
    Bug(protocol_bugs.primary_by_chance),
    *(
        Bug(plant, kinds, seconds_max=3.0, seeds_max=300, is_quickly_caught=quickly)
        for plant, kinds, quickly in protocol_bugs.STEP_BUGS
    ),
    Bug(
        observer_bugs.notification_newer_than_the_snapshot_deleted,
        workload="chains",
    ),
    Bug(observer_bugs.notification_at_the_start_timestamp, workload="chains"),
    Bug(
        observer_bugs.acknowledgement_not_in_the_transaction,
        workload="chains",
    ),
    Bug(observer_bugs.deletes_wake_every_observer, workload="chains", is_quickly_caught=True),
    Bug(observer_bugs.write_after_a_delete_handled_with_it, workload="chains"),
    Bug(observer_bugs.columns_read_last_time_kept_from_then, workload="chains"),
    Bug(observer_bugs.weak_notification_not_written_again, (Kind.SLOW_LINKS,), workload="chains"),
    Bug(
        observer_bugs.roll_forward_without_the_notification,
        (Kind.CLIENT_STEP,),
        workload="chains",
    ),
    Bug(
        observer_bugs.registration_returns_before_tablets_know,
        workload="chains",
        with_master=True,
        is_quickly_caught=True,
    ),
    Bug(
        observer_bugs.commits_of_any_schema_are_taken,
        workload="chains",
        with_master=True,
    ),
    # The server is cut off before the observer is registered, which is early.
    Bug(
        observer_bugs.backfill_at_a_snapshot_from_before_the_registration,
        (Kind.UNHEARD,),
        workload="newcomers",
        network=PERFECT,
        after_seconds=-1.2,
        lone_disruption_seconds=2.5,
    ),
    Bug(
        observer_bugs.waiting_does_not_count_backfills,
        workload="newcomers",
        is_quickly_caught=True,
    ),
    Bug(
        observer_bugs.backfill_counts_as_done_when_it_begins,
        (Kind.CRASH,),
        workload="newcomers",
    ),
    Bug(
        observer_bugs.backfill_is_reported_before_its_notifications_are_durable,
        (Kind.CRASH,),
        workload="newcomers",
        seeds_max=300,
    ),
    Bug(
        observer_bugs.table_created_without_the_observers_that_wait_for_it,
        workload="newcomers",
        is_quickly_caught=True,
    ),
    # Servers that are away until a commit's time is up, and back while its notification is deleted.
    Bug(
        observer_bugs.unknown_run_taken_for_committed,
        (Kind.POWER,),
        workload="chains",
        lone_disruption_seconds=4.5,
    ),
    Bug(
        observer_bugs.notification_deleted_before_the_run,
        (Kind.CRASH, Kind.PAUSE),
        workload="chains",
    ),
    *(
        Bug(plant, kinds, workload=workload, with_master=True, seconds_max=5.0, seeds_max=400)
        for plant, kinds, workload in observer_bugs.COLLECTION_BUGS
    ),
    Bug(
        observer_bugs.new_owner_forgets_the_safe_point,
        (Kind.PAUSE, Kind.TAKEOVER),
        workload="sequential",
        with_master=True,
        after_seconds=3.5,
        seconds_max=3.0,
        seeds_max=400,
    ),
    *(
        Bug(plant, workload="registers", with_master=True, is_quickly_caught=True)
        for plant in protocol_bugs.LOCK_ONLY_BUGS
    ),
    *(
        Bug(plant, workload="predicates", is_quickly_caught=True)
        for plant in protocol_bugs.SCAN_BUGS
    ),
    *(
        Bug(
            plant,
            workload="predicates",
            joined_share=1.0,
            page_rows_max=FEW_ROWS,
            is_quickly_caught=True,
        )
        for plant in protocol_bugs.JOINED_BUGS
    ),
    *(
        Bug(plant, workload="predicates", joined_share=1.0, is_quickly_caught=True)
        for plant in protocol_bugs.CONDITION_BUGS
    ),
    *(
        Bug(plant, workload="successors", with_master=True, is_quickly_caught=True)
        for plant in server_bugs.TABLE_BUGS
    ),
    *(
        Bug(
            plant,
            (Kind.UNHEARD,),
            workload="recreations",
            with_master=True,
            one_round_share=0.5,
            lone_disruption_seconds=2.5,
            is_quickly_caught=True,
        )
        for plant in server_bugs.DROPS
    ),
    Bug(
        server_bugs.a_silent_owner_is_taken_for_gone,
        (Kind.UNHEARD,),
        workload="recreations",
        with_master=True,
        one_round_share=0.5,
        lone_disruption_seconds=4.0,
        is_quickly_caught=True,
    ),
    *(
        Bug(
            plant,
            kinds,
            workload=workload,
            one_round_share=0.8,
            seconds_max=3.0,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, kinds, workload, quickly in protocol_bugs.ONE_ROUND_BUGS
    ),
    Bug(
        protocol_bugs.write_latch_does_not_wait_for_held_cells,
        (Kind.SLOW_DISK,),
        workload="loads",
        with_master=True,
        one_round_share=0.9,
        is_quickly_caught=True,
    ),
    *(
        Bug(
            plant,
            workload="expiring",
            with_master=with_master,
            seeds_max=200,
            is_quickly_caught=True,
        )
        for plant, with_master in observer_bugs.EXPIRY_BUGS
    ),
    Bug(
        observer_bugs.readers_do_not_notice_that_a_ttl_has_become_shorter,
        workload="changing ttls",
        with_master=True,
        seeds_max=100,
    ),
    Bug(
        observer_bugs.a_ttl_becomes_longer_while_expired_cells_are_deleted,
        workload="changing ttls",
        with_master=True,
        seeds_max=150,
    ),
    *(
        Bug(plant, kinds, workload="loads", is_quickly_caught=quickly)
        for plant, kinds, quickly in server_bugs.LOAD_BUGS
    ),
    *(
        Bug(plant, kinds, workload="loaders", one_round_share=0.8, is_quickly_caught=quickly)
        for plant, kinds, quickly in server_bugs.BESIDE_TRANSACTIONS
    ),
    *(
        Bug(plant, workload="loads", on_rows=True, seeds_max=300, is_quickly_caught=True)
        for plant in server_bugs.ROW_LOAD_BUGS
    ),
    *(
        Bug(
            plant,
            kinds,
            workload="feeds",
            with_master=with_master,
            is_quickly_caught=quickly,
        )
        for plant, kinds, with_master, quickly in server_bugs.FEED_BUGS
    ),
    Bug(
        server_bugs.a_former_owner_says_that_a_table_has_no_feed,
        (Kind.PAUSE,),
        workload="feeds",
        with_master=True,
        seconds_max=6.0,
        seeds_max=200,
    ),
    *(
        Bug(
            plant,
            kinds,
            workload="hubs",
            one_round_share=one_round_share,
            seconds_max=3.0,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, kinds, one_round_share, quickly in protocol_bugs.READ_LOCK_BUGS
    ),
    *(
        Bug(plant, kinds, workload="indexes", is_quickly_caught=quickly)
        for plant, kinds, quickly in index_bugs.INDEX_BUGS
    ),
    Bug(
        index_bugs.former_values_are_those_of_an_older_participant,
        workload="indexed jobs",
        with_master=True,
        seeds_max=200,
        is_quickly_caught=True,
    ),
    *(
        Bug(plant, workload="indexed tasks", with_master=True, is_quickly_caught=True)
        for plant in index_bugs.TASK_BUGS
    ),
    *(
        Bug(plant, workload="expiring indexes", is_quickly_caught=True)
        for plant in index_bugs.EXPIRING_INDEX_BUGS
    ),
    *(
        Bug(plant, workload="indexes", on_rows=True, with_master=True, is_quickly_caught=True)
        for plant in index_bugs.ROW_INDEX_BUGS
    ),
    *(
        Bug(plant, workload="on duty", is_quickly_caught=True)
        for plant in protocol_bugs.SERIALIZABLE_BUGS
    ),
    *(
        Bug(plant, workload="sequential", one_round_share=share, is_quickly_caught=True)
        for plant, share in protocol_bugs.NEWEST_BUGS
    ),
    *(
        Bug(
            plant,
            workload="counters",
            one_round_share=0.8,
            sessions_per_client=6,
            seeds_max=300,  # one in a hundred has a first read between a commit and its answer
            is_quickly_caught=quickly,
        )
        for plant, quickly in protocol_bugs.HANDOVER_BUGS
    ),
    *(
        Bug(plant, workload="counters", one_round_share=0.8, is_quickly_caught=True)
        for plant in protocol_bugs.HOLDING_BUGS
    ),
    *(
        Bug(plant, kinds, workload="queues", one_round_share=0.8, is_quickly_caught=quickly)
        for plant, kinds, quickly in protocol_bugs.TURN_BUGS
    ),
    *(
        Bug(plant, workload="registers", one_round_share=share, is_quickly_caught=True)
        for plant, share in protocol_bugs.FAMILY_BUGS
    ),
    Bug(observer_bugs.changes_during_a_pause_are_not_looked_at, workload="chains"),
    *(
        Bug(
            plant,
            kinds,
            workload="inverted",
            with_master=True,
            on_rows=on_rows,
            seconds_max=6.0,
            seeds_max=300,
        )
        for plant, kinds, on_rows in observer_bugs.PREVIOUS_BUGS
    ),
    *(Bug(plant, workload="chains", is_quickly_caught=True) for plant in observer_bugs.BATCH_BUGS),
    *(
        Bug(plant, workload="recipes", is_quickly_caught=True)
        for plant in observer_bugs.RECIPE_BUGS
    ),
    *(
        Bug(
            plant,
            kinds,
            workload="jobs",
            seconds_max=3.0,
            seeds_max=200,
            is_quickly_caught=quickly,
        )
        for plant, kinds, quickly in shared_bugs.SHARED_BUGS
    ),
    Bug(
        shared_bugs.no_copy_of_a_refused_group_is_expected,
        workload="jobs",
        network=NetworkFaults(duplicate=0.5),
    ),
    Bug(
        shared_bugs.a_driver_takes_the_commit_of_another_one_for_its_own,
        workload="deciders",
        with_master=True,
        seconds_max=3.0,
        seeds_max=50,
        is_quickly_caught=True,
    ),
    *(
        Bug(
            plant,
            kinds,
            workload=workload or "mixed",
            on_rows=True,
            seconds_max=3.0,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, kinds, workload, quickly in shared_bugs.ROW_BUGS
    ),
    Bug(
        shared_bugs.an_unexplained_refusal_was_not_executed,
        workload="bank",
        on_rows=True,
        network=NetworkFaults(slow_seconds_max=0.01, duplicate=0.2, drop_reply=0.1),
        is_quickly_caught=True,
    ),
    *(
        Bug(
            shared_bugs.with_eager_collectors(plant),
            kinds,
            workload=workload or "mixed",
            on_rows=True,
            seconds_max=3.0,
            seeds_max=400,
        )
        for plant, kinds, workload in shared_bugs.ROW_COLLECTION_BUGS
    ),
    *(
        Bug(
            plant,
            kinds,
            workload="chains",
            on_rows=True,
            seconds_max=3.0,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, kinds, quickly in observer_bugs.AT_ANY_STEP
    ),
    *(
        Bug(
            plant,
            (Kind.CLIENT_STEP,),
            workload="chains",
            on_rows=True,
            aim="commit of the primary",
            in_bursts=True,
            is_quickly_caught=True,
        )
        for plant in observer_bugs.AT_THE_COMMIT_POINT
    ),
    *(
        Bug(
            plant,
            kinds,
            workload=workload,
            on_rows=True,
            with_master=True,
            seconds_max=4.0,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, kinds, workload, quickly in shared_bugs.ROW_CLUSTER_BUGS
    ),
    Bug(
        shared_bugs.epoch_from_before_the_timestamps,
        workload="chains",
        on_rows=True,
        with_master=True,
        network=PERFECT,
        in_bursts=True,
        seeds_max=300,
        is_quickly_caught=True,
    ),
    *(
        Bug(
            shared_bugs.with_eager_masters(plant),
            (Kind.CLIENT_STEP,),
            workload="drops",
            on_rows=True,
            with_master=True,
            aim="commit of others",
            in_bursts=True,
            network=PERFECT,
            # A table is collected when retention has passed since it was dropped.
            after_seconds=1.5,
            seeds_max=300,
            is_quickly_caught=quickly,
        )
        for plant, quickly in shared_bugs.OF_DROPS
    ),
    *(
        Bug(
            plant,
            kinds,
            workload="jobs",
            on_rows=True,
            seconds_max=3.0,
            seeds_max=200,
            is_quickly_caught=quickly,
        )
        for plant, kinds, quickly in shared_bugs.ROW_SHARED_BUGS
    ),
)


def seeds_until_caught(bug: Bug) -> tuple[int, Verdict | None]:
    """The number of seeds that were run, and the failing verdict; None if it was not caught."""
    first = FIRST_SEEDS.get(bug.name, 0)
    with pytest.MonkeyPatch.context() as patch:
        bug.plant(patch)
        for seeds in range(1, bug.seeds_max + 1):
            verdict = simulate(bug.scenario(first + seeds - 1))
            if verdict.failed:
                _require_well_planted(bug, verdict)
                return seeds, verdict
    return bug.seeds_max, None


_OF_A_BROKEN_PLANT = re.compile(r"\b(TypeError|AttributeError|NameError|UnboundLocalError)\(")


def _require_well_planted(bug: Bug, verdict: Verdict) -> None:
    """A plant that no longer fits the code fails by itself, and would be "caught" whatever the
    checker can see."""
    for problem in verdict.problems:
        if _OF_A_BROKEN_PLANT.search(problem):
            raise AssertionError(f"{bug.name} is not planted well: {problem}")
