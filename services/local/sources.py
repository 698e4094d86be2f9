"""The files of the observers that workers run: after a change in them, workers restart.

For `shop:observers`, these are `shop.py` or everything in the package `shop`, and whatever they
import from beside them. Nothing is executed: a module that does not import is exactly what is about
to be corrected.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

Stamp = tuple[int, int]


class Sources:
    """Notices that files changed."""

    def __init__(self, references: Sequence[str], here: Path) -> None:
        """`references` are lists of observers, as module:name; modules may also be `here`."""
        self._modules = sorted({one.partition(":")[0].partition(".")[0] for one in references})
        self._here = here
        self._imports: dict[Path, tuple[Stamp, set[str]]] = {}
        """The modules that a file imports, read again only if it changed."""
        self._seen = self._stamps()

    def changed(self) -> list[Path]:
        """The files that were changed, added or removed since the last call."""
        before, self._seen = self._seen, self._stamps()
        return sorted({path for path, _ in before.items() ^ self._seen.items()})

    def _stamps(self) -> dict[Path, Stamp]:
        found: dict[Path, Stamp] = {}
        for module in self._modules:
            base = _base(module, [self._here, *map(Path, sys.path)])
            if base is not None:
                self._add(base, module, found, set())
        return found

    def _add(self, base: Path, module: str, found: dict[Path, Stamp], added: set[str]) -> None:
        """Adds the files of a module, and of the modules beside it that it imports."""
        if module in added:
            return
        added.add(module)
        for path in _files(base, module):
            try:
                status = path.stat()
                found[path] = stamp = (status.st_mtime_ns, status.st_size)
                imports = self._imports_of(path, stamp)
            except OSError:
                continue  # removed at this moment
            for imported in imports:
                self._add(base, imported, found, added)

    def _imports_of(self, path: Path, stamp: Stamp) -> set[str]:
        known, imports = self._imports.get(path, (None, set[str]()))
        if known != stamp:
            found = _imports(path.read_bytes())
            if found is not None:  # otherwise those of before: they have not been removed
                imports = found
            self._imports[path] = (stamp, imports)
        return imports


def names(paths: Iterable[Path]) -> str:
    """The names of files, for people."""
    return ", ".join(sorted({path.name for path in paths}))


def _base(module: str, bases: Sequence[Path]) -> Path | None:
    return next((base for base in bases if any(_files(base, module))), None)


def _files(base: Path, module: str) -> Iterator[Path]:
    """A package before a file of the same name, as Python finds them."""
    package, file = base / module, base / f"{module}.py"
    if package.is_dir() and (not file.is_file() or (package / "__init__.py").is_file()):
        yield from package.rglob("*.py")
    elif file.is_file():
        yield file


def _imports(source: bytes) -> set[str] | None:
    """The first parts of the names of imported modules; None if the source is not Python."""
    try:
        parsed = ast.parse(source)
    except (SyntaxError, ValueError):
        return None
    found = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found
