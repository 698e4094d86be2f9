"""Directories of exports, damaged: imported as they were, or refused, and nothing between."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Callable
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

from percolator import Table, aio, codecs
from percolator.backup.export_files import ExportFormat
from percolator.backup.exporter import export
from percolator.backup.importer import import_tables, verify
from percolator.errors import PercolatorError, SchemaError
from percolator.v1.master_pb2 import ChangeObserversRequest, Observer
from percolator.world import Random
from tests.fuzz.findings import Input, Record
from tests.fuzz.messages import damaged

_ROWS = 60
_READ_SECONDS = 10.0
goods = Table("goods", key=codecs.text)
price = goods.column("price", codecs.integer)
label = goods.column("label", codecs.raw)
_TTL = timedelta(days=365)
_WATCHED = ChangeObserversRequest(
    table=goods.name, add=[Observer(name="watcher", columns=[price.name])]
)
_PAUSED = ChangeObserversRequest(table=goods.name, pause=["watcher"])

_BOUNDARIES: tuple[Any, ...] = (
    None,
    0,
    -1,
    1,
    2**31,
    2**63,
    2**64,
    10**400,
    1.5,
    "",
    "a",
    "00",
    "zz",
    "../a",
    "/etc/passwd",
    [],
    {},
    [[]],
    True,
    "\0",
    "\ud800",
    "x" * 5_000,
)

_RESIGNED = (
    "edited record, right checksum",
    "damaged cells, right checksums",
    "edited line, right checksums",
)
"""Anyone who can sign an export can write one with other rows."""

Content = dict[str, tuple[int, bytes]]


def _edit(record: Any, chance: Random) -> None:
    """Changes one entry of a record, somewhere inside."""
    place: Any = record
    while True:
        key = chance.choice(sorted(place) if isinstance(place, dict) else range(len(place)))
        inner = place[key]
        if not isinstance(inner, dict | list) or not inner or chance.random() < 0.2:
            break
        place = inner
    if isinstance(place, dict) and chance.random() < 0.2:
        del place[key]
    else:
        place[key] = chance.choice(_BOUNDARIES)


def _edited_line(content: bytes, chance: Random) -> bytes:
    """Lines of JSON, of which one has another entry."""
    lines = content.splitlines(keepends=True)
    number = chance.randrange(len(lines))
    record = json.loads(lines[number])
    _edit(record, chance)
    lines[number] = json.dumps(record).encode() + b"\n"
    return b"".join(lines)


class Half(Exception):
    """An import that failed has left rows; or one that succeeded is different."""


class ExportDirectories:
    """Imports of exports in one format, into a new database in this process."""

    kinds: tuple[str, ...] = (
        "whole",
        "damaged bytes",
        "cut",
        "missing",
        "additional",
        "exchanged",
        "a directory",
        "edited record",
        "edited record, right checksum",
        "damaged cells, right checksums",
        "edited line, right checksums",
        "import log",
    )

    def __init__(self, directory: Path, database: aio.Database, form: ExportFormat) -> None:
        self.name = f"exports ({form})"
        self._form = form
        if form is ExportFormat.PARQUET:
            self.kinds = tuple(kind for kind in self.kinds if not kind.startswith("edited line"))
        self._database = database
        directory /= form
        self._whole = directory / "whole"
        self._used = directory / "used"
        self._content: Content = {
            f"{'amz'[at % 3]}{at:02}": (at, b"l" * (at * 90 % 4_000)) for at in range(_ROWS)
        }
        self._files: list[str] = []

    async def prepare(self) -> None:
        """Makes the export that inputs are made from; the table itself goes."""
        self._whole.mkdir(parents=True)
        await self._database.create_table(goods, ["m"], ttl={label: _TTL})
        await self._database.set_many(
            (row, {price: one, label: text}) for row, (one, text) in self._content.items()
        )
        # Registered last, so there are no notifications; and paused, as nobody could run it.
        engine = self._database.internal.engine
        for change in (_WATCHED, _PAUSED):
            await engine.catalog.change_observers(change, engine.now() + _READ_SECONDS)
        await export(self._database, self._whole, tables=[goods.name], form=self._form)
        await self._database.drop_table(goods)
        self._files = sorted(
            str(path.relative_to(self._whole)) for path in self._whole.rglob("*") if path.is_file()
        )

    # ------------------------------------------------------------------------------- making

    def make(self, kind: str, chance: Random) -> bytes:
        """The files that are different, with their content; None for one that is missing."""
        file = chance.choice(self._files)
        content = (self._whole / file).read_bytes()
        changed: dict[str, bytes | None] = {}
        match kind:
            case "damaged bytes":
                changed[file] = damaged(content, chance)
            case "cut":
                changed[file] = content[: chance.randrange(len(content))]
            case "missing":
                changed[file] = None
            case "additional":
                name = chance.choice(
                    (f"goods/part-00009{self._form.suffix}", "a.json", f"b/c{self._form.suffix}")
                )
                changed[name] = content
            case "exchanged":
                changed[file] = (self._whole / chance.choice(self._files)).read_bytes()
            case "a directory":
                changed[file] = None
                changed[f"{file}/inside"] = content
            case "edited record" | "edited record, right checksum":
                changed["manifest.json"] = self._edited(kind, chance)
            case "damaged cells, right checksums":
                changed = self._rehashed(damaged, chance)
            case "edited line, right checksums":
                changed = self._rehashed(_edited_line, chance)
            case "import log":
                log = b'{"table": "goods", "start": 1, "commit": 2}\n'
                changed["import.log"] = chance.choice(
                    (b"", b"\0" * 9, damaged(log, chance), b"{}\n")
                )
        made = {
            name: None if one is None else base64.b64encode(one).decode()
            for name, one in changed.items()
        }
        return json.dumps({"kind": kind, "files": made}).encode()

    def _edited(self, kind: str, chance: Random) -> bytes:
        if kind == "edited record" and chance.random() < 0.3:
            return chance.choice((b"[" * 100_000, b"{}", b"null", b'{"checksum": 1}', b"1" * 6_000))
        record = json.loads((self._whole / "manifest.json").read_text())
        _edit(record, chance)
        return self._signed(record) if kind.endswith("checksum") else json.dumps(record).encode()

    def _rehashed(
        self, change: Callable[[bytes, Random], bytes], chance: Random
    ) -> dict[str, bytes | None]:
        """Other cells that all checksums agree with: then only their format can betray them."""
        file = chance.choice([one for one in self._files if one.endswith(self._form.suffix)])
        content = change((self._whole / file).read_bytes(), chance)
        record = json.loads((self._whole / "manifest.json").read_text())
        for table in record["tables"]:
            for part in table["parts"]:
                if part["file"] == file:
                    part.update(bytes=len(content), sha256=sha256(content).hexdigest())
        return {file: content, "manifest.json": self._signed(record)}

    def _signed(self, record: dict[str, Any]) -> bytes:
        record.pop("checksum", None)
        record["checksum"] = sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        return json.dumps(record).encode()

    # ------------------------------------------------------------------------------ judging

    async def judge(self, data: bytes) -> str:
        """Imports it, and looks at what is there then."""
        made = json.loads(data)
        shutil.rmtree(self._used, ignore_errors=True)
        shutil.copytree(self._whole, self._used)
        for name, encoded in made["files"].items():
            path = self._used / name
            path.unlink(missing_ok=True)
            if encoded is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(encoded))
        checked = self._verified()
        try:
            return await self._imported(checked, made["kind"])
        finally:
            await self._database.drop_table(goods, missing_ok=True)

    def _verified(self) -> bool:
        try:
            verify(self._used)
        except PercolatorError:
            return False
        return True

    async def _imported(self, checked: bool, kind: str) -> str:
        try:
            await import_tables(self._database, self._used)
        except PercolatorError as error:
            await self._require_nothing()
            return type(error).__name__
        if kind in _RESIGNED:
            return "accepted"
        if not checked:
            raise Half("imported, although the export was found to be damaged")
        if await self._found() != self._content:
            raise Half("imported, and different from what was exported")
        return "accepted"

    async def _require_nothing(self) -> None:
        """After a refusal, the table does not exist, or is open and empty."""
        try:
            found = await self._found()
        except SchemaError:
            return
        if found:
            raise Half(f"refused, and yet {len(found)} rows are there")

    async def _found(self) -> Content:
        found: Content = {}
        async with self._database.snapshot(timeout=_READ_SECONDS) as snapshot:
            async for row in snapshot.scan(goods):
                found[row.key] = row[price], row[label]
        return found


async def fuzz_exports(
    exports: ExportDirectories, record: Record, *, seconds: float, seed: int
) -> None:
    """Imports one damaged export after another for so long; at least one of each kind."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    await exports.prepare()
    number = 0
    while loop.time() < deadline or number < len(exports.kinds):
        kind = exports.kinds[number % len(exports.kinds)]
        data = exports.make(kind, Random(f"{seed} exports {number}"))
        await judged(exports, Input(exports.name, kind, data), record)
        number += 1


async def judged(exports: ExportDirectories, one: Input, record: Record) -> None:
    """Imports one export, and records the outcome."""
    try:
        outcome = await exports.judge(one.data)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        outcome = "wrong"
        record.wrong(f"{exports.name}, {one.kind}: {type(error).__name__}: {error}", one)
    record.count(exports.name, one.kind, outcome)
