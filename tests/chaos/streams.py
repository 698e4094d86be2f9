"""Faults of many roles at the same time: one stream of faults for each, all decided by a seed.

In a stream, one fault after another occurs, repairs what it broke, and waits until everything works
again; then comes a pause of random length. The order of the faults and the lengths of the pauses
are decided by the seed; which faults meet depends on how fast the machine is. No role is ever
disturbed twice at once, so another process can always take over, and since each stream waits for
recovery before the next fault, the cluster cannot be kept down forever.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence

from rich.console import Console

from percolator.world import Random
from tests.chaos.clients import Shop
from tests.chaos.compaction import NoEffect
from tests.chaos.faults import Fault
from tests.chaos.scene import Scene
from tests.chaos.supervisor import Injection, Verdict, figures, now
from tests.chaos.supervisor import table as recovery_table

console = Console(highlight=False, markup=False, soft_wrap=True)

_PAUSE_SECONDS = 1.5
"""The average pause of a stream of ten kinds of faults. One of fewer kinds pauses longer."""
_KINDS = 10
_LATE_PAUSE_SECONDS = 0.5
"""The longest pause when the time is up."""
_OVERTIME_SECONDS = 120.0
"""How long kinds that have not occurred when the time is up may still be tried."""


class Streams:
    """The faults of one run."""

    def __init__(
        self, scene: Scene, kinds: Mapping[str, Sequence[Fault]], *, seed: int, together: int
    ) -> None:
        """At most `together` faults occur at the same time."""
        self.injected: list[Injection] = []
        self.missed: list[str] = []
        """Why faults had no effect, one line for each."""
        self._scene = scene
        self._kinds = kinds
        self._seed = seed
        self._limit = asyncio.Semaphore(together)
        self._began = 0.0
        self._in_effect: dict[str, float] = {}

    async def run(self, seconds: float) -> None:
        """Returns when the time is up, and every kind has occurred or been tried for long."""
        self._began = now()
        async with asyncio.TaskGroup() as tasks:
            for name, faults in self._kinds.items():
                tasks.create_task(self._stream(name, faults, self._began + seconds))

    def show(self, verdict: Verdict, shop: Shop) -> None:
        """Prints the faults, how soon everything worked again, and how much was checked."""
        console.print(recovery_table(figures(self.injected)))
        console.print(
            f"{len(self.injected)} faults; {len(verdict.history):,} transactions checked: "
            f"{verdict.committed:,} committed writes, {verdict.unknown:,} whose outcome no client "
            f"was told; {shop.placed:,} orders placed"
        )

    def never_injected(self) -> list[str]:
        injected = {one.kind for one in self.injected}
        everything = [fault.name for faults in self._kinds.values() for fault in faults]
        return [name for name in everything if name not in injected]

    async def _stream(self, name: str, faults: Sequence[Fault], deadline: float) -> None:
        chance = Random(f"chaos {self._seed} {name}")
        for fault in _endless(faults, chance):
            pause = chance.expovariate(len(faults) / (_KINDS * _PAUSE_SECONDS))
            await asyncio.sleep(min(pause, max(deadline - now(), _LATE_PAUSE_SECONDS)))
            late = now() - deadline
            missing = {one.name for one in faults} & set(self.never_injected())
            if late > _OVERTIME_SECONDS or (late > 0 and not missing):
                return
            if late > 0 and fault.name not in missing:
                continue
            async with self._limit, self._scene.roles.taken(fault.roles):
                await self._inject(fault, chance)

    async def _inject(self, fault: Fault, chance: Random) -> None:
        began = self._in_effect[fault.name] = now()
        console.print(f"{self._now()}  {fault.name} ...")
        try:
            seconds = await fault.inject(self._scene, chance)
        except NoEffect as reason:
            self.missed.append(f"{fault.name}: {reason}")
            console.print(f"{self._now()}  {fault.name} had no effect: {reason}")
        except Exception as error:
            others = ", ".join(sorted(self._in_effect.keys() - {fault.name}))
            at = began - self._began
            error.add_note(f"during {fault.name} at {at:.1f} s, beside: {others or 'nothing'}")
            raise
        else:
            until = now()
            # It is over when everything works again, and when what was broken is repaired.
            self.injected.append(
                Injection(fault.name, began - self._began, until - self._began, seconds)
            )
            console.print(f"{self._now()}  {fault.name}: worked again after {seconds:.2f} s")
        finally:
            del self._in_effect[fault.name]

    def _now(self) -> str:
        return f"{now() - self._began:6.1f} s"


def _endless(faults: Sequence[Fault], chance: Random) -> Iterator[Fault]:
    """Yields each kind once before any is repeated."""
    while True:
        order = list(faults)
        chance.shuffle(order)
        yield from order
