"""The wheel built by `make wheel`, installed without extras: a client, and nothing that only
services need; and with the extra `server`: every service."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import tomllib
import zipfile
from collections.abc import Iterator
from email import message_from_bytes
from pathlib import Path

import pytest

from percolator.services.local.cluster import LocalCluster
from percolator.services.serve import NEEDED, SERVICES
from tests.packaging.conftest import ROOT, empty_environment

pytestmark = pytest.mark.timeout(180)  # the first test fetches and installs

HERE = Path(__file__).parent
MAY_NEED = {
    "percolator.spark": {"pyspark", "pyarrow"},
    "percolator.backup": {"pyarrow"},
    "percolator.bucket.s3": {"obstore"},
    "percolator.services": {*NEEDED, "cryptography"},
    "percolator.testing.pytest_plugin": {"pytest"},
}
"""Modules that work only with the extra, or pytest, installed."""


@pytest.fixture(scope="module")
def environment(wheel: Path, constraints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and its requirements, in the locked versions."""
    programs = empty_environment(tmp_path_factory.mktemp("environment"))
    pip = [str(programs / "pip"), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--constraint", str(constraints), str(wheel)], check=True)
    return programs


@pytest.fixture(scope="module")
def with_services(wheel: Path, constraints: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment with the wheel and what its services need."""
    programs = empty_environment(tmp_path_factory.mktemp("with_services"))
    pip = [str(programs / "pip"), "install", "--quiet", "--no-compile"]
    subprocess.run([*pip, "--constraint", str(constraints), f"{wheel}[server]"], check=True)
    return programs


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(tmp_path_factory.mktemp("cluster"), tablet_servers=1) as started:
        yield started


def _command(cluster: LocalCluster) -> dict[str, str]:
    return {"PERCOLATOR_ADDRESS": cluster.address, "PATH": "/usr/bin:/bin"}


def test_the_wheel_holds_the_library_and_the_services_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    info = f"{wheel.name.removesuffix('-py3-none-any.whl')}.dist-info"
    assert tops == {"percolator", "pyspark_percolator", info}
    assert {"percolator/py.typed", "percolator/v1/cells_pb2.pyi", f"{info}/licenses/LICENSE"} <= {
        *names
    }
    tracked = subprocess.run(
        ["git", "ls-files", "percolator/*.py", "pyspark_percolator/*.py", "services/*.py"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    expected = [
        f"percolator/{name}" if name.startswith("services/") else name
        for name in tracked
        if (ROOT / name).exists()
    ]
    assert [name for name in expected if name not in names] == []


def test_the_wheel_asks_for_what_a_client_needs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith(".dist-info/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    always = [one for one in metadata.get_all("Requires-Dist", []) if "extra ==" not in one]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bare = re.compile(r"^[\w-]+")
    assert {bare.findall(one)[0] for one in always} == {
        bare.findall(one)[0] for one in project["dependencies"]
    }
    assert {"spark", "export", "server"} <= set(metadata.get_all("Provides-Extra", []))


def test_nothing_is_installed_that_a_client_does_not_need(environment: Path) -> None:
    absent = [
        "plyvel",
        "plyvel_next",
        "pyspark",
        "pyarrow",
        "prometheus_client",
        "structlog",
        "tests",
    ]
    program = (
        "import importlib.util, sys\n"
        "print([name for name in sys.argv[1:] if importlib.util.find_spec(name)])"
    )
    found = subprocess.run(
        [environment / "python", "-I", "-c", program, *absent],
        check=True,
        capture_output=True,
        text=True,
    )
    assert found.stdout == "[]\n"
    subprocess.run([environment / "pip", "check"], check=True, capture_output=True)


def test_every_module_is_there_or_names_what_it_needs(environment: Path) -> None:
    program = """
import importlib, pkgutil, percolator
for found in pkgutil.walk_packages(percolator.__path__, "percolator."):
    if found.name.endswith("__main__"): continue
    try: importlib.import_module(found.name)
    except ModuleNotFoundError as error: print(found.name, error.name)
"""
    done = subprocess.run(
        [environment / "python", "-I", "-c", program], capture_output=True, text=True, check=True
    )
    refused = dict(line.split() for line in done.stdout.splitlines())
    unexpected = {
        module: missing
        for module, missing in refused.items()
        if not any(
            module.startswith(package) and missing in extra for package, extra in MAY_NEED.items()
        )
    }
    assert unexpected == {}


def test_a_program_a_worker_and_the_command_line_work_against_a_cluster(
    environment: Path, cluster: LocalCluster, tmp_path: Path
) -> None:
    for name in ("program.py", "watched_notes.py"):
        shutil.copy(HERE / name, tmp_path)

    def run(*arguments: str) -> str:
        return subprocess.run(
            [str(environment / arguments[0]), *arguments[1:]],
            cwd=tmp_path,
            env=_command(cluster),
            check=True,
            capture_output=True,
            text=True,
            timeout=40,
        ).stdout

    worker = subprocess.Popen(
        [environment / "percolator", "worker", "--observers", "watched_notes:observers"],
        cwd=tmp_path,
        env=_command(cluster),
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert worker.stderr is not None
        waiting = "waiting: there is no table 'notes'"
        assert any(line.startswith(waiting) for line in iter(worker.stderr.readline, ""))
        assert run("python", "program.py").splitlines() == ["one two", "conflict"]
        # On a busy machine, it may say before that it waits for an answer.
        assert "running count of notes\n" in iter(worker.stderr.readline, "")
        run("percolator", "set", "notes", "c", "text=four five six")
        run("percolator", "wait")
        got = run("percolator", "get", "notes", "c", "words", "--as", "integer")
        assert got.split()[-3:] == ["c", "words", "3"]
    finally:
        worker.send_signal(signal.SIGTERM)
        _, said = worker.communicate(timeout=30)
    assert (worker.returncode, said.splitlines()[-1]) == (0, "stopping"), said


def test_a_database_in_memory_comes_with_it(environment: Path) -> None:
    program = """
import percolator.testing
from percolator import Table, codecs
table = Table("t")
column = table.column("c", codecs.text)
with percolator.testing.connect() as db:
    db.create_table(table)
    with db.transaction() as tx: tx.set("a", column, "kept")
    with db.snapshot() as snapshot: print(snapshot.get("a", column))
"""
    done = subprocess.run(
        [environment / "python", "-I", "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "kept\n"


def test_the_wheel_holds_no_test_code_beyond_the_documented_doubles(environment: Path) -> None:
    """Simulator and checker stay in `tests/`: all of `percolator.testing` serves its documented
    entry points."""
    program = """
import pkgutil, sys
import percolator.testing, percolator.testing.row_database
found = pkgutil.walk_packages(percolator.testing.__path__, "percolator.testing.")
print(*({one.name for one in found} - sys.modules.keys()))
"""
    done = subprocess.run(
        [environment / "python", "-I", "-c", program], check=True, capture_output=True, text=True
    )
    assert done.stdout == "percolator.testing.pytest_plugin\n"


def test_what_needs_an_extra_says_which(environment: Path, cluster: LocalCluster) -> None:
    done = subprocess.run(
        [environment / "percolator", "export", "somewhere"],
        env=_command(cluster),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "percolator-store[export]" in done.stderr


@pytest.mark.parametrize(
    "command",
    [
        ["percolator", "dev"],
        ["percolator", "serve", "oracle"],
        ["python", "-m", "percolator.cli", "serve", "oracle"],
    ],
)
def test_services_without_the_extra_say_what_to_install(
    environment: Path, tmp_path: Path, command: list[str]
) -> None:
    program, *arguments = command
    done = subprocess.run(
        [environment / program, *arguments], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("pip install 'percolator-store[server]'")
    assert list(tmp_path.iterdir()) == []


def test_a_project_with_a_package_called_services_runs_its_observers(
    with_services: Path, tmp_path: Path
) -> None:
    """Services are `percolator.services`: the name `services` is the project's own."""
    package = tmp_path / "services"
    package.mkdir()
    (package / "__init__.py").touch()
    shutil.copy(HERE / "watched_notes.py", package / "orders.py")
    shutil.copy(HERE / "watched_notes.py", tmp_path)  # which program.py imports
    shutil.copy(HERE / "program.py", tmp_path)
    named = ["--observers", "services.orders:observers"]
    options = ["--temporary", "--port", "0", "--tablet-servers", "1", "--gateways", "0"]

    def started(*command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [with_services / "percolator", *command, *named],
            cwd=tmp_path,
            env={"PATH": "/usr/bin:/bin", "COLUMNS": "200"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def heard(process: subprocess.Popen[str], awaited: str) -> str:
        lines: list[str] = []
        for line in process.stderr or ():
            lines.append(line)
            if awaited in line:
                return line
        raise AssertionError("".join(lines))

    launcher = started("dev", *options)
    worker: subprocess.Popen[str] | None = None
    try:
        address = heard(launcher, "Percolator runs at").split()[3].rstrip(".")
        done = subprocess.run(
            [with_services / "python", "program.py"],
            cwd=tmp_path,
            env={"PERCOLATOR_ADDRESS": address},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.splitlines() == ["one two", "conflict"]
        heard(launcher, "worker runs its observers")
        own = ["--masters", address, "--listen", "127.0.0.1:0", "--metrics-listen="]
        worker = started("serve", "worker", *own)
        heard(worker, "running an observer")
        worker.send_signal(signal.SIGTERM)
        _, said = worker.communicate(timeout=60)
        assert worker.returncode == 0, said
        launcher.send_signal(signal.SIGINT)
        _, said = launcher.communicate(timeout=60)
        assert launcher.returncode == 0, said
    finally:
        for process in filter(None, (worker, launcher)):
            process.kill()
            process.communicate()


@pytest.mark.parametrize("service", SERVICES)
def test_each_service_of_the_wheel_shows_its_options(with_services: Path, service: str) -> None:
    done = subprocess.run(
        [with_services / "percolator", "serve", service, "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"usage: percolator serve {service} [--SETTING VALUE ...]")


def test_certificates_are_made_from_the_wheel(with_services: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    subprocess.run(
        [with_services / "percolator", "certs", made], check=True, stdout=subprocess.DEVNULL
    )
    assert (made / "cluster" / "certificate.pem").read_text().startswith("-----BEGIN CERT")
