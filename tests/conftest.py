"""Asynchronous tests run on virtual time, unless they talk to real processes."""

from __future__ import annotations

import asyncio
import inspect
from typing import Any

import pytest
from hypothesis import settings

from percolator.testing.virtual_time import run_virtually

# The same examples in every run, and no wall-clock limit on one: a loaded machine is not a bug.
settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")

REAL_TIME_MARKS = ("integration", "chaos", "spark", "real_time")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Runs `async def` tests: on the real loop where real processes or disks are meant."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in wanted}
    real = any(pyfuncitem.get_closest_marker(mark) for mark in REAL_TIME_MARKS)
    run: Any = asyncio.run if real else run_virtually
    run(pyfuncitem.obj(**arguments))
    return True
