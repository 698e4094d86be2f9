"""`python -m tests.fuzz.guided NAME`: code that reads bytes, fuzzed where it has not been yet.

atheris counts which lines and branches of `percolator` and `services` each input reaches, and goes
on from inputs that reach new ones. It exists for x86-64 only: elsewhere the same code gets inputs
that are damaged at random. An input that fails is written to the folder that is given, and ends the
process.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import sys
import time
from collections.abc import Callable
from pathlib import Path

HAS_ATHERIS = importlib.util.find_spec("atheris") is not None
FAILING_EXIT_CODE = 77
"""As libFuzzer's own: a failing input was found."""
_INPUT_BYTES_MAX = 4_096


def _imported_with_guidance() -> None:
    """Imports everything that is to be guided, with counters in its code."""
    if HAS_ATHERIS:
        import atheris

        with atheris.instrument_imports(include=["percolator"], enable_loader_override=False):
            importlib.import_module("tests.fuzz.judging")


def bodies() -> dict[str, Callable[[], Callable[[bytes], None]]]:
    """Targets that can be guided, by name: each makes a function that takes an input, or raises."""
    from tests.fuzz import judging

    return {
        "decoding": lambda: judging.decode,
        "judging": judging.judging,
        "on rows": judging.serving,
    }


def seeds() -> dict[str, list[bytes]]:
    """Valid inputs, from which the others are made."""
    from tests.fuzz import judging

    return {
        "decoding": judging.seeds_of_decoding(),
        "judging": judging.seeds(),
        "on rows": judging.seeds_of_on_rows(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="tests.fuzz.guided", description=__doc__)
    parser.add_argument("name")
    parser.add_argument("--seconds", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    _imported_with_guidance()
    # Not closed before the process ends: libFuzzer ends it.
    asyncio.set_event_loop(asyncio.new_event_loop())
    body = bodies()[arguments.name]()
    corpus = arguments.folder / "corpus"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()[arguments.name]):
        (corpus / f"seed-{number}").write_bytes(seed)
    if HAS_ATHERIS:
        _with_guidance(body, arguments, corpus)
    else:
        _at_random(body, arguments, corpus)


def _with_guidance(
    body: Callable[[bytes], None], arguments: argparse.Namespace, corpus: Path
) -> None:
    import atheris

    flags = [
        f"-max_total_time={arguments.seconds}",
        f"-seed={arguments.seed or 1}",
        f"-max_len={_INPUT_BYTES_MAX}",
        f"-artifact_prefix={arguments.folder}/",
        "-print_final_stats=1",
        "-rss_limit_mb=1024",
    ]
    atheris.Setup([sys.argv[0], *flags, str(corpus)], body)
    atheris.Fuzz()


def _at_random(body: Callable[[bytes], None], arguments: argparse.Namespace, corpus: Path) -> None:
    from percolator.world import Random
    from tests.fuzz.messages import damaged

    chance = Random(f"guided {arguments.seed}")
    known = [path.read_bytes() for path in sorted(corpus.iterdir())]
    deadline = time.monotonic() + arguments.seconds
    number = 0
    while time.monotonic() < deadline:
        data = damaged(chance.choice(known), chance)[:_INPUT_BYTES_MAX]
        number += 1
        try:
            body(data)
        except Exception:
            (arguments.folder / f"crash-{number}").write_bytes(data)
            raise
    print(f"stat::number_of_executed_units: {number}")


if __name__ == "__main__":
    main()
