"""Runs one document as a reader would: `python driver.py STEPS.json`, in an empty directory.

Python blocks share one namespace, as in one session; each shell block runs in its own shell.
Exits with 1 at the first block that fails, or that prints something other than the document shows.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import selectors
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any

STARTED_SECONDS = 30
SHELL = ["bash", "-euo", "pipefail", "-c"]


class Failed(Exception):
    """Unexpected result that the reader would see."""


class Reader:
    """Goes through a document from top to bottom."""

    def __init__(self) -> None:
        self._namespace: dict[str, Any] = {"__name__": "__main__"}
        self._printed = ""
        self._running: list[subprocess.Popen[str]] = []

    def take(self, step: dict[str, Any]) -> None:
        getattr(self, f"_{step['kind']}")(step)

    def leave(self) -> None:
        for process in self._running:
            process.terminate()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _file(self, step: dict[str, Any]) -> None:
        path = Path(step["path"])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(step["text"])

    def _python(self, step: dict[str, Any]) -> None:
        printed = io.StringIO()
        # So that a traceback names the document's own lines.
        source = "\n" * step["line"] + step["text"]
        with contextlib.redirect_stdout(printed):
            exec(compile(source, step["document"], "exec"), self._namespace)
        self._printed = printed.getvalue()

    def _sh(self, step: dict[str, Any]) -> None:
        done = subprocess.run([*SHELL, step["text"]], capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"exit code {done.returncode}\n{done.stdout}{done.stderr}")
        self._printed = done.stdout

    def _terminal(self, step: dict[str, Any]) -> None:
        process = subprocess.Popen(
            [*SHELL, f"exec {step['text'].strip()}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._running.append(process)
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout or sys.stdin, selectors.EVENT_READ)
            said = selector.select(STARTED_SECONDS)
        if not said or process.poll() is not None:
            raise Failed("printed nothing, or ended, in the other terminal")

    def _output(self, step: dict[str, Any]) -> None:
        shown = [re.escape(part) for part in step["text"].strip().split("…")]
        if not re.fullmatch("[^\n]*".join(shown), self._printed.strip()):
            raise Failed(f"expected\n{step['text']}\ngot\n{self._printed}")


def main() -> int:
    sys.path.insert(0, "")
    reader = Reader()
    try:
        for step in json.loads(Path(sys.argv[1]).read_text()):
            try:
                reader.take(step)
            except BaseException:  # noqa: BLE001 (whatever it is, its place is reported)
                sys.stderr.write(f"{step['document']}:{step['line']}\n{traceback.format_exc()}")
                return 1
    finally:
        reader.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
