"""A link between a server and all that dial it, which can be cut like a cable, or lose packets.

While it is cut, nothing passes and nothing is refused: connections stay open, and what was sent
stays in them, as if packets were lost for a while. When it is mended, all of it arrives. Where
packets are lost, TCP sends them again: what was sent arrives late, and everything behind it too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from percolator.tasks import Tasks
from percolator.world import Random

T = TypeVar("T")

_CHUNK_BYTES = 256 << 10
_SENT_AGAIN_SECONDS = 0.2
_SENT_AGAIN_SECONDS_MAX = 3.2
"""Linux sends a lost packet again after this time, and twice that after each further loss."""


class Disturbance:
    """Something done to a link. Several may be in effect at the same time."""

    def __init__(self, whose: Callable[[int], bool], share: float, random: Random) -> None:
        self.hits = 0
        """How often something was held back or lost."""
        self._mended = asyncio.Event()
        self._whose = whose
        self._share = share
        self._random = random

    def mend(self) -> None:
        """Lets everything through again. Harmless if done before; from the loop of the link."""
        self._mended.set()

    async def passed(self, port: int) -> bool:
        """Returns when a packet of this caller has passed, and whether it had to wait."""
        wait, waited = _SENT_AGAIN_SECONDS, False
        while (
            not self._mended.is_set() and self._whose(port) and self._random.random() < self._share
        ):
            self.hits += 1
            waited = True
            try:
                await asyncio.wait_for(self._mended.wait(), wait)
            except TimeoutError:
                wait = min(2 * wait, _SENT_AGAIN_SECONDS_MAX)
        return waited


class Link:
    """Accepts on two free ports, for gRPC and for frames, and forwards each to the same port of
    another address of this machine."""

    def __init__(self, host: int = 0) -> None:
        """`host` numbers the machines that the addresses of links pretend to be on."""
        self._host = f"127.0.{host}.1"
        self._behind = f"127.0.{host}.2"
        self._loop = asyncio.new_event_loop()
        self._requests: list[Disturbance] = []
        self._answers: list[Disturbance] = []
        self._connections = Tasks()
        self._thread = threading.Thread(target=self._loop.run_forever, name="link", daemon=True)
        self._thread.start()
        self._servers = [
            self._call(asyncio.start_server(self._accept, self._host, 0)) for _ in range(2)
        ]
        self.port, self._frames_port = (
            int(server.sockets[0].getsockname()[1]) for server in self._servers
        )

    @property
    def address(self) -> str:
        """The address that others dial."""
        return f"{self._host}:{self.port}"

    @property
    def behind(self) -> str:
        """Where the server listens."""
        return f"{self._behind}:{self.port}"

    @property
    def frames_behind(self) -> str:
        """Where the server listens for frames."""
        return f"{self._behind}:{self._frames_port}"

    def cut(
        self, *, answers_only: bool = False, whose: Callable[[int], bool] = lambda port: True
    ) -> Disturbance:
        """Holds everything back; with `answers_only`, only what the server sends.

        `whose` decides by the port of a caller whether that caller is cut off.
        """
        return self._disturb(Disturbance(whose, 1.0, Random(0)), answers_only=answers_only)

    def lose(
        self, share: float, random: Random, *, whose: Callable[[int], bool] = lambda port: True
    ) -> Disturbance:
        """Loses a share of what is sent in both directions; it is sent again, as TCP does."""
        return self._disturb(Disturbance(whose, share, random), answers_only=False)

    def mend(self, *disturbances: Disturbance) -> None:
        """Ends these disturbances, or all; what was held back comes first."""

        def end() -> None:
            for one in disturbances or {*self._requests, *self._answers}:
                one.mend()
                for direction in (self._requests, self._answers):
                    if one in direction:
                        direction.remove(one)

        self._loop.call_soon_threadsafe(end)

    def _disturb(self, disturbance: Disturbance, *, answers_only: bool) -> Disturbance:
        def begin() -> None:
            self._answers.append(disturbance)
            if not answers_only:
                self._requests.append(disturbance)

        self._loop.call_soon_threadsafe(begin)
        return disturbance

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
        for server in self._servers:
            server.close()
        await self._connections.cancel()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # Not a coroutine: asyncio would make it a task, and log that it was cancelled.
        self._connections.start(self._serve(reader, writer))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._join(reader, writer)
        except OSError:
            # One side has hung up, which is normal: the broken connection tells the other side.
            pass
        finally:
            writer.close()

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        port: int = writer.get_extra_info("peername")[1]
        dialled: int = writer.get_extra_info("sockname")[1]
        await _passed(self._requests, port)
        server_reader, server_writer = await asyncio.open_connection(self._behind, dialled)
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(_pass(reader, server_writer, self._requests, port))
                both.create_task(_pass(server_reader, writer, self._answers, port))
        except* OSError:
            # As above. What is raised here would be a group again, before Python 3.11.4.
            pass
        finally:
            server_writer.close()


async def _passed(disturbances: list[Disturbance], port: int) -> None:
    """Returns when nothing that is in effect holds this caller back."""
    # Another one may have begun while this waited.
    while any([await one.passed(port) for one in list(disturbances)]):
        pass


async def _pass(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    disturbances: list[Disturbance],
    port: int,
) -> None:
    """Forwards one direction. A cut link holds back the end of the stream, too."""
    while data := await reader.read(_CHUNK_BYTES):
        await _passed(disturbances, port)
        writer.write(data)
        await writer.drain()
    await _passed(disturbances, port)
    raise ConnectionResetError("the other side has hung up")
