"""The call that tunes Python's garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

import percolator


@pytest.fixture
def collector() -> Iterator[None]:
    """Leaves the collector as it was."""
    thresholds = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*thresholds)


class Cyclic:
    """Only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.usefixtures("collector")
def test_what_lives_is_excluded_and_what_is_garbage_is_not_kept() -> None:
    garbage = weakref.ref(Cyclic())
    percolator.tune_garbage_collector()
    assert garbage() is None
    assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == (50_000, 20, 50)


@pytest.mark.usefixtures("collector")
def test_cycles_made_later_are_still_collected() -> None:
    percolator.tune_garbage_collector()
    later = weakref.ref(Cyclic())
    gc.collect()
    assert later() is None
