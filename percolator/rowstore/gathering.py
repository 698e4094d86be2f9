"""A read that others join before it is sent: one of them leads, and makes the call for all."""

from __future__ import annotations

import asyncio
import copy

from percolator.errors import PercolatorError
from percolator.rowstore.port import StoredCell

Cells = dict[bytes, list[StoredCell]]
"""What was found, by the key of its row."""


class Gathering:
    """The keys of one call that is not sent yet."""

    def __init__(self, key: bytes) -> None:
        self.keys: dict[bytes, None] = {key: None}
        self._answer: asyncio.Future[Cells | None] | None = None
        """Only if somebody follows: most calls are made by one for itself."""

    async def follow(self, key: bytes) -> Cells | None:
        """The answer of the call, which also asks for this key; None if whoever led was cancelled.
        Raises what the call has raised."""
        self.keys[key] = None
        if self._answer is None:
            self._answer = asyncio.get_running_loop().create_future()
        answer = self._answer
        await asyncio.wait([answer])  # a caller that is cancelled does not cancel the others
        error = answer.exception()
        if error is not None:
            raise copy.copy(error)
        return answer.result()

    def end(self, cells: Cells) -> None:
        if self._answer is not None:
            self._answer.set_result(cells)

    def fail(self, error: BaseException) -> None:
        """The call failed; or whoever led was cancelled, and the others read for themselves."""
        if self._answer is None:
            return
        if isinstance(error, PercolatorError):
            self._answer.set_exception(error)
            self._answer.exception()  # all who follow may have been cancelled
        else:
            self._answer.set_result(None)
