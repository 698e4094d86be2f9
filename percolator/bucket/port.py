"""A narrow port to an object store: create, replace if unchanged, read, head, list, delete.

`Attempts` is what a driver implements: one attempt for each call, without retries. `Bucket` repeats
attempts until it knows what is in the store. Rules, each with the failure that it prevents:

- A driver never repeats a call itself. Otherwise, nobody knows whether an earlier attempt arrived,
  and one's own object is taken for a rival's.
- A refused condition (412, 409), an error (500) and silence are no answers: before any of them is
  believed, the object is read and compared with what was to be written. Stores answer with any of
  them after a write that succeeded: radosgw has answered 500 to the loser of a race, S3 may answer
  409, and proxies repeat requests.
- Whatever is written is unique: it contains a number that only its writer uses. Otherwise, two
  writers of the same bytes both take the object for their own. And a tag of S3 is a hash of the
  bytes: if they come back, so does the tag, and a change that was sent long ago applies to them.
- A key is deleted only when no creation of it can be on its way any more, and is never created
  again. Otherwise, one that was sent long ago succeeds after the deletion: the former owner of a
  log would acknowledge a commit under a number that its successor has used and deleted.
- A list is a hint: it may lag. Otherwise, an object that it lacks is taken for one that does not
  exist: only creating or reading proves anything.
- Nobody computes with a tag, or compares tags of different keys.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from percolator.bucket.settings import Settings
from percolator.errors import InvalidArgument

_KEY = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
"""Characters that no store and no library encodes, each in a way of its own."""
_KEY_CHARACTERS_MAX = 512
LISTED_MAX = 1_000
"""How many keys one list may have."""


class Stored(NamedTuple):
    """An object as it was read."""

    data: bytes
    tag: str
    """The tag of this version of the object; opaque."""


class Head(NamedTuple):
    """An object without its bytes."""

    tag: str
    size: int


class Listed(NamedTuple):
    """An object as a list shows it."""

    key: str
    size: int


class Refused(Exception):
    """The store says that a condition does not hold. No proof of that: see the module's rules."""


class Doubtful(Exception):
    """No answer that says anything: the attempt may have been executed, or may be later."""


class Attempts(Protocol):
    """One attempt for each call. Raises `Doubtful`, or a `PercolatorError` for an answer that will
    not change by itself, such as missing rights: then this attempt was not executed."""

    @property
    def name(self) -> str:
        """The store for messages: its address, and its endpoint."""

    async def create(self, key: str, data: bytes) -> str:
        """Stores an object if the key has none, and returns its tag. Raises `Refused`."""

    async def replace(self, key: str, data: bytes, tag: str) -> str:
        """Stores an object if the key's has this tag, and returns the new one. Raises `Refused`."""

    async def read(self, key: str) -> Stored | None:
        """The object; None if the key has none."""

    async def head(self, key: str) -> Head | None:
        """The object's tag and size; None if the key has none."""

    async def list(self, folder: str, after: str, limit: int) -> list[Listed]:
        """The first objects, in the order of their keys, whose keys begin with `folder` and a
        slash, and are above `after`. Without a folder, those of all keys."""

    async def delete(self, key: str) -> None:
        """Deletes the object if there is one."""

    async def settings(self) -> Settings:
        """Settings of the bucket, as far as the store tells them to this account."""


def require_key(key: str, field: str = "key") -> None:
    """Raises `InvalidArgument` for a key that some store could not keep as it is."""
    if len(key) > _KEY_CHARACTERS_MAX or not _KEY.fullmatch(key):
        raise InvalidArgument(
            field,
            f"expected at most {_KEY_CHARACTERS_MAX} letters, digits, dots, hyphens, underscores "
            f"and single slashes between names that do not begin with a dot; found {key!r}",
        )
