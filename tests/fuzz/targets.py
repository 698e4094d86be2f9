"""Targets without a cluster: files that an operator may hand to the programs.

A target makes inputs, and judges one by giving it to the real code. It returns "accepted", or the
name of the typed refusal; any other exception is a finding.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from percolator import Table, aio, codecs
from percolator.backup.export_files import ExportFormat
from percolator.backup.exporter import export
from percolator.backup.importer import import_tables, verify
from percolator.errors import InvalidArgument, PercolatorError, SchemaError
from percolator.observers.definition import load as load_observers
from percolator.services.chassis.access import Tokens
from percolator.services.chassis.settings import (
    ServiceSettings,
    environment_name,
    flag_name,
    load,
    to_toml,
)
from percolator.services.gateway.service import GatewaySettings
from percolator.services.local.authority import files_in, make_all
from percolator.services.lockservice.service import LockServiceSettings
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.worker.service import WorkerSettings
from percolator.v1.master_pb2 import ChangeObserversRequest, Observer
from percolator.wire import tls
from percolator.wire.credentials import TOKEN_VARIABLE, client_credentials
from percolator.world import Random
from tests.fuzz.findings import Input, Record
from tests.fuzz.messages import damaged

# Certificates, keys and tokens, damaged: refused with the name of the file, and never shown.

_PARTS = ("ca", "certificate", "key")
_SHOWN_CHARACTERS = 24
"""A piece of a secret that is as long as this is recognised in an error."""


class SecretShown(Exception):
    """An error shows a part of a secret."""


class CertificateFiles:
    """Reads and tries certificates as services and clients do."""

    name = "certificates"
    kinds = ("valid", "damaged", "cut", "exchanged", "twice", "of another authority", "noise")

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._sets = []
        for name in ("one", "other"):
            (directory / name).mkdir()
            make_all(directory / name)
            files = files_in(directory / name / "cluster")
            self._sets.append({part: Path(getattr(files, part)).read_bytes() for part in _PARTS})
        self._used = directory / "used"
        self._used.mkdir()

    def make(self, kind: str, chance: Random) -> bytes:
        files, others = dict(self._sets[0]), self._sets[1]
        part = chance.choice(_PARTS)
        match kind:
            case "damaged":
                files[part] = damaged(files[part], chance)
            case "cut":
                files[part] = files[part][: chance.randrange(len(files[part]))]
            case "exchanged":
                files[part] = files[chance.choice(_PARTS)]
            case "twice":
                files[part] += chance.choice((files[part], others[part], b"\n" * 9, b"# text\n"))
            case "of another authority":
                files[part] = others[part]
            case "noise":
                files[part] = chance.choice((b"", b"\0" * 100, chance.randbytes(500), b"\xff" * 9))
        made = {name: base64.b64encode(content).decode() for name, content in files.items()}
        return json.dumps({"files": made, "serves": chance.random() < 0.5}).encode()

    def judge(self, data: bytes) -> str:
        made = json.loads(data)
        contents = {part: base64.b64decode(made["files"][part]) for part in _PARTS}
        files = files_in(self._used)
        for part in _PARTS:
            Path(getattr(files, part)).write_bytes(contents[part])
        try:
            tls.load(files, "tls_{}".format, serves=made["serves"])
        except InvalidArgument as error:
            require_unseen(contents["key"], str(error))
            return "refused"
        return "accepted"


class TokenFiles:
    """Reads the tokens of a cluster, and the token of a client."""

    name = "tokens"
    kinds = ("valid", "damaged", "edited", "noise", "a client's token")

    def __init__(self, directory: Path) -> None:
        make_all(directory)
        self._valid = (directory / "cluster" / "tokens.toml").read_bytes()
        self._file = directory / "used"
        self._tls = files_in(directory / "client")

    def make(self, kind: str, chance: Random) -> bytes:
        text = self._valid
        match kind:
            case "damaged":
                text = damaged(text, chance)
            case "edited":
                old, new = chance.choice(
                    [
                        (b'"admin"', b'"root"'),
                        (b"[admin]", b"[a b]"),
                        (b"sha256", b"sha512"),
                        (b'role = "', b'role = ["'),
                        (b"[client]", b"[admin]"),
                        (b"sha256 =", b"a = 1\nsha256 ="),
                    ]
                )
                text = text.replace(old, new)
            case "noise":
                text = chance.choice((b"", chance.randbytes(80), b"a=" + b"[" * 3_000, b"\xff"))
            case "a client's token":
                text = chance.choice(
                    (b"", b"abc", b"a b", b"\xff\n", b"a\nb\n", b"x" * 2_000, b"t\n")
                )
        return b"client\n" + text if kind == "a client's token" else b"servers\n" + text

    def judge(self, data: bytes) -> str:
        whose, _, text = data.partition(b"\n")
        self._file.write_bytes(text)
        try:
            if whose == b"client":
                client_credentials(self._tls, environment={TOKEN_VARIABLE: str(self._file)})
            else:
                Tokens(self._file)
        except InvalidArgument as error:
            require_unseen(text, str(error))
            return "refused"
        return "accepted"


def require_unseen(secret: bytes, error: str) -> None:
    """Raises if a long enough piece of a line of the secret is in the error's text."""
    for line in secret.decode("latin-1").splitlines():
        for at in range(len(line) - _SHOWN_CHARACTERS):
            if line[at : at + _SHOWN_CHARACTERS] in error and "-----" not in line:
                raise SecretShown(error)


# Settings of every service: TOML files, flags and environment variables, valid and damaged.

KINDS: dict[str, type[ServiceSettings]] = {
    kind.service: kind
    for kind in (
        GatewaySettings,
        LockServiceSettings,
        MasterSettings,
        OracleSettings,
        TabletServerSettings,
        WorkerSettings,
    )
}

_VALUES = (
    "",
    " ",
    "0",
    "1",
    "-1",
    "1.5",
    "1e308",
    "-1e308",
    "nan",
    "inf",
    "0x10",
    "1_000",
    "9" * 5_000,
    "true",
    "false",
    "auto",
    "json",
    "127.0.0.1:0",
    "127.0.0.1:7100",
    "[::1]:7100",
    "[::1",
    "a:99999",
    "a:b:c",
    "h" * 300 + ":1",
    "a:1,b:2",
    ",",
    "a:1,,b:2",
    "\0",
    "\ud800",
    "ü",
    "/",
    "x" * 5_000,
)
_REFUSED = 2


class SettingsError(Exception):
    """The settings were neither accepted nor refused in one line."""


class SettingsFiles:
    """Loads settings as a service does at its start."""

    name = "settings"
    kinds = ("valid", "flags", "environment", "a file", "a damaged file", "noise")

    def __init__(self, directory: Path) -> None:
        self._file = directory / "settings.toml"

    def make(self, kind: str, chance: Random) -> bytes:
        service = chance.choice(sorted(KINDS))
        settings = KINDS[service]
        argv, environment, text = self._needed(settings), {}, b""
        fields = sorted(settings.model_fields)
        if kind == "flags":
            for field in chance.sample(fields, chance.randrange(1, 4)):
                argv += [chance.choice((flag_name(field), flag_name(field)[:-1], f"-{field}"))]
                argv += [chance.choice(_VALUES).replace("\0", "")][: chance.randrange(2)]
        elif kind == "environment":
            for field in chance.sample(fields, chance.randrange(1, 4)):
                environment[environment_name(settings, field)] = chance.choice(_VALUES)
        elif kind != "valid":
            text = self._toml(settings, chance)
            if kind == "a damaged file":
                text = damaged(text, chance)
            elif kind == "noise":
                text = chance.choice((chance.randbytes(200), b"a=" + b"[" * 2_000, b"[[a]]\n" * 50))
        encoded = base64.b64encode(text).decode()
        made = {"service": service, "argv": argv, "environment": environment, "file": encoded}
        return json.dumps(made).encode()

    def _needed(self, settings: type[ServiceSettings]) -> list[str]:
        """The flags without which the service does not start."""
        given = []
        if "store" in settings.model_fields:
            given += ["--store", "store"]
        if settings is not MasterSettings:
            given += ["--masters", "127.0.0.1:7100"]
        if "observers" in settings.model_fields:
            given += ["--observers", "a:b"]
        return given

    def _toml(self, settings: type[ServiceSettings], chance: Random) -> bytes:
        """A file of all settings, some of them with values of other types."""
        lines = to_toml(load(settings, self._needed(settings), {})).splitlines()
        for _ in range(chance.randrange(3)):
            at = chance.randrange(len(lines))
            key, equals, _ = lines[at].partition(" = ")
            if equals:
                lines[at] = f"{key} = {self._value(chance)}"
        return "\n".join(lines).encode()

    def _value(self, chance: Random) -> str:
        text: Any = chance.choice(_VALUES).encode("utf-8", "replace").decode()
        return chance.choice(
            [json.dumps(text), "[]", "{}", "true", "-1", "nan", "1979-05-27", "[1, [2]]", "1e400"]
        )

    def judge(self, data: bytes) -> str:
        made = json.loads(data)
        argv: Sequence[str] = made["argv"]
        if text := base64.b64decode(made["file"]):
            self._file.write_bytes(text)
            argv = [*argv, "--config", str(self._file)]
        said, printed = io.StringIO(), io.StringIO()
        try:
            with redirect_stderr(said), redirect_stdout(printed):
                load(KINDS[made["service"]], argv, made["environment"])
        except SystemExit as end:
            return self._ended(made["service"], end.code, said.getvalue())
        return "accepted"

    def _ended(self, service: str, code: object, said: str) -> str:
        if code == 0:
            return "accepted"
        one_line = said.endswith("\n") and said.count("\n") == 1
        if code != _REFUSED or not one_line or not said.startswith(f"{service}: "):
            raise SettingsError(f"exit code {code}, and this instead of one line: {said!r:.300}")
        return "refused"


# Modules of observers that do not import, name nothing that can be run, or end the process.

_VALID = """from percolator import Table, codecs, observes

table = Table("observed")
column = table.column("column", codecs.integer)
other = Table("other").column("column", codecs.integer)


@observes(column)
async def run(tx, row):
    pass


observers = [run]
"""
_INSTEAD_OF_THE_LIST = (
    "run",
    "None",
    "()",
    "[]",
    "[run, run]",
    "[run, None]",
    "{run}",
    "'run'",
    "iter([run])",
    "[[run]]",
    "[type]",
    "object()",
    "(run,)",
    "Exception",
    "b'run'",
    "range(3)",
)
_AT_IMPORT = (
    "import sys; sys.exit(0)",
    "import sys; sys.exit('done')",
    "raise SystemExit(3)",
    "raise ValueError",
    "raise BaseException('all of it')",
    "raise ExceptionGroup('two', [ValueError(), KeyError()])",
    "import no_such_module",
    "from percolator import no_such_name",
    "def f(): return f()\nf()",
    "1 / 0",
    "class Odd(Exception):\n    def __str__(self): raise ValueError('no text')\nraise Odd",
    "__getattr__ = 1",
    "def __getattr__(name): raise KeyError(name)",
    "import percolator.cli.nothing",
    "class L(list):\n    def __len__(self): return -1\n",
)
_DECORATED = (
    "@observes()",
    "@observes(column, other)",
    "@observes('column')",
    "@observes(column, name='')",
    "@observes(column, name='x' * 1000)",
    "@observes(column, attempts=0)",
    "@observes",
    "@observes(None)",
    "@observes(column, concurrency=-1)",
    "@observes(column, deadline_seconds=float('nan'))",
    "@observes(column, weak=1)",
    "@observes(column, nothing=1)",
    "@observes(column)\n@observes(column)",
)
_REFERENCES = (
    "{}:nothing",
    "{}",
    "{}:",
    ":observers",
    "{}:observers:more",
    "{}.a:b",
    "..:a",
    "{}: observers",
)


class ObserverModules:
    """Loads observers as a worker does at its start."""

    name = "observer modules"
    kinds = ("valid", "the list", "at import", "decorated", "reference", "damaged text", "noise")

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, kind: str, chance: Random) -> bytes:
        source, reference = _VALID, "{}:observers"
        match kind:
            case "the list":
                source += f"observers = {chance.choice(_INSTEAD_OF_THE_LIST)}\n"
            case "at import":
                source += chance.choice(_AT_IMPORT) + "\n"
            case "decorated":
                source = source.replace("@observes(column)", chance.choice(_DECORATED))
            case "reference":
                reference = chance.choice(_REFERENCES)
        content = source.encode()
        if kind == "damaged text":
            content = damaged(content, chance)
        elif kind == "noise":
            content = chance.choice((b"", b"\0", chance.randbytes(100), b"(" * 3_000, b"\xff\xfe"))
        return reference.encode() + b"\n" + content

    def judge(self, data: bytes) -> str:
        reference, _, content = data.partition(b"\n")
        module = f"fuzzed_{sha256(data).hexdigest()[:16]}"
        file = self._directory / f"{module}.py"
        file.write_bytes(content)
        sys.path.insert(0, str(self._directory))
        importlib.invalidate_caches()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load_observers(reference.decode().format(module))
        except InvalidArgument:
            return "refused"
        finally:
            sys.path.remove(str(self._directory))
            sys.modules.pop(module, None)
            file.unlink()
        return "accepted"


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


# Directories of exports, damaged: imported as they were, or refused, and nothing between.

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
        await export_judged(exports, Input(exports.name, kind, data), record)
        number += 1


async def export_judged(exports: ExportDirectories, one: Input, record: Record) -> None:
    """Imports one export, and records the outcome."""
    try:
        outcome = await exports.judge(one.data)
    except Exception as error:  # noqa: BLE001 (whatever it is, it is the finding)
        outcome = "wrong"
        record.wrong(f"{exports.name}, {one.kind}: {type(error).__name__}: {error}", one)
    record.count(exports.name, one.kind, outcome)
