"""Owners of one log in a hostile bucket: they claim it, serve, stop for a while, and die.

Each is a process of its own: it may be paused and killed at any step, while what it has sent is
still on its way to the store. All write batches with unique names. A world records what they are
told, and judges it:

- What was acknowledged is in the log: once, in the order of the calls. What was refused never is.
- A read that was confirmed had found all that was acknowledged before it began.
- An opened tablet has all that was acknowledged before, and there is no hole.
"""

from __future__ import annotations

import asyncio
import json
import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from contextvars import Context
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from percolator.bucket.bucket import Bucket
from percolator.bucket.log import Base, Entry, Kind, LogMoved, Segment, TabletLog
from percolator.bucket.port import Doubtful, Head, Stored
from percolator.bucket.settings import Settings
from percolator.errors import PercolatorError, StoreFault, StoreUnusable
from percolator.services.chassis.epoch_directory import SharedLook
from percolator.tasks import Tasks
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, Page
from tests.simulation.loop import Life, SimulationLoop, run_simulation
from tests.simulation.process import SimulatedClock

T = TypeVar("T")

FOLDER = "tablets/7"
_TROUBLE_SECONDS = 12.0
_LATE_SECONDS = 6.0
_SLOW_SECONDS = 5.0
"""The longest time of a slow answer."""
_CUT_OFF_SECONDS = 8.0
_PAUSED_SHARE = 0.02
"""Requests with which their process stops: before it sends them, or while they are on their way."""
_CLOCK_RATES = (0.96, 1.04)
_CHILD = b"written to a half of the tablet"


@dataclass(frozen=True)
class Course:
    """Circumstances of a seed."""

    strengths: tuple[float, ...] = (0.5, 1.0)
    """Strengths of the store's faults."""
    slow_share: float = 0.0
    """Answers that take seconds, although the store is well: those of half the processes."""
    cut_share: float = 0.0
    """Claims during which other processes do not reach the store."""
    lease_seconds: tuple[float, ...] = (0.0,)
    pause_seconds_max: tuple[float, ...] = (0.25, 0.25, 2.0)
    """From one batch to the next: an owner that writes soon learns that it was deposed."""
    calm_seconds_max: float = 4.0
    """From one pause of a process to the next."""


BUSY = Course()
SLOW = Course((0.0, 0.5), slow_share=0.4)
LEASED = Course((0.0, 0.5), 0.0, 1.0, (0.0, 5.0), (0.25, 2.0))
LEASED_AND_SLOW = Course((0.0,), 0.4, 1.0, (1.0,), (0.25, 2.0))
LEASED_BY_ALL = Course((0.0,), 0.0, 1.0, (5.0,), (0.25,), 20.0)
COURSES = (BUSY, SLOW, LEASED, LEASED_AND_SLOW, LEASED_BY_ALL)
"""A bug shows in one or two of them."""


class World:
    """One seed: a store, the processes, and what they were told."""

    def __init__(self, loop: SimulationLoop, seed: int, course: Course) -> None:
        self.loop = loop
        self.random = rng = random.Random(seed)
        self.course = course
        strength = rng.choice(course.strengths)

        def share() -> float:
            return strength * rng.choice((0.0, 0.02, 0.06, 0.12))

        self.store = BucketInMemory(
            SimulatedClock(loop),
            random.Random(seed + 1),
            Tasks(),
            BucketFaults(
                lost_request=share(),
                lost_answer=share(),
                late_request=share(),
                late_answer=share(),
                failed_before=share(),
                failed_after_success=share(),
                late_seconds=_LATE_SECONDS,
                call_seconds=0.03,
                list_delay_seconds=rng.choice((0.0, 1.0, 20.0)),
            ),
        )
        self.cut_until = dict[Life, float]()
        """Until when processes do not reach the store."""
        self.events: Counter[str] = Counter()
        self.problems: list[str] = []
        self.is_over = False
        self.checkpoints: dict[str, list[bytes]] = {"": []}
        self.served_epochs: set[int] = set()
        self._called: dict[bytes, float] = {}
        self.acknowledged: dict[bytes, float] = {}
        """When each batch was acknowledged, in this order."""
        self._refused: set[bytes] = set()

    # ------------------------------------------------------------------ what owners are told

    def call(self, batch: bytes) -> None:
        self._called[batch] = self.loop.now

    def acknowledge(self, batch: bytes) -> None:
        self.acknowledged[batch] = self.loop.now

    def refuse(self, batch: bytes) -> None:
        self._refused.add(batch)

    def read(self, what: str, found: dict[bytes, int], count: int, before: int) -> None:
        """`count` batches were found by a reading, before which `before` were acknowledged."""
        for batch in list(self.acknowledged)[:before]:
            if found.get(batch, inf) >= count:
                self.problems.append(f"{what} lacks {batch.decode()} at {self.loop.now:.3f}")
                return

    def unusable(self, what: str, error: StoreUnusable) -> None:
        if error.fault is StoreFault.DAMAGED:
            self.problems.append(f"{what}: {error.message}")

    def judge(self, content: list[bytes]) -> None:
        """Judges everything by what is in the log in the end."""
        if len(set(content)) < len(content):
            self.problems.append("a batch is in the log twice")
        for batch in self.acknowledged:
            if batch != _CHILD and batch not in content:
                self.problems.append(f"{batch.decode()} was acknowledged, and is lost")
        for batch in self._refused:
            if batch in content:
                self.problems.append(f"{batch.decode()} was refused, and is in the log")
        latest = -inf
        for batch in content:
            if self.acknowledged.get(batch, inf) < latest:
                self.problems.append(f"{batch.decode()} comes after one that was called later")
            latest = max(latest, self._called[batch])

    # ------------------------------------------------------------------ processes

    def log(self, clock: SimulatedClock, epoch: int, life: Life | None = None) -> CountedLog:
        rng = random.Random(self.random.random())
        way = Way(self, life)
        attempt_seconds = _SLOW_SECONDS if self.course.slow_share else 0.8
        bucket = Bucket(
            way,
            clock,
            rng,
            attempt_seconds=attempt_seconds,
            # An owner that has given up an entry has no lease any more.
            seconds=_CUT_OFF_SECONDS if self.course.cut_share else 2.0 * attempt_seconds,
        )
        return CountedLog(
            self,
            life,
            bucket,
            rng,
            epoch,
            interval_seconds=self.random.choice((0.0, 0.0, 0.1)),
            lease_seconds=self.random.choice(self.course.lease_seconds),
        )

    async def run(self) -> None:
        rng = self.random
        processes: list[Process] = []
        helpers: list[asyncio.Task[None]] = []
        at = 0.0
        for number in range(rng.randint(3, 5)):
            epoch = 1 + number - (rng.random() < 0.1 and number > 0)
            processes.append(Owner(self, f"{number}", epoch))
            helpers.append(asyncio.create_task(self._life(processes[-1], at)))
            at = max(0.0, at + rng.choice((rng.uniform(-1.0, 1.0), rng.uniform(1.0, 5.0))))
        if rng.random() < 0.3:
            at = rng.uniform(3.0, _TROUBLE_SECONDS)
            processes.append(Sealer(self, "sealer", int(1 + at / 2.5)))
            helpers.append(asyncio.create_task(self._life(processes[-1], at)))
        await self.loop.sleep(_TROUBLE_SECONDS)
        self.store.faults = BucketFaults(call_seconds=0.03)
        self.is_over = True
        await asyncio.wait(helpers)
        await self.loop.sleep(_LATE_SECONDS + 2.0 * _SLOW_SECONDS + _CUT_OFF_SECONDS)
        for process in processes:
            process.life.end()
            await process.life.ended()
        try:
            self.judge(await self._content())
        except StoreUnusable as error:
            self.unusable("the last reading", error)

    async def _life(self, process: Process, at: float) -> None:
        """Starts a process, stops it for a while, a few times, and may kill it."""
        rng = self.random
        await self.loop.sleep(at)
        process.start()
        while not self.is_over:
            await self.loop.sleep(rng.uniform(0.0, self.course.calm_seconds_max))
            if rng.random() < 0.08:
                self.events["killed"] += 1
                process.life.end()
                return
            self.pause(process.life)

    def pause(self, life: Life) -> None:
        """Stops a process for a while."""
        if life.alive and not life.paused and not self.is_over:
            self.events["paused"] += 1
            life.pause()
            seconds = self.random.choice((0.2, 1.0, 2.0, 4.0)) * self.random.random()
            self.loop.deliver_at(self.loop.now + seconds, life.resume, ())

    def cut_others_off(self, life: Life) -> None:
        """Other processes may not notice what this one is about to do."""
        if not self.is_over and self.random.random() < self.course.cut_share:
            self.events["cut off"] += 1
            until = self.loop.now + self.random.uniform(0.0, _CUT_OFF_SECONDS)
            for other, before in self.cut_until.items():
                self.cut_until[other] = max(before, until) if other is not life else 0.0

    async def _content(self) -> list[bytes]:
        """All batches of the log, as a last owner finds them."""
        log = self.log(SimulatedClock(self.loop), 1_000)
        try:
            await log.take_over(served_epoch=max(self.served_epochs, default=0))
            return await self.content(log, log.base, log.number)
        except LogMoved:
            sealed = await log.seal()
            return await self.content(log, sealed.base, sealed.number)

    async def content(self, log: TabletLog, base: Base, through: int) -> list[bytes]:
        """All batches up to a number."""
        found = list(self.checkpoints[base.checkpoint])
        async with aclosing(log.entries(Segment(FOLDER, base.number, through))) as entries:
            found.extend([entry.body async for entry in entries if entry.body])
        return found

    def floor(self) -> int:
        floor = self.store.objects.get(f"{FOLDER}/floor")
        return int(json.loads(floor)["floor"]) if floor else 0


class CountedLog(TabletLog):
    """A log that counts what a seed is there for."""

    def __init__(
        self,
        world: World,
        life: Life | None,
        bucket: Bucket,
        rng: random.Random,
        epoch: int,
        **settings: float,
    ) -> None:
        super().__init__(bucket, rng, FOLDER, epoch, **settings)
        self._world = world
        self._life = life

    async def _create(self, entry: Entry) -> Entry | None:
        rng = self._world.random
        if entry.kind is not Kind.BATCH and self._life is not None and rng.random() < 1 / 3:
            # The most dangerous instant for a pause: it knows where the log ends.
            self._world.pause(self._life)
            await asyncio.sleep(0)
        if entry.kind is not Kind.BATCH and self._life is not None:
            self._world.cut_others_off(self._life)
        found = await super()._create(entry)
        if found is not None and entry.kind is not Kind.BATCH:
            self._world.events["a rival was faster"] += 1
        if found is None and entry.kind is not Kind.BATCH and entry.number <= self._world.floor():
            self._world.events["claim of a deleted number"] += 1
        return found


class Way:
    """The way of a process to the store: what is sent arrives although the process is paused."""

    def __init__(self, world: World, life: Life | None) -> None:
        self._world = world
        self._life = life
        self._store = world.store
        self._slow_share = world.random.choice((0.0, world.course.slow_share))
        if life is not None:
            world.cut_until[life] = 0.0
        self.name = world.store.name

    async def create(self, key: str, data: bytes) -> str:
        return await self._sent(lambda: self._store.create(key, data))

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        return await self._sent(lambda: self._store.replace(key, data, tag))

    async def read(self, key: str) -> Stored | None:
        return await self._sent(lambda: self._store.read(key))

    async def head(self, key: str) -> Head | None:
        return await self._sent(lambda: self._store.head(key))

    async def list(self, folder: str, after: str, limit: int) -> Page:
        return await self._sent(lambda: self._store.list(folder, after, limit))

    async def delete(self, key: str) -> None:
        await self._sent(lambda: self._store.delete(key))

    async def settings(self) -> Settings:
        return await self._sent(self._store.settings)

    async def _sent(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        loop = self._world.loop
        answer: asyncio.Future[T] = loop.create_future()
        if self._life is not None and not self._life.alive:
            return await answer
        rng = self._world.random
        if self._life is not None and rng.random() < _PAUSED_SHARE:
            self._world.pause(self._life)
            if rng.random() < 1 / 2:
                await asyncio.sleep(0)  # it is sent after the pause

        def arrive(task: asyncio.Task[T]) -> None:
            error = None if task.cancelled() else task.exception()
            if answer.done() or task.cancelled():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(task.result())

        async def go() -> T:
            if self._life is not None and self._world.cut_until[self._life] > loop.now:
                await loop.sleep(self._world.cut_until[self._life] - loop.now)
                raise Doubtful("it is not reached")
            result = await request()
            if rng.random() < self._slow_share:
                await loop.sleep(rng.random() * _SLOW_SECONDS)
            return result

        # Outside of any process.
        loop.create_task(go(), context=Context()).add_done_callback(arrive)
        return await answer


class RatedClock(SimulatedClock):
    """A machine's clock, which is a little too fast or too slow."""

    def __init__(self, loop: SimulationLoop, rate: float) -> None:
        super().__init__(loop)
        self._rate = rate

    def monotonic_seconds(self) -> float:
        return 1_000.0 + super().monotonic_seconds() * self._rate

    async def sleep(self, seconds: float) -> None:
        await super().sleep(seconds / self._rate)


class Process(ABC):
    """A process that uses the log."""

    def __init__(self, world: World, name: str, epoch: int) -> None:
        self.world = world
        self.name = name
        self.life = Life(world.loop, name)
        self.log = world.log(
            RatedClock(world.loop, world.random.choice(_CLOCK_RATES)), epoch, self.life
        )

    def start(self) -> None:
        self.life.spawn(self.main())

    @abstractmethod
    async def main(self) -> None: ...

    def split(self) -> None:
        """The log is sealed: from now on, others write."""
        if self.life.alive and _CHILD not in self.world.acknowledged:
            self.world.acknowledge(_CHILD)

    async def pass_time(self, seconds_max: float) -> None:
        await self.world.loop.sleep(seconds_max * self.world.random.random())


class Sealer(Process):
    """Ends the log, as for a split: from then on, others write to the halves of the tablet."""

    async def main(self) -> None:
        world, log = self.world, self.log
        while True:
            try:
                sealed = await log.seal()
                found = await world.content(log, sealed.base, sealed.number)
            except LogMoved:
                world.events["no seal: a later owner"] += 1
                return
            except StoreUnusable as error:
                if "has no entries" not in error.message:
                    world.unusable("seal", error)
                return
            except PercolatorError:
                continue
            world.events["sealed"] += 1
            positions = {batch: place for place, batch in enumerate(found)}
            if _CHILD not in world.acknowledged:
                world.read("seal", positions, len(found), len(world.acknowledged))
            self.split()
            return


class Owner(Process):
    """Claims the log, opens the tablet, writes, reads, publishes bases, trims, perhaps seals."""

    def __init__(self, world: World, name: str, epoch: int) -> None:
        super().__init__(world, name, epoch)
        self.look = SharedLook(self._is_held)
        self._found: dict[bytes, int] | None = None
        """The batches of the tablet while it is open, each with its place."""
        self._tasks: list[asyncio.Task[None]] = []
        """Its readers, and what makes its checkpoints, so that they are not collected."""
        self._written = 0
        self._checkpoints = 0
        self._is_sealing = world.random.random() < 0.25
        self._pause_seconds_max = world.random.choice(world.course.pause_seconds_max)

    async def _is_held(self) -> bool:
        return await self.log.is_held()

    async def main(self) -> None:
        world, log = self.world, self.log
        served_epoch = max((one for one in world.served_epochs if one < log.epoch), default=0)
        for attempt in range(5):
            try:
                before = len(world.acknowledged)
                await log.take_over(served_epoch=served_epoch)
                world.events["takeover" if not attempt else "taken over again"] += 1
                content = await world.content(log, log.base, log.number)
            except LogMoved:
                world.events["claim refused" if not log.number else "deposed when opening"] += 1
                return
            except StoreUnusable as error:
                world.unusable(f"opening by {self.name}", error)
                return
            except PercolatorError:
                continue
            if world.is_over:
                return
            found = {batch: place for place, batch in enumerate(content)}
            world.read(f"opening by {self.name}", found, len(found), before)
            self._found = found
            if not attempt:
                work = (*(self._read() for _ in range(3)), *(self._keep() for _ in range(2)))
                self._tasks = [asyncio.create_task(one) for one in work]
            await self._write()
            self._found = None
            if log.is_lost or world.is_over:
                return

    async def _write(self) -> None:
        world, log = self.world, self.log
        base: Base | None = None
        while not world.is_over and self._found is not None:
            await self.pass_time(self._pause_seconds_max)
            if world.random.random() < 0.4:
                base = await self._checkpoint()
            self._written += 1
            batch = f"{self.name}.{self._written}".encode()
            world.call(batch)
            try:
                await log.append(batch, base)
            except LogMoved:
                world.events["append refused"] += 1
                world.refuse(batch)
                return
            except StoreUnusable as error:
                world.unusable(f"append by {self.name}", error)
                world.refuse(batch)
                return
            except PercolatorError:
                world.events["append unknown"] += 1
                return
            if not self.life.alive:
                return
            world.acknowledge(batch)
            world.served_epochs.add(log.epoch)
            self._found[batch] = len(self._found)
            if base is not None:
                world.events["base published"] += 1
                base = None
            if self._is_sealing and world.random.random() < 0.15:
                await self._seal()

    async def _checkpoint(self) -> Base:
        """A base that includes all that is written. Nothing is written while it is made."""
        self._checkpoints += 1
        name = f"{self.name}.{self._checkpoints}"
        self.world.checkpoints[name] = list(self._found or ())
        await self.pass_time(0.1)
        return Base(name, (), self.log.number)

    async def _seal(self) -> None:
        try:
            await self.log.seal()
        except (LogMoved, PercolatorError):
            return
        self.world.events["sealed by its owner"] += 1
        self.split()

    async def _read(self) -> None:
        world, log = self.world, self.log
        while not world.is_over:
            await self.pass_time(0.4)
            found = self._found
            if found is None:
                continue
            before, count = len(world.acknowledged), len(found)
            if world.random.random() < 0.3:
                await self.pass_time(0.05)
            try:
                is_leased = log.has_lease()
                is_held = is_leased or await self.look()
            except LogMoved:
                return
            except StoreUnusable as error:
                world.unusable(f"look by {self.name}", error)
                continue
            except PercolatorError:
                world.events["look failed"] += 1
                continue
            if not is_held:
                world.events["read refused"] += 1
                return
            if self.life.alive:
                world.events["read by lease" if is_leased else "read by a look"] += 1
                world.read(f"read by {self.name}", found, count, before)
                world.served_epochs.add(log.epoch)

    async def _keep(self) -> None:
        """Trims, also when others own the log."""
        while not self.world.is_over:
            await self.pass_time(0.8)
            try:
                deleted = await self.log.trim()
            except StoreUnusable as error:
                self.world.unusable(f"trim by {self.name}", error)
            except PercolatorError:
                self.world.events["trim failed"] += 1
            else:
                self.world.events["trimmed"] += deleted > 0
                self.world.events["trimmed when deposed"] += deleted > 0 and self.log.is_lost


def simulate(seed: int, course: Course) -> World:
    """Runs a seed."""

    async def main(loop: SimulationLoop) -> World:
        world = World(loop, seed, course)
        await world.run()
        return world

    return run_simulation(main)
