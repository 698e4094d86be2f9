"""Frames are cut out of whatever pieces the network delivers, and noise is refused at once."""

from __future__ import annotations

import pytest

from percolator.wire.frames import HEADER, PREAMBLE, Frame, FrameReader, Kind, NotFrames, frame

SENT = [
    Frame(Kind.HELLO, 0, b"hello"),
    Frame(Kind.CALL, 1, b""),
    Frame(Kind.ANSWER, 2**32 - 1, bytes(1000)),
]
BYTES = PREAMBLE + b"".join(frame(Kind(one.kind), one.call, one.body) for one in SENT)


def cut(reader: FrameReader) -> list[Frame]:
    found = []
    while (one := reader.next()) is not None:
        found.append(one)
    return found


@pytest.mark.parametrize("size", [1, 2, 7, 100, len(BYTES)])
def test_frames_come_out_as_they_were_sent_whatever_the_pieces(size: int) -> None:
    reader = FrameReader(1000, PREAMBLE)
    found = []
    for start in range(0, len(BYTES), size):
        reader.add(BYTES[start : start + size])
        found += cut(reader)
    assert found == SENT
    assert not reader.kept


def test_a_part_of_a_frame_is_kept() -> None:
    reader = FrameReader(1000)
    reader.add(frame(Kind.PING, 0)[:-1])
    assert cut(reader) == []
    assert reader.kept


@pytest.mark.parametrize("noise", [b"G", b"\x16\x03\x01", PREAMBLE[:-2] + b"2\n"])
def test_what_does_not_begin_with_the_preamble_is_refused_at_its_first_byte(noise: bytes) -> None:
    reader = FrameReader(1000, PREAMBLE)
    reader.add(noise)
    with pytest.raises(NotFrames, match="does not begin"):
        reader.next()


def test_a_frame_that_is_too_large_is_refused_by_its_header() -> None:
    reader = FrameReader(1000)
    reader.add(HEADER.pack(1001, Kind.CALL, 1))
    with pytest.raises(NotFrames, match="1001 bytes, at most 1000"):
        reader.next()
