"""`percolator serve`: each service starts quickly, and wrong commands are refused in one line."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from percolator.services import serve
from percolator.services.serve import NEEDED, SERVICES, main
from percolator.v1.cluster_pb2 import ServiceKind

ROOT = Path(__file__).parents[3]

DISPENSABLE = {"uvloop", "cryptography"}
"""Without uvloop, services are slower; only `percolator certs` needs cryptography."""


def python(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_every_kind_of_service_can_be_served() -> None:
    kinds = {name.removeprefix("SERVICE_KIND_").replace("_", "") for name in ServiceKind.keys()}  # noqa: SIM118 (it is no dict)
    assert {name.upper() for name in SERVICES} == kinds - {"UNSPECIFIED"}


def test_help_lists_every_service(capsys: pytest.CaptureFixture[str]) -> None:
    for flag in ("-h", "--help"):
        assert main([flag]) == 0
        told = capsys.readouterr().out
        assert told.startswith("usage: percolator serve SERVICE [OPTION ...]")
        assert all(f"\n  {name} " in told for name in SERVICES)


@pytest.mark.parametrize("name", SERVICES)
def test_each_service_has_help_of_its_own(name: str) -> None:
    command = [sys.executable, "-m", "percolator.cli", "serve", name, "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: percolator serve {name} [--SETTING VALUE ...]")
    assert "\n  --listen VALUE" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "expected a service: oracle, lockservice, "),
        ([""], "there is no service ''; there are oracle, "),
        (["orcale"], "there is no service 'orcale'; did you mean oracle?"),
        (["Oracle"], "there is no service 'Oracle'; did you mean oracle?"),
        (["chassis"], "there is no service 'chassis'"),
        (["--listen=:1", "oracle"], "--listen=:1: options come after the service, one of oracle, "),
    ],
)
def test_a_service_that_does_not_exist_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    printed = capsys.readouterr()
    (line,) = printed.err.splitlines()
    assert line.startswith(f"error: percolator serve: {said}")
    assert printed.out == ""


def test_services_without_the_extra_name_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    leveldb = "plyvel_next" if sys.version_info >= (3, 13) else "plyvel"
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == leveldb else name)
    assert main(["oracle", "--help"]) == 2
    assert capsys.readouterr().err == (
        f"error: the services need {leveldb}: pip install 'percolator-store[server]'\n"
    )


def test_services_look_for_all_that_the_extra_installs() -> None:
    wanted = map(Requirement, requires("percolator-store") or ())
    installed = {
        one.name
        for one in wanted
        if one.marker and one.marker.evaluate({"extra": "server"}) and not one.marker.evaluate()
    }
    providers = packages_distributions()
    looked_for = {name for module in NEEDED for name in providers[module]}
    assert {name.replace("_", "-") for name in looked_for} == installed - DISPENSABLE


def test_no_service_imports_what_only_terminals_need() -> None:
    """An observer may still import it afterwards."""
    imports = "; ".join(f"import percolator.services.{name}.service" for name in SERVICES)
    unwanted = "('rich', 'typer', 'percolator.cli.app')"
    program = (
        f"import sys, percolator.cli; {imports};"
        f"print([name for name in {unwanted} if name in sys.modules]); import rich"
    )
    assert python(program) == "[]\n"


@pytest.mark.parametrize("name", SERVICES)
def test_no_garbage_is_sought_in_what_a_service_imports(name: str) -> None:
    """Looking through all of it, while it was imported and at the end, took a tenth of a start."""
    program = (
        "import atexit, gc, sys; runs = [];"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000));"  # called last
        f"sys.argv = ['percolator', 'serve', '{name}', '--help'];"
        "import percolator.cli, percolator.services.serve;"
        "atexit.register(lambda: print(runs));"
        "gc.callbacks.append(lambda phase, info: runs.append(phase));"
        "percolator.cli.main()"
    )
    assert python(program).splitlines()[-2:] == ["[]", "True"]


def test_nothing_is_imported_before_the_service_that_is_asked_for() -> None:
    program = (
        "import sys; sys.argv = ['percolator', 'serve', 'nothing'];"
        "from percolator.cli import main\n"
        "try: main()\n"
        "except SystemExit as ended: print(ended.code, *sorted(\n"
        "    name for name in sys.modules if name.startswith(('percolator', 'typer', 'grpc'))))"
    )
    assert python(program) == (
        "2 percolator percolator.cli percolator.services percolator.services.serve\n"
    )
