"""Asynchronous tests run on virtual time, unless they talk to real processes."""

from __future__ import annotations

import asyncio
import gc
import inspect
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, _AsyncGeneratorContextManager, asynccontextmanager
from typing import Any

import pytest
from hypothesis import settings

from tests import loop_reports
from tests.bucket.ceph import Ceph, started_ceph
from tests.simulation.virtual_time import run_virtually

# The same examples in every run, and no wall-clock limit on one: a loaded machine is not a bug.
settings.register_profile("deterministic", deadline=None, derandomize=True)
settings.load_profile("deterministic")

# In the background of a shell, or under nohup, these are ignored, also by all child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

REAL_TIME_MARKS = ("integration", "chaos", "spark", "bigtable", "bucket", "real_time")


@pytest.fixture(scope="session")
def ceph() -> Iterator[Ceph]:
    """A store for all tests marked `bucket`, which leave it in one piece."""
    with started_ceph() as store:
        yield store


@pytest.fixture(autouse=True)
def _signals_mean_what_they_did() -> Iterator[None]:
    """Restores handlers that a test's programs set, or a later test would miss its interrupt."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _no_exception_goes_unretrieved() -> Iterator[None]:
    """asyncio only logs them: a service would continue, with only a traceback in its log."""
    with loop_reports.refused():
        yield


def pytest_itemcollected(item: pytest.Item) -> None:
    """Keeps tests on one worker that share a fixture of their file, and small tests of one file.

    Any worker may run any of the others, such as those of planted bugs, which take seconds each.
    """
    assert isinstance(item, pytest.Function)
    fixtures = item._fixtureinfo.name2fixturedefs.values()
    shares = any(fixture.scope == "module" for found in fixtures for fixture in found)
    if shares or "unit" in item.path.parts:
        item.add_marker(pytest.mark.xdist_group(str(item.path)))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Runs files that start processes first: the short ones fill the remaining time at the end."""
    waiting = {item.path for item in items if item.get_closest_marker("integration")}
    items.sort(key=lambda item: item.path not in waiting)


def pytest_collection_finish() -> None:
    """Garbage collections skip everything imported, which stays anyway, and run only rarely."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Runs `async def` tests: on the real loop if they use real processes or disks."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    wanted = inspect.signature(pyfuncitem.obj).parameters
    arguments: dict[str, Any] = {name: pyfuncitem.funcargs[name] for name in wanted}
    real = any(pyfuncitem.get_closest_marker(mark) for mark in REAL_TIME_MARKS)
    run: Any = asyncio.run if real else run_virtually
    run(_within_fixtures(pyfuncitem.obj, arguments))
    return True


async def _within_fixtures(
    test: Callable[..., Awaitable[object]], arguments: dict[str, Any]
) -> None:
    """Runs a test with its asynchronous fixtures, which are made by `asynccontextmanager`, and are
    entered and left in the event loop of the test. One may have others as its arguments."""
    made: dict[object, Any] = {}
    async with AsyncExitStack() as stack:

        async def value_of(fixture: object) -> Any:
            if not isinstance(fixture, _AsyncGeneratorContextManager):
                return fixture
            if fixture not in made:
                needed = {name: await value_of(one) for name, one in fixture.kwds.items()}
                manager = asynccontextmanager(fixture.func)(*fixture.args, **needed)
                made[fixture] = await stack.enter_async_context(manager)
            return made[fixture]

        await test(**{name: await value_of(one) for name, one in arguments.items()})
