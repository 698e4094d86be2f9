"""Certificates, keys and tokens, damaged: refused with the name of the file, and never shown."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from percolator.errors import InvalidArgument
from percolator.services.chassis.gate import Tokens
from percolator.services.local.authority import files_in, make_all
from percolator.wire import tls
from percolator.wire.credentials import TOKEN_VARIABLE, client_credentials
from percolator.world import Random
from tests.fuzz.messages import damaged

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
