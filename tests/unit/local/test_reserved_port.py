"""A reserved port is kept for the one that asks for it by number."""

from __future__ import annotations

import errno
import gc
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from percolator.services.local.process import ReservedPort

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
