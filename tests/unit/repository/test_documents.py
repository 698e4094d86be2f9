"""The documents are true: links and names lead somewhere, and lists and figures are complete."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
from markdown_it import MarkdownIt

import percolator
import percolator.v1
from benchmarks import bulk_loads, figures, report
from benchmarks.report import RUNS, Report
from percolator import aio, codecs, errors, recipes, testing
from percolator.errors import PercolatorError
from percolator.wire import methods
from percolator.wire.roles import REQUIRED
from percolator.world import StreamMethod, UnaryMethod
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


# Benchmarks run anywhere without breaking a check, and README shows what was recorded.


def test_the_figures_in_the_readme_are_those_of_the_recorded_results() -> None:
    assert figures.shown() == figures.table(), "run `make figures`"


def test_a_run_is_written_where_git_does_not_look() -> None:
    ignored = subprocess.run(["git", "check-ignore", "--quiet", RUNS / "oracle.json"], cwd=ROOT)
    assert ignored.returncode == 0, f"git does not ignore {RUNS}"


def test_benchmarks_leave_the_recorded_results_alone() -> None:
    """`figures` is the only module that knows where they are."""
    modules = set((ROOT / "benchmarks").glob("*.py")) - {Path(figures.__file__)}
    knowing = [one.name for one in modules if "benchmarks/results" in one.read_text()]
    knowing += [one.name for one in modules if "benchmarks.figures" in one.read_text()]
    assert knowing == []
    assert figures.RESULTS not in (RUNS, *RUNS.parents)


def test_recording_a_run_takes_it_out_of_the_waiting_runs(tmp_path: Path) -> None:
    runs, results = tmp_path / "runs", tmp_path / "results"
    results.mkdir()
    (results / "oracle.json").write_text("an earlier run")
    made = Report("oracle")
    made.add("timestamps", 570_000.0, "/s")
    made.finish(runs=runs)

    assert figures.record(runs, results) == [results / "oracle.json"]
    assert json.loads((results / "oracle.json").read_text())["results"][0]["value"] == 570_000.0
    assert figures.record(runs, results) == []


def test_a_part_of_a_benchmark_replaces_its_own_figures_only(tmp_path: Path) -> None:
    def run(**figures_of_parts: list[float]) -> None:
        made = Report("parts")
        for name, values in figures_of_parts.items():
            for number, value in enumerate(values):
                made.add("    of it" if number else name, value, "ms")
        made.finish(runs=tmp_path, merge=True)

    run(scan=[1.0, 2.0], write=[3.0, 4.0])
    run(write=[5.0, 6.0])
    found = json.loads((tmp_path / "parts.json").read_text())["results"]
    assert [(one["name"], one["value"]) for one in found] == [
        ("write", 5.0), ("    of it", 6.0), ("scan", 1.0), ("    of it", 2.0)
    ]  # fmt: skip
    assert ["environment" in one for one in found] == [False, False, True, True]


def test_an_absolute_figure_is_never_judged() -> None:
    """Machines differ by a factor of two, so a bound on one would judge the machine."""
    made = Report("oracle")
    with pytest.raises(ValueError, match=r"'timestamps' has a must in '/s'"):
        made.add("timestamps", 570_000.0, "/s", must=300_000.0, at_least=True)
    made.add("raw / transaction", 0.3, "×", must=0.28, at_least=True)
    made.add("commits lost", 0.0, "", must=0)


def test_no_recorded_verdict_is_about_an_absolute_figure() -> None:
    judged = [
        f"{path.name}: {one['name']}"
        for path in figures.RESULTS.glob("*.json")
        for one in json.loads(path.read_text())["results"]
        if one["must"] is not None and one["unit"] not in report.JUDGED_UNITS
    ]
    assert judged == []


@pytest.mark.real_time
async def test_commits_beside_bulk_loads_are_measured(tmp_path: Path) -> None:
    found = await bulk_loads.measure(tmp_path / "tablet", rounds=1, seconds=0.3)
    assert set(found.beside) == set(found.cells) == {1, bulk_loads.LOADERS}
    assert not found.failed, found
    assert min(found.alone, found.loads, *found.cells.values()) > 0
    assert min(found.beside.values()) > 0, "a loader keeps all transactions out"
    assert f"{found.expected:,.0f} commits per CPU second are expected" in str(found)


# Every remote procedure of the protos is named, with its types, and says who may call it.

Signature = tuple[str, str, str, bool]


def _declared() -> set[Signature]:
    found: set[Signature] = set()
    for path in Path(percolator.v1.__path__[0]).glob("*_pb2.py"):
        module = importlib.import_module(f"percolator.v1.{path.stem}")
        for service in module.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                found.add(
                    (
                        f"/{service.full_name}/{method.name}",
                        method.input_type.full_name,
                        method.output_type.full_name,
                        method.server_streaming,
                    )
                )
    return found


def _named() -> set[Signature]:
    return {
        (
            value.path,
            value.request.DESCRIPTOR.full_name,
            value.response.DESCRIPTOR.full_name,
            isinstance(value, StreamMethod),
        )
        for value in vars(methods).values()
        if isinstance(value, UnaryMethod | StreamMethod)
    }


def test_every_remote_procedure_is_named_with_the_types_of_the_proto() -> None:
    assert _declared() == _named()


def test_every_remote_procedure_has_a_role_and_no_other_has() -> None:
    assert set(REQUIRED) == {path for path, *_ in _named()}
