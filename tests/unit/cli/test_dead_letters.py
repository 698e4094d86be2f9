"""What `percolator dead-letters` says about a letter."""

from __future__ import annotations

from percolator import codecs
from percolator.cli.dead_letters import _changed, _data, _is_of
from percolator.cli.values import Forms
from percolator.codec_names import CodecNames
from percolator.observers.running.dead_letter import DeadLetter


def test_a_weak_notification_is_shown_without_a_time_of_change() -> None:
    def letter(commit: int) -> DeadLetter:
        return DeadLetter("docs", "clean", b"source", b"a", commit, "error", 5, 7)

    assert _changed(letter(0)) == "never"
    assert _changed(letter(1 << 18)).startswith("1970-01-01T00:00:00.001Z")


def test_rows_are_shown_and_chosen_by_their_keys() -> None:
    key = codecs.tuple_of(codecs.text, codecs.ordered_integer)
    row = key.encode(("eu", 17))
    letter = DeadLetter("orders", "count", b"state", row, 1 << 18, "error", 5, 7)
    forms = Forms(CodecNames(key="tuple_of(text, ordered_integer)"))
    assert forms.row_text(row) == '["eu", 17]'
    assert _data([letter], {"orders": forms})[0]["key"] == ["eu", 17]
    assert _is_of(letter, '["eu", 17]', forms)
    assert _is_of(letter, "hex:" + row.hex(), forms)
    assert not _is_of(letter, '["eu", 18]', forms)
    assert not _is_of(letter, "eu", forms)
