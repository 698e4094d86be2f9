"""Images and containers as their files describe them, and tests/containers/ensure-engine with
programs in the place of Docker's."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
ENSURE_ENGINE = ROOT / "tests" / "containers" / "ensure-engine"
COMPOSE_FILES = [
    "compose.yaml",
    *sorted(f"deploy/{path.name}" for path in (ROOT / "deploy").glob("compose*.yaml")),
]
DOCKERFILES = sorted((ROOT / "deploy").glob("*Dockerfile"))
PINNED = re.compile(r"[a-z0-9./-]+:[A-Za-z0-9._-]+@sha256:[0-9a-f]{64}")
BUILT_HERE = re.compile(r"percolator(-emulator)?:\$\{PERCOLATOR_TAG:-local\}")


def services(file: str) -> dict[str, dict[str, Any]]:
    """The services of a compose file that say what they are: the others only change those of
    compose.yaml."""
    described = yaml.safe_load((ROOT / file).read_text())["services"]
    return {name: one for name, one in described.items() if "image" in one}


SERVICES = [(file, name) for file in COMPOSE_FILES for name in services(file)]


def test_all_compose_files_are_found() -> None:
    assert {"compose.yaml", "deploy/compose.bigtable.yaml", "deploy/compose.tls.yaml"} <= set(
        COMPOSE_FILES
    )
    assert {"master", "tabletserver", "prometheus", "grafana"} <= {name for _, name in SERVICES}


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_a_container_may_do_no_more_than_it_must(file: str, name: str) -> None:
    service = services(file)[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert re.fullmatch(r"[1-9]\d*[mg]", service["mem_limit"])
    assert 0 < service["pids_limit"] <= 512
    assert not {"privileged", "devices", "pid", "ipc", "userns_mode"} & service.keys()
    assert ("cap_add" in service) == (name == "certificates"), "it copies files of another user"
    # A file in the place of a whole list would drop what the list protects.
    for changing in COMPOSE_FILES:
        changed = yaml.safe_load((ROOT / changing).read_text())["services"].get(name, {})
        if "image" not in changed:
            assert not changed.keys() & {"read_only", "cap_add", "mem_limit", "pids_limit"}


@pytest.mark.parametrize(("file", "name"), SERVICES)
def test_an_image_is_pinned_by_its_digest_or_built_here(file: str, name: str) -> None:
    service = services(file)[name]
    if "build" in service:
        assert BUILT_HERE.fullmatch(service["image"])
    else:
        assert PINNED.fullmatch(service["image"])


def _bases(dockerfile: Path) -> Iterator[str]:
    """The images that stages begin with, except those of this file and the empty one."""
    text = dockerfile.read_text()
    arguments = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    stages = {"scratch"}
    for base, _, stage in re.findall(r"^FROM (\S+)( AS (\w+))?$", text, re.MULTILINE):
        if base not in stages:
            yield re.sub(r"\$\{(\w+)\}", lambda found: arguments[found[1]], base)
        stages.add(stage)


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_a_stage_begins_with_a_pinned_image(dockerfile: Path) -> None:
    assert dockerfile.read_text().count("\nFROM ")
    assert [base for base in _bases(dockerfile) if not PINNED.fullmatch(base)] == []


def test_compose_builds_on_the_base_of_the_dockerfile() -> None:
    (base,) = set(_bases(ROOT / "deploy" / "Dockerfile"))
    named = [
        services(file)[name]["build"]["args"]["BASE_IMAGE"]
        for file, name in SERVICES
        if "args" in services(file)[name].get("build", {})
    ]
    assert set(named) == {f"${{PERCOLATOR_BASE_IMAGE:-{base}}}"}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda path: path.name)
def test_nothing_is_installed_but_from_a_lock_with_hashes(dockerfile: Path) -> None:
    lines = dockerfile.read_text().replace("\\\n", " ").splitlines()
    steps = [step for line in lines if not line.startswith("#") for step in line.split("&&")]
    installing = [step for step in steps if re.search(r"\b(pip|apt-get|npm|curl|wget)\b", step)]
    locked = re.compile(r"--require-hashes -r /build/\w+\.lock\s*$")
    own = re.compile(r"--no-deps --no-build-isolation \.\s*$")
    unlocked = [
        step
        for step in installing
        if "pip uninstall" not in step and not locked.search(step) and not own.search(step)
    ]
    assert unlocked == []


def test_nobody_logs_in_to_grafana_with_a_default_password() -> None:
    grafana = services("compose.yaml")["grafana"]
    version = re.findall(r"\d+", grafana["image"].partition("@")[0])
    assert tuple(map(int, version)) > (11, 6, 9)
    environment = grafana["environment"]
    assert environment["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"


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
