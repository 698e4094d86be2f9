"""Carries out the disruptions of a scenario, and undoes them.

A disruption that finds nothing to hit (a tablet server that is already down, a client that has
finished) is not counted.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from dataclasses import replace
from itertools import count
from typing import Any

from percolator.bigtable.messages import CHECK_AND_MUTATE_ROW, READ_ROWS
from percolator.v1 import cells_pb2
from percolator.v1.tabletserver_pb2 import Change, MutateRequest, Mutation, StepList
from percolator.wire import methods
from percolator.world import Random, World
from tests.simulation.cluster import Cluster, host_of
from tests.simulation.network import Envelope, Fault
from tests.simulation.process import SimulatedProcess
from tests.simulation.programs import ORACLE, STANDBY_ORACLE
from tests.simulation.rows import row_step
from tests.simulation.scenario import Disruption, Kind

FAR_AHEAD, FAR_BEHIND = "wall clock far ahead", "wall clock far behind"
CLIENT_STEPS = (
    "read",
    "timestamp",
    "prewrite",
    "commit of the primary",
    "commit of others",
    "commit in one round",
    "mutation answered",
)
_SLOW_SECONDS_PER_AMOUNT = 0.02
_JUMP_MILLISECONDS_PER_AMOUNT = 2_000
_DAY_MILLISECONDS = 86_400_000
_FAR_MILLISECONDS = (
    2 * 3_600_000,
    _DAY_MILLISECONDS,
    40 * _DAY_MILLISECONDS,
    300 * _DAY_MILLISECONDS,
    5 * 365 * _DAY_MILLISECONDS,
)
_FSYNCS_FAILING = 2
_FSYNC_SECONDS_PER_AMOUNT = 0.02
_CLIENT_DOWN_SECONDS = 0.5
_STALLED_TIMES = 4.0
"""How much longer a stall is than others: up to tens of seconds, as with a network mount."""


def far_off(address: str) -> str:
    """The name under which it is counted that the clock of a process was set hours to years off."""
    role = host_of(address).partition("-")[0]
    return f"wall clock far off: {role}"


class Disruptions:
    """Carries out all disruptions of a scenario on its cluster."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        # The name of the stream of random numbers: another one would change every seed.
        self._chance = Random(f"strikes {cluster.scenario.seed}")
        self._armed: list[Ambush] = []
        self._visits: list[asyncio.Task[None]] = []
        self._bad_clock: SimulatedProcess | None = None
        """The only machine whose clock is sometimes far off: most clocks are always right."""
        self._do: dict[Kind, Callable[[Disruption], Callable[[], None] | None]] = {
            Kind.CRASH: self._crash,
            Kind.CRASH_ORACLE: self._crash,
            Kind.POWER: self._cut_power,
            Kind.PAUSE: self._pause,
            Kind.ONE_WAY: self._cut_one_way,
            Kind.HALF: self._cut_in_half,
            Kind.RING: self._cut_to_ring,
            Kind.ISOLATE: self._isolate,
            Kind.UNHEARD: self._cut_off_from_masters,
            Kind.SLOW_LINKS: self._slow_links,
            Kind.CLOCK_BACK: self._set_clock_back,
            Kind.CLOCK_FORWARD: self._set_clock_forward,
            Kind.CLOCK_FAR: self._set_clock_far_off,
            Kind.FSYNC: self._fail_fsync,
            Kind.FULL: self._fill_disk,
            Kind.SLOW_DISK: self._slow_disk,
            Kind.STALL: self._stall,
            Kind.STALL_ALL: self._stall_all,
            Kind.CLIENT_STEP: self._ambush,
            Kind.TAKEOVER: self._take_over,
            Kind.SPLIT: self._split,
        }

    async def run(self) -> None:
        """Returns when the last disruption has ended."""
        begin = self._cluster.loop.time()
        disruptions = self._cluster.scenario.disruptions
        await asyncio.gather(*(self._carry_out(disruption, begin) for disruption in disruptions))
        self._armed.clear()
        await asyncio.gather(*self._visits)

    async def _carry_out(self, disruption: Disruption, begin: float) -> None:
        await asyncio.sleep(max(begin + disruption.at_seconds - self._cluster.loop.time(), 0.0))
        undo = self._do[disruption.kind](disruption)
        stalls = disruption.kind in (Kind.STALL, Kind.STALL_ALL)
        await asyncio.sleep(disruption.seconds * (_STALLED_TIMES if stalls else 1.0))
        if undo is not None:
            undo()

    def _count(self, kind: Kind) -> None:
        self._cluster.occurred[kind.value] += 1

    # ------------------------------------------------------------------ processes

    def _crash(self, disruption: Disruption) -> None:
        process = self._process(disruption)
        if process.alive:
            self._count(disruption.kind)
            self._kill(process, disruption.seconds, machine=disruption.amount % 3 == 0)

    def _cut_power(self, disruption: Disruption) -> None:
        self._count(disruption.kind)
        cluster = self._cluster
        for address in cluster.servers:
            self._kill(cluster.processes[address], disruption.seconds, machine=True)
        cluster.root.disk.cut_power(self._chance)

    def _pause(self, disruption: Disruption) -> Callable[[], None] | None:
        process = self._process(disruption)
        if not process.alive or process.paused:
            return None
        self._count(disruption.kind)
        process.pause()
        return process.resume

    def _kill(self, process: SimulatedProcess, seconds: float, *, machine: bool) -> None:
        self._cluster.down_until[process.address] = self._cluster.loop.time() + seconds
        process.crash(machine=machine)
        if machine and self._cluster.tablets is not None:
            self._cluster.tablets.lose_power(process.address)

    def _process(self, disruption: Disruption) -> SimulatedProcess:
        """Chooses tablet servers three times as often as others, since they hold the data."""
        cluster = self._cluster
        if disruption.kind is Kind.CRASH_ORACLE:
            oracles = [one for one in (ORACLE, STANDBY_ORACLE) if one in cluster.processes]
            return cluster.processes[oracles[disruption.target % len(oracles)]]
        candidates = [*cluster.processes, *cluster.tablet_servers, *cluster.tablet_servers]
        return cluster.processes[candidates[disruption.target % len(candidates)]]

    # ------------------------------------------------------------------ links

    def _cut_one_way(self, disruption: Disruption) -> Callable[[], None]:
        source, target = self._two(disruption)
        self._cluster.wire.links.cut(source, target)
        return self._healing(disruption)

    def _cut_in_half(self, disruption: Disruption) -> Callable[[], None]:
        self._cluster.wire.links.split_at_random(list(self._cluster.processes), self._chance)
        return self._healing(disruption)

    def _cut_to_ring(self, disruption: Disruption) -> Callable[[], None]:
        names = list(self._cluster.processes)
        self._chance.shuffle(names)
        self._cluster.wire.links.ring(names)
        return self._healing(disruption)

    def _isolate(self, disruption: Disruption) -> Callable[[], None]:
        self._cluster.wire.links.isolate(self._process(disruption).address, self._cluster.processes)
        return self._healing(disruption)

    def _cut_off_from_masters(self, disruption: Disruption) -> Callable[[], None] | None:
        """A tablet server no longer hears the masters, and clients go on using it."""
        cluster = self._cluster
        if cluster.row_store is not None:
            return None
        self._count(disruption.kind)
        server = cluster.tablet_servers[disruption.target % len(cluster.tablet_servers)]
        links = cluster.wire.links
        for master in cluster.masters:
            links.cut(master, server)

        def mend() -> None:
            for master in cluster.masters:
                links.mend(master, server)

        return mend

    def _slow_links(self, disruption: Disruption) -> Callable[[], None]:
        slow = self._process(disruption).address
        extra = disruption.amount * _SLOW_SECONDS_PER_AMOUNT
        for other in self._cluster.processes:
            self._cluster.wire.links.slow(other, slow, extra)
        return self._healing(disruption)

    def _two(self, disruption: Disruption) -> tuple[str, str]:
        names = list(self._cluster.processes)
        first = disruption.target % len(names)
        return names[first], names[(first + 1 + disruption.amount % (len(names) - 1)) % len(names)]

    def _healing(self, disruption: Disruption) -> Callable[[], None]:
        self._count(disruption.kind)
        return self._cluster.wire.links.heal

    # ------------------------------------------------------------------ clocks

    def _set_clock_back(self, disruption: Disruption) -> None:
        self._count(disruption.kind)
        process = self._clock_of(disruption)
        process.clock.set_wall_back(disruption.amount * _JUMP_MILLISECONDS_PER_AMOUNT)

    def _set_clock_forward(self, disruption: Disruption) -> None:
        self._count(disruption.kind)
        process = self._clock_of(disruption)
        process.clock.set_wall_back(-disruption.amount * _JUMP_MILLISECONDS_PER_AMOUNT)

    def _set_clock_far_off(self, disruption: Disruption) -> Callable[[], None]:
        """Sets a clock far off, and right again later. An oracle on that machine has to start with
        the wrong clock. A master beside it may be the only one at first, as after a power cut."""
        self._count(disruption.kind)
        process = self._bad_clock = self._bad_clock or self._far_clock_of(disruption)
        ahead = _FAR_MILLISECONDS[disruption.amount % len(_FAR_MILLISECONDS)]
        if disruption.target & 8:
            ahead = -ahead
        self._cluster.occurred[FAR_AHEAD if ahead > 0 else FAR_BEHIND] += 1
        self._cluster.occurred[far_off(process.address)] += 1
        process.clock.set_wall_back(-ahead)
        oracles = [one for one in (ORACLE, STANDBY_ORACLE) if one in self._cluster.processes]
        if process.address in oracles:
            for address in (*oracles, *self._cluster.masters):
                is_on_that_machine = host_of(address) == host_of(process.address)
                seconds = 0.0 if is_on_that_machine else disruption.seconds
                self._kill(self._cluster.processes[address], seconds, machine=False)
        return lambda: process.clock.set_wall_back(ahead)

    def _far_clock_of(self, disruption: Disruption) -> SimulatedProcess:
        """Chooses oracles most often, then masters and tablet servers, and sometimes any other."""
        cluster, chosen = self._cluster, disruption.target // 16
        oracles = [one for one in (ORACLE, STANDBY_ORACLE) if one in cluster.processes]
        of_eight = [oracles] * 3 + [cluster.masters, cluster.tablet_servers] * 2
        addresses = [*of_eight, list(cluster.processes)][disruption.target % 8]
        return cluster.processes[addresses[chosen % len(addresses)]]

    def _clock_of(self, disruption: Disruption) -> SimulatedProcess:
        """Chooses the oracle's clock half of the time: no other clock should matter."""
        oracle = self._cluster.processes[ORACLE]
        return oracle if disruption.target % 2 else self._process(disruption)

    # ------------------------------------------------------------------ disks

    def _fail_fsync(self, disruption: Disruption) -> Callable[[], None] | None:
        files = self._cluster.root.open_files.get(self._disk_user(disruption))
        if files is None:
            return None
        self._count(disruption.kind)
        files.faults.fail("fsync", nth=1 + disruption.amount % 5, times=_FSYNCS_FAILING)
        files.faults.fail("append", nth=1 + disruption.amount % 7, number=errno.EIO)
        return files.faults.heal

    def _fill_disk(self, disruption: Disruption) -> Callable[[], None] | None:
        files = self._cluster.root.open_files.get(self._disk_user(disruption))
        if files is None:
            return None
        self._count(disruption.kind)
        files.is_full = True

        def empty() -> None:
            files.is_full = False
            files.faults.heal()

        return empty

    def _slow_disk(self, disruption: Disruption) -> Callable[[], None] | None:
        files = self._cluster.root.open_files.get(self._disk_user(disruption))
        if files is None:
            return None
        self._count(disruption.kind)
        usual = self._cluster.scenario.fsync_seconds_max
        files.fsync_seconds_max = disruption.amount * _FSYNC_SECONDS_PER_AMOUNT

        def quicken() -> None:
            files.fsync_seconds_max = usual

        return quicken

    def _stall(self, disruption: Disruption) -> Callable[[], None] | None:
        files = self._cluster.root.open_files.get(self._process(disruption).address)
        if files is None:
            return None
        self._count(disruption.kind)
        files.answers.clear()
        return files.answers.set

    def _stall_all(self, disruption: Disruption) -> Callable[[], None]:
        self._count(disruption.kind)
        self._cluster.root.answers.clear()
        return self._cluster.root.answers.set

    def _disk_user(self, disruption: Disruption) -> str:
        users = [*self._cluster.tablet_servers, ORACLE]
        return users[disruption.target % len(users)]

    # ------------------------------------------------------------------ tablets

    def _take_over(self, disruption: Disruption) -> None:
        cluster = self._cluster
        if cluster.scenario.on_rows:
            return
        self._count(disruption.kind)
        if cluster.scenario.with_master:
            self._visit(cluster.operator.move)
        else:
            cluster.placements.moves.append(disruption.target % len(cluster.placements.tablets))

    def _split(self, disruption: Disruption) -> None:
        if self._cluster.scenario.with_master and not self._cluster.scenario.on_rows:
            self._count(disruption.kind)
            self._visit(self._cluster.operator.split)

    def _visit(self, work: Callable[[World], Coroutine[Any, Any, None]]) -> None:
        self._visits.append(
            asyncio.create_task(self._cluster.visit(f"operator-{len(self._visits)}:1", work))
        )

    # ------------------------------------------------------------------ clients

    def _ambush(self, disruption: Disruption) -> None:
        """Waits until the disruptions end: a short wait would miss rare steps."""
        clients = [*self._cluster.clients, *self._cluster.workers]
        address = clients[disruption.target % len(clients)]
        if address not in self._cluster.processes:
            return
        aim = aim_of(disruption.target)
        if aim is None:
            ambush = Ambush(address, disruption.amount, is_reply=disruption.target % 3 == 0)
        else:
            countdown = 1 + disruption.amount % AIMED_AFTER_MAX
            is_reply = aim.endswith("answered")
            ambush = Ambush(address, countdown, is_reply=is_reply, aim=aim)
        self._armed.append(ambush)
        self._cluster.wire.watcher = self._watch

    def _watch(self, envelope: Envelope) -> Fault | None:
        if not self._armed:
            self._cluster.wire.watcher = None
            return None
        for ambush in self._armed:
            step = ambush.step(envelope)
            if step is None:
                continue
            self._armed.remove(ambush)
            self._count(Kind.CLIENT_STEP)
            self._cluster.occurred[f"client killed at: {step}"] += 1
            # Outside all processes, as soon as this step of the loop is over.
            loop, process = self._cluster.loop, self._cluster.processes[ambush.client]
            loop.deliver_at(loop.time(), self._kill_client, (process,))
            return Fault.REQUEST_DROPPED if self._chance.random() < 0.3 else None
        return None

    def _kill_client(self, process: SimulatedProcess) -> None:
        self._kill(process, _CLIENT_DOWN_SECONDS, machine=False)


# Killing a client at a step of the protocol: which message is sent at which step.

AIMED_AFTER_MAX = 4
AIMS = (None, "read", *CLIENT_STEPS, "commit of the primary", "commit of others")
"""Steps that an ambush may wait for. None is any message: that is rarely one of the few that
matter."""
_TARGETS_PER_AIM = 3


class Ambush:
    """Waits for a message of a client's commit, and then for a given number of further ones."""

    def __init__(
        self, client: str, countdown: int, *, is_reply: bool, aim: str | None = None
    ) -> None:
        """With `aim`, only messages of that step count."""
        self.client = client
        self._countdown = countdown
        self._is_reply = is_reply
        self._aim = aim

    def step(self, envelope: Envelope) -> str | None:
        """The step at which it fires, or None."""
        if envelope.is_reply is not self._is_reply:
            return None
        if (envelope.target if envelope.is_reply else envelope.source) != self.client:
            return None
        name = _STEPS.get(envelope.path)
        if name is None:
            return None
        if self._aim is not None and _step_of(envelope, name) != self._aim:
            return None
        self._countdown -= 1
        return None if self._countdown > 0 else _step_of(envelope, name)


def aim_of(target: int) -> str | None:
    """Step that an ambush waits for, by the number of its target."""
    return AIMS[target // _TARGETS_PER_AIM % len(AIMS)]


def aimed(disruption: Disruption, aim: str) -> Disruption:
    """A disruption like this one that kills a client at this step."""
    return replace(disruption, target=next(n for n in count(disruption.target) if aim_of(n) == aim))


def _step_of(envelope: Envelope, name: str) -> str:
    if envelope.is_reply:
        return f"{name} answered"
    if envelope.path == CHECK_AND_MUTATE_ROW.path:
        return row_step(envelope.payload)
    return _mutation_step(envelope.payload) if name == "mutation" else name


_STEPS = {
    methods.MUTATE.path: "mutation",
    methods.COMMIT_TRANSACTIONS.path: "commit in one round",
    methods.MUTATE_TOGETHER.path: "commit of all parts",
    methods.ROLL_FORWARD.path: "order to roll forward",
    methods.GET_TIMESTAMPS.path: "timestamp",
    methods.READ.path: "read",
    CHECK_AND_MUTATE_ROW.path: "mutation",
    READ_ROWS.path: "read",
}


_IN_ORDER = (
    "status",
    "heartbeat or push",
    "prewrite",
    "rollback",
    "commit of the primary",
    "commit of others",
    "notification deleted",
)
"""Every step of a mutation."""

_LISTED: dict[int, str] = {
    StepList.KIND_PREWRITE: "prewrite",
    StepList.KIND_COMMIT_PRIMARY: "commit of the primary",
    StepList.KIND_COMMIT_SECONDARY: "commit of others",
}
"""Steps that travel in lists."""


def _mutation_step(payload: bytes) -> str:
    """The furthest step of the protocol among the mutations of a request."""
    batches = MutateRequest.FromString(payload).batches
    steps = [_step(mutation) for batch in batches for mutation in batch.mutations]
    steps += [_LISTED[kind] for batch in batches for kind in batch.steps.kinds]
    return max(steps, default="mutation", key=_IN_ORDER.index)


def _step(mutation: Mutation) -> str:
    for change in mutation.changes:
        match change.space:
            case cells_pb2.SPACE_WRITE:
                # Only the commit point checks whether it was rolled back; other commits follow it.
                asks = any(one.space == cells_pb2.SPACE_ROLLBACK for one in mutation.conditions)
                return "commit of the primary" if asks else "commit of others"
            case cells_pb2.SPACE_ROLLBACK:
                return "rollback"
            case cells_pb2.SPACE_NOTIFY if change.kind == Change.KIND_DELETE:
                return "notification deleted"
            case cells_pb2.SPACE_LOCK if change.kind == Change.KIND_PUT:
                return "prewrite" if mutation.not_below else "heartbeat or push"
            case _:
                continue
    return "status"
