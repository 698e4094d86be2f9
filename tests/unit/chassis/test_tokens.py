"""The file of tokens: what it grants, and that no part of it is ever shown.

Streams in progress when the token of their caller is withdrawn.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import structlog

from percolator.errors import InvalidArgument, NotReady, Unauthenticated, UsageError
from percolator.services.chassis.access import (
    CLUSTER_IDENTITY,
    Access,
    CallerIdentity,
    Grant,
    Tokens,
)
from percolator.services.chassis.frames import Caller, FrameCallContext, FrameCallFailed
from percolator.services.chassis.rpc import Exposed, Gate, RpcEdge, RpcMetrics
from percolator.v1 import gateway_pb2
from percolator.v1 import tabletserver_pb2 as pb
from percolator.wire.credentials import SCHEME
from percolator.wire.methods import FOLLOW_CHANGES, GET, WATCH_NOTIFICATIONS
from percolator.wire.roles import Role
from percolator.wire.status import from_status
from percolator.wire.tokens import (
    Entry,
    Right,
    Rights,
    new_token,
    parse,
    token_entry,
    token_hash,
    with_entry,
    without_entry,
)
from tests.simulation.virtual_time import VirtualClock
from tests.unit.wire.permissions import change_mode


def tokens_file(directory: Path, *entries: str) -> Path:
    path = directory / "tokens.toml"
    path.write_text("\n".join(entries))
    return path


def role_of(tokens: Tokens, token: str) -> Role | None:
    grant = tokens.grant_of(token_hash(token))
    return None if grant is None else grant.role


def test_a_token_has_the_role_that_the_file_gives_it(tmp_path: Path) -> None:
    shop, boss = new_token(), new_token()
    path = tokens_file(
        tmp_path, token_entry("shop", Role.CLIENT, shop), token_entry("boss", Role.ADMIN, boss)
    )
    tokens = Tokens(path)
    assert tokens.grant_of(token_hash(shop)) == Grant("shop", Role.CLIENT)
    assert tokens.grant_of(token_hash(boss)) == Grant("boss", Role.ADMIN)
    assert tokens.grant_of(token_hash(shop + "x")) is None
    assert tokens.grant_of(token_hash("")) is None


def test_the_file_does_not_hold_the_token(tmp_path: Path) -> None:
    token = new_token()
    assert token not in token_entry("shop", Role.CLIENT, token)


ENTRY = token_entry("shop", Role.CLIENT, "s3cret")
FORMER = ENTRY + 'former_sha256 = "{}"\nformer_expires = 2027-01-31T00:00:00Z\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("shop = ", "not TOML"),
        ("shop = 1", "[shop]: expected role and sha256"),
        (ENTRY + "name = 1", "nothing else"),
        (ENTRY + ENTRY, "[shop] appears twice"),
        (ENTRY + "expires = 2027-01-31", "[shop]: expires: expected a time with its zone"),
        (ENTRY + "expires = 2027-01-31T00:00:00", "expires: expected a time with its zone"),
        (ENTRY + 'expires = "s3cret"', "expires: expected a time with its zone"),
        (ENTRY + "expires = 9999-12-31T23:59:59-01:00", "expires: in UTC, it is before year 1"),
        (ENTRY + 'former_sha256 = "s3cret"', "both former_sha256 and former_expires"),
        (ENTRY + "former_expires = 2027-01-31T00:00:00Z", "both former_sha256 and former_expires"),
        (ENTRY + 'read = "orders"', "[shop]: read: expected a list of TABLE or TABLE:PREFIX"),
        (ENTRY + "write = [7]", "[shop]: write: expected a list"),
        (ENTRY + 'read = ["orders:"]', "read: expected a list of TABLE or TABLE:PREFIX"),
        (ENTRY + 'read = [":eu/"]', "read: expected a list"),
        (ENTRY + 'read = ["orders:hex:0"]', "read: expected a list"),
        (ENTRY + 'delete = ["orders"]', "nothing else"),
        (ENTRY.replace("client", "admin") + 'read = ["orders"]', "restrict clients only"),
        (ENTRY + 'administer = ["orders:eu/"]', "administer: expected whole tables"),
        (FORMER.format("s3cret"), "former_sha256: expected 64 hexadecimal digits"),
        (FORMER.format(token_hash("s3cret").hex()), "another token has the same"),
        ('["a b"]\nrole = "client"', "letters, digits"),
        (ENTRY.replace("client", "server"), "expected client or admin"),
        ('[shop]\nrole = "client"\nsha256 = "s3cret"', "64 hexadecimal digits"),
        ('[shop]\nrole = "client"\nsha256 = 7', "64 hexadecimal digits"),
        (ENTRY + ENTRY.replace("shop", "twin"), "another token has the same"),
    ],
)
def test_a_wrong_file_is_refused_by_name_without_a_word_of_its_secrets(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tokens_file(tmp_path, text)
    with pytest.raises(InvalidArgument) as caught:
        Tokens(path)
    assert caught.value.field == "tokens"
    assert str(path) in caught.value.reason
    assert words in caught.value.reason
    assert "s3cret" not in caught.value.reason


@pytest.mark.parametrize("text", ['{} = "admin"', "[{}]", '["{}"]\nrole = "root"\nsha256 = ""'])
def test_a_token_in_the_place_of_a_name_is_not_shown(text: str, tmp_path: Path) -> None:
    token = new_token()
    with pytest.raises(InvalidArgument, match=token[:6]) as refused:
        Tokens(tokens_file(tmp_path, text.format(token)))
    assert token[:7] not in str(refused.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"tokens: .*none: No such file"):
        Tokens(tmp_path / "none")


async def test_a_change_of_the_file_is_in_force_within_seconds(tmp_path: Path) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    path = tokens_file(tmp_path, ENTRY)
    tokens = Tokens(path)
    following = asyncio.create_task(tokens.follow(clock))
    with structlog.testing.capture_logs() as log:
        path.write_text(token_entry("other", Role.ADMIN, "another") + "\n")
        await clock.sleep(5)
        assert tokens.grant_of(token_hash("s3cret")) is None
        assert role_of(tokens, "another") is Role.ADMIN
        path.write_text("broken")
        await clock.sleep(5)
        away = path.rename(tmp_path / "away")
        await clock.sleep(60)
        assert role_of(tokens, "another") is Role.ADMIN
        assert [entry["log_level"] for entry in log].count("error") == 2
        away.rename(path)
        await clock.sleep(5)
    assert [entry["log_level"] for entry in log].count("error") == 3
    following.cancel()


async def test_a_file_that_could_not_be_read_is_in_force_once_its_permissions_allow_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualClock(asyncio.get_running_loop())
    path = tokens_file(tmp_path, ENTRY)
    tokens = Tokens(path)
    following = asyncio.create_task(tokens.follow(clock))
    path.write_text(token_entry("other", Role.ADMIN, "another") + "\n")
    with monkeypatch.context() as forbidden:
        forbidden.setattr(Path, "read_text", _refused)  # a mode would not keep root from it
        await clock.sleep(5)
    assert role_of(tokens, "s3cret") is Role.CLIENT
    change_mode(path)
    await clock.sleep(5)
    assert tokens.grant_of(token_hash("s3cret")) is None
    assert role_of(tokens, "another") is Role.ADMIN
    following.cancel()


def _refused(*_: object, **__: object) -> str:
    raise PermissionError(errno.EACCES, "Permission denied")


SHOP, BOSS = token_entry("shop", Role.CLIENT, "s3cret"), token_entry("boss", Role.ADMIN, "b0ss")
SERVICE = pb.DESCRIPTOR.services_by_name["TabletServerService"]
GATEWAY = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"]


class EndlessHandler:
    """Streams an answer each second; the other methods are not called."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self.is_closed = False

    async def watch_notifications(
        self, request: pb.WatchNotificationsRequest
    ) -> AsyncIterator[pb.WatchNotificationsResponse]:
        try:
            while True:
                await self._clock.sleep(1)
                yield pb.WatchNotificationsResponse()
        finally:
            self.is_closed = True

    follow_changes = watch_notifications

    def __getattr__(self, name: str) -> Callable[[Any], Any]:
        return lambda _: UsageError(name)


class Details(NamedTuple):
    """A `grpc.HandlerCallDetails`."""

    method: str
    invocation_metadata: tuple[tuple[str, str], ...] = ()


class StreamContext(FrameCallContext):
    """A call over gRPC, as far as its edge looks at it."""

    def peer(self) -> str:
        return "the watcher"

    async def read(self) -> bytes:
        return b""


class Watcher:
    """A caller who watches over the edge of a server with tokens."""

    def __init__(self, tokens: Path) -> None:
        loop = asyncio.get_running_loop()
        clock = VirtualClock(loop)
        self.handler = EndlessHandler(clock)
        known = Tokens(tokens)
        self._following = asyncio.create_task(known.follow(clock))
        self._edge = RpcEdge(Gate(10, 1024), RpcMetrics(), clock, Access(known, clock))
        self._edge.expose([Exposed(SERVICE, self.handler), Exposed(GATEWAY, self.handler)])
        self._caller = Caller(SCHEME + "s3cret", (), "ipv4:192.0.2.1:5000")
        self._loop = loop

    async def answers(self, path: str = WATCH_NOTIFICATIONS.path) -> AsyncIterator[bytes]:
        context = StreamContext(self._caller, self._loop.time() + 3600, self._loop.time)
        handler = self._edge.service(Details(path))
        assert handler is not None
        try:
            async for answer in handler.stream_stream(None, context):
                yield answer
        except FrameCallFailed as failed:
            raise from_status(failed.status) from None

    def leave(self) -> None:
        self._following.cancel()


async def several(answers: AsyncIterator[bytes]) -> None:
    """Takes the answers of ten seconds."""
    for _ in range(10):
        await anext(answers)


async def test_a_stream_ends_within_seconds_once_its_token_is_withdrawn(tmp_path: Path) -> None:
    """Otherwise its owner could go on reading for as long as the server runs."""
    tokens = tokens_file(tmp_path, SHOP + BOSS)
    watcher = Watcher(tokens)
    answers = watcher.answers()
    await several(answers)
    tokens.write_text(BOSS)
    # Not `Unauthenticated`: programs take that for a call of which nothing was answered.
    with pytest.raises(NotReady, match="token"):
        await several(answers)
    assert watcher.handler.is_closed
    with pytest.raises(Unauthenticated):
        await anext(watcher.answers())
    watcher.leave()


async def test_a_stream_ends_within_seconds_once_its_token_expires(tmp_path: Path) -> None:
    now = VirtualClock(asyncio.get_running_loop()).wall_milliseconds() / 1000
    end = datetime.fromtimestamp(now, UTC).replace(microsecond=0) + timedelta(seconds=15)
    tokens = tokens_file(tmp_path, token_entry("shop", Role.CLIENT, "s3cret", end))
    watcher = Watcher(tokens)
    answers = watcher.answers()
    await several(answers)
    with pytest.raises(NotReady, match="no longer accepted"):
        await several(answers)
    assert watcher.handler.is_closed
    watcher.leave()


async def test_a_stream_ends_when_the_rights_of_its_token_change(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, SHOP + 'read = ["orders", "stock"]\n')
    watcher = Watcher(tokens)
    answers = watcher.answers(FOLLOW_CHANGES.path)
    await several(answers)
    tokens.write_text(SHOP + 'read = ["orders"]\n')
    with pytest.raises(NotReady, match="the rights of the token"):
        await several(answers)
    assert watcher.handler.is_closed
    watcher.leave()


async def test_a_stream_goes_on_when_tokens_of_others_are_withdrawn(tmp_path: Path) -> None:
    tokens = tokens_file(tmp_path, SHOP + BOSS)
    watcher = Watcher(tokens)
    answers = watcher.answers()
    await anext(answers)
    tokens.write_text(SHOP)
    await several(answers)
    watcher.leave()


END = datetime(2027, 1, 31, tzinfo=UTC)


class ClockAt(VirtualClock):
    """Says what time it is, and nothing else."""

    def __init__(self, time: datetime) -> None:
        self.time = time

    def wall_milliseconds(self) -> int:
        return round(self.time.timestamp() * 1000)


def caller_with(tokens: Path, clock: ClockAt, token: str, path: str = "/p") -> CallerIdentity:
    metadata = [("authorization", SCHEME + token)]
    access = Access(Tokens(tokens), clock)
    return access.require(path, Role.CLIENT, metadata, lambda: (), lambda: "ipv4:192.0.2.1:5000")


def test_a_token_is_refused_by_name_from_the_time_at_which_it_expires(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, token_entry("shop", Role.CLIENT, "s3cret", END))
    clock = ClockAt(END - timedelta(milliseconds=1))
    assert caller_with(path, clock, "s3cret").name == "shop"
    clock.time = END
    with pytest.raises(Unauthenticated, match="'shop' has expired at 2027-01-31T00:00:00Z"):
        caller_with(path, clock, "s3cret")


def test_after_a_rotation_both_tokens_have_the_name_until_the_former_one_ends(
    tmp_path: Path,
) -> None:
    entry = Entry("shop", Role.ADMIN, token_hash("new"), None, token_hash("old"), END)
    path = tokens_file(tmp_path, entry.text())
    clock = ClockAt(END - timedelta(milliseconds=1))
    for token in ("new", "old"):
        assert caller_with(path, clock, token) == CallerIdentity(
            Role.ADMIN, None, "shop", "192.0.2.1"
        )
    clock.time = END
    assert caller_with(path, clock, "new").name == "shop"
    with pytest.raises(Unauthenticated, match="'shop' has expired"):
        caller_with(path, clock, "old")


def test_a_former_token_ends_no_later_than_the_name_itself(tmp_path: Path) -> None:
    later = END + timedelta(days=1)
    entry = Entry("shop", Role.ADMIN, token_hash("new"), END, token_hash("old"), later)
    with pytest.raises(Unauthenticated, match="expired"):
        caller_with(tokens_file(tmp_path, entry.text()), ClockAt(END), "old")


OTHERS = f"""# Of the shop.
a = {{ role = "admin", sha256 = "{token_hash("a").hex()}" }}
[b] # whose
role = "client"
# not [shop]
sha256 = "{token_hash("b").hex()}"
"""


def test_an_entry_is_taken_out_without_a_change_of_any_other_line() -> None:
    entry = Entry("shop", Role.CLIENT, token_hash("s3cret"), END)
    added = with_entry(OTHERS, entry)
    assert parse(added, "file")["shop"] == entry
    twin = replace(entry, name="shop-2", digest=token_hash("twin"))
    assert without_entry(with_entry(added, twin), "shop", "file") == (OTHERS + "\n" + twin.text())
    assert without_entry(added, "shop", "file").rstrip() == OTHERS.rstrip()


def test_an_entry_that_is_no_section_is_left_to_people() -> None:
    with pytest.raises(InvalidArgument, match=r"\[a\] is no section of its own; edit the file"):
        without_entry(OTHERS, "a", "file")


def test_a_certificate_alone_gives_no_role_unless_the_setting_says_so() -> None:
    def role(access: Access, name: bytes, *metadata: tuple[str, str]) -> Role:
        required, peer = Role.CLIENT, "ipv4:192.0.2.1:5000"
        return access.require("/p", required, metadata, lambda: (name,), lambda: peer).role

    closed = Access(None, ClockAt(END))
    with pytest.raises(Unauthenticated, match="a certificate alone gives no role"):
        role(closed, b"a client")
    with pytest.raises(Unauthenticated, match="knows no tokens"):
        role(closed, b"a client", ("authorization", SCHEME + "s3cret"))
    assert role(closed, CLUSTER_IDENTITY) is Role.SERVER
    opened = Access(None, ClockAt(END), any_certificate_is_admin=True)
    assert role(opened, b"a client") is Role.ADMIN
    assert role(opened, b"a client", ("authorization", SCHEME + "s3cret")) is Role.ADMIN
    assert role(opened, CLUSTER_IDENTITY) is Role.SERVER


def test_rights_are_read_as_they_are_written(tmp_path: Path) -> None:
    read = (Right("orders"), Right("stock", b"eu/"), Right("stock", b"\x00\xff"))
    rights = Rights(read, (Right("caf\u00e9"),), (Right("orders"),))
    entry = Entry("shop", Role.CLIENT, token_hash("s3cret"), rights=rights)
    assert 'read = ["orders", "stock:eu/", "stock:hex:00ff"]' in entry.text()
    assert caller_with(tokens_file(tmp_path, entry.text()), ClockAt(END), "s3cret", GET.path) == (
        CallerIdentity(
            Role.CLIENT, (token_hash("s3cret"), "192.0.2.1"), "shop", "192.0.2.1", rights
        )
    )
