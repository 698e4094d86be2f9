"""The documents are true: links and names lead somewhere, and lists and figures are complete."""

from __future__ import annotations

import inspect
import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

import percolator
from percolator import aio, codecs, errors, recipes, testing
from percolator.errors import PercolatorError
from tests.chaos import supervisor
from tests.chaos.catalogue import streams
from tests.chaos.supervisor import Figure, Injection
from tests.documents.commands import ROOT, documents


def _links(document: Path) -> Iterator[str]:
    for block in MarkdownIt().parse(document.read_text()):
        for token in block.children or ():
            target = token.attrs.get("href") or token.attrs.get("src")
            if target:
                yield str(target)


def _anchors(document: Path) -> set[str]:
    tokens = MarkdownIt().parse(document.read_text())
    titles = [
        following.content
        for token, following in itertools.pairwise(tokens)
        if token.type == "heading_open"
    ]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def _leads_somewhere(document: Path, link: str) -> bool:
    path, _, anchor = link.partition("#")
    target = (document.parent / path).resolve() if path else document
    if not target.exists():
        return False
    return not anchor or target.suffix != ".md" or anchor in _anchors(target)


def test_links_between_documents_lead_to_files_and_headings_that_exist() -> None:
    dead = [
        f"{document.name}: {link}"
        for document in documents()
        for link in _links(document)
        if not re.match(r"[a-z]+:", link) and not _leads_somewhere(document, link)
    ]
    assert dead == []


def test_every_picture_of_docs_is_well_formed_and_shown_in_a_document() -> None:
    shown = {
        (document.parent / link).resolve() for document in documents() for link in _links(document)
    }
    pictures = set((ROOT / "docs" / "images").glob("*.svg"))
    for picture in pictures:
        ElementTree.parse(picture)
    assert pictures
    assert pictures - shown == set()


def test_every_document_of_docs_is_in_the_contents_of_the_site() -> None:
    """`make docs` refuses one that is in no contents; this says so much sooner."""
    contents = (ROOT / "docs" / "site" / "index.md").read_text().split()
    left_out = [
        str(document.relative_to(ROOT))
        for document in documents()
        if document.parent == ROOT / "docs" and f"/docs/{document.stem}" not in contents
    ]
    assert left_out == []


ELSEWHERE = {"cluster.json", "shop.py", "wordindex.py", "overdrafts.py", "_pb2_grpc.py"}
"""On a store root, written by the reader, and what is not generated."""


def test_files_named_in_the_documents_exist() -> None:
    """Documents name files in backticks: `services/oracle/oracle.py`, or `allocator.py`."""
    known = ("percolator/", "services/", "tests/", "benchmarks/", "protos/", "docs/", "examples/")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    names = {Path(one).name for one in tracked if (ROOT / one).exists()} | ELSEWHERE
    dead = []
    for document in documents():
        for name in re.findall(r"`([\w./*-]+)`", document.read_text()):
            if name.startswith(known):
                there = any(ROOT.glob(name))
            elif re.fullmatch(r"[\w*-]+\.(py|md|proto|json|toml|yaml|yml|rs)", name):
                there = name in names
            else:
                continue
            if not there:
                dead.append(f"{document.name}: {name}")
    assert dead == []


def test_every_guide_stands_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text()
    guides = [one.name for one in (ROOT / "docs").glob("*.md") if one in documents()]
    assert [name for name in guides if name != "README.md" and f"({name})" not in index] == []


# ---------------------------------------------------------------------- errors

ERRORS = ROOT / "docs" / "errors.md"
ERROR = re.compile(r"^\| `(\w+)` \| (\w+) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def _declared_errors() -> dict[str, str]:
    return {
        name: kind.retry.name
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, PercolatorError)
    }


def test_every_error_stands_in_the_guide_once_and_says_whether_a_retry_is_safe() -> None:
    rows = ERROR.findall(ERRORS.read_text())
    assert len({name for name, *_ in rows}) == len(rows)
    assert {name: retry for name, retry, *_ in rows} == _declared_errors()


def test_every_error_stands_in_the_tree_of_its_module() -> None:
    tree = set(re.findall(r"[─ ] ?(\w+)", (errors.__doc__ or "").split("Every error")[0]))
    assert set(_declared_errors()) <= tree


# ------------------------------------------------------- docstrings of the API


def _public(module: ModuleType) -> dict[str, object]:
    """The names in `__all__`, or those defined in the module itself."""
    names = getattr(module, "__all__", None)
    if names is not None:
        return {name: getattr(module, name) for name in names}
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }


def _members(kind: type) -> Iterator[tuple[str, object]]:
    for base in kind.__mro__:
        if not base.__module__.startswith("percolator"):
            continue
        for name, value in vars(base).items():
            if name.startswith("_"):
                continue
            function = getattr(value, "__func__", value)
            if inspect.isroutine(function) or isinstance(value, property):
                yield name, function


@pytest.mark.parametrize("module", [percolator, aio, codecs, errors, recipes, testing])
def test_every_public_name_and_method_has_a_docstring(module: ModuleType) -> None:
    silent = []
    for name, value in _public(module).items():
        if not inspect.getdoc(value):
            silent.append(name)
        if inspect.isclass(value):
            silent += [
                f"{name}.{member}" for member, what in _members(value) if not inspect.getdoc(what)
            ]
    assert silent == []


# -------------------------------------------------------------- recovery times

RECOVERY_SECONDS_MAX = 30.0


def test_the_table_of_recovery_times_is_the_recorded_one() -> None:
    assert supervisor.shown() == supervisor.table(supervisor.record_of()), "run `make recovery`"


def test_every_kind_of_fault_was_measured_and_none_took_too_long() -> None:
    found = supervisor.record_of()
    kinds = {fault.name for faults in streams(full_disk=True).values() for fault in faults}
    assert {one.kind for one in found} == kinds
    assert max(one.seconds for one in found) <= RECOVERY_SECONDS_MAX


def test_faults_count_as_beside_each_other_if_they_overlap() -> None:
    injected = [
        Injection("kill", 0.0, 3.0, 2.0),
        Injection("pause", 2.5, 7.0, 1.0),
        Injection("cut", 7.5, 9.0, 0.5),
    ]
    assert [one.beside for one in supervisor.figures(injected)] == [1, 1, 0]


def test_a_cell_of_the_table_has_the_median_and_the_worst() -> None:
    found = [Figure("kill", 0, 1.0), Figure("kill", 0, 2.0), Figure("kill", 0, 9.0)]
    found += [Figure("kill", 5, 4.0), Figure("cut", 2, 0.5)]
    assert supervisor.table(found).splitlines()[2:] == [
        "| cut | 1 |  | 0.5, 0.5 |  |",
        "| kill | 4 | 2.0, 9.0 |  | 4.0, 4.0 |",
    ]


def test_recording_takes_the_waiting_runs_and_keeps_what_is_recorded_without_them(
    tmp_path: Path,
) -> None:
    runs, recorded = tmp_path / "runs", tmp_path / "recovery.json"
    supervisor.write_run("1", [Injection("kill", 0.0, 3.0, 2.0)], runs)
    supervisor.write_run("2", [Injection("kill", 0.0, 3.0, 1.0)], runs)
    expected = [Figure("kill", 0, 1.0), Figure("kill", 0, 2.0)]
    assert supervisor.record(runs, recorded) == expected
    assert supervisor.record(runs, recorded) == expected
    assert not list(runs.iterdir())
