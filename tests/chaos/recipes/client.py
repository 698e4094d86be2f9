"""A client process that uses all recipes: `python -m tests.chaos.recipes.client LIFE`, as JSON."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple, TextIO

from percolator import aio
from percolator.errors import OutcomeUnknown, PercolatorError
from percolator.world import Random
from tests.chaos.appender import require_expected
from tests.chaos.client import BrokenPromise, Life, connected, life_of_this_process, pacing
from tests.chaos.clients import Clients
from tests.chaos.recipes.at_work import by_city, city, counts, deeds, done, people
from tests.integration.recipes_at_work import mirror, mirrors, out, sums

# Operations of one transaction of a chaos run on all recipes, and the log that records them.
#
# Amounts that are added together come to nothing. So at every snapshot all sums come to nothing: a
# transaction of which only a part counts shows at once.

KEYS = [f"key {number}" for number in range(6)]
_PEOPLE = [f"person {number}" for number in range(30)]
_CITIES = ["Bern", "Lima", "Oslo", "Rome"]
_LEAVES = 0.2
COMMITTED, ABORTED, UNKNOWN = "committed", "aborted", "unknown"


@dataclass(frozen=True)
class Deed:
    """One transaction, and what its client was told about it."""

    name: str
    keys: tuple[str, str]
    """The amount is added to the first and taken from the second."""
    amount: int
    exports: tuple[str, ...]
    person: str
    city: str | None
    outcome: str = UNKNOWN
    commit_ts: int = 0

    @classmethod
    def of(cls, name: str, chance: Random) -> Deed:
        return cls(
            name,
            (chance.choice(KEYS), chance.choice(KEYS)),
            chance.randint(1, 9),
            tuple(sorted(set(chance.choices(KEYS, k=2)))),
            chance.choice(_PEOPLE),
            None if chance.random() < _LEAVES else chance.choice(_CITIES),
        )

    async def write(self, tx: aio.Transaction) -> None:
        first, second = self.keys
        await sums.add(tx, first, self.amount)
        await sums.add(tx, second, -self.amount)
        await counts.add(tx, first, self.amount)
        await counts.add(tx, second, -self.amount)
        for key in self.exports:
            await out.put(tx, key, self.name)
        if self.city is None:
            await tx.delete(self.person, city)
        else:
            await tx.set(self.person, city, self.city)
        await tx.set(self.name, done, True)

    def known(self, outcome: str, commit_ts: int = 0) -> Deed:
        """This operation with the outcome that its client was told."""
        return replace(self, outcome=outcome, commit_ts=commit_ts)


async def torn(snapshot: aio.Snapshot) -> list[str]:
    """Lists violations at one snapshot, whichever transactions it shows."""
    problems = []
    if total := sum((await sums.items(snapshot)).values()):
        problems.append(f"all that was combined comes to {total}")
    if total := sum((await counts.items(snapshot)).values()):
        problems.append(f"all counters come to {total}")
    return problems


class Log:
    """The deeds of a session, each written down before its commit, and again when it has ended."""

    def __init__(self, file: TextIO, session: str) -> None:
        self._file = file
        self._session = session
        self._number = 0

    def began(self, deed: Deed) -> None:
        self._number += 1
        self._write(deed, None)

    def ended(self, deed: Deed) -> None:
        self._write(deed, time.monotonic())

    def _write(self, deed: Deed, ended: float | None) -> None:
        line = {
            "session": self._session,
            "number": self._number,
            "operations": [["put", deeds.name, deed.name]],
            "instants": [ended],
            "commit_ts": deed.commit_ts,
            "deed": asdict(deed),
        }
        self._file.write(json.dumps(line) + "\n")
        # Hand it to the kernel at once: a killed process loses what is in its own buffer.
        self._file.flush()


def logged(paths: Iterable[Path]) -> dict[str, Deed]:
    """All deeds, as their clients last knew them. A line that a kill cut off is none."""
    found: dict[str, Deed] = {}
    for path in paths:
        for line in path.read_text().split("\n")[:-1]:
            told = json.loads(line)["deed"]
            told |= {"keys": tuple(told["keys"]), "exports": tuple(told["exports"])}
            deed = Deed(**told)
            found[deed.name] = deed
    return found


# Contents of recipes after a chaos run, compared with a model in plain Python.
#
# The row of its own that each transaction wrote says whether it has committed. What it did is in
# its client's log, and when, in its exports: their sequence numbers are those of commits.

_PLACE_BITS = 32
_HANDLED_SECONDS = 60.0
DEEDS_MIN = 20
"""Fewer would prove nothing."""


class Exported(NamedTuple):
    key: str
    sequence: int
    deed: str


class Held(NamedTuple):
    """Everything that recipes hold at one snapshot."""

    deeds: set[str]
    sums: Mapping[str, int]
    mirrors: Mapping[str, int]
    counts: Mapping[str, int]
    cities: Mapping[str, str]
    found: list[tuple[str, str]]
    """Entries of the index."""
    waiting: int
    """Values that were put and not exported."""


async def judge_recipes(database: aio.Database, clients: Clients, exports: Path) -> list[str]:
    """Lists violations after all clients have stopped, on a healthy cluster."""
    quiet = await database.wait_for_observers(timeout=_HANDLED_SECONDS)
    told = logged(clients.logs_of(PROGRAM))
    problems = [f"dead letters: {name}: {n}" for name, n in quiet.dead_letters.items() if n]
    problems += judge(told, await found_in(database), read(exports))
    return [f"recipes: {problem}" for problem in problems]


def read(exports: Path) -> list[Exported]:
    """Exports that workers have written to a file, if any."""
    lines = exports.read_text().splitlines() if exports.exists() else []
    records = [json.loads(line) for line in lines]
    return [Exported(one["key"], one["sequence"], one["value"]) for one in records]


async def found_in(database: aio.Database) -> Held:
    """Current contents of the recipes."""
    async with database.snapshot() as snapshot:
        return Held(
            {row.key async for row in snapshot.scan(deeds)},
            await sums.items(snapshot),
            {row.key: row[mirror] async for row in snapshot.scan(mirrors)},
            await counts.items(snapshot),
            {row.key: row[city] async for row in snapshot.scan(people)},
            await by_city.range(snapshot),
            await out.pending(snapshot),
        )


def judge(told: Mapping[str, Deed], held: Held, exported: list[Exported]) -> Iterator[str]:
    """Lists deeds that are lost, duplicated, torn, or out of order."""
    committed = [told[name] for name in sorted(held.deeds & told.keys())]
    if len(committed) < DEEDS_MIN:
        yield f"only {len(committed)} transactions: this proves nothing"
    for deed in told.values():
        if deed.outcome == COMMITTED and deed.name not in held.deeds:
            yield f"{deed.name} has committed, and is not stored"
        if deed.outcome == ABORTED and deed.name in held.deeds:
            yield f"{deed.name} was aborted, and is stored"
    if strange := sorted(held.deeds - told.keys()):
        yield f"stored, and never written: {strange[:5]}"
    amounts: Counter[str] = Counter(dict.fromkeys(KEYS, 0))
    for deed in committed:
        amounts[deed.keys[0]] += deed.amount
        amounts[deed.keys[1]] -= deed.amount
    for kept, found in (
        ("sums", held.sums),
        ("mirrors", held.mirrors),
        ("counts", held.counts),
    ):
        for key, expected in amounts.items():
            if found.get(key, 0) != expected:
                yield f"{kept}: {key} is {found.get(key)}, and {expected} was added"
    yield from _wrong_exports(committed, held.waiting, exported)
    yield from _wrong_cities(committed, held, {one.deed: one.sequence for one in exported})


def _wrong_exports(committed: list[Deed], waiting: int, exported: list[Exported]) -> Iterator[str]:
    if waiting:
        yield f"{waiting} values were not exported"
    times = Counter((one.key, one.deed) for one in exported)
    for deed in committed:
        for key in deed.exports:
            if (found := times.pop((key, deed.name), 0)) != 1:
                yield f"{deed.name} is {found} times in the file of exports for {key}"
    if times:
        yield f"exported, and never put: {list(times)[:5]}"
    commits = {deed.name: deed.commit_ts for deed in committed if deed.outcome == COMMITTED}
    by_key: dict[str, list[Exported]] = defaultdict(list)
    for one in exported:
        commit = one.sequence >> _PLACE_BITS
        if commits.get(one.deed, commit) != commit:
            yield f"{one} has another timestamp than its commit, {commits[one.deed]}"
        by_key[one.key].append(one)
    for key, of_key in by_key.items():
        numbers = [one.sequence for one in of_key]
        # The file leaves out what arrives again, so a number that comes late is missing.
        if numbers != sorted(set(numbers)):
            yield f"the numbers of {key} do not ascend"


def _wrong_cities(committed: list[Deed], held: Held, sequences: Mapping[str, int]) -> Iterator[str]:
    expected: dict[str, str] = {}
    for deed in sorted(committed, key=lambda one: sequences.get(one.name, 0) >> _PLACE_BITS):
        expected.pop(deed.person, None)
        if deed.city is not None:
            expected[deed.person] = deed.city
    if held.cities != expected:
        yield f"people live in {held.cities}, and should in {expected}"
    pairs = sorted((city, person) for person, city in expected.items())
    if held.found != pairs:
        yield f"{by_city.table.name!r} differs: {sorted(set(held.found) ^ set(pairs))[:5]}"


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
