"""Access tokens of a Google account: fetched early, and once for all waiting calls.

`google-auth` finds the account, as everywhere. It is an extra, and is imported only when an account
is needed: an emulator needs none. Fetching a token blocks (it reads files, and asks a server of
Google's), so it has a thread of its own. A token is replaced while it is still valid, so that calls
wait for the first one only.
"""

from __future__ import annotations

import asyncio
import copy
import datetime
import importlib
import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from percolator.errors import NotReady, PercolatorError, Unauthenticated, UsageError

_log = logging.getLogger("percolator.bigtable")

Metadata = tuple[tuple[str, str], ...]

_EARLY_SECONDS = 300.0
"""How long before its end a token is replaced: Google's metadata server has a newer one by then."""
_LAST_SECONDS = 10.0
"""A token that ends so soon may have ended when the call arrives."""
_PAUSE_SECONDS = 10.0
"""Between attempts to replace a token that can still be used."""

_SCOPES = (
    "https://www.googleapis.com/auth/bigtable.data",
    "https://www.googleapis.com/auth/bigtable.admin",
)
_FETCH_SECONDS = 10.0
"""The most that one request for a token may take."""
_HOW = (
    "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS to the key "
    "file of a service account, or run where a service account is attached"
)


class Token(NamedTuple):
    """A proof of who is calling."""

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
        """The metadata of a call, once there is a token. Raises the error that prevents one, and
        `NotReady` if it takes too long: the call was not made."""
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
            # A copy for each waiter: a raised error keeps the trace of where it was raised.
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
        """Logs that a token that can still be used was not replaced: no call waits for that."""
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


class GoogleAccount:
    """Application Default Credentials. All methods but the constructor block."""

    def __init__(self) -> None:
        """Raises `UsageError` if the extra is missing."""
        try:
            self._auth: Any = importlib.import_module("google.auth")
            self._errors: Any = importlib.import_module("google.auth.exceptions")
            self._transport: Any = importlib.import_module("google.auth.transport.requests")
        except ImportError:
            raise UsageError(
                "Bigtable needs google-auth for credentials: pip install "
                "'percolator-store[bigtable]', or set BIGTABLE_EMULATOR_HOST to use an emulator"
            ) from None
        self._credentials: Any = None

    def token(self) -> Token:
        """A new token. Raises `Unauthenticated` if there can be none, and `NotReady` if there may
        be one later."""
        try:
            if self._credentials is None:
                self._credentials, _ = self._auth.default(scopes=_SCOPES)
            self._credentials.refresh(partial(_within, self._transport.Request()))
        except self._errors.DefaultCredentialsError as error:
            raise Unauthenticated(
                f"there are no usable Google credentials ({_said(error)}): {_HOW}"
            ) from None
        except self._errors.TransportError as error:
            raise NotReady(f"Google's token server was not reached: {_said(error)}") from None
        except self._errors.GoogleAuthError as error:
            if error.retryable:
                raise NotReady(f"Google gives no token now: {_said(error)}") from None
            self._credentials = None  # found again if somebody mends them
            raise Unauthenticated(
                f"Google refuses the credentials ({_said(error)}); to replace them: {_HOW}"
            ) from None
        credentials = self._credentials
        return Token(
            credentials.token,
            _seconds_left(credentials.expiry),
            getattr(credentials, "quota_project_id", None) or "",
        )


def _within(
    request: Callable[..., object],
    *arguments: object,
    timeout: float | None = None,
    **named: object,
) -> object:
    """A request for a token that does not take the two minutes that the library would wait."""
    return request(*arguments, timeout=min(timeout or _FETCH_SECONDS, _FETCH_SECONDS), **named)


def _said(error: Exception) -> str:
    """The library's text, without the objects that it attaches."""
    text = str(error.args[0] if error.args else error)
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _seconds_left(expiry: datetime.datetime | None) -> float:
    """The library gives times of UTC without saying so."""
    if expiry is None:
        return math.inf
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return max((expiry - now).total_seconds(), 0.0)


def network_closed() -> UsageError:
    """The error of a call that is made after its network was closed."""
    return UsageError("the network of this client is closed")
