"""Access tokens, kept fresh: fetched early, and once for all who wait.

Fetching one blocks (it reads files, and asks a server of Google's), so it has a thread of its own.
A token is replaced while it is still valid, so that calls wait for the first one only.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from percolator.errors import NotReady, PercolatorError, UsageError

_log = logging.getLogger("percolator.bigtable")

Metadata = tuple[tuple[str, str], ...]

_EARLY_SECONDS = 300.0
"""How long before its end a token is replaced: Google's metadata server has a newer one by then."""
_LAST_SECONDS = 10.0
"""A token that ends so soon may have ended when the call arrives."""
_PAUSE_SECONDS = 10.0
"""Between attempts to replace a token that can still be used."""


class Token(NamedTuple):
    """What proves who is calling."""

    value: str
    seconds: float
    """How long it is valid from now on."""
    quota_project: str = ""
    """The project whose quota the calls use, if it is not that of the account."""


class Tokens:
    """The tokens of one account, for calls from one event loop."""

    def __init__(
        self, fetch: Callable[[], Token], now: Callable[[], float] = time.monotonic
    ) -> None:
        """`fetch` may block. It raises `PercolatorError`."""
        self._fetch = fetch
        self._now = now
        self._metadata: Metadata | None = None
        self._replaced_from = self._until = float("-inf")
        self._fetching: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "bigtable-token")
        self._is_closed = False

    def current(self) -> Metadata | None:
        """The metadata of a call with the present token; None if `metadata` has to be awaited."""
        now = self._now()
        if now < self._replaced_from:
            return self._metadata
        if now >= self._until:
            return None
        if self._fetching is None and not self._is_closed:
            self._replaced_from = now + _PAUSE_SECONDS
            self._start()
        return self._metadata

    async def metadata(self, timeout_seconds: float) -> Metadata:
        """The same; waits for a token. Raises what prevents one, and `NotReady` if it takes too
        long: the call was not made."""
        found = self.current()
        if found is not None:
            return found
        if self._is_closed:
            raise network_closed()
        fetching = self._fetching or self._start()
        done, _ = await asyncio.wait([fetching], timeout=timeout_seconds)
        if not done:
            raise NotReady(f"no access token within {timeout_seconds:g} s")
        if fetching.cancelled():
            raise network_closed()
        error = fetching.exception()
        if error is not None:
            # Each waiter has its own: a raised error keeps the trace of whoever raised it.
            raise copy.copy(error)
        if self._metadata is None:
            raise NotReady("the access token was refused while others waited for it")
        return self._metadata

    def refused(self, metadata: Metadata) -> None:
        """Called when the service does not accept a token: the next call fetches another one,
        unless that has happened already."""
        if metadata is self._metadata:
            self._metadata = None
            self._replaced_from = self._until = float("-inf")

    async def close(self) -> None:
        self._is_closed = True
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> asyncio.Task[None]:
        self._fetching = asyncio.create_task(self._renew())
        self._fetching.add_done_callback(self._note)
        return self._fetching

    def _note(self, fetching: asyncio.Task[None]) -> None:
        """A token that can still be used was not replaced: nobody waits for that."""
        if fetching.cancelled() or (error := fetching.exception()) is None:
            return
        if self._now() < self._until or not isinstance(error, PercolatorError):
            _log.warning("the access token was not renewed: %s", error, exc_info=error)

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            token = await loop.run_in_executor(self._thread, self._fetch)
        finally:
            self._fetching = None
        headers = [("authorization", f"Bearer {token.value}")]
        if token.quota_project:
            headers.append(("x-goog-user-project", token.quota_project))
        self._metadata = tuple(headers)
        now = self._now()
        self._until = now + token.seconds - min(_LAST_SECONDS, token.seconds / 4)
        self._replaced_from = now + token.seconds - min(_EARLY_SECONDS, token.seconds / 2)


def network_closed() -> UsageError:
    """The error of a call that is made after its network was closed."""
    return UsageError("the network of this client is closed")
