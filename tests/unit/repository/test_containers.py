"""tests/containers/ensure-engine, with programs in the place of Docker's."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
ENSURE_ENGINE = ROOT / "tests" / "containers" / "ensure-engine"

# `docker version` answers when this file is there.
ENGINE = "engine-answers"
DOCKER = f"""
case $1 in
  version) [ -e $MACHINE/{ENGINE} ] || {{ echo "Cannot connect to $MACHINE" >&2; exit 1; }} ;;
  *) exit 1 ;;
esac
"""
DOCKERD = f"touch $MACHINE/{ENGINE}; sleep 2"
INSTALLS = """
echo "$@" >>$MACHINE/apt
for package; do
  [ $package != docker.io ] || mv $MACHINE/docker.io/* $MACHINE/bin
  [ $package != docker-compose ] || mv $MACHINE/docker-compose/* $MACHINE/bin
done
"""
PROGRAMS = {
    "docker.io/docker": DOCKER,
    "docker.io/dockerd": DOCKERD,
    "docker-compose/docker-compose": "exit 0",
}


class Machine:
    """A PATH with a few programs, and packages that its `apt-get` can install."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for needed in ("env", "bash", "tail", "flock", "setsid", "sleep", "touch", "mv"):
            found = shutil.which(needed)
            assert found
            self.program(f"bin/{needed}", f'exec {found} "$@"')
        self.program("bin/id", "[ $1 = -u ] && echo 0 || echo root")
        self.program("bin/apt-get", INSTALLS)
        for name, text in PROGRAMS.items():
            self.program(name, text)

    def program(self, name: str, text: str) -> None:
        path = self.directory / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!{shutil.which('bash')}\n{text}\n")
        path.chmod(0o755)

    def has(self, *packages: str) -> None:
        for package in packages:
            for path in (self.directory / package).iterdir():
                path.rename(self.directory / "bin" / path.name)

    def ensure_engine(self, **variables: str) -> tuple[int, str]:
        """The exit code, and what was printed."""
        done = subprocess.run(
            [shutil.which("bash") or "", ENSURE_ENGINE],
            env={
                "PATH": str(self.directory / "bin"),
                "MACHINE": str(self.directory),
                "DOCKERD_LOG": str(self.directory / "dockerd.log"),
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=30,
            check=False,
        )
        return done.returncode, done.stdout

    @property
    def engine_answers(self) -> bool:
        return (self.directory / ENGINE).exists()

    @property
    def installed(self) -> list[str]:
        """The arguments of each call of apt-get."""
        calls = self.directory / "apt"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture(name="machine")
def _machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_an_engine_that_answers_is_left_alone(machine: Machine) -> None:
    machine.has("docker.io", "docker-compose")
    (machine.directory / ENGINE).touch()
    assert machine.ensure_engine() == (0, "")
    assert machine.installed == []


def test_a_plain_debian_gets_an_engine_and_keeps_it(machine: Machine) -> None:
    code, _ = machine.ensure_engine()
    assert code == 0
    assert machine.engine_answers
    assert machine.installed[0] == "update"
    assert machine.installed[1].endswith(" docker.io docker-compose")
    assert machine.ensure_engine() == (0, "")
    assert len(machine.installed) == 2


def test_an_installed_engine_is_started(machine: Machine) -> None:
    machine.has("docker.io", "docker-compose")
    code, _ = machine.ensure_engine()
    assert code == 0
    assert machine.engine_answers
    assert machine.installed == []


def test_compose_alone_is_installed_beside_an_engine(machine: Machine) -> None:
    machine.has("docker.io")
    (machine.directory / ENGINE).touch()
    code, _ = machine.ensure_engine()
    assert code == 0
    assert machine.installed[1].endswith(" docker-compose")
    assert "docker.io" not in machine.installed[1]


def test_the_log_of_an_engine_that_does_not_start_is_printed(machine: Machine) -> None:
    machine.has("docker.io", "docker-compose")
    machine.program("bin/dockerd", "echo 'failed to mount overlay'; exit 1")
    code, printed = machine.ensure_engine()
    assert code == 1
    assert "dockerd has ended" in printed
    assert "failed to mount overlay" in printed


@pytest.mark.parametrize(
    ("has", "expected"),
    [
        ((), "sudo apt-get install --yes --no-install-recommends docker.io docker-compose"),
        (("docker.io",), "sudo apt-get install --yes --no-install-recommends docker-compose"),
        (("docker.io", "docker-compose"), "Cannot connect to "),
    ],
)
def test_other_users_are_told_what_to_do(
    machine: Machine, has: tuple[str, ...], expected: str
) -> None:
    machine.program("bin/id", "[ $1 = -u ] && echo 1000 || echo alice")
    machine.has(*has)
    code, printed = machine.ensure_engine()
    assert code == 1
    assert expected in printed
    assert machine.installed == []
    assert not machine.engine_answers


def test_no_engine_is_started_in_the_place_of_another_machine_s(machine: Machine) -> None:
    machine.has("docker.io", "docker-compose")
    code, printed = machine.ensure_engine(DOCKER_HOST="tcp://192.0.2.1:2375")
    assert code == 1
    assert "DOCKER_HOST=tcp://192.0.2.1:2375" in printed
    assert not machine.engine_answers


def test_a_system_without_debian_s_packages_is_told_what_it_needs(machine: Machine) -> None:
    (machine.directory / "bin" / "apt-get").unlink()
    code, printed = machine.ensure_engine()
    assert code == 1
    assert "A Docker engine and Compose are needed" in printed
