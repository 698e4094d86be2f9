"""Hostile bytes for the port for frames: what is nearly a hello, and then what is nearly a call."""

from __future__ import annotations

from percolator.v1.frames_pb2 import FramesHello
from percolator.wire.credentials import SCHEME
from percolator.wire.frames.layout import CALL_HEAD, HEADER, PREAMBLE, Kind, frame
from percolator.world import Random

_FRAMES_MAX = 40
_NUMBERS = 4
"""Few, so that calls collide and cancel each other."""


def hostile(chance: Random, server_id: str, token: str) -> bytes:
    """A connection's worth of bytes, most of which get past the hello."""
    sent = PREAMBLE + frame(Kind.HELLO, 0, _hello(chance, server_id, token))
    sent += b"".join(_frame(chance) for _ in range(chance.randrange(_FRAMES_MAX)))
    if chance.random() < 0.3:
        sent = sent[: chance.randrange(len(sent))]
    if chance.random() < 0.2:
        at = chance.randrange(len(sent) + 1)
        sent = sent[:at] + chance.randbytes(chance.randrange(1, 9)) + sent[at:]
    return sent


def _hello(chance: Random, server_id: str, token: str) -> bytes:
    if chance.random() < 0.1:
        return chance.randbytes(chance.randrange(50))
    authorization = chance.choice(
        (SCHEME + token, SCHEME + token, SCHEME + "x", "", "\x00" * 2_000)
    )
    return FramesHello(server_id=server_id, authorization=authorization).SerializeToString()


def _frame(chance: Random) -> bytes:
    number = chance.randrange(_NUMBERS)
    match chance.choice(("call", "call", "call", "cancel", "ping", "kind", "size")):
        case "call":
            head = CALL_HEAD.pack(
                chance.choice((0, 0, 1, 2, 3, 255)), chance.choice((0, 1, 100, 2**32 - 1))
            )
            return frame(Kind.CALL, number, head + chance.randbytes(chance.randrange(60)))
        case "cancel":
            return frame(Kind.CANCEL, number)
        case "ping":
            return frame(Kind.PING, number, chance.randbytes(chance.randrange(9)))
        case "kind":
            return HEADER.pack(0, chance.randrange(256), number)
    return HEADER.pack(chance.choice((2**32 - 1, 2**24 + 6, 5, 1)), Kind.CALL, number)
