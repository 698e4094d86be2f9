"""A bug to be planted, and the scenarios that have to reveal it."""

from __future__ import annotations

from asyncio import AbstractEventLoop, get_running_loop
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import pytest

from tests.simulation.disruptions import aimed
from tests.simulation.network import NetworkFaults
from tests.simulation.scenario import (
    PAGE_ROWS_MAX,
    Kind,
    Scenario,
    harsh,
    in_bursts,
    scenario_of,
    with_roles_in_bucket,
    with_tablets_in_bucket,
)

Patch = pytest.MonkeyPatch

_LONG_TRANSACTIONS = 500
_LONE_DISRUPTION = 11
"""Which of a seed's disruptions it is: by then, observers are at work."""


@dataclass(frozen=True)
class Bug:
    """A bug, and where it has to be looked for."""

    plant: Callable[[Patch], None]
    kinds: tuple[Kind, ...] = ()
    """Kinds of disruptions that reveal it, many of them; if empty, those of each seed."""
    workload: str | None = None
    doubled_share: float = 0.04
    """The share of transactions with two committers."""
    one_round_share: float = 0.0
    """The share of transactions that try to commit in one round. Most bugs are in two phases."""
    joined_share: float = 0.0
    """The share of scans that are made with joined pages, too."""
    page_rows_max: int = PAGE_ROWS_MAX
    seconds_max: float = 1.0
    """How long a disruption lasts."""
    seeds_max: int = 100
    with_master: bool = False
    on_rows: bool = False
    """True if it is in the code for row stores."""
    in_bucket: bool = False
    """True if it is in the code for masters and oracles that lead by a bucket."""
    tablets_in_bucket: bool = False
    """True if it is in the code for tablets in a bucket."""
    restricted: bool = False
    """True if it is in the code for clients whose tokens have rights to some tables only."""
    after_seconds: float = 0.0
    """Disruptions wait this long, and there is work for as long: history has to be collected first.
    If it is negative, they come so much earlier."""
    network: NetworkFaults | None = None
    """If given, the one of each seed. A message that is lost keeps a collector from work for 30 s,
    and some bugs need copies of messages more often than a seed has them."""
    lone_disruption_seconds: float = 0.0
    """If not 0, there is only one disruption, and it lasts this long: others would end it early."""
    aim: str | None = None
    """If given, all clients that are killed are killed at this step."""
    in_bursts: bool = False
    """True if each client has many sessions that begin together: then its death leaves many
    transactions at the same step."""
    sessions_per_client: int = 0
    """If not 0, each client has so many, and they begin at their own times: they form lines."""
    is_quickly_caught: bool = False
    """True if it is caught in seconds: then it is part of every test run."""

    @property
    def name(self) -> str:
        return self.plant.__name__.replace("_", " ")

    def scenario(self, seed: int) -> Scenario:
        if self.kinds:
            found = harsh(seed, self.kinds, workload=self.workload, seconds_max=self.seconds_max)
        else:
            found = scenario_of(seed, workload=self.workload, with_master=False)
        if self.lone_disruption_seconds:
            lone = replace(
                found.disruptions[_LONE_DISRUPTION], seconds=self.lone_disruption_seconds
            )
            found = replace(found, disruptions=(lone,))
        if self.after_seconds:
            late = (
                replace(disruption, at_seconds=disruption.at_seconds + self.after_seconds)
                for disruption in found.disruptions
            )
            found = replace(found, disruptions=tuple(late), transactions=_LONG_TRANSACTIONS)
        if self.network is not None:
            found = replace(found, network=self.network)
        if self.sessions_per_client:
            found = replace(found, sessions_per_client=self.sessions_per_client, burst_seconds=0.0)
        if self.aim is not None:
            found = replace(
                found, disruptions=tuple(aimed(one, self.aim) for one in found.disruptions)
            )
        if self.in_bursts:
            found = in_bursts(found)
        if self.in_bucket:
            found = with_roles_in_bucket(found)
        if self.tablets_in_bucket:
            found = with_tablets_in_bucket(found)
        return replace(
            found,
            on_rows=self.on_rows,
            restricted=self.restricted,
            doubled_share=self.doubled_share,
            one_round_share=self.one_round_share,
            joined_share=self.joined_share,
            page_rows_max=self.page_rows_max,
            # Some workloads need the real master: without it they fail, with a bug or without.
            with_master=self.with_master or found.with_master,
        )


# What a planted bug remembers during one seed.

T = TypeVar("T")


class PerSeed(Generic[T]):
    """Each seed has an event loop of its own, and so something new. Otherwise it would depend on
    the seeds before it whether a bug is caught, since rows and timestamps are the same in all."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._of_loops: WeakKeyDictionary[AbstractEventLoop, T] = WeakKeyDictionary()

    def now(self) -> T:
        """Value for the seed that is running."""
        loop = get_running_loop()
        if loop not in self._of_loops:
            self._of_loops[loop] = self._make()
        return self._of_loops[loop]


# Where the search for a planted bug begins: at a seed that shows it, and takes little time.
#
# Each is a seed that showed its bug when it was noted here. A change of the product may move what a
# seed shows. Then the search goes on with the seeds after it, as far as a search from 0 would, and
# costs only time: note the seed that `make planted-bugs` prints instead.

FIRST_SEEDS = {
    "a commit goes on under another schema": 146,
    "a failed attempt goes on": 10,
    "a former owner says that a table has no feed": 27,
    "a half of a split loses what was in the feed": 2,
    "a hidden version taken for none": 146,
    "a late comer begins above the commit before its turn": 42,
    "a later run loads into the table of an earlier one": 2,
    "a part begins after the end": 4,
    "a part begins in a row whatever closed it": 2,
    "a range is cleared by a run that has lost it": 24,
    "a run that was overtaken reads what may be gone from a row": 2091,
    "a run that was overtaken reads what may be gone": 5,
    "a transaction counts as gone with its first lock": 166,
    "a ttl becomes longer while expired cells are deleted": 58,
    "abort not primary first": 27,
    "acknowledgement collected although its cell is there": 5,
    "all locks but one are enough": 13,
    "all locks of the row count": 7,
    "all parts are committed": 1,
    "an unexplained refusal was not executed": 158,
    "answered before it is durable": 22,
    "answered before the batch is durable": 4,
    "any lock is deleted with the own": 1,
    "backfill at a snapshot from before the registration": 4,
    "backfill is reported before its notifications are durable": 25,
    "batch takes in what was handled before": 6,
    "cache used again after a power cut": 2,
    "cache used again that is no prefix": 2,
    "calls joined after they were sent": 3,
    "cells let go before the batch is shown": 6,
    "change ends what is remembered only when its writer hears of it": 53,
    "changes during a pause are not looked at": 4,
    "checkpoint claims what was written during its upload": 3,
    "child begins before its parent is sealed": 2,
    "child deletes its parents entries before its first checkpoint": 1,
    "collects before old locks are resolved": 21,
    "commit of the primary passes a push": 33,
    "commits are read before locks": 2,
    "commits without a look at the epoch": 149,
    "creation does not wait for the former table": 59,
    "deletions in loaded rows are collected": 14,
    "drop waits once": 5,
    "dropped table deleted at once": 5,
    "entries of jobs are added under unlocked columns": 16,
    "entries of jobs are given up with their rows": 4,
    "epoch from before the timestamps": 37,
    "epoch not raised at a drop": 2,
    "epoch not raised at a registration": 4,
    "every run is published": 8,
    "every run of a load is let in": 3,
    "executed counts as not sent": 71,
    "expiry is judged when the read arrives": 49,
    "former values are those of an older participant": 6,
    "guard by the servers own clock": 2,
    "handover of every commit": 32,
    "handover used by one that came later": 298,
    "heartbeat raises the lock whatever it is": 6,
    "intent cleared by the marker of another start": 151,
    "intent cleared while its cell is locked": 7,
    "intent cleared without a trace": 43,
    "intents after the commit point": 3,
    "intents that join a sent call taken for written": 4,
    "intents that were not answered taken for written": 9,
    "judged while a batch changes the cell": 1,
    "kept cells are locked whatever was committed": 3,
    "lock only record collected once there is a newer commit": 1,
    "locks are read below their commit": 1,
    "locks resolved below any timestamp are enough": 2,
    "look under way joined": 98,
    "low water mark moved too far": 5,
    "marker not checked": 342,
    "marker put over a lock": 35,
    "master on rows writes after it was replaced": 3,
    "mirror after the snapshot": 3,
    "most of the known clocks are most clocks": 9,
    "mutations of held cells do not wait": 8,
    "named before everything is locked": 1,
    "new owner forgets the read locks": 31,
    "new owner forgets the safe point": 3,
    "newest version under a notification collected": 6,
    "no answer is taken for not executed": 6,
    "no copy of a refused group is expected": 22,
    "no rollback marker": 10,
    "notification deleted before the run": 7,
    "one refusal for all joined steps": 69,
    "one round looks at its own cells only": 5,
    "oracle begins before the epoch of the store": 87500865,
    "oracle believes its own clock": 6,
    "oracle in a bucket answers without a look": 61,
    "oracle in a bucket looks too early": 250,
    "oracle on rows answers without a look": 409,
    "other columns of an index are not locked": 19,
    "prewrite passes newer lock only commits": 173,
    "prewrite passes the note": 30,
    "read locks do not wait for writers on their way": 82,
    "read locks pass live locks": 1,
    "read locks pass newer commits": 4,
    "read locks pass writers": 4,
    "read passes the note": 12,
    "read without a look at the bucket": 2,
    "readers do not notice that a ttl has become shorter": 3,
    "readers of changes ignore locks behind those that are reported": 26,
    "readers of changes ignore locks": 7,
    "reads do not wait": 6,
    "refusal answered before its batch is durable": 99,
    "refusal speaks for an unanswered message": 14,
    "registration returns before tablets know": 8,
    "replaced lock does not have to be there": 3,
    "report of an earlier epoch confirms a drop": 3,
    "rollback passes the own commit": 5,
    "rollback sets no marker": 2,
    "rows that were not answered are taken for loaded": 27,
    "safe point checked before the read": 6,
    "scans of changes do not wait": 14,
    "schemas are as young as any epoch": 10,
    "second committer announces nothing": 4,
    "shards of the present number only": 1,
    "shared reads as of whoever leads": 148,
    "shown before it is durable": 210,
    "shown before it is in the log": 1,
    "stalled look answered without the store": 106,
    "table created without the observers that wait for it": 2,
    "table deleted before the locks are resolved": 3,
    "tablets are opened before all know that the load is complete": 271,
    "tablets are told of what was not chosen": 6,
    "tablets roll forward what has lost its lock": 32,
    "the epoch is not raised for indexes": 2,
    "the judge does not learn of loads": 15,
    "timestamp fetched before the cells are held": 65,
    "timestamp from before the last prewrite": 1,
    "timestamp is not set aside": 9,
    "transactions have no turn": 7,
    "transactions hold rows while their range is being closed": 2,
    "turns of dead clients do not end": 2,
    "two phases after a message without an answer": 71,
    "unfinished table uploaded": 12,
    "unique entries of jobs are locked after their owners are asked": 1,
    "unknown run taken for committed": 36,
    "values are collected before the safe point has seen their end": 22,
    "waiting does not count backfills": 5,
    "weak notification not written again": 90,
    "what gives up stays in its lines": 8,
    "what one snapshot may pass is passed by all": 12,
    "what was last seen is collected from a row": 6,
    "what was seen is left under a deletion in a row": 4,
    "what was seen is left under a deletion": 5,
    "write after a delete handled with it": 97,
    "write latch does not wait for held cells": 99,
    "writers pass committed read locks": 1,
    "writers pass read locks": 4,
}
