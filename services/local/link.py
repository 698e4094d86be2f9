"""A link between a server and everybody who dials it, that can be cut as a cable is.

While it is cut, nothing passes and nothing is refused: connections stay, and so does what was sent
into them, as with packets that are lost for a while. When it is mended, all of it arrives.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_CHUNK_BYTES = 256 << 10
_HOST = "127.0.0.1"
_BEHIND = "127.0.0.2"
"""Also this machine: a server behind a link has the link's port, on this address."""


class Link:
    """Accepts on a free port of 127.0.0.1, and forwards to the same port of 127.0.0.2."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._requests = _Gate()
        self._answers = _Gate()
        self._passing: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, _HOST, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    @property
    def address(self) -> str:
        """What others dial."""
        return f"{_HOST}:{self.port}"

    @property
    def behind(self) -> str:
        """Where the server listens."""
        return f"{_BEHIND}:{self.port}"

    @property
    def held_back(self) -> int:
        """How often something had to wait because the link was cut."""
        return self._requests.held_back + self._answers.held_back

    def cut(
        self, *, answers_only: bool = False, whose: Callable[[int], bool] = lambda port: True
    ) -> None:
        """Holds everything back; or only what the server sends, which goes on being asked.

        `whose` says, by the port from which somebody dialled, whether he is cut off.
        """
        self._answers.close(self._loop, whose)
        if not answers_only:
            self._requests.close(self._loop, whose)

    def mend(self) -> None:
        """Lets everything through again, first what was held back."""
        self._answers.open(self._loop)
        self._requests.open(self._loop)

    def close(self) -> None:
        """Breaks all connections. Closing twice is harmless."""
        if self._thread.is_alive():
            self._call(self._end())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def _end(self) -> None:
        self._server.close()
        for task in self._passing:
            task.cancel()
        await asyncio.gather(*self._passing, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._passing.add(task)
        try:
            await self._join(reader, writer)
        except OSError:
            # Either side has gone, as sides do: the other one is told by the broken connection.
            pass
        finally:
            self._passing.discard(task)
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port: int = writer.get_extra_info("peername")[1]
        await self._requests.passed(port)
        server_reader, server_writer = await asyncio.open_connection(_BEHIND, self.port)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass(reader, server_writer, self._requests, port))
                both.create_task(_pass(server_reader, writer, self._answers, port))
        except* OSError as problems:
            raise problems.exceptions[0] from None
        finally:
            server_writer.close()


class _Gate:
    """Open or closed; what wants through a closed one waits."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._whose: Callable[[int], bool] = lambda port: True
        self.held_back = 0

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.call_soon_threadsafe(self._opened.set)

    def close(self, loop: asyncio.AbstractEventLoop, whose: Callable[[int], bool]) -> None:
        self._whose = whose
        loop.call_soon_threadsafe(self._opened.clear)

    async def passed(self, port: int) -> None:
        if not self._opened.is_set() and self._whose(port):
            self.held_back += 1
            await self._opened.wait()


async def _pass(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: _Gate, port: int
) -> None:
    """One direction. Its end, too, is news that a cut link does not tell."""
    while data := await reader.read(_CHUNK_BYTES):
        await gate.passed(port)
        writer.write(data)
        await writer.drain()
    await gate.passed(port)
    raise ConnectionResetError("the other side has gone")
