"""The names in a tablet's directory: one subdirectory per ownership, with its stage.

    e7            live: the owner at epoch 7 serves from it
    e7.sealed     a later owner took the name away; never written again
    e7.tmp        the claim of a process that is taking over at epoch 7
    e7.withdrawn  published, then given up before anything was served; or a ghost: created under
                  the live name after that was sealed. Only ever deleted

An epoch is never used twice, so each name is created at most once, except for ghosts. Other names
are not epochs and are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

_PATTERN = re.compile(r"e([1-9][0-9]{0,19})(\.sealed|\.tmp|\.withdrawn)?")


class Stage(Enum):
    """The stage of a directory in the life of its epoch; the value is the suffix of its name."""

    LIVE = ""
    SEALED = ".sealed"
    CLAIM = ".tmp"
    WITHDRAWN = ".withdrawn"


@dataclass(frozen=True)
class EpochName:
    """The name of one epoch directory."""

    epoch: int
    stage: Stage

    def __str__(self) -> str:
        return f"e{self.epoch}{self.stage.value}"


@lru_cache(maxsize=1024)  # the few names in a directory, which are listed again and again
def parse(name: str) -> EpochName | None:
    """The epoch that a directory entry names; None for any other entry."""
    match = _PATTERN.fullmatch(name)
    return EpochName(int(match[1]), Stage(match[2] or "")) if match else None


def parse_all(names: Iterable[str]) -> list[EpochName]:
    """The epochs among directory entries, lowest first."""
    found = [parsed for parsed in map(parse, names) if parsed is not None]
    return sorted(found, key=lambda name: (name.epoch, name.stage.value))


def highest_sealed(names: Iterable[EpochName], below: int) -> EpochName | None:
    """The newest state that an owner before epoch `below` left behind."""
    sealed = [name for name in names if name.stage is Stage.SEALED and name.epoch < below]
    return max(sealed, key=lambda name: name.epoch, default=None)
