"""percolator/v1 is exactly what the protos generate."""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_generated_stubs_are_fresh(tmp_path: Path) -> None:
    """After changing a proto, run `make protos`: a stale stub would speak an older protocol."""
    protos = sorted(str(path) for path in (ROOT / "protos/percolator/v1").glob("*.proto"))
    subprocess.run(
        [
            ROOT / ".venv/protos/bin/python",
            "-W",
            "ignore",
            "-m",
            "grpc_tools.protoc",
            f"-I{ROOT / 'protos'}",
            f"--python_out={tmp_path}",
            f"--pyi_out={tmp_path}",
            *protos,
        ],
        check=True,
        timeout=50,
    )
    generated = {path.name: path.read_bytes() for path in (tmp_path / "percolator/v1").iterdir()}
    checked_in = {
        path.name: path.read_bytes()
        for path in (ROOT / "percolator/v1").iterdir()
        if path.suffix in {".py", ".pyi"} and path.name != "__init__.py"
    }
    assert sorted(generated) == sorted(checked_in)
    stale = [name for name in generated if generated[name] != checked_in[name]]
    assert stale == []
