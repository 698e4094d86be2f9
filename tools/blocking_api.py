"""Generates percolator/blocking/api.py from the asyncio API: `make blocking`.

Each class there has a namesake in percolator/aio, or in percolator/observers. Its members have the
signatures and docstrings of the namesake's, without `await`. A body is one call:

    a coroutine, or a write      runs in the event loop, while the caller's thread waits
    a property, or an attribute  is asked for in the caller's thread; so is a plain method
    a method that makes one of   wraps what `Database.internal` makes
    these classes

What cannot be made so is written by hand, in api.py itself, and stays as it is there:

    a body that begins with a comment "By hand: ...", which says why
    members that the namesake lacks, and those with an underscore, such as `__exit__`
    the first line of a class, and all that is outside of these classes and `connect`
"""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TARGET = ROOT / "percolator/blocking/api.py"
SOURCES = {
    "connect": "percolator/aio/connecting.py",
    "Reads": "percolator/aio/reads.py",
    "Snapshot": "percolator/aio/snapshot.py",
    "Transaction": "percolator/aio/transaction.py",
    "Pin": "percolator/aio/pin.py",
    "SharedTransaction": "percolator/aio/shared.py",
    "Share": "percolator/aio/shared.py",
    "ChangePages": "percolator/aio/changes.py",
    "Changes": "percolator/aio/changes.py",
    "Worker": "percolator/observers/worker.py",
    "Database": "percolator/aio/database.py",
}
ONLY_ASYNCIO = {
    "Reads": {"find_pages", "require_not_ended", "scan_pages"},
    "Snapshot": {"scan_cells", "scan_joined", "get_cells"},
    "Transaction": {"ended", "internal", "joins_transactions"},
    "Pin": {"session_id", "set"},
    "SharedTransaction": {"begin", "told"},
    "Share": {"begin", "kept", "write"},
    "ChangePages": {"require_whole", "next", "aclose"},
    "Changes": {"aclose"},
    "Database": {"internal"},
}
"""Members that are for the rest of the library, or for asyncio alone."""
PROSE = {
    "for all tasks of one event loop": "for all threads of the process",
    "in the event loop in which it was started": "in the background",
    "One task at a time": "One thread at a time",
    "A task that waits": "A thread that waits",
    "functions that are run again.": (
        "functions that are run again. A transaction belongs to the thread that began it."
    ),
    "its function is called with a database.": (
        "its function is called with a database. The function runs in the calling thread."
    ),
}
"""Replaced in docstrings. Sentences about awaiting are left out."""
ANNOTATIONS = {"AsyncIterator": "Iterator", "Written": "None", "Connecting": "Database"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


class _WithoutAwaits(ast.NodeTransformer):
    """Turns the annotations of an asyncio signature into blocking ones."""

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        self.generic_visit(node)
        name = ast.unparse(node.value)
        if name == "Coroutine" and isinstance(node.slice, ast.Tuple):
            return node.slice.elts[-1]
        return node.slice if name == "Awaitable" else node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        return node.left if ast.unparse(node.right).startswith("AsyncIterable") else node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(ANNOTATIONS.get(node.id, node.id))


def _name(node: ast.stmt) -> str:
    """The name of a function, class or attribute; empty for anything else."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AnnAssign):
        return ast.unparse(node.target)
    return getattr(node, "name", "")


def _docstring(text: str, indent: int) -> str:
    first, *others = inspect.cleandoc(text).split("\n\n")
    paragraphs = [f'"""{first}', *others] if others else [f'"""{first}"""']
    written = []
    for paragraph in paragraphs:
        if paragraph.startswith(">>>"):
            written.append(re.sub(r"\b(async |await |(?<=percolator\.)aio\.)", "", paragraph))
            continue
        prose = re.sub(r"[^.]*\bawait[^.]*\.", "", " ".join(paragraph.split()))
        for old, new in PROSE.items():
            prose = prose.replace(old, new)
        if prose:
            written.append(textwrap.fill(prose, 100 - indent, break_on_hyphens=False))
    return "\n\n".join(written) + ('\n"""' if others else "")


def _signature(function: Function) -> str:
    kept = [one for one in function.decorator_list if ast.unparse(one) in ("overload", "property")]
    plain = ast.FunctionDef(
        name=function.name,
        args=function.args,
        body=[ast.Pass()],
        decorator_list=kept,
        returns=function.returns,
    )
    made = ast.fix_missing_locations(_WithoutAwaits().visit(plain))
    return ast.unparse(made).removesuffix("pass").rstrip()


def _call(function: Function) -> str:
    """The body of a method, of which nothing is written by hand."""
    result = ast.unparse(function.returns) if function.returns else ""
    decorators = [ast.unparse(one) for one in function.decorator_list]
    called, taken = f"self._asynchronous.{function.name}", function.args
    if decorators == ["property"]:
        return f"return {called}"
    if result in SOURCES:
        made = ast.unparse(function.body[-1]).removeprefix("return self.")
        return f"self._check()\nreturn {result}(self._loop_thread, self._asynchronous.{made})"
    if taken.vararg or taken.kwarg:
        raise SystemExit(f"{function.name} takes any arguments: write its body by hand")
    names = [one.arg for one in (*taken.posonlyargs, *taken.args)][1:]
    names += [f"{one.arg}={one.arg}" for one in taken.kwonlyargs]
    call = f"{called}({', '.join(names)})"
    if isinstance(function, ast.AsyncFunctionDef) or decorators or result == "Written":
        bound = f"partial({', '.join([called, *names])})" if names else called
        call = f"self._call({bound})"
    return call if result in ("None", "Written") else f"return {call}"


def _members(body: Sequence[ast.stmt]) -> dict[str, list[ast.stmt]]:
    """By name: overloads belong together, and a docstring to the attribute before it."""
    members: dict[str, list[ast.stmt]] = {}
    name = ""
    for node in body:
        name = _name(node) or name
        members.setdefault(name, []).append(node)
    return members


def _source(nodes: Sequence[ast.stmt], lines: list[str]) -> str:
    """Adjacent statements, as they stand in the target."""
    decorators: list[ast.expr] = getattr(nodes[0], "decorator_list", [])
    first = min([nodes[0].lineno, *(one.lineno for one in decorators)])
    return "\n".join(lines[first - 1 : nodes[-1].end_lineno])


def _body_by_hand(nodes: Sequence[ast.stmt], lines: list[str]) -> str:
    """The body of a function as it stands in the target, if it is written by hand."""
    if not nodes or not isinstance(nodes[-1], Function):
        return ""
    docstring = nodes[-1].body[0]
    body = textwrap.dedent("\n".join(lines[docstring.end_lineno : nodes[-1].end_lineno]))
    return body if body.lstrip().startswith("# By hand: ") else ""


def _member(theirs: Sequence[ast.stmt], by_hand: str, indent: int) -> str:
    last = theirs[-1]
    if isinstance(last, Function):
        made = [f"{_signature(one)} ..." for one in theirs[:-1] if isinstance(one, Function)]
        docstring = _docstring(ast.get_docstring(last) or "", indent)
        made += [
            _signature(last),
            textwrap.indent(f"{docstring}\n{by_hand or _call(last)}", "    "),
        ]
        return "\n".join(made)
    first, docstring = theirs[0], _docstring(ast.literal_eval(ast.unparse(last)), indent)
    if not isinstance(first, ast.AnnAssign):
        raise SystemExit(f"{_name(first)} has no annotation")
    body = textwrap.indent(f"{docstring}\nreturn self._asynchronous.{_name(first)}", "    ")
    return f"@property\ndef {_name(first)}(self) -> {ast.unparse(first.annotation)}:\n{body}"


def _class(theirs: ast.ClassDef, ours: ast.ClassDef, lines: list[str]) -> list[str]:
    own = _members(ours.body[1:])
    members = {
        name: nodes
        for name, nodes in _members(theirs.body).items()
        if name and not name.startswith("_") and name not in ONLY_ASYNCIO.get(ours.name, ())
    }
    before, after, seen = list[str](), list[str](), False
    for name, nodes in own.items():
        if name in members:
            seen = True
        else:
            stays = after if seen else before
            stays.append(_source(nodes, lines))
    made = [_docstring(ast.get_docstring(theirs) or "", 4)]
    made += [
        _member(nodes, _body_by_hand(own.get(name, ()), lines), 8)
        for name, nodes in members.items()
    ]
    made = [textwrap.indent(one, "    ") for one in made]
    return [made[0], "", *before, *made[1:], *after]


def generated(text: str) -> str:
    """The target as it should be, made from what it is."""
    lines = text.splitlines()
    made, at = list[str](), 0
    for ours in ast.parse(text).body:
        if _name(ours) not in SOURCES:
            continue
        made += lines[at : ours.lineno - 1]
        at = ours.end_lineno or 0
        source = ast.parse((ROOT / SOURCES[_name(ours)]).read_text())
        (theirs,) = [one for one in source.body if _name(one) == _name(ours)]
        if isinstance(ours, ast.ClassDef) and isinstance(theirs, ast.ClassDef):
            made += [lines[ours.lineno - 1], *_class(theirs, ours, lines)]
        else:
            made.append(_member([theirs], _body_by_hand([ours], lines), 4))
    made += lines[at:]
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(TARGET), "-"]
    text = "\n".join(made) + "\n"
    return subprocess.run(  # noqa: S603 - the formatter of this environment
        command, input=text, text=True, check=True, stdout=subprocess.PIPE, cwd=ROOT
    ).stdout


if __name__ == "__main__":
    TARGET.write_text(generated(TARGET.read_text()))
