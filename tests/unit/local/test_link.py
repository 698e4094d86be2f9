"""A link passes everything, holds it back while it is cut, and delays it while it loses packets.

A reserved port is kept for the one that asks for it by number.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager

import pytest

from percolator.services.local.link import Link
from percolator.services.local.process import ReservedPort
from percolator.world import Random

pytestmark = pytest.mark.real_time

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Server:
    """Answers each line with the same line."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []
        self.arrived = asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            self.lines.append(line)
            self.arrived.set()
            writer.write(line)
        writer.close()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[Link, Server, Streams]]:
    link, server = Link(), Server()
    host, _, port = link.behind.rpartition(":")
    listening = await asyncio.start_server(server.answer, host, int(port))
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    try:
        yield link, server, (reader, writer)
    finally:
        writer.close()
        await asyncio.to_thread(link.close)
        listening.close()
        await listening.wait_closed()


async def test_what_is_sent_into_a_cut_link_arrives_when_it_is_mended_and_not_before() -> None:
    async with linked() as (link, server, (reader, writer)):
        writer.write(b"before\n")
        assert await reader.readline() == b"before\n"
        cut = link.cut()
        writer.write(b"meanwhile\n")
        answer = asyncio.ensure_future(reader.readline())
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done
        assert server.lines == [b"before\n"]
        assert cut.hits >= 1
        link.mend()
        assert await answer == b"meanwhile\n"


async def test_a_server_whose_answers_are_cut_off_goes_on_being_asked() -> None:
    async with linked() as (link, server, (reader, writer)):
        link.cut(answers_only=True)
        writer.write(b"question\n")
        await server.arrived.wait()
        answer = asyncio.ensure_future(reader.readline())
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done
        link.mend()
        assert await answer == b"question\n"


async def test_a_connection_that_is_made_while_the_link_is_cut_works_once_it_is_mended() -> None:
    async with linked() as (link, _, __):
        link.cut()
        reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
        writer.write(b"patient\n")
        link.mend()
        assert await reader.readline() == b"patient\n"
        writer.close()


async def test_a_client_is_told_when_there_is_no_server() -> None:
    link = Link()
    reader, writer = await asyncio.open_connection("127.0.0.1", link.port)
    assert await reader.read() == b""
    writer.close()
    await asyncio.to_thread(link.close)


async def test_closing_breaks_connections_and_may_be_repeated() -> None:
    async with linked() as (link, _, (reader, writer)):
        writer.write(b"question\n")
        await reader.readline()
        await asyncio.to_thread(link.close)
        await asyncio.to_thread(link.close)
        assert await reader.read() == b""


async def test_one_who_dials_can_be_cut_off_while_others_go_on() -> None:
    async with linked() as (link, server, (reader, writer)):
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", link.port)
        own_port = writer.get_extra_info("sockname")[1]
        for one in (writer, other_writer):
            one.write(b"before\n")
        assert [await reader.readline(), await other_reader.readline()] == [b"before\n"] * 2
        link.cut(whose=lambda port: port == own_port)
        writer.write(b"held back\n")
        other_writer.write(b"passes\n")
        assert await other_reader.readline() == b"passes\n"
        assert server.lines == [b"before\n", b"before\n", b"passes\n"]
        link.mend()
        assert await reader.readline() == b"held back\n"
        other_writer.close()


async def test_several_cuts_may_overlap_and_each_is_mended_by_itself() -> None:
    async with linked() as (link, server, (reader, writer)):
        first, second = link.cut(), link.cut()
        writer.write(b"patient\n")
        answer = asyncio.ensure_future(reader.readline())
        link.mend(first)
        done, _ = await asyncio.wait([answer], timeout=0.1)
        assert not done
        link.mend(second)
        assert await answer == b"patient\n"
        assert server.lines == [b"patient\n"]


async def test_what_a_link_loses_is_sent_again_in_its_order() -> None:
    async with linked() as (link, server, (reader, writer)):
        loss = link.lose(0.5, Random("loss"))
        sent = [b"%d\n" % number for number in range(3)]
        for line in sent:
            writer.write(line)
            assert await reader.readline() == line
        assert server.lines == sent
        assert loss.hits >= 1


async def test_a_server_behind_a_link_of_another_host_has_an_address_of_that_host() -> None:
    link = Link(host=2)
    assert link.address == f"127.0.2.1:{link.port}"
    assert link.behind == f"127.0.2.2:{link.port}"
    await asyncio.to_thread(link.close)


OTHERS = 500


@contextmanager
def bound(port: int, *, reuse: bool) -> Iterator[socket.socket]:
    with socket.socket() as found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        found.bind(("127.0.0.1", port))
        yield found


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_its_process_listens_there_in_each_of_its_lives() -> None:
    reserved = ReservedPort()
    port = port_of(reserved.address)
    for _ in range(2):
        with bound(port, reuse=True) as server:
            server.listen()
            with socket.create_connection(("127.0.0.1", port)):
                pass
        with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            pass


def test_others_do_not_get_it() -> None:
    reserved = ReservedPort()
    port = port_of(reserved.address)
    with pytest.raises(OSError, match="in use") as refused, bound(port, reuse=False):
        pass
    assert refused.value.errno == errno.EADDRINUSE
    with ExitStack() as kept:
        taken = [kept.enter_context(bound(0, reuse=True)) for _ in range(OTHERS)]
        assert port not in {one.getsockname()[1] for one in taken}


def test_it_is_given_back() -> None:
    reserved = ReservedPort()
    port = port_of(reserved.address)
    del reserved
    gc.collect()
    with bound(port, reuse=False):
        pass
