"""The bucket of a simulation: a service that others run, in which the roles are, or nothing.

It never loses what it has answered. Its answers may be lost, late or wrong, and a request may
arrive when the process that sent it is paused, dead, or does not expect it any more.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from percolator.bucket.port import Doubtful, Head, Refused, Stored
from percolator.bucket.settings import Settings
from percolator.services.chassis.cluster_store import BucketClusterStore
from percolator.services.chassis.coordinator import CoordinatorTimes
from percolator.services.master.master import ROLE as MASTER_ROLE
from percolator.services.oracle.oracle import ROLE as ORACLE_ROLE
from percolator.tasks import Tasks
from percolator.world import Random, World
from tests.doubles.bucket_in_memory import BucketFaults, BucketInMemory, Page
from tests.simulation.disks import SimulatedFiles
from tests.simulation.loop import SimulationLoop
from tests.simulation.process import Incarnation
from tests.simulation.virtual_time import VirtualClock

T = TypeVar("T")

IN_A_BUCKET = "run whose masters and oracles lead by a bucket"
MASTERS_REPLACED = "master replaced in a bucket"
ORACLES_REPLACED = "oracle replaced in a bucket"
_CALL_SECONDS = 0.005
_GOOD = BucketFaults(call_seconds=_CALL_SECONDS)


FAULTS = (
    "lost_request",
    "lost_answer",
    "late_request",
    "late_answer",
    "failed_before",
    "failed_after_success",
    "list_delay_seconds",
)


def misled(fault: str) -> str:
    """The name under which a fault of the bucket is counted."""
    return f"bucket: {fault.replace('_', ' ')}"


class SimulatedBucket:
    """The bucket, and how processes reach it."""

    def __init__(self, loop: SimulationLoop, seed: int) -> None:
        self.loop = loop
        self.calls: Counter[str] = Counter()
        """Attempts of all processes, by what they ask for."""
        self.model = BucketInMemory(VirtualClock(loop), Random(f"bucket {seed}"), Tasks(), _GOOD)

    def misbehave(self, badness: float) -> None:
        """From now on, each fault strikes this share of the calls."""
        self.model.faults = BucketFaults(
            lost_request=badness,
            lost_answer=badness,
            late_request=badness,
            late_answer=badness,
            failed_before=badness,
            failed_after_success=badness,
            late_seconds=3.0,
            call_seconds=_CALL_SECONDS,
            list_delay_seconds=1.0 if badness else 0.0,
        )

    def opened(self, incarnation: Incarnation, files: SimulatedFiles) -> BucketClusterStore:
        """The store as one incarnation reaches it. It stalls when the process's files do."""
        return BucketClusterStore(_Reached(self, files), incarnation.world)

    def heal(self) -> None:
        """Ends all faults."""
        self.model.faults = _GOOD

    async def count(self, world: World, occurred: Counter[str]) -> None:
        """Counts the faults, and how often another leader took over."""
        for fault, times in self.model.struck.items():
            occurred[misled(fault)] += times
        recorded = BucketClusterStore(self.model, world).coordinator(CoordinatorTimes())
        for role, name in ((MASTER_ROLE, MASTERS_REPLACED), (ORACLE_ROLE, ORACLES_REPLACED)):
            leader = await recorded.leader(role)
            occurred[name] += 0 if leader is None else leader.epoch - 1


class _Reached:
    """The attempts of one incarnation."""

    def __init__(self, bucket: SimulatedBucket, files: SimulatedFiles) -> None:
        self._bucket = bucket
        self._model = bucket.model
        self._files = files

    @property
    def name(self) -> str:
        return "the simulated bucket"

    async def create(self, key: str, data: bytes) -> str:
        return await self._asked("create", self._model.create(key, data))

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        return await self._asked("replace", self._model.replace(key, data, tag))

    async def read(self, key: str) -> Stored | None:
        return await self._asked("read", self._model.read(key))

    async def head(self, key: str) -> Head | None:
        return await self._asked("head", self._model.head(key))

    async def list(self, folder: str, after: str, limit: int) -> Page:
        return await self._asked("list", self._model.list(folder, after, limit))

    async def delete(self, key: str) -> None:
        await self._asked("delete", self._model.delete(key))

    async def settings(self) -> Settings:
        return await self._asked("settings", self._model.settings())

    async def _asked(self, verb: str, call: Coroutine[Any, Any, T]) -> T:
        self._bucket.calls[verb] += 1
        # In no process's context: what was sent arrives, even if its sender is paused or killed.
        doing = self._bucket.loop.create_task(_outcome(call), context=contextvars.Context())
        outcome = await asyncio.shield(doing)
        await self._files.until_the_store_answers()
        if isinstance(outcome, Refused | Doubtful):
            raise outcome
        return outcome


async def _outcome(call: Coroutine[Any, Any, T]) -> T | Refused | Doubtful:
    """Nobody may be left to hear of an error."""
    try:
        return await call
    except (Refused, Doubtful) as error:
        return error
