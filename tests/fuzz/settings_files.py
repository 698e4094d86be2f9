"""Settings of every service: TOML files, flags and environment variables, valid and damaged."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from percolator.services.chassis.settings import (
    ServiceSettings,
    environment_name,
    flag_name,
    load,
    to_toml,
)
from percolator.services.gateway.service import GatewaySettings
from percolator.services.lockservice.service import LockServiceSettings
from percolator.services.master.service import MasterSettings
from percolator.services.oracle.service import OracleSettings
from percolator.services.tabletserver.settings import TabletServerSettings
from percolator.services.worker.service import WorkerSettings
from percolator.world import Random
from tests.fuzz.messages import damaged

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
