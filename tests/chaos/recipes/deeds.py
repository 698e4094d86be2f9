"""Operations of one transaction of a chaos run on all recipes, and the log that records them.

Amounts that are added together come to nothing. So at every snapshot all sums come to nothing: a
transaction of which only a part counts shows at once.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TextIO

from percolator import aio
from percolator.world import Random
from tests.chaos.recipes.at_work import by_city, counts, deeds, done
from tests.integration.recipes_at_work import out, sums

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
            await by_city.delete(tx, self.person)
        else:
            await by_city.set(tx, self.person, self.city)
        await tx.set(self.name, done, True)

    def known(self, outcome: str, commit_ts: int = 0) -> Deed:
        """This operation with the outcome that its client was told."""
        return replace(self, outcome=outcome, commit_ts=commit_ts)


async def torn(snapshot: aio.Snapshot) -> list[str]:
    """Lists violations at one snapshot, whichever transactions it shows."""
    problems = await by_city.check(snapshot)
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
