"""A client process to be killed: `python -m tests.chaos.client LIFE`, the life being JSON.

It runs sessions of a workload until SIGTERM, and writes down every transaction as it happens, so
that its files hold what it knew when it was killed. If it sees a broken promise, or an error that
no client has to expect, it ends with an exit code other than 0.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from percolator import aio
from percolator.errors import DeadlineExceeded, NotReady, Unavailable
from percolator.world import Random
from tests.chaos import host_clock
from tests.isolation.history import HistoryFile, Recorder
from tests.simulation.sessions import Chronicle, Session
from tests.simulation.workloads.catalogue import WORKLOADS

CLOCK = "this machine"
"""All processes of a machine share its monotonic clock, so instants can be compared."""

CONNECT_SECONDS = 30.0
"""A client may be started while nothing works."""
_CONNECT_AGAIN_SECONDS = 0.2


@dataclass(frozen=True)
class Life:
    """The settings of one client process."""

    address: str
    name: str
    number: int
    workload: str
    sessions: int
    directory: str
    seed: int
    pace_seconds: float = 0.0
    """How long a session waits after each transaction, on average."""
    host_clock: str = ""
    """The file that says how wrong its wall clock is."""
    program: str = "tests.chaos.client"

    @property
    def history(self) -> Path:
        return Path(self.directory) / f"{self.name}.{self.number}.history"

    @property
    def claims(self) -> Path:
        """File of the outcomes that the library later reported for unknown transactions."""
        return self.history.with_suffix(".claims")

    @property
    def log(self) -> Path:
        return self.history.with_suffix(".log")

    def argument(self) -> str:
        return json.dumps(asdict(self))


class BrokenPromise(Exception):
    """The workload has seen something that it must never see."""


def chronicle_of(history: HistoryFile) -> Chronicle:
    """A chronicle that writes everything down at once, and has no end until told to stop."""
    endless: defaultdict[str, int] = defaultdict(lambda: sys.maxsize)
    recorder = Recorder(time.monotonic, clock=CLOCK, listener=history.written)
    return Chronicle(recorder, left=endless)


async def live(life: Life) -> None:
    workload = WORKLOADS[life.workload]()
    with HistoryFile(life.history) as history, life.claims.open("a") as claims:
        chronicle = chronicle_of(history)

        def stop() -> None:
            chronicle.stopped = True

        def write_claims() -> None:
            for claim in chronicle.claims:
                said = [claim.record.session, claim.record.number, claim.committed]
                claims.write(json.dumps(said) + "\n")
            claims.flush()
            chronicle.claims.clear()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        async with (
            connected(life) as database,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(life.sessions):
                name = f"{life.name}/{number}"
                chance = Random(f"{life.seed} {name} {life.number}")
                session = Session(chronicle, name, life.number, database, chance)
                pace = pacing(life)
                tasks.create_task(_work(session, workload.step, write_claims, pace))
        if chronicle.broken:
            raise BrokenPromise("; ".join(chronicle.broken))


@asynccontextmanager
async def connected(life: Life) -> AsyncIterator[aio.Database]:
    """Connects as soon as anything answers: `connect` gives up at once if everything refuses."""
    database = await _connect(life, time.monotonic() + CONNECT_SECONDS)
    try:
        yield database
    finally:
        await database.close()


async def _connect(life: Life, deadline: float) -> aio.Database:
    description = f"{life.name} #{life.number}"
    while True:
        left = max(deadline - time.monotonic(), 1.0)
        try:
            return await aio.connect(life.address, description=description, timeout=left)
        except (Unavailable, NotReady, DeadlineExceeded):
            if time.monotonic() >= deadline:
                raise
            await asyncio.sleep(_CONNECT_AGAIN_SECONDS)


def pacing(life: Life) -> Callable[[Random], Awaitable[None]]:
    async def pace(chance: Random) -> None:
        if life.pace_seconds:
            await asyncio.sleep(2 * life.pace_seconds * chance.random())

    return pace


async def _work(
    session: Session,
    step: Callable[[Session], Awaitable[None]],
    write_claims: Callable[[], None],
    pace: Callable[[Random], Awaitable[None]],
) -> None:
    while session.goes_on:
        await step(session)
        write_claims()
        await pace(session.random)


def life_of_this_process() -> Life:
    """Task of this process, as its command line says. Sets the clock of its host."""
    life = Life(**json.loads(sys.argv[1]))
    if life.host_clock:
        host_clock.live_by(Path(life.host_clock))
    return life


if __name__ == "__main__":
    asyncio.run(live(life_of_this_process()))
