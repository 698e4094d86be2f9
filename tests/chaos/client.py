"""A client process to be killed: `python -m tests.chaos.client LIFE`, the life being JSON.

Runs sessions of a workload until SIGTERM, and writes down every transaction as it happens, so that
what it knew when it was killed is in its files. A promise that it sees broken, or an error that no
client has to expect, ends it with an exit code that is not 0.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from percolator import aio
from percolator.testing.history import Recorder
from percolator.testing.history_file import HistoryFile
from percolator.world import Random
from tests.simulation.sessions import Chronicle, Session
from tests.simulation.workloads.catalogue import WORKLOADS

CLOCK = "this machine"
"""All processes of a machine share its monotonic clock, so instants can be compared."""


@dataclass(frozen=True)
class Life:
    """What one client process is told."""

    address: str
    name: str
    number: int
    workload: str
    sessions: int
    directory: str
    seed: int

    @property
    def history(self) -> Path:
        return Path(self.directory) / f"{self.name}.{self.number}.history"

    @property
    def claims(self) -> Path:
        """What the library said, after all, about transactions that had ended unknown."""
        return self.history.with_suffix(".claims")

    @property
    def log(self) -> Path:
        return self.history.with_suffix(".log")

    def argument(self) -> str:
        return json.dumps(asdict(self))


class BrokenPromise(Exception):
    """The workload has seen what it must never see."""


def chronicle_of(history: HistoryFile) -> Chronicle:
    """Written down at once; with no end but being told to stop."""
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
            aio.connect(life.address, description=f"{life.name} #{life.number}") as database,
            asyncio.TaskGroup() as tasks,
        ):
            for number in range(life.sessions):
                name = f"{life.name}/{number}"
                chance = Random(f"{life.seed} {name} {life.number}")
                session = Session(chronicle, name, life.number, database, chance)
                tasks.create_task(_work(session, workload.step, write_claims))
        if chronicle.broken:
            raise BrokenPromise("; ".join(chronicle.broken))


async def _work(
    session: Session, step: Callable[[Session], Awaitable[None]], write_claims: Callable[[], None]
) -> None:
    while session.goes_on:
        await step(session)
        write_claims()


if __name__ == "__main__":
    asyncio.run(live(Life(**json.loads(sys.argv[1]))))
