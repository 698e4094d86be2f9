"""Makes a worker of which a part fails as soon as it has started: a bug, as far as it can know."""

from __future__ import annotations

from percolator.observers.scanner import Scanner
from tests.integration.test_observer_commands import measure


async def _fail(self: Scanner) -> None:
    raise RuntimeError("a bug")


Scanner.scan_forever = _fail  # type: ignore[method-assign]
observers = [measure]
