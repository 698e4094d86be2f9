"""A service is there soon: what it does not need is not imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVICES = ("gateway", "lockservice", "master", "oracle", "tabletserver", "worker")


def test_no_service_imports_what_only_terminals_need() -> None:
    """And yet an observer may: what was kept away from others can be imported afterwards."""
    imports = "; ".join(f"import services.{name}.__main__" for name in SERVICES)
    program = f"import sys; {imports}; print('rich' in sys.modules); import rich"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"
