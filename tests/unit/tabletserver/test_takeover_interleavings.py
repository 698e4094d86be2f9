"""Takeovers of one tablet, with their system calls in every order."""

from __future__ import annotations

from random import Random

import pytest

from percolator.errors import TabletMoved
from services.chassis import epoch_directory
from services.chassis.epoch_names import EpochName, Stage
from tests.unit.tabletserver.interleavings import Explorer

WALKS = 1_000


@pytest.mark.parametrize("epochs", [(2,), (2, 3), (2, 2)])
def test_no_order_of_system_calls_loses_an_acknowledged_write(epochs: tuple[int, ...]) -> None:
    """Every state is a crash too: whoever goes no further was killed or paused there."""
    explorer = Explorer(epochs)
    assert explorer.violations() == []
    # Not vacuous: each acknowledges in some order, and the first owner does not in every one.
    assert {process for outcome in explorer.outcomes for process in outcome} == set(
        range(len(epochs) + 1)
    )
    assert any(0 not in outcome for outcome in explorer.outcomes)
    if len(set(epochs)) == len(epochs):
        # Nor does everybody withdraw for ever: whoever has the highest epoch gets the tablet.
        assert all(len(epochs) in outcome for outcome in explorer.outcomes)


@pytest.mark.parametrize("epochs", [(2, 3, 4), (2, 2, 3)])
def test_three_claimants_lose_no_acknowledged_write(epochs: tuple[int, ...]) -> None:
    explorer = Explorer(epochs)
    random = Random(7)
    for _ in range(WALKS):
        assert explorer.walk(random) == []
    assert len(explorer.outcomes) > 3


async def _nothing(self: object) -> None:
    """Stands in for a step that is left out."""


def test_without_the_last_look_a_write_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epoch_directory._Takeover, "_look_last", _nothing)
    assert Explorer((2, 3)).violations()


def test_without_the_check_of_the_directory_a_write_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def always(self: object) -> bool:
        return True

    monkeypatch.setattr(epoch_directory.EpochDirectory, "stands", always)
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
