"""Access tokens: fetched once for all calls, early, outside the event loop, and again if refused.

Accounts use google-auth as it is, with a token server on this machine.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from percolator.bigtable.account import GoogleAccount, Token, Tokens
from percolator.bigtable.connection import Connection
from percolator.bigtable.place import parse_place
from percolator.errors import NotReady, PercolatorError, Retry, Unauthenticated, UsageError

pytestmark = pytest.mark.real_time

HOUR = 3600.0


class Source:
    """A source of tokens that notes the asking threads, and can be slow or fail."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[int] = set()
        self.error: PercolatorError | None = None
        self.seconds = HOUR
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def __call__(self) -> Token:
        self.threads.add(threading.get_ident())
        self.count += 1
        number = self.count
        assert self.may_go_on.wait(10)
        if self.error is not None:
            raise self.error
        return Token(f"token-{number}", self.seconds, "quota")


class Clock:
    """The time, as the test sets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
@asynccontextmanager
async def tokens(source: Source, clock: Clock) -> AsyncIterator[Tokens]:
    made = Tokens(source, clock)
    yield made
    source.may_go_on.set()
    await made.close()


async def _until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (what it waits for is in another thread)
            await asyncio.sleep(0.001)


async def test_many_callers_share_one_fetch_outside_the_event_loop(
    tokens: Tokens, source: Source
) -> None:
    source.may_go_on.clear()
    waiting = [asyncio.create_task(tokens.metadata(10)) for _ in range(50)]
    await _until(lambda: source.count)
    await asyncio.sleep(0)  # the loop goes on while the fetch is blocked
    source.may_go_on.set()
    found = await asyncio.gather(*waiting)
    assert set(found) == {(("authorization", "Bearer token-1"), ("x-goog-user-project", "quota"))}
    assert source.count == 1
    assert threading.get_ident() not in source.threads


async def test_a_token_is_replaced_before_it_expires_while_calls_still_use_it(
    tokens: Tokens, source: Source, clock: Clock
) -> None:
    first = await tokens.metadata(10)
    clock.now = HOUR - 301
    assert tokens.current() is first
    assert source.count == 1
    clock.now = HOUR - 299
    source.may_go_on.clear()
    assert tokens.current() is first
    assert tokens.current() is first
    await _until(lambda: source.count == 2)
    source.may_go_on.set()
    await _until(lambda: tokens.current() is not first)
    assert source.count == 2


async def test_no_call_waits_for_a_failing_account_while_its_token_is_valid(
    tokens: Tokens, source: Source, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    first = await tokens.metadata(10)
    source.error = NotReady("the network is down")
    clock.now = HOUR - 200
    with caplog.at_level(logging.WARNING, "percolator.bigtable"):
        assert await tokens.metadata(10) is first
        await _until(lambda: caplog.messages)
    assert "the network is down" in caplog.text
    assert tokens.current() is first
    assert source.count == 2, "it is asked again after a pause only"
    clock.now += 11
    tokens.current()
    await _until(lambda: source.count == 3)
    clock.now = HOUR - 5  # too late for a call to arrive
    assert tokens.current() is None
    with pytest.raises(NotReady) as caught:
        await tokens.metadata(10)
    assert caught.value.retry is Retry.SAFE


async def test_every_waiting_call_gets_the_error_and_the_next_call_fetches_again(
    tokens: Tokens, source: Source
) -> None:
    source.error = Unauthenticated("there are no usable Google credentials")
    found = await asyncio.gather(*(tokens.metadata(10) for _ in range(3)), return_exceptions=True)
    assert [str(error) for error in found] == ["there are no usable Google credentials"] * 3
    assert len(set(map(id, found))) == 3
    source.error = None
    assert (await tokens.metadata(10))[0] == ("authorization", "Bearer token-2")


async def test_a_call_that_waits_too_long_for_a_token_is_not_made(
    tokens: Tokens, source: Source
) -> None:
    source.may_go_on.clear()
    with pytest.raises(NotReady, match=r"no access token within 0\.01 s") as caught:
        await tokens.metadata(0.01)
    assert caught.value.retry is Retry.SAFE


async def test_a_refused_token_is_replaced_and_a_later_refusal_of_it_changes_nothing(
    tokens: Tokens,
) -> None:
    first = await tokens.metadata(10)
    tokens.refused(first)
    assert tokens.current() is None
    second = await tokens.metadata(10)
    tokens.refused(first)
    assert tokens.current() is second


async def test_a_short_lived_token_is_replaced_halfway_through_its_life(
    tokens: Tokens, source: Source, clock: Clock
) -> None:
    source.seconds = 20.0
    first = await tokens.metadata(10)
    clock.now = 9.0
    assert tokens.current() is first
    assert source.count == 1
    clock.now = 11.0
    assert tokens.current() is first
    await _until(lambda: source.count == 2)


async def test_closing_does_not_wait_for_a_fetch(tokens: Tokens, source: Source) -> None:
    source.may_go_on.clear()
    waiting = asyncio.create_task(tokens.metadata(10))
    await _until(lambda: source.count)
    async with asyncio.timeout(5):
        await tokens.close()
    with pytest.raises(UsageError, match="closed"):
        await waiting


async def test_after_closing_the_token_stays_usable_and_no_other_is_fetched(
    tokens: Tokens, source: Source, clock: Clock
) -> None:
    first = await tokens.metadata(10)
    await tokens.close()
    clock.now = HOUR - 200.0  # it would be replaced by now
    assert await tokens.metadata(10) is first
    clock.now = HOUR
    with pytest.raises(UsageError, match="the network of this client is closed"):
        await tokens.metadata(10)
    assert source.count == 1


GIVEN = "GOOGLE_APPLICATION_CREDENTIALS"


class TokenServer(ThreadingHTTPServer):
    """Answers with a token, or as a test says."""

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


def test_the_key_file_of_a_service_account_gives_tokens_with_their_lifetime(
    file: Path, server: TokenServer
) -> None:
    account = GoogleAccount()
    token = account.token()
    assert token.value == "a-token"
    assert 3500 < token.seconds <= 3600
    assert server.asked == 1
    server.answer = {"access_token": "another", "expires_in": 60}
    assert account.token().value == "another"


def test_a_missing_key_file_is_named_with_advice(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(GIVEN, str(file.parent / "none.json"))
    with pytest.raises(Unauthenticated, match="no usable Google credentials") as caught:
        GoogleAccount().token()
    assert "none.json" in caught.value.message
    assert "gcloud auth application-default login" in caught.value.message


@pytest.mark.parametrize("content", ["no json", "{}", '{"type": "service_account"}'])
def test_a_file_without_an_account_is_refused(file: Path, content: str) -> None:
    file.write_text(content)
    with pytest.raises(Unauthenticated, match="no usable Google credentials"):
        GoogleAccount().token()


def test_missing_credentials_are_reported_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(GIVEN, raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    with pytest.raises(Unauthenticated, match="where a service account is attached"):
        GoogleAccount().token()


def test_a_refused_account_is_read_again_after_it_was_repaired(
    file: Path, server: TokenServer
) -> None:
    server.status, server.answer = 400, {"error": "invalid_grant", "error_description": "disabled"}
    account = GoogleAccount()
    with pytest.raises(Unauthenticated, match="invalid_grant") as caught:
        account.token()
    assert "gcloud auth application-default login" in caught.value.message
    server.status, server.answer = 200, {"access_token": "mended", "expires_in": 3600}
    assert account.token().value == "mended"


def test_an_unreachable_token_server_is_worth_another_attempt(file: Path, private_key: str) -> None:
    found = json.loads(file.read_text())
    found["token_uri"] = "http://127.0.0.1:1/token"
    file.write_text(json.dumps(found))
    with pytest.raises(NotReady, match="token server was not reached") as caught:
        GoogleAccount().token()
    assert caught.value.retry is Retry.SAFE


async def test_only_the_service_needs_the_extra_and_not_an_emulator(
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


async def test_a_connection_fetches_no_token_before_its_first_call(
    file: Path, server: TokenServer
) -> None:
    await Connection(parse_place("bigtable://my-project/my-instance", environment={})).close()
    assert server.asked == 0
