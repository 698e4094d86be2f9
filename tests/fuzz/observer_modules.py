"""Modules of observers that do not import, name nothing that can be run, or end the process."""

from __future__ import annotations

import importlib
import sys
import warnings
from hashlib import sha256
from pathlib import Path

from percolator.errors import InvalidArgument
from percolator.observers.registry.loading import load
from percolator.world import Random
from tests.fuzz.messages import damaged

_VALID = """from percolator import Table, codecs, observes

table = Table("observed")
column = table.column("column", codecs.integer)
other = Table("other").column("column", codecs.integer)


@observes(column)
async def run(tx, row):
    pass


observers = [run]
"""
_INSTEAD_OF_THE_LIST = (
    "run",
    "None",
    "()",
    "[]",
    "[run, run]",
    "[run, None]",
    "{run}",
    "'run'",
    "iter([run])",
    "[[run]]",
    "[type]",
    "object()",
    "(run,)",
    "Exception",
    "b'run'",
    "range(3)",
)
_AT_IMPORT = (
    "import sys; sys.exit(0)",
    "import sys; sys.exit('done')",
    "raise SystemExit(3)",
    "raise ValueError",
    "raise BaseException('all of it')",
    "raise ExceptionGroup('two', [ValueError(), KeyError()])",
    "import no_such_module",
    "from percolator import no_such_name",
    "def f(): return f()\nf()",
    "1 / 0",
    "class Odd(Exception):\n    def __str__(self): raise ValueError('no text')\nraise Odd",
    "__getattr__ = 1",
    "def __getattr__(name): raise KeyError(name)",
    "import percolator.cli.nothing",
    "class L(list):\n    def __len__(self): return -1\n",
)
_DECORATED = (
    "@observes()",
    "@observes(column, other)",
    "@observes('column')",
    "@observes(column, name='')",
    "@observes(column, name='x' * 1000)",
    "@observes(column, attempts=0)",
    "@observes",
    "@observes(None)",
    "@observes(column, concurrency=-1)",
    "@observes(column, deadline_seconds=float('nan'))",
    "@observes(column, weak=1)",
    "@observes(column, nothing=1)",
    "@observes(column)\n@observes(column)",
)
_REFERENCES = (
    "{}:nothing",
    "{}",
    "{}:",
    ":observers",
    "{}:observers:more",
    "{}.a:b",
    "..:a",
    "{}: observers",
)


class ObserverModules:
    """Loads observers as a worker does at its start."""

    name = "observer modules"
    kinds = ("valid", "the list", "at import", "decorated", "reference", "damaged text", "noise")

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def make(self, kind: str, chance: Random) -> bytes:
        source, reference = _VALID, "{}:observers"
        match kind:
            case "the list":
                source += f"observers = {chance.choice(_INSTEAD_OF_THE_LIST)}\n"
            case "at import":
                source += chance.choice(_AT_IMPORT) + "\n"
            case "decorated":
                source = source.replace("@observes(column)", chance.choice(_DECORATED))
            case "reference":
                reference = chance.choice(_REFERENCES)
        content = source.encode()
        if kind == "damaged text":
            content = damaged(content, chance)
        elif kind == "noise":
            content = chance.choice((b"", b"\0", chance.randbytes(100), b"(" * 3_000, b"\xff\xfe"))
        return reference.encode() + b"\n" + content

    def judge(self, data: bytes) -> str:
        reference, _, content = data.partition(b"\n")
        module = f"fuzzed_{sha256(data).hexdigest()[:16]}"
        file = self._directory / f"{module}.py"
        file.write_bytes(content)
        sys.path.insert(0, str(self._directory))
        importlib.invalidate_caches()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                load(reference.decode().format(module))
        except InvalidArgument:
            return "refused"
        finally:
            sys.path.remove(str(self._directory))
            sys.modules.pop(module, None)
            file.unlink()
        return "accepted"
