"""Notices a peer that is gone without a word: asks it for a sign, and gives it up without one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

LOOK_SECONDS: Final = 10.0
"""How often a connection with calls in progress is looked at. After so many looks without a sign
of the peer it is asked for one, and given up at the next look."""
LOOKS_BEFORE_PING: Final = 3


class SignsOfLife:
    """Looks after one connection."""

    def __init__(
        self, is_used: Callable[[], bool], ask: Callable[[], None], give_up: Callable[[], None]
    ) -> None:
        self.heard = False
        """Set whenever something arrives."""
        self._loop = asyncio.get_running_loop()
        self._is_used = is_used
        self._ask = ask
        self._give_up = give_up
        self._silent = 0
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def stop(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        self._timer = self._loop.call_later(LOOK_SECONDS, self._look)
        if self.heard or not self._is_used():
            self.heard = False
            self._silent = 0
            return
        self._silent += 1
        if self._silent == LOOKS_BEFORE_PING:
            self._ask()
        elif self._silent > LOOKS_BEFORE_PING:
            self._give_up()
