"""Meaning of a seed: a workload, a cluster, a network and a list of faults, all drawn in advance.

Everything is drawn here, and every process has its own random numbers, so that leaving out one
disruption, or some transactions, leaves the rest as it was: this allows a failing seed to be
minimised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from percolator.world import Random
from tests.simulation.network import PERFECT, NetworkFaults
from tests.simulation.workloads.catalogue import WORKLOADS
from tests.simulation.workloads.transactions import BURST_SECONDS, SESSIONS_PER_CLIENT

CLIENTS = 4
TRANSACTIONS = 200
_FEW_SESSIONS = 2
_MANY_SESSIONS = 25
_BURSTS_SHARE = 0.3
_BURST_SECONDS = 1.0
_TIMES_IN_A_CROWD = 4
"""A crowd runs this many times the transactions, at hardly a higher cost."""
_QUEUES_SHARE = 0.5
"""The share of the seeds that drew `counters` and run `queues`: both are about hot cells."""
_WITH_OBSERVERS = {"chains", "inverted", "newcomers", "recipes"}
_NEWCOMERS_SHARE = 0.4
"""The share of the seeds that drew `chains` and run `newcomers`: both are about observers."""
_INVERTED_SHARE = 0.4
"""The share of the others that run `inverted`."""
_ON_DUTY_SHARE = 0.4
"""The share of the seeds that drew `hubs` and run `on duty`: both are about read locks."""
_INDEXES_SHARE = 0.5
"""The share of the seeds that drew `successors` and run `indexes`: both change schemas."""
_EXPIRING_INDEXES_SHARE = 0.4
"""The share of the seeds that drew `indexes` and run `expiring indexes`."""
_RECREATIONS_SHARE = 0.5
"""The share of the seeds that drew `registers` and run `recreations`. As a part of `successors`
alone it runs so seldom that a drop was repeated after a time-out in none of 600 seeds."""
_INDEXED_JOBS_SHARE = 0.3
"""The share of the seeds that drew `jobs` and run `indexed jobs`."""
_INDEXED_TASKS_SHARE = 0.5
"""The share of the seeds that drew `indexed jobs` and run `indexed tasks`."""
_ONLY_ON_TABLETS = {"expiring", "expiring indexes", "feeds", "indexed jobs", "recreations"}
"""Workloads that use what a row store does not have yet."""
_ON_REAL_MASTERS = {
    "expiring indexes",
    "indexed jobs",
    "indexed tasks",
    "indexes",
    "recreations",
    "successors",
}
"""Workloads that change schemas in a way that the stand-in for the master does not."""
_WITHIN_RIGHTS = {
    "appends",
    "bank",
    "blind",
    "counters",
    "crowd",
    "hubs",
    "large",
    "long fork",
    "mixed",
    "on duty",
    "predicates",
    "queues",
    "registers",
    "sequential",
    "sets",
}
"""Workloads of which every step is for clients whose tokens have rights to some tables only."""
_RESTRICTED_SHARE = 0.3
_ROWS_SHARE = 0.5
"""The share of the other workloads' seeds that run on a row store: a third of all seeds."""
_ROWS_MASTER_SHARE = 0.4
"""The share of seeds on a row store in which everything is there: masters and oracles, too."""
_BUCKET_SHARE = 0.5
"""The share of the seeds with real masters over tablets in which those lead by a bucket."""
_TABLETS_IN_BUCKET_SHARE = 0.35
"""The share of the seeds with tablets whose logs are in a bucket."""
_ON_SCHEMAS = {
    "expiring indexes",
    "indexed tasks",
    "indexes",
    "newcomers",
    "recreations",
    "successors",
}
"""Workloads that change schemas while servers do not hear of it, and clients go on using them."""
_UNHEARD_SHARE = 0.5
_UNHEARD_SECONDS_MAX = 3.0
_CLIENTS_SHARE_WITH_OBSERVERS = 0.4
"""The clients' share of all transactions: the others are runs of observers."""
TROUBLE_SECONDS = 2.5
"""How long new disruptions begin; all of them end."""
_TABLET_SERVERS = 3
_DISRUPTIONS_MAX = 9
_MASTER_SHARE = 0.5
_HARSH_DISRUPTIONS = 20
PAGE_ROWS_MAX = 1_000
"""No tablet has so many rows."""
FEW_ROWS = 4


class Kind(Enum):
    """Kind of fault; the value is the name under which it is counted."""

    CRASH = "kill -9"
    CRASH_ORACLE = "kill -9 of the oracle"
    POWER = "power cut of the servers' machine"
    PAUSE = "process paused"
    ONE_WAY = "partition: one way"
    HALF = "partition: two halves"
    RING = "partition: ring"
    ISOLATE = "partition: one isolated"
    UNHEARD = "tablet server does not hear the masters"
    SLOW_LINKS = "slow links"
    CLOCK_BACK = "wall clock set back"
    CLOCK_FORWARD = "wall clock set forward"
    CLOCK_FAR = "wall clock hours to years off"
    FSYNC = "fsync made to fail"
    FULL = "disk filled"
    SLOW_DISK = "disk slow"
    STALL = "store stalls for one process"
    STALL_ALL = "store stalls for all processes"
    CLIENT_STEP = "client killed at a step"
    TAKEOVER = "tablet taken from a living owner"
    SPLIT = "tablet split"


@dataclass(frozen=True)
class Disruption:
    """One thing that goes wrong, and ends."""

    at_seconds: float
    kind: Kind
    target: int
    """The number of the process or tablet, modulo how many there are."""
    seconds: float
    amount: int
    """How much or how many, in the unit of the kind."""

    def __str__(self) -> str:
        return (
            f"{self.at_seconds:5.2f} s: {self.kind.value} "
            f"(target {self.target}, for {self.seconds:.2f} s, amount {self.amount})"
        )


@dataclass(frozen=True)
class Scenario:
    """One run. Equal scenarios take the same course."""

    seed: int
    workload: str
    disruptions: tuple[Disruption, ...]
    network: NetworkFaults
    clock_skews_milliseconds: tuple[int, ...]
    lock_ttl_seconds: float
    """The shorter it is, the more living owners are taken for dead."""
    fsync_seconds_max: float
    doubled_share: float = 0.04
    """The share of transactions that two committers commit concurrently."""
    one_round_share: float = 0.6
    """The share of transactions that try to commit in one round; the others take two phases."""
    joined_share: float = 0.3
    """The share of scans that are made with joined pages, too."""
    page_rows_max: int = PAGE_ROWS_MAX
    """The most rows in one page of a scan."""
    with_master: bool = False
    """True if real masters run instead of the stand-in: on tablets with splits and moves, on a row
    store with leaders that are rows, as the oracles' are then, too."""
    transactions: int = TRANSACTIONS
    sessions_per_client: int = _FEW_SESSIONS
    burst_seconds: float = 0.0
    """The interval at which all sessions of a client begin together, so that they share its calls
    and the servers' batches. 0: each begins at its own time, and most calls carry one row."""
    without_sessions: frozenset[int] = frozenset()
    """Sessions that do not work; each of the others still has the same share of the transactions
    as if they did."""
    tablet_servers: int = _TABLET_SERVERS
    on_rows: bool = False
    """True if a row store has the cells, in place of tablet servers."""
    restricted: bool = False
    """True if half of the clients have tokens with rights to some tables only."""
    roles_in_bucket: bool = False
    """True if masters and oracles lead by a bucket, in place of directories, and find there what
    former leaders have recorded."""
    tablets_in_bucket: bool = False
    """True if the tablets' logs are in a bucket, in place of directories."""
    bucket_badness: float = 0.0
    """The share of the calls to the bucket that each of its faults strikes."""

    @property
    def sessions(self) -> tuple[int, ...]:
        """The sessions that work."""
        count = CLIENTS * self.sessions_per_client
        return tuple(one for one in range(count) if one not in self.without_sessions)

    @property
    def transactions_per_session(self) -> int:
        return -(-self.transactions // (CLIENTS * self.sessions_per_client))

    def __str__(self) -> str:
        master = "the real master" if self.with_master else "a stand-in for the master"
        if self.roles_in_bucket:
            master += f" and roles in a bucket ({self.bucket_badness:.0%} of each fault)"
        cells = "a row store" if self.on_rows else "tablets"
        if self.tablets_in_bucket:
            cells += f" in a bucket ({self.bucket_badness:.0%} of each fault)"
        cells += ", half of the clients with restricted tokens" if self.restricted else ""
        lines = [
            f"seed {self.seed}: {self.workload}, {cells}, {master}, {len(self.sessions)} sessions "
            f"of {self.transactions_per_session} transactions"
            + (" in bursts" if self.burst_seconds else ""),
            f"  network: {self.network if self.network is not PERFECT else 'perfect'}",
            *(f"  {disruption}" for disruption in self.disruptions),
        ]
        return "\n".join(lines)


def scenario_of(
    seed: int,
    *,
    workload: str | None = None,
    transactions: int = TRANSACTIONS,
    with_master: bool | None = None,
    on_rows: bool | None = None,
) -> Scenario:
    """The scenario of a seed: the same for the same arguments, in every process.

    With `with_master` given, either way, it is on tablets unless `on_rows` is given, too.
    """
    is_drawn = with_master is None and on_rows is None
    chance = Random(f"scenario {seed}")
    drawn = chance.choice(sorted(WORKLOADS))
    if drawn == "chains" and Random(f"newcomers {seed}").random() < _NEWCOMERS_SHARE:
        drawn = "newcomers"
    elif drawn == "chains" and Random(f"inverted {seed}").random() < _INVERTED_SHARE:
        drawn = "inverted"
    if drawn == "hubs" and Random(f"on duty {seed}").random() < _ON_DUTY_SHARE:
        drawn = "on duty"
    if drawn == "counters" and Random(f"queues {seed}").random() < _QUEUES_SHARE:
        drawn = "queues"
    if drawn == "successors" and Random(f"indexes {seed}").random() < _INDEXES_SHARE:
        share = Random(f"expiring indexes {seed}").random()
        drawn = "expiring indexes" if share < _EXPIRING_INDEXES_SHARE else "indexes"
    if drawn == "registers" and Random(f"recreations {seed}").random() < _RECREATIONS_SHARE:
        drawn = "recreations"
    if drawn == "jobs" and Random(f"indexed jobs {seed}").random() < _INDEXED_JOBS_SHARE:
        share = Random(f"indexed tasks {seed}").random()
        drawn = "indexed tasks" if share < _INDEXED_TASKS_SHARE else "indexed jobs"
    master = chance.random() < _MASTER_SHARE
    disruptions = sorted(
        (_any_disruption(chance) for _ in range(chance.randint(0, _DISRUPTIONS_MAX))),
        key=lambda one: one.at_seconds,
    )
    found = Scenario(
        seed,
        workload or drawn,
        tuple(disruptions),
        _network(chance),
        tuple(chance.randint(-5_000, 5_000) for _ in range(16)),
        chance.choice((0.4, 1.0, 3.0)),
        chance.choice((0.003, 0.003, 0.03)),
        with_master=master if with_master is None else with_master,
        page_rows_max=Random(f"pages {seed}").choice((FEW_ROWS, PAGE_ROWS_MAX)),
        transactions=transactions,
    )
    rows = Random(f"rows {seed}")
    if on_rows is None and with_master is None and found.workload not in _ONLY_ON_TABLETS:
        on_rows = rows.random() < _ROWS_SHARE
    if on_rows:
        if with_master is None:
            with_master = rows.random() < _ROWS_MASTER_SHARE
        found = replace(found, on_rows=True, with_master=with_master)
    if needs_master(found):
        found = replace(found, with_master=True)
    if is_drawn and found.with_master and not found.on_rows:
        found = with_roles_in_bucket(found, _BUCKET_SHARE)
    if is_drawn and not found.on_rows:
        found = with_tablets_in_bucket(found, _TABLETS_IN_BUCKET_SHARE)
    if found.workload in _WITHIN_RIGHTS and not found.on_rows:
        share = Random(f"restricted {seed}").random()
        found = replace(found, restricted=share < _RESTRICTED_SHARE)
    if found.workload in _ON_SCHEMAS and not found.on_rows:
        found = _with_servers_unheard(found)
    if found.workload == "crowd":
        return replace(
            found,
            sessions_per_client=SESSIONS_PER_CLIENT,
            burst_seconds=BURST_SECONDS,
            transactions=transactions * _TIMES_IN_A_CROWD,
        )
    if found.workload in _WITH_OBSERVERS:
        found = replace(found, transactions=round(transactions * _CLIENTS_SHARE_WITH_OBSERVERS))
    if chance.random() < _BURSTS_SHARE:
        return in_bursts(found)
    return found


def with_roles_in_bucket(scenario: Scenario, share: float = 1.0) -> Scenario:
    """In this share of the seeds, this scenario with masters and oracles that lead by a bucket."""
    chance = Random(f"bucket {scenario.seed}")
    if chance.random() >= share:
        return scenario
    badness = chance.choice((0.0, 0.01, 0.03))
    return replace(scenario, roles_in_bucket=True, bucket_badness=badness)


def with_tablets_in_bucket(scenario: Scenario, share: float = 1.0) -> Scenario:
    """In this share of the seeds, this scenario with tablets in a bucket, that of roles if any."""
    chance = Random(f"tablets in a bucket {scenario.seed}")
    if chance.random() >= share:
        return scenario
    found = replace(scenario, tablets_in_bucket=True)
    if not found.roles_in_bucket:
        found = replace(found, bucket_badness=chance.choice((0.0, 0.003, 0.01, 0.03)))
    return found


def needs_master(scenario: Scenario) -> bool:
    """The stand-in does not drop tables and, on tablets, registers no observers."""
    return scenario.workload in _ON_REAL_MASTERS or (
        scenario.workload == "newcomers" and not scenario.on_rows
    )


def _with_servers_unheard(scenario: Scenario) -> Scenario:
    """In some seeds, a disruption that is not among the others, which all workloads draw from."""
    chance = Random(f"unheard {scenario.seed}")
    if chance.random() >= _UNHEARD_SHARE:
        return scenario
    drawn = _any_disruption(chance)
    unheard = replace(drawn, kind=Kind.UNHEARD, seconds=chance.random() * _UNHEARD_SECONDS_MAX)
    disruptions = sorted((*scenario.disruptions, unheard), key=lambda one: one.at_seconds)
    return replace(scenario, disruptions=tuple(disruptions))


def in_bursts(scenario: Scenario) -> Scenario:
    """This scenario with many sessions that begin together."""
    return replace(scenario, sessions_per_client=_MANY_SESSIONS, burst_seconds=_BURST_SECONDS)


def harsh(
    seed: int, kinds: Sequence[Kind], *, workload: str | None = None, seconds_max: float = 1.0
) -> Scenario:
    """A scenario with many disruptions of these kinds only."""
    chance = Random(f"harsh {seed}")
    disruptions = [
        replace(
            _any_disruption(chance),
            kind=chance.choice(kinds),
            seconds=chance.random() ** 2 * seconds_max,
        )
        for _ in range(_HARSH_DISRUPTIONS)
    ]
    disruptions.sort(key=lambda one: one.at_seconds)
    mild = scenario_of(seed, workload=workload, with_master=False)
    if mild.workload in _WITH_OBSERVERS:
        # Here the clients alone run the usual number, with two or three observer runs for each.
        mild = replace(mild, transactions=TRANSACTIONS)
    return replace(
        mild, disruptions=tuple(disruptions), lock_ttl_seconds=0.4, fsync_seconds_max=0.03
    )


_WEIGHTS = {
    Kind.CRASH: 5,
    Kind.CRASH_ORACLE: 1,
    Kind.POWER: 2,
    Kind.PAUSE: 5,
    Kind.ONE_WAY: 2,
    Kind.HALF: 1,
    Kind.RING: 1,
    Kind.ISOLATE: 3,
    Kind.SLOW_LINKS: 2,
    Kind.CLOCK_BACK: 1,
    Kind.CLOCK_FORWARD: 1,
    Kind.CLOCK_FAR: 2,
    Kind.FSYNC: 3,
    Kind.FULL: 1,
    Kind.SLOW_DISK: 2,
    Kind.STALL: 3,
    Kind.STALL_ALL: 1,
    Kind.CLIENT_STEP: 8,
    Kind.TAKEOVER: 5,
    Kind.SPLIT: 2,
}


def _any_disruption(chance: Random) -> Disruption:
    (kind,) = chance.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
    return Disruption(
        chance.random() * TROUBLE_SECONDS,
        kind,
        chance.getrandbits(16),
        chance.random() ** 3 * 6.0,
        chance.randint(1, 40),
    )


def _network(chance: Random) -> NetworkFaults:
    """A network: some seeds have a good one, some a bad one, and most something in between."""
    badness = chance.choice((0.0, 0.003, 0.01, 0.03))
    if not badness:
        return PERFECT
    return NetworkFaults(
        slow=badness * chance.random(),
        slow_seconds_max=chance.choice((0.1, 1.0, 5.0)),
        duplicate=badness * 2 * chance.random(),
        drop_request=badness * chance.random(),
        drop_reply=badness * chance.random(),
        break_connection=badness * chance.random(),
    )
