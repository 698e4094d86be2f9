"""Takeovers of one tablet, with their system calls in every order."""

from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from percolator.errors import TabletMoved
from percolator.services.chassis import epoch_directory, files
from percolator.services.chassis.epoch_directory import EpochName, Stage
from tests.unit.tabletserver.interleavings import Explorer

WALKS = 2_000


@pytest.mark.parametrize("epochs", [(2,), (2, 3), (2, 2)])
def test_no_order_of_system_calls_loses_an_acknowledged_write(epochs: tuple[int, ...]) -> None:
    """Every state is a crash too: a process that goes no further was killed or paused there."""
    explorer = Explorer(epochs)
    assert explorer.violations() == []
    # Not vacuous: each acknowledges in some order, and the first owner does not in every one.
    assert {process for outcome in explorer.outcomes for process in outcome} == set(
        range(len(epochs) + 1)
    )
    assert any(0 not in outcome for outcome in explorer.outcomes)
    if len(set(epochs)) == len(epochs):
        # Nor do all of them withdraw forever: the one with the highest epoch gets the tablet.
        assert all(len(epochs) in outcome for outcome in explorer.outcomes)


@pytest.mark.parametrize("epochs", [(2, 3, 4), (2, 2, 3)])
def test_three_claimants_lose_no_acknowledged_write(epochs: tuple[int, ...]) -> None:
    explorer = Explorer(epochs)
    random = Random(7)
    for _ in range(WALKS):
        assert explorer.walk(random) == []
    assert len(explorer.outcomes) > 3


def test_a_directory_recreated_by_a_deposed_owner_does_not_prevent_a_takeover() -> None:
    """An owner that is deposed before it opens its database leaves a ghost under its live name,
    beside what was sealed. The next claimant serves all the same, in every order."""
    explorer = Explorer((2,), recreating=True)
    assert explorer.violations() == []
    assert all(1 in outcome for outcome in explorer.outcomes)


@pytest.mark.parametrize("epochs", [(2, 3), (2, 3, 4)])
def test_several_ghosts_do_not_prevent_a_takeover(epochs: tuple[int, ...]) -> None:
    explorer = Explorer(epochs, recreating=True)
    random = Random(11)
    for _ in range(WALKS):
        assert explorer.walk(random) == []
    assert all(len(epochs) in outcome for outcome in explorer.outcomes)


def test_when_a_ghost_is_sealed_like_an_epoch_no_takeover_succeeds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted bug: the ghost cannot be renamed over what was sealed under its epoch."""

    async def seal(
        self: epoch_directory._Takeover, live: list[EpochName], names: list[EpochName]
    ) -> None:
        for name in live:
            sealed = EpochName(name.epoch, Stage.SEALED)
            with suppress(FileNotFoundError):
                await self._files.rename(self._tablet / str(name), self._tablet / str(sealed))

    monkeypatch.setattr(epoch_directory._Takeover, "_seal", seal)
    explorer = Explorer((2,), recreating=True)
    assert explorer.violations() == []
    assert frozenset() in explorer.outcomes


async def _nothing(self: object) -> None:
    """Takes the place of a step that is left out."""


def test_without_the_last_look_a_write_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_directory._Takeover, "_look_last", _nothing)
    assert Explorer((2, 3)).violations()


def test_without_the_check_of_the_directory_a_write_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def always(self: object) -> bool:
        return True

    monkeypatch.setattr(files.EpochDirectory, "_look", always)
    assert Explorer((2,)).violations()


def test_removing_a_published_epoch_under_its_live_name_loses_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def remove_in_place(self: epoch_directory._Takeover) -> None:
        names = await self._look()
        try:
            self._refuse_if_surpassed(names, own=EpochName(self._epoch, Stage.LIVE))
        except TabletMoved:
            await epoch_directory.remove_tree(self._files, self._live)
            raise

    monkeypatch.setattr(epoch_directory._Takeover, "_look_last", remove_in_place)
    assert Explorer((2, 3)).violations()
