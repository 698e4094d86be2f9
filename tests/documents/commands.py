"""Checks that the commands in a block exist, with the options that it passes to them."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import io
import itertools
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from markdown_it.token import Token

from percolator.cli.app import app
from percolator.services.serve import SERVICES
from tests.command_line import CliRunner

# The code blocks of the documents, and how each of them is checked.
#
# A comment just before a block, which readers do not see, states exceptions:
#
#     <!-- file: shop/text.py -->               written to that file, for the blocks that follow
#     <!-- in another terminal -->              started, and left running until the document ends
#     <!-- run by tests/spark/test_guide.py --> that test runs it
#     <!-- not run: why -->                     only checked: do its commands exist?

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


OTHERS = {"bash", "cargo", "cd", "docker", "docker-compose", "export", "pip", "pytest", "."}
"""Commands of other projects, whose options are not checked here."""


def problems(text: str) -> list[str]:
    """One line for each command that would be rejected."""
    return [f"{shlex.join(words)}: {wrong}" for words in _commands(text) if (wrong := _look(words))]


def _commands(text: str) -> Iterator[list[str]]:
    pending = ""
    for line in text.splitlines():
        pending += line.removesuffix("\\") + "\n"
        if line.endswith("\\"):
            continue
        lexer = shlex.shlex(pending, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError:
            continue  # inside quotes that end on a later line
        pending = ""
        yield from _between_operators(words)


def _between_operators(words: list[str]) -> Iterator[list[str]]:
    command: list[str] = []
    for word in [*words, ";"]:
        if not re.fullmatch(r"[;&|<>]+", word):
            if command or not re.fullmatch(r"[A-Z_]+=.*", word):
                command.append(word)
        elif command:
            yield command
            command = []
            if word in {"<", ">", ">>"}:
                return


def _look(words: list[str]) -> str:
    name, *arguments = words
    name = name.removeprefix(".venv/bin/")
    if name == "make":
        unknown = {word for word in arguments if "=" not in word} - _targets()
        return f"no such target: {', '.join(sorted(unknown))}" if unknown else ""
    if name == "percolator" and arguments[:1] == ["serve"]:
        return _service(*arguments[1:])
    if name == "percolator":
        return _parse(arguments)
    if name == "python" and arguments[0] == "-m":
        return _module(arguments[1], arguments[2:])
    if name == "python":
        return ""
    return "" if name in OTHERS else "not a command of this project"


@functools.cache
def _targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def _parse(arguments: list[str]) -> str:
    """Parses down to the last subcommand, with `--help`, so that nothing is executed."""
    if "--install-completion" in arguments:
        return ""  # would be executed before the help is shown
    if "--" in arguments:
        arguments = arguments[: arguments.index("--")]
    result = CliRunner().invoke(app, [*arguments, "--help"])
    return result.output.strip() if result.exit_code else ""


def _module(name: str, arguments: list[str]) -> str:
    if importlib.util.find_spec(name) is None:
        return "no such module"

    def run() -> None:
        runpy.run_module(name, run_name="__main__", alter_sys=True)

    return _unknown_options(name, arguments, run)


def _service(name: str = "", *arguments: str) -> str:
    if name in ("SERVICE", "--help"):
        return ""  # any of them, or all
    if name not in SERVICES:
        return f"no such service: {name}"
    main = importlib.import_module(f"percolator.services.{name}.service").main
    return _unknown_options(name, arguments, lambda: sys.exit(main(sys.argv[1:])))


def _unknown_options(name: str, arguments: Sequence[str], run: Callable[[], None]) -> str:
    given = {word.partition("=")[0] for word in arguments if word.startswith("--")}
    if not given:
        return ""
    words = [name, *itertools.takewhile(lambda word: word not in given, arguments), "--help"]
    key = " ".join(words)
    if key not in _told:
        _told[key] = _printed(words, run)
    unknown = [one for one in given if not re.search(f"{one}(?![a-z-])", _told[key])]
    return f"no such option: {', '.join(sorted(unknown))}" if unknown else ""


_told: dict[str, str] = {}
"""The help of a program, by its command."""


def _printed(words: list[str], run: Callable[[], None]) -> str:
    """The output of a program that is run in this process: its imports are cached."""
    told = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        warnings.catch_warnings(),
        contextlib.redirect_stdout(told),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # it was imported before: no harm
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", words)
        try:
            run()
        except SystemExit as ended:
            if ended.code:
                raise AssertionError(f"{' '.join(words)}: exit code {ended.code}") from None
    return told.getvalue()
