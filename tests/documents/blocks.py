"""The code blocks of the documents, and how each of them is checked.

A comment just before a block, which readers do not see, states exceptions:

    <!-- file: shop/text.py -->               written to that file, for the blocks that follow
    <!-- in another terminal -->              started, and left running until the document ends
    <!-- run by tests/spark/test_guide.py --> that test runs it
    <!-- not run: why -->                     only checked: do its commands exist?
"""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]

PROGRAMS = {"python", "sh"}
DATA = {"toml", "yaml"}
"""Languages that a test only parses, to check that they are well-formed."""
SHOWN = {"text", "output", "{toctree}"}
"""Drawings, listings, output of the previous block (`output`), and input for `make docs` only."""


@dataclass(frozen=True)
class Block:
    """One block of code."""

    document: str
    line: int
    language: str
    """Empty for a block that does not name its language."""
    text: str
    directive: str

    @property
    def place(self) -> str:
        return f"{self.document}:{self.line}"

    def told(self, what: str) -> str:
        """The text after `what` in the comment; empty if the comment says something else."""
        found = self.directive.removeprefix(what)
        return "" if found == self.directive else found.strip(" :") or what


def documents() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "*.md"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return [ROOT / name for name in listed.split() if (ROOT / name).exists()]


def blocks(document: Path) -> list[Block]:
    found = []
    before: Token | None = None
    for token in MarkdownIt().parse(document.read_text()):
        if token.type in {"fence", "code_block"} and token.map is not None:
            found.append(
                Block(
                    document=str(document.relative_to(ROOT)),
                    line=token.map[0] + 1,
                    language=token.info.strip(),
                    text=token.content,
                    directive=_comment(before),
                )
            )
        before = token
    return found


def _comment(token: Token | None) -> str:
    """The comment just before a block, alone or after other text."""
    if token is None or token.type != "html_block":
        return ""
    last = token.content.strip().splitlines()[-1].strip()
    if not last.startswith("<!--") or not last.endswith("-->"):
        return ""
    return last.removeprefix("<!--").removesuffix("-->").strip()


def all_blocks() -> list[Block]:
    return [block for document in documents() for block in blocks(document)]
