"""Tokens by google-auth as it is, from a server of tokens on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from percolator.bigtable.connection import Connection
from percolator.bigtable.google_account import GoogleAccount
from percolator.bigtable.place import parse_place
from percolator.errors import NotReady, Retry, Unauthenticated, UsageError

GIVEN = "GOOGLE_APPLICATION_CREDENTIALS"


class TokenServer(ThreadingHTTPServer):
    """Gives tokens, or whatever a test says."""

    status = 200
    answer: dict[str, object] = {"access_token": "a-token", "expires_in": 3600}  # noqa: RUF012
    asked = 0

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/token"


class _Handler(BaseHTTPRequestHandler):
    server: TokenServer

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked += 1
        body = json.dumps(self.server.answer).encode()
        self.send_response(self.server.status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent: a test has its own output."""


@pytest.fixture(name="server")
def token_server() -> Iterator[TokenServer]:
    with TokenServer(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def private_key() -> str:
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    ).decode()


@pytest.fixture(name="file")
def key_file(
    tmp_path: Path, server: TokenServer, private_key: str, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """The key file of a service account, which the environment names."""
    path = tmp_path / "account.json"
    path.write_text(
        json.dumps(
            {
                "type": "service_account",
                "client_email": "someone@my-project.iam.gserviceaccount.com",
                "private_key": private_key,
                "token_uri": server.uri,
            }
        )
    )
    monkeypatch.setenv(GIVEN, str(path))
    monkeypatch.delenv("BIGTABLE_EMULATOR_HOST", raising=False)
    return path


def test_a_service_accounts_key_file_gives_tokens_with_their_time(
    file: Path, server: TokenServer
) -> None:
    account = GoogleAccount()
    token = account.token()
    assert token.value == "a-token"
    assert 3500 < token.seconds <= 3600
    assert server.asked == 1
    server.answer = {"access_token": "another", "expires_in": 60}
    assert account.token().value == "another"


def test_a_file_that_is_missing_is_named_with_what_to_do(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GIVEN, str(file.parent / "none.json"))
    with pytest.raises(Unauthenticated, match="no usable Google credentials") as caught:
        GoogleAccount().token()
    assert "none.json" in caught.value.message
    assert "gcloud auth application-default login" in caught.value.message


@pytest.mark.parametrize("content", ["no json", "{}", '{"type": "service_account"}'])
def test_a_file_that_holds_no_account_is_no_credentials(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(Unauthenticated, match="no usable Google credentials"):
        GoogleAccount().token()


def test_no_credentials_anywhere_are_said_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(GIVEN, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(Unauthenticated, match="where a service account is attached"):
        GoogleAccount().token()


def test_a_refused_account_is_read_anew_once_it_was_mended(file: Path, server: TokenServer) -> None:
    server.status, server.answer = 400, {"error": "invalid_grant", "error_description": "disabled"}
    account = GoogleAccount()
    with pytest.raises(Unauthenticated, match="invalid_grant") as caught:
        account.token()
    assert "gcloud auth application-default login" in caught.value.message
    server.status, server.answer = 200, {"access_token": "mended", "expires_in": 3600}
    assert account.token().value == "mended"


def test_a_token_server_that_is_away_is_worth_another_attempt(file: Path, private_key: str) -> None:
    found = json.loads(file.read_text())
    found["token_uri"] = "http://127.0.0.1:1/token"
    file.write_text(json.dumps(found))
    with pytest.raises(NotReady, match="token server was not reached") as caught:
        GoogleAccount().token()
    assert caught.value.retry is Retry.SAFE


async def test_without_the_extra_the_service_is_refused_and_an_emulator_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def missing(name: str) -> object:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr("importlib.import_module", missing)
    text = "bigtable://my-project/my-instance"
    with pytest.raises(UsageError, match=r"pip install 'percolator-store\[bigtable\]'"):
        Connection(parse_place(text, environment={}))
    emulator = {"BIGTABLE_EMULATOR_HOST": "localhost:1"}
    await Connection(parse_place(text, environment=emulator)).close()


async def test_a_connection_to_the_service_asks_for_no_token_before_its_first_call(
    file: Path, server: TokenServer
) -> None:
    connection = Connection(parse_place("bigtable://my-project/my-instance", environment={}))
    await connection.close()
    assert server.asked == 0
