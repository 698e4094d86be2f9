"""The bytes of the mark, the one thing that an oracle must not lose. See docs/formats.md."""

from __future__ import annotations

import re
import zlib
from dataclasses import dataclass

from percolator.errors import InvalidArgument, StoreFault, StoreUnusable, WrongCluster
from percolator.timestamps import PHYSICAL_MILLISECONDS_MAX

FORMAT = 2
"""A mark without an epoch is written in format 1, which every release reads."""

_CLUSTER_ID = re.compile(r"[\x21-\x7e]{0,128}")
_FIRST_LINE = re.compile(rb"percolator-oracle-mark ([0-9]{1,9})\n")
_FORMAT_1 = re.compile(
    rb"(percolator-oracle-mark 1\n"
    rb"cluster=([\x21-\x7e]{0,128})\n"
    rb"milliseconds=([0-9]{1,14})\n)"
    rb"crc32=([0-9a-f]{8})\n"
)
_FORMAT_2 = re.compile(
    rb"(percolator-oracle-mark 2\n"
    rb"cluster=([\x21-\x7e]{0,128})\n"
    rb"milliseconds=([0-9]{1,14})\n"
    rb"epoch=([0-9]{1,19})\n)"
    rb"crc32=([0-9a-f]{8})\n"
)


@dataclass(frozen=True)
class Mark:
    """The physical part of every timestamp ever handed out is below `milliseconds`."""

    milliseconds: int
    cluster_id: str
    """The cluster of the timestamps; empty for an oracle that served without a master."""
    epoch: int = 0
    """The catalogue's epoch; 0 if it was never raised."""

    def __post_init__(self) -> None:
        # An id that does not fit the format could be written, and then never be read again.
        if not _CLUSTER_ID.fullmatch(self.cluster_id):
            raise InvalidArgument("cluster_id", f"{self.cluster_id[:64]!r} is not printable ASCII")

    def encode(self) -> bytes:
        body = (
            f"percolator-oracle-mark {FORMAT if self.epoch else 1}\n"
            f"cluster={self.cluster_id}\n"
            f"milliseconds={self.milliseconds}\n" + (f"epoch={self.epoch}\n" if self.epoch else "")
        ).encode("ascii")
        return body + f"crc32={zlib.crc32(body):08x}\n".encode("ascii")

    @classmethod
    def decode(cls, data: bytes, where: str) -> Mark:
        """Refuses everything that `encode` of this version cannot have written."""
        first_line = _FIRST_LINE.match(data)
        if first_line is not None and int(first_line[1]) > FORMAT:
            raise WrongCluster(
                f"{where} was written by a newer version: format {int(first_line[1])}, "
                f"this one knows {FORMAT}",
                expected=f"format {FORMAT}",
                found=f"format {int(first_line[1])}",
            )
        whole = _FORMAT_1.fullmatch(data) or _FORMAT_2.fullmatch(data)
        if whole is None or zlib.crc32(whole[1]) != int(whole[whole.re.groups], 16):
            raise _damaged(where)
        epoch = int(whole[4]) if whole.re is _FORMAT_2 else 0
        milliseconds = int(whole[3])
        if milliseconds > PHYSICAL_MILLISECONDS_MAX:
            raise _damaged(where)
        return cls(milliseconds, whole[2].decode("ascii"), epoch)


def _damaged(where: str) -> StoreUnusable:
    return StoreUnusable(
        f"{where} is damaged, and a guess could hand out timestamps twice; docs/formats.md says "
        "how to write a new one",
        fault=StoreFault.DAMAGED,
    )
