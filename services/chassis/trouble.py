"""A trouble that lasts is logged once, not at every attempt: a full disk may last for days, and the
logs of all processes that try again twice a second may be on it."""

from __future__ import annotations

import logging
from typing import Any

REASONS_MAX = 16
"""How many reasons of one trouble are told. A text may say something else each time."""


class Trouble:
    """Logs when a trouble begins, each new reason, and when it is over.

    A reason that comes back is not new: of two servers that are both gone, callers name sometimes
    the one and sometimes the other.
    """

    def __init__(
        self,
        log: Any,  # noqa: ANN401 - structlog's loggers have no common type
        event: str,
        over: str = "",
        *,
        level: int = logging.WARNING,
        **context: object,
    ) -> None:
        """Without `over`, its end is not logged: something else tells of it."""
        self._log = log
        self._event = event
        self._over = over
        self._level = level
        self._context = context
        self._told: set[str] = set()

    def lasts(self, error: object) -> None:
        reason = str(error)
        if reason not in self._told and len(self._told) < REASONS_MAX:
            self._told.add(reason)
            self._log.log(self._level, self._event, error=reason, **self._context)

    def is_over(self) -> None:
        """May be called at any time, also without a trouble."""
        if self._told and self._over:
            self._log.info(self._over, **self._context)
        self._told.clear()
