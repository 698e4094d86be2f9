"""Links in the documents lead somewhere."""

from __future__ import annotations

import itertools
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[3]


def _documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split() if (ROOT / name).exists()]


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
        for document in _documents()
        for link in _links(document)
        if not re.match(r"[a-z]+:", link) and not _leads_somewhere(document, link)
    ]
    assert dead == []


def test_every_document_of_docs_is_in_the_contents_of_the_site() -> None:
    """`make docs` refuses one that is in no contents; this says so much sooner."""
    contents = (ROOT / "docs" / "site" / "index.md").read_text().split()
    left_out = [
        str(document.relative_to(ROOT))
        for document in _documents()
        if document.parent == ROOT / "docs" and f"/docs/{document.stem}" not in contents
    ]
    assert left_out == []


ELSEWHERE = {"cluster.json", "wordindex.py", "overdrafts.py", "_pb2_grpc.py"}
"""On a store root, written by the reader, and what is not generated."""


def test_files_named_in_the_documents_exist() -> None:
    """Documents name files in backticks: `services/oracle/allocator.py`, or `allocator.py`."""
    known = ("percolator/", "services/", "tests/", "benchmarks/", "protos/", "docs/", "examples/")
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split()
    names = {Path(one).name for one in tracked if (ROOT / one).exists()} | ELSEWHERE
    dead = []
    for document in _documents():
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
    guides = [one.name for one in (ROOT / "docs").glob("*.md") if one in _documents()]
    assert [name for name in guides if name != "README.md" and f"({name})" not in index] == []
