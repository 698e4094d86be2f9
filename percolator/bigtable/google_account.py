"""The account under which this process calls Google, found by `google-auth` as everywhere.

The library is an extra, and is asked for only when an account is needed: an emulator needs none.
"""

from __future__ import annotations

import datetime
import importlib
import math
from collections.abc import Callable
from functools import partial
from typing import Any

from percolator.bigtable.tokens import Token
from percolator.errors import NotReady, Unauthenticated, UsageError

_SCOPES = (
    "https://www.googleapis.com/auth/bigtable.data",
    "https://www.googleapis.com/auth/bigtable.admin",
)
_SECONDS = 10.0
"""The most that one request for a token may take."""
_HOW = (
    "run `gcloud auth application-default login`, set GOOGLE_APPLICATION_CREDENTIALS to the key "
    "file of a service account, or run where a service account is attached"
)


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
                raise NotReady(f"Google gives no token at the moment: {_said(error)}") from None
            self._credentials = None  # whoever mends them need not restart this process
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
    return request(*arguments, timeout=min(timeout or _SECONDS, _SECONDS), **named)


def _said(error: Exception) -> str:
    """What the library says, without the objects that it attaches."""
    text = str(error.args[0] if error.args else error)
    return text.splitlines()[0].rstrip(".") if text else type(error).__name__


def _seconds_left(expiry: datetime.datetime | None) -> float:
    """The library gives times of UTC without saying so."""
    if expiry is None:
        return math.inf
    now = datetime.datetime.now(datetime.UTC).replace(tzinfo=None)
    return max((expiry - now).total_seconds(), 0.0)
