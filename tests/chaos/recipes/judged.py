"""Contents of recipes after a chaos run, compared with a model in plain Python.

The row of its own that each transaction wrote says whether it has committed. What it did is in its
client's log, and when, in its exports: their sequence numbers are those of commits.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from percolator import aio
from tests.chaos.clients import Clients
from tests.chaos.recipes.at_work import by_city, by_city_later, city, counts, deeds, people
from tests.chaos.recipes.client import PROGRAM
from tests.chaos.recipes.deeds import ABORTED, COMMITTED, KEYS, Deed, logged
from tests.integration.recipes_at_work import mirror, mirrors, out, sums

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
    indexes: tuple[list[tuple[str, str]], list[tuple[str, str]]]
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
            (await by_city.range(snapshot), await by_city_later.range(snapshot)),
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
    for index, found in zip((by_city, by_city_later), held.indexes, strict=True):
        if found != pairs:
            yield f"{index.table.name!r} differs: {sorted(set(found) ^ set(pairs))[:5]}"
