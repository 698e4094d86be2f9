"""Notices a peer that is gone without a word: asks it for a sign, and gives it up without one.

A call may end long before that, at its deadline. Its answer is owed all the same: otherwise, calls
that are short and rare would all be sent to a peer that was gone long ago.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOK_SECONDS: Final = 10.0
"""How often a connection is looked at whose peer owes an answer. After so many looks without a sign
of the peer it is asked for one, and given up at the next look."""
LOOKS_BEFORE_PING: Final = 3


class SignsOfLife:
    """Looks after one connection."""

    def __init__(
        self, is_used: Callable[[], bool], ask: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        """`is_used` says whether calls are in progress."""
        self.is_owed = False
        """Set when a call is sent."""
        self._heard = False
        """Whether something has arrived since the last look."""
        self._loop = asyncio.get_running_loop()
        self._is_used = is_used
        self._ask = ask
        self._give_up = give_up
        self._silent = 0
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def hear(self) -> None:
        """Called when something arrives."""
        self._heard = True
        self.is_owed = False

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        if self._heard or not (self.is_owed or self._is_used()):
            self._heard = False
            self._silent = 0
            return
        self._silent += 1
        if self._silent == LOOKS_BEFORE_PING:
            self._ask()
        elif self._silent > LOOKS_BEFORE_PING:
            self._give_up()
