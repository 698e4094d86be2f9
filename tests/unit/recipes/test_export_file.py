"""ExportFile: each export once, whatever was left half written."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from percolator import InvalidArgument
from percolator.recipes import Export, ExportFile


def exports(*pairs: tuple[str, int]) -> list[Export[str, int]]:
    return [Export(key, sequence, sequence * 10) for key, sequence in pairs]


def lines(path: Path) -> list[tuple[str, int, int]]:
    found = map(json.loads, path.read_text().splitlines())
    return [(one["key"], one["sequence"], one["value"]) for one in found]


def test_what_is_in_the_file_is_not_appended_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ExportFile(path)
    assert file.append(exports(("a", 1), ("b", 1), ("a", 3))) == 3
    assert file.append(exports(("a", 1), ("a", 3), ("a", 4))) == 1
    assert ExportFile(path).append(exports(("b", 1), ("a", 4), ("b", 2), ("b", 2))) == 1
    assert file.append(exports(("b", 2))) == 0
    expected = [("a", 1), ("b", 1), ("a", 3), ("a", 4), ("b", 2)]
    assert lines(path) == [(key, number, number * 10) for key, number in expected]


def test_a_line_that_was_left_half_written_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    ExportFile(path).append(exports(("a", 1), ("a", 2), ("b", 1)))
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        ExportFile(path).append(exports(("a", 1), ("a", 2), ("b", 1)))
        assert path.read_bytes() == whole


def test_an_open_file_notices_what_another_one_appends_and_a_new_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ExportFile(path), ExportFile(path)
    for number in range(10):
        (first if number % 2 else second).append(exports(("a", number), ("a", number + 1)))
    assert [sequence for _, sequence, _ in lines(path)] == list(range(11))
    path.rename(tmp_path / "old.jsonl")
    first.append(exports(("a", 11)))
    assert [sequence for _, sequence, _ in lines(path)] == [11]


def test_an_open_file_notices_that_it_was_emptied(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, second = ExportFile(path), ExportFile(path)
    first.append(exports(("a", 1), ("a", 2)))
    path.write_bytes(b"")  # as programs do that rotate logs by copying them
    second.append(exports(("a", 3)))
    assert first.append(exports(("a", 3), ("a", 4))) == 1
    assert [sequence for _, sequence, _ in lines(path)] == [3, 4]


def test_what_another_process_wrote_and_left_is_made_durable_before_it_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.jsonl"
    synced: list[str] = []

    def sync(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)

    monkeypatch.setattr(os, "fsync", sync)
    ExportFile(path).append(exports(("a", 1)))
    assert synced == [tmp_path.name, "out.jsonl"]
    synced.clear()
    file = ExportFile(path)
    assert file.append(exports(("a", 1))) == 0
    assert synced == [tmp_path.name, "out.jsonl"]
    assert file.append(exports(("a", 1))) == 0
    assert len(synced) == 2, "what is durable is not written out again"


def test_threads_append_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    files = [ExportFile(path), ExportFile(path)]
    with ThreadPoolExecutor(4) as threads:
        work = [
            threads.submit(files[number % 2].append, exports((f"key {number % 4}", number // 8)))
            for number in range(80)
        ]
        for one in work:
            one.result()
    for key in range(4):
        found = [sequence for name, sequence, _ in lines(path) if name == f"key {key}"]
        assert found == sorted(set(found))
        assert found[-1] == 9


def test_what_is_no_export_is_refused_and_nothing_is_appended(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    file = ExportFile(path)
    with pytest.raises(InvalidArgument, match="value: not a JSON value"):
        file.append([Export("a", 1, 1), Export("a", 2, b"bytes")])
    assert not path.exists()
    path.write_text('{"key": "a", "sequence": 1, "value": 1}\nmine\n')
    with pytest.raises(InvalidArgument, match=r"out.jsonl, byte 40: this line is not an export"):
        file.append(exports(("a", 2)))
    assert path.read_text().endswith("mine\n")
