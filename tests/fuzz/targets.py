"""What is fuzzed without a cluster: files that an operator may hand to the programs.

A target makes inputs, and judges one by giving it to the real code. It returns "accepted", or the
name of the typed refusal; any other exception is a finding.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stderr, redirect_stdout
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from percolator.errors import InvalidArgument
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
