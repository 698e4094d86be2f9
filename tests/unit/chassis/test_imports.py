"""A service starts quickly: it does not import what it does not need."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
SERVICES = ("gateway", "lockservice", "master", "oracle", "tabletserver", "worker")


def test_no_service_imports_what_only_terminals_need() -> None:
    """An observer may still import it afterwards."""
    imports = "; ".join(f"import services.{name}.__main__" for name in SERVICES)
    program = f"import sys; {imports}; print('rich' in sys.modules); import rich"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", SERVICES)
def test_no_garbage_is_sought_in_what_a_service_imports(name: str) -> None:
    """Looking through all of it, while it was imported and at the end, took a tenth of a start."""
    program = (
        "import atexit, gc, sys; sys.argv = ['-m']; runs = [];"
        "atexit.register(lambda: print(gc.get_freeze_count() > 10_000));"  # called last
        "import services;"
        "gc.callbacks.append(lambda phase, info: runs.append(phase));"
        f"import services.{name}.__main__; print(runs)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\nTrue\n"
