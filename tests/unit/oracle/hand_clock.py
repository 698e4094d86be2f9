"""A clock that stands still until a test moves it."""

from __future__ import annotations


class HandClock:
    """The wall clock may jump; the monotonic clock only advances."""

    def __init__(self, wall_milliseconds: int = 1_800_000_000_000) -> None:
        self.wall = wall_milliseconds
        self.monotonic = 1000.0

    def wall_milliseconds(self) -> int:
        return self.wall

    def monotonic_seconds(self) -> float:
        return self.monotonic

    async def sleep(self, seconds: float) -> None:
        self.go_on(seconds)

    def go_on(self, seconds: float) -> None:
        """Advances both clocks."""
        self.monotonic += seconds
        self.wall += round(seconds * 1000)
