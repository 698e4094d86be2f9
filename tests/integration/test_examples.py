"""Each example runs with one command, and leaves nothing behind.

The bank's other test is test_bank.py; the client in Rust is run by tests/rust.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Shared:
    """What one run of `python -m examples` said, and what examples in it did."""

    directory: Path
    done: subprocess.CompletedProcess[str]

    def of(self, example: str, kind: str) -> str:
        return (self.directory / f"{example}.{kind}").read_text()


@pytest.mark.parametrize(
    ("example", "ends_with"),
    [
        ("bank", "12,000 in all accounts together: nothing was made or lost"),
        ("counter_view", "the view is what all orders add up to"),
    ],
)
def test_an_example_runs_on_its_own_cluster(example: str, ends_with: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"examples.{example}", "--seconds", "0.5"]
    done = subprocess.run(
        [sys.executable, "-m", "examples", *command],
        cwd=ROOT,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, _complaints(done.stderr)) == (0, [])
    assert done.stdout.splitlines()[-1] == ends_with
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Shared:
    """Examples one after another on one cluster: to start one takes longer than they do."""
    directory = tmp_path_factory.mktemp("shared")
    command = (
        'for one in unique_numbers phrase_counts inverted_index; do "$PYTHON" -m examples.$one '
        '> "$OUT/$one.out" 2> "$OUT/$one.err"; echo $? > "$OUT/$one.code"; '
        # Two of them make a table with the same name.
        '[ $one != phrase_counts ] || percolator tables delete documents --yes > "$OUT/dropped"; '
        "done; "
        "echo $PERCOLATOR_GATEWAY; exit 7"
    )
    done = subprocess.run(
        [sys.executable, "-m", "examples", "bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, "OUT": str(directory), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return Shared(directory, done)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("example", "ends_with"),
    [
        ("unique_numbers", "different numbers, as plain Python counts them"),
        ("phrase_counts", "pairs of words, as plain Python counts them"),
        ("inverted_index", "words, as plain Python finds them"),
    ],
)
def test_an_example_of_recipes_agrees_with_plain_python(
    example: str, ends_with: str, shared: Shared
) -> None:
    assert shared.done.stderr == ""
    assert (shared.of(example, "code"), _complaints(shared.of(example, "err"))) == ("0\n", [])
    assert shared.of(example, "out").endswith(f"{ends_with}\n")


def test_the_shop_agrees_with_plain_python() -> None:
    command = ["--observers", "examples.shop:observers", sys.executable, "-m", "examples.shop"]
    done = subprocess.run(
        [sys.executable, "-m", "examples", *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, _complaints(done.stderr)) == (0, [])
    lines = done.stdout.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["dishes", "drinks"]
    assert all(line.endswith("as plain Python finds in all orders") for line in lines)


def _complaints(stderr: str) -> list[str]:
    """What a program said on its standard error, but for transactions that a busy machine slows."""
    slow = re.compile(r"slow transaction: |\d+ more slow transactions were not logged")
    return [line for line in stderr.splitlines() if not slow.match(line)]


def test_the_commands_of_the_makefile_run_the_examples() -> None:
    recipes = (ROOT / "Makefile").read_text()
    for example in ("bank", "counter_view", "shop", "webindex.load"):
        assert re.search(rf"-m examples .*?python -m examples\.{example}\b", recipes, re.DOTALL)


@pytest.mark.timeout(120)
def test_the_exit_code_of_a_failing_command_is_passed_on(shared: Shared) -> None:
    assert shared.done.returncode == 7
    assert re.fullmatch(r"127\.0\.0\.1:\d+\n", shared.done.stdout)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (["--foo", "true"], "there is no command '--foo'"),
        (["/no/such/command"], "there is no command '/no/such/command'"),
        (["--observers", "nope:x", "true"], "observers: module 'nope' cannot be imported"),
        (["--observers", "examples.webindex.observers:nope", "true"], "has no 'nope'"),
    ],
)
def test_a_command_that_cannot_run_starts_no_cluster(
    command: list[str], problem: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples", *command],
        cwd=ROOT,
        env={"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert problem in done.stderr
