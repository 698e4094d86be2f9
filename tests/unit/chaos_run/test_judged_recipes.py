"""The judge of a chaos run finds what recipes have lost, doubled, torn, or exported in no order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import percolator.testing
from percolator import aio
from percolator.recipes import ExportFile
from percolator.world import Random
from tests.chaos.recipes import at_work
from tests.chaos.recipes.deeds import ABORTED, COMMITTED, Deed, Log, logged, torn
from tests.chaos.recipes.judged import Exported, Held, found_in, judge, read
from tests.integration import recipes_at_work
from tests.integration.recipes_at_work import sums

DEEDS = 30

Told = dict[str, Deed]
Run = tuple[Told, Held, list[Exported]]


@asynccontextmanager
async def recipes() -> AsyncIterator[aio.Database]:
    async with percolator.testing.connect_async() as database:
        await at_work.create(database)
        yield database


async def a_run(directory: Path) -> Run:
    log_path = directory / "log"
    async with recipes() as database:
        chance = Random("deeds")
        with log_path.open("w") as file:
            log = Log(file, "client")
            for number in range(DEEDS):
                deed = Deed.of(f"deed {number}", chance)
                log.began(deed)
                async with database.transaction() as tx:
                    await deed.write(tx)
                log.ended(deed.known(COMMITTED, tx.commit_timestamp or 0))
                if number % 10 == 0:
                    await percolator.testing.run_observers_async(database, at_work.observers)
        await percolator.testing.run_observers_async(database, at_work.observers)
        return logged([log_path]), await found_in(database), read(directory / "exports")


@pytest.fixture(name="run", scope="module")
def _run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipes_at_work, "file", ExportFile(directory / "exports"))
        return asyncio.run(a_run(directory))


def test_a_run_without_faults_is_found_right(run: Run) -> None:
    assert list(judge(*run)) == []


def without_a_deed(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(deeds=held.deeds - {"deed 7"}), exported


def with_an_aborted_deed(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told | {"deed 7": replace(told["deed 7"], outcome=ABORTED)}, held, exported


def with_a_deed_that_was_never_written(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(deeds=held.deeds | {"another"}), exported


def with_one_sum_doubled(told: Told, held: Held, exported: list[Exported]) -> Run:
    key, amount = next((key, amount) for key, amount in held.sums.items() if amount)
    return told, held._replace(sums={**held.sums, key: 2 * amount}), exported


def with_an_old_mirror(told: Told, held: Held, exported: list[Exported]) -> Run:
    key = next(key for key, amount in held.mirrors.items() if amount)
    return told, held._replace(mirrors={**held.mirrors, key: 0}), exported


def without_a_counter(told: Told, held: Held, exported: list[Exported]) -> Run:
    key = next(key for key, amount in held.counts.items() if amount)
    left = {one: amount for one, amount in held.counts.items() if one != key}
    return told, held._replace(counts=left), exported


def without_an_export(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held, exported[1:]


def with_an_export_twice(told: Told, held: Held, exported: list[Exported]) -> Run:
    again = exported[0]._replace(sequence=exported[-1].sequence + 1)
    return told, held, [*exported, again]


def with_exports_in_no_order(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held, exported[::-1]


def with_a_value_not_exported(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(waiting=1), exported


def with_an_index_that_lags(told: Told, held: Held, exported: list[Exported]) -> Run:
    first, second = held.indexes
    return told, held._replace(indexes=(first, second[1:])), exported


def with_somebody_gone(told: Told, held: Held, exported: list[Exported]) -> Run:
    return told, held._replace(cities=dict(list(held.cities.items())[1:])), exported


@pytest.mark.parametrize(
    "doctored",
    [
        without_a_deed,
        with_an_aborted_deed,
        with_a_deed_that_was_never_written,
        with_one_sum_doubled,
        with_an_old_mirror,
        without_a_counter,
        without_an_export,
        with_an_export_twice,
        with_exports_in_no_order,
        with_a_value_not_exported,
        with_an_index_that_lags,
        with_somebody_gone,
    ],
)
def test_whatever_is_wrong_is_found(run: Run, doctored: Callable[..., Run]) -> None:
    assert list(judge(*doctored(*run)))


def test_too_few_transactions_prove_nothing(run: Run) -> None:
    told, held, exported = run
    assert any("proves nothing" in one for one in judge(told, held._replace(deeds=set()), exported))


async def test_a_snapshot_that_shows_a_part_of_a_transaction_is_torn() -> None:
    async with recipes() as database:
        async with database.snapshot() as snapshot:
            assert await torn(snapshot) == []
        async with database.transaction() as tx:
            await sums.add(tx, "key 1", 5)
        async with database.snapshot() as snapshot:
            assert await torn(snapshot) == ["all that was combined comes to 5"]
