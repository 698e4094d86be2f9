"""The recipes of the tests that kill workers, and what their observers do."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from percolator import Table, aio, codecs
from percolator.recipes import CombineQueue, Export, ExportFile, ExportQueue, KeyChange

FILE_VARIABLE = "EXPORTS_OF_THE_TEST"
file = ExportFile(Path(os.environ.get(FILE_VARIABLE, "exports.jsonl")))

sums = CombineQueue("sums", key=codecs.text, value=codecs.integer, combine=sum, buckets=4)
mirrors = Table("mirrors")
mirror = mirrors.column("mirror", codecs.integer)


@sums.changed(batch=20)
async def reflect(tx: aio.Transaction, changes: Sequence[KeyChange[str, int]]) -> None:
    for key, old, new in changes:
        if await tx.get(key, mirror) != old or new is None:
            raise ValueError(f"{key}: the mirror is not {old}")
        await tx.set(key, mirror, new)


out = ExportQueue("out", key=codecs.text, value=codecs.json, buckets=3)


@out.exporter(batch=10)
def send(exports: Sequence[Export[str, object]]) -> None:
    file.append(exports)


observers = [reflect, send]
