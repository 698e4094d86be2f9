"""What is fuzzed without a cluster: files that an operator may hand to the programs.

A target makes inputs, and judges one by giving it to the real code. It returns "accepted", or the
name of the typed refusal; any other exception is a finding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from percolator.world import Random
from tests.fuzz.certificate_files import CertificateFiles, TokenFiles
from tests.fuzz.findings import Input, Record
from tests.fuzz.observer_modules import ObserverModules
from tests.fuzz.settings_files import SettingsFiles


class Target(Protocol):
    """One kind of file, and the code that reads it."""

    @property
    def name(self) -> str: ...

    @property
    def kinds(self) -> Sequence[str]: ...

    def make(self, kind: str, chance: Random) -> bytes:
        """An input, complete in itself."""
        ...

    def judge(self, data: bytes) -> str: ...


TARGETS: dict[str, Callable[[Path], Target]] = {
    "settings": SettingsFiles,
    "observer modules": ObserverModules,
    "certificates": CertificateFiles,
    "tokens": TokenFiles,
}


def judged(target: Target, one: Input, record: Record) -> None:
    """Gives one input to its target, and records the outcome."""
    try:
        outcome = target.judge(one.data)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 (whatever it is, it is the finding)
        outcome = "wrong"
        record.wrong(f"{target.name} ({one.kind}): {type(error).__name__}: {error}", one)
    record.count(target.name, one.kind, outcome)


def fuzz_files(directory: Path, record: Record, *, seconds: float, seed: int) -> None:
    """Gives inputs to all targets, in turn, for so long; at least one of each kind."""
    targets = []
    for name, build in TARGETS.items():
        own = directory / name.replace(" ", "-")
        own.mkdir()
        targets.append(build(own))
    deadline = time.monotonic() + seconds
    number = 0
    while time.monotonic() < deadline or number < max(len(one.kinds) for one in targets):
        for target in targets:
            kind = target.kinds[number % len(target.kinds)]
            data = target.make(kind, Random(f"{seed} {target.name} {number}"))
            judged(target, Input(target.name, kind, data), record)
        number += 1
