"""Mistakes in taking over that show in few orders of system calls among many: every one is tried.

Tablets, and the roles of the coordinator, are taken over by the same procedure.
"""

from __future__ import annotations

import pytest

from services.chassis.epoch_directory import _Takeover
from services.chassis.epoch_names import EpochName, Stage
from tests.unit.tabletserver.interleavings import Explorer


def test_reading_before_sealing_loses_what_was_acknowledged_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A leader that reads the mark first hands out timestamps twice."""

    async def read_first(self: _Takeover) -> None:
        names = [name for name in await self._look() if name.epoch < self._epoch]
        newest = max(names, key=lambda name: name.epoch)
        await self._cloned(self._tablet / str(newest))
        await self._seal([name for name in names if name.stage is Stage.LIVE])

    monkeypatch.setattr(_Takeover, "_inherit", read_first)
    assert Explorer((2,)).violations()


def test_without_looking_again_after_the_claim_a_write_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of two claimants neither sees the other, if both look only before they are visible."""

    def see_nobody(self: _Takeover, names: list[EpochName], *, own: EpochName | None) -> None:
        """After the claim, nobody is looked for."""
        if own is None:
            correct(self, names, own=own)

    correct = _Takeover._refuse_if_surpassed
    monkeypatch.setattr(_Takeover, "_refuse_if_surpassed", see_nobody)
    assert Explorer((2, 3)).violations()
