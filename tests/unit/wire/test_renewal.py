"""Files are read again when they change, and unusable content changes nothing."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from percolator.errors import InvalidArgument
from percolator.wire.renewal import Renewal
from tests.unit.wire.permissions import change_mode


class Reading:
    """Reads numbers, and counts the reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.times = 0
        self.is_forbidden = False
        """Root may read any file, so its mode alone would not keep a test from reading it."""

    def __call__(self) -> list[int]:
        self.times += 1
        try:
            if self.is_forbidden:
                raise PermissionError
            return [int(self.path.read_text())]
        except (OSError, ValueError) as error:
            raise InvalidArgument("number", str(error)) from None


@pytest.fixture(name="reading")
def _reading(tmp_path: Path) -> Reading:
    path = tmp_path / "number"
    path.write_text("1")
    return Reading(path)


def test_nothing_is_read_again_while_nothing_changes(reading: Reading) -> None:
    renewal = Renewal(reading, [str(reading.path)])
    first = renewal.current()
    assert renewal.current() is first
    assert reading.times == 1


def test_a_file_that_was_replaced_is_read_again(reading: Reading) -> None:
    renewal = Renewal(reading, [str(reading.path)])
    new = reading.path.with_suffix(".new")
    new.write_text("2")
    new.replace(reading.path)
    assert renewal.current() == [2]


@pytest.mark.parametrize("broken", ["", "one", None])
def test_the_previous_content_stays_in_use_until_there_is_a_usable_one(
    reading: Reading, broken: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    renewal = Renewal(reading, [str(reading.path)])
    if broken is None:
        reading.path.unlink()
    else:
        reading.path.write_text(broken)
    with caplog.at_level(logging.ERROR):
        assert renewal.current() == renewal.current() == [1]
    assert len(caplog.records) == 1  # and not again with every connection
    reading.path.write_text("22")
    assert renewal.current() == [22]


def test_a_file_is_read_once_its_permissions_allow_it(reading: Reading) -> None:
    renewal = Renewal(reading, [str(reading.path)])
    reading.path.write_text("2")
    reading.is_forbidden = True
    assert renewal.current() == [1]
    reading.is_forbidden = False
    change_mode(reading.path)
    assert renewal.current() == [2]


def test_unusable_content_at_the_start_is_refused(reading: Reading) -> None:
    reading.path.write_text("one")
    with pytest.raises(InvalidArgument):
        Renewal(reading, [str(reading.path)])


def test_each_of_several_files_is_watched(reading: Reading, tmp_path: Path) -> None:
    other = tmp_path / "other"
    renewal = Renewal(reading, [str(reading.path), str(other)])
    renewal.current()
    other.write_text("there now")
    renewal.current()
    assert reading.times == 2
