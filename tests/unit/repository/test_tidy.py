"""Rules for every file of the product; fresh stubs; one version everywhere."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from datetime import date
from functools import cache
from pathlib import Path

import pytest

import percolator
from tools import blocking_api

ROOT = Path(__file__).parents[3]


def _tracked(*patterns: str) -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).exists()]


SOURCES = [path for path in _tracked("*.py") if not path.match("percolator/v1/*")]


PRODUCT = [
    path
    for path in SOURCES
    if path.is_relative_to(ROOT / "percolator") or path.is_relative_to(ROOT / "services")
]


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(_text(path))


def test_every_module_of_the_product_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in PRODUCT
        if _parsed(path).body and not ast.get_docstring(_parsed(path))
    ]
    assert silent == []


@pytest.mark.parametrize("word", ["TODO", "FIXME", "XXX", "NotImplementedError"])
def test_nothing_is_left_for_later_inside_the_code(word: str) -> None:
    found = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path != Path(__file__) and word in _text(path)
    ]
    assert found == []


def test_invariants_of_the_product_are_raised_not_asserted() -> None:
    """`python -O` drops asserts: a check that can be dropped guards nothing in production."""
    asserting = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in PRODUCT
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Assert)
    ]
    assert asserting == []


def test_no_except_star_raises() -> None:
    """Before 3.11.4, Python wraps even a single exception that is raised there in a group."""
    raising = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in SOURCES
        for tried in ast.walk(_parsed(path))
        if isinstance(tried, ast.TryStar)
        for handler in tried.handlers
        for node in ast.walk(handler)
        if isinstance(node, ast.Raise)
    ]
    assert raising == []


LOGIC = (
    "percolator/bucket",
    "percolator/protocol",
    "percolator/tablet",
    "percolator/wire",
    "percolator/routing",
    "percolator/observers",
    "percolator/formats",
    "services",
)
FORBIDDEN_CALLS = {
    "time.time",
    "time.time_ns",
    "time.monotonic",
    "time.sleep",
    "random.random",
    "random.choice",
    "random.randint",
    "asyncio.sleep",
}
MAY_TOUCH_THE_MACHINE = ("services/local/",)


def _dotted(function: ast.expr) -> str:
    """`time.sleep`, where the function is an attribute of a name: all that is forbidden is."""
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return f"{function.value.id}.{function.attr}"
    return ""


def test_logic_takes_time_and_chance_from_its_arguments() -> None:
    """Code that reads the machine's clock itself cannot be simulated."""
    found = []
    for path in PRODUCT:
        name = str(path.relative_to(ROOT))
        if not name.startswith(LOGIC) or name.startswith(MAY_TOUCH_THE_MACHINE):
            continue
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Call) and _dotted(node.func) in FORBIDDEN_CALLS:
                yielding = ast.unparse(node) == "asyncio.sleep(0)"
                if not yielding:
                    found.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert found == []


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    """After changing a proto, run `make protos`: a stale stub would speak an older protocol."""
    protos = sorted(str(path) for path in (ROOT / "protos/percolator/v1").glob("*.proto"))
    subprocess.run(
        [
            ROOT / ".venv/protos/bin/python",
            "-W",
            "ignore",
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'protos'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            *protos,
        ],
        check=True,
        timeout=50,
    )
    generated = {path.name: path.read_bytes() for path in (tmp_path / "percolator/v1").iterdir()}
    checked_in = {
        path.name: path.read_bytes()
        for path in (ROOT / "percolator/v1").iterdir()
        if path.suffix in {".py", ".pyi"} and path.name != "__init__.py"
    }
    assert sorted(generated) == sorted(checked_in)
    stale = [name for name in generated if generated[name] != checked_in[name]]
    assert stale == []


def test_the_blocking_api_is_up_to_date() -> None:
    """After a change to the asyncio API, run `make blocking`."""
    text = blocking_api.TARGET.read_text()
    assert blocking_api.generated(text) == text


def test_an_edit_of_a_generated_body_or_docstring_is_undone() -> None:
    text = blocking_api.TARGET.read_text()
    edited = text.replace("return self._call(self._asynchronous.timestamp)", "raise KeyError")
    edited = edited.replace("Reads many rows of a table", "Reads many rows")
    assert edited.count("raise KeyError") == 1
    assert blocking_api.generated(edited) == text


@pytest.mark.parametrize("old", blocking_api.PROSE)
def test_text_that_differs_between_the_apis_is_in_the_docstrings(old: str) -> None:
    sources = {_text(ROOT / name) for name in blocking_api.SOURCES.values()}
    assert any(old in " ".join(text.split()) for text in sources)


# --------------------------------------------------------------------- version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
VERSION = str(PROJECT["version"])


def test_the_newest_section_of_the_changelog_is_this_version_with_a_date() -> None:
    sections = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased"
    version, _, day = sections[1].partition(" - ")
    assert version == VERSION
    assert date.fromisoformat(day) >= date(2026, 11, 23)


def test_the_package_knows_its_version() -> None:
    assert percolator.__version__ == VERSION
    assert "__version__" in dir(percolator)


def test_the_kept_wheel_is_of_this_minor_version_or_of_the_one_before() -> None:
    """Masters let no server of any other version register."""
    (wheel,) = (ROOT / "tests/compatibility/previous").glob("*.whl")
    major, minor, _ = map(int, wheel.name.split("-")[1].split("."))
    this_major, this_minor, _ = map(int, VERSION.split("."))
    assert major == this_major
    assert minor in {this_minor - 1, this_minor}


def test_the_supported_pythons_are_those_of_the_metadata() -> None:
    pythons = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    support = (ROOT / "SECURITY.md").read_text()
    assert pythons
    assert all(f"{one}" in support for one in pythons)
