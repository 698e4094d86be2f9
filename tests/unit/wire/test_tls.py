"""Certificate files are tried out before they are used, and an error names what is wrong."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from percolator.errors import InvalidArgument
from percolator.wire.credentials import TLS_VARIABLES, TOKEN_VARIABLE, client_credentials
from percolator.wire.renewal import Renewal
from percolator.wire.tls import load
from tests.unit.wire.certificates import Certificates, made
from tests.unit.wire.permissions import change_mode

__all__ = ["made"]

WRONG = [
    "no authority",
    "empty name",
    "a directory",
    "text as authority",
    "key as certificate",
    "certificate as key",
    "another's key",
    "protected key",
    "another authority",
    "expired",
    "a client's",
]


def test_good_files_are_read_and_their_content_is_shown_nowhere(certificates: Certificates) -> None:
    for files, serves in ((certificates.cluster, True), (certificates.client, False)):
        material = load(files, "tls_{}".format, serves=serves)
        assert material.key == Path(files.key).read_bytes()
        assert "PRIVATE KEY" not in repr(material)


def test_every_kind_of_bad_file_is_tried(certificates: Certificates) -> None:
    assert certificates.bad.keys() == set(WRONG)


@pytest.mark.parametrize("wrong", WRONG)
def test_a_bad_file_is_refused_with_the_setting_and_its_name(
    certificates: Certificates, wrong: str
) -> None:
    files, part, words = certificates.bad[wrong]
    with pytest.raises(InvalidArgument) as caught:
        load(files, "tls_{}".format, serves=True)
    assert caught.value.field == f"tls_{part}"
    assert words in caught.value.reason
    assert getattr(files, part) in caught.value.reason
    assert "PRIVATE KEY" not in str(caught.value)


def test_a_client_may_have_any_name_in_its_certificate(certificates: Certificates) -> None:
    with pytest.raises(InvalidArgument):
        load(certificates.client, "tls_{}".format, serves=True)
    assert load(certificates.client, "tls_{}".format, serves=False).ca


def test_a_program_may_name_its_files_or_leave_them_to_the_environment(
    certificates: Certificates, tmp_path: Path
) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    files = certificates.client
    environment = {name: getattr(files, part) for part, name in TLS_VARIABLES.items()}
    environment[TOKEN_VARIABLE] = str(token)
    said = client_credentials(files, "s3cret", {})
    assert client_credentials(None, None, environment) == said
    assert said.metadata == (("authorization", "Bearer s3cret"),)
    assert "s3cret" not in repr(said)


def test_without_any_settings_it_is_plain_text() -> None:
    assert client_credentials(None, None, {}).tls is None


def test_an_incomplete_set_of_environment_variables_is_refused(certificates: Certificates) -> None:
    environment = {TLS_VARIABLES["ca"]: certificates.client.ca}
    with pytest.raises(InvalidArgument, match="PERCOLATOR_TLS_CERTIFICATE: is not set, although"):
        client_credentials(None, None, environment)


@pytest.mark.parametrize("content", [b"", b"two words", b"\xff\xfe", b"x" * 1025])
def test_a_file_without_a_token_is_named_and_not_quoted(content: bytes, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        client_credentials(None, None, {TOKEN_VARIABLE: str(token)})
    assert str(caught.value).startswith(f"{TOKEN_VARIABLE}: {token}: holds no token")
    assert "two words" not in str(caught.value)


def test_a_token_does_not_travel_in_plain_text(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="token: needs TLS"):
        client_credentials(None, "s3cret", {})


# Files are read again when they change, and unusable content changes nothing.


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
