"""A client process that uses all recipes: `python -m tests.chaos.recipes.client LIFE`, as JSON."""

from __future__ import annotations

import asyncio
import signal

from percolator import aio
from percolator.errors import OutcomeUnknown, PercolatorError
from percolator.world import Random
from tests.chaos.appender import require_expected
from tests.chaos.client import BrokenPromise, Life, connected, life_of_this_process, pacing
from tests.chaos.recipes.deeds import ABORTED, COMMITTED, Deed, Log, torn

PROGRAM = "tests.chaos.recipes.client"
_LOOKS_EVERY = 5


async def write(database: aio.Database, deed: Deed, log: Log) -> None:
    """Tries it once. Raises only errors that no client has to expect."""
    tx = database.transaction()
    try:
        await deed.write(tx)
    except PercolatorError as error:
        tx.rollback()
        require_expected(error)
        return
    log.began(deed)
    try:
        commit_ts = await tx.commit()
    except OutcomeUnknown:
        log.ended(deed)
    except PercolatorError as error:
        log.ended(deed.known(ABORTED))
        require_expected(error)
    else:
        log.ended(deed.known(COMMITTED, commit_ts or 0))


async def look(database: aio.Database) -> None:
    try:
        async with database.snapshot() as snapshot:
            problems = await torn(snapshot)
            at = await snapshot.timestamp()
    except PercolatorError as error:
        require_expected(error)
        return
    if problems:
        raise BrokenPromise(f"at {at}: {'; '.join(problems)}")


async def live(life: Life) -> None:
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    pace = pacing(life)
    with life.history.open("a") as file:

        async def work(database: aio.Database, session: str) -> None:
            chance, log, number = Random(f"{life.seed} {session}"), Log(file, session), 0
            while not stopped.is_set():
                number += 1
                if number % _LOOKS_EVERY:
                    await write(database, Deed.of(f"{session}-{number}", chance), log)
                else:
                    await look(database)
                await pace(chance)

        async with connected(life) as database, asyncio.TaskGroup() as tasks:
            for number in range(life.sessions):
                tasks.create_task(work(database, f"{life.name}/{life.number}.{number}"))


if __name__ == "__main__":
    asyncio.run(live(life_of_this_process()))
