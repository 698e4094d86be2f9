"""Prints what happens, line by line, and shows the progress in between.

On a terminal, the progress is a view below the lines, which is redrawn continually. Anywhere else,
such as in the log of a build, it is a line every other second.
"""

from __future__ import annotations

import asyncio
import time

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from examples.demo.state import State
from examples.demo.view import line, view

DRAWN_EVERY_SECONDS = 0.2
LINE_EVERY_SECONDS = 2.0


class Screen:
    """Owns standard output."""

    def __init__(self, console: Console, *, live: bool) -> None:
        self.console = console
        self._is_live = live
        self._began = time.monotonic()

    def say(self, text: str, *, style: str = "") -> None:
        """Prints one line that stays."""
        passed = Text(f"{self._seconds():5.1f} s  ", style="dim")
        self.show(Text.assemble(passed, (text, style)))

    def show(self, what: RenderableType) -> None:
        """Prints something for a person to read."""
        self.console.print(what, highlight=False, soft_wrap=not self._is_live)

    def chapter(self, title: str) -> None:
        """Begins a chapter."""
        self.show(Text(f"\n── {title}", style="bold cyan"))

    async def follow(self, state: State) -> None:
        """Shows the state until it is cancelled."""
        if not self._is_live:
            while True:
                await asyncio.sleep(LINE_EVERY_SECONDS)
                self.show(Text(line(state, self._seconds())))
        # The last view disappears at the end; the lines tell the story.
        with Live(Group(), console=self.console, auto_refresh=False, transient=True) as drawn:
            while True:
                drawn.update(view(state, self._seconds()), refresh=True)
                await asyncio.sleep(DRAWN_EVERY_SECONDS)

    def _seconds(self) -> float:
        return time.monotonic() - self._began
