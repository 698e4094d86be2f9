"""The library and its services run on uvloop, and do without it."""

from __future__ import annotations

import asyncio
import sys

import pytest

from percolator.event_loop import new_event_loop


def test_the_loop_is_that_of_uvloop_if_it_is_installed() -> None:
    loop = new_event_loop()
    loop.close()
    assert type(loop).__module__.startswith("uvloop")


def test_without_uvloop_the_loop_is_that_of_asyncio(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = new_event_loop()
    loop.close()
    assert isinstance(loop, asyncio.SelectorEventLoop)
