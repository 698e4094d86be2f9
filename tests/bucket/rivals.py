"""Processes that create the same numbers in a bucket, and count in one object there.

`python -m tests.bucket.rivals ADDRESS NAME` is one of them. It works until its input ends. Its
output is lines of JSON: doubts, as they arise, how far it is, and what it has done, at the end.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import uuid
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, cast

from percolator.bucket.bucket import Bucket
from percolator.bucket.place import parse_bucket
from percolator.bucket.port import Attempts, Doubtful
from percolator.bucket.s3 import s3_attempts
from percolator.world import MachineClock, machine_random

COUNTER = "counter"
_ATTEMPT_SECONDS = 0.5
_CALL_SECONDS = 60.0
_AT_ONCE = 4


def key_of(number: int) -> str:
    """The key of a number: they are listed in order."""
    return f"log/{number:08d}"


class Done(NamedTuple):
    """Work of one process."""

    found: list[str]
    """By number: the object that it has created or found."""
    own: list[int]
    """The numbers that it was told are its own."""
    own_after_silence: int
    """How many of them were found later, since no attempt had an answer that confirms them."""
    increments: int


async def create_counter(bucket: Bucket) -> None:
    """An object in which nobody has counted."""
    await bucket.create(COUNTER, _json({"sum": 0, "last": {}}))


async def increment(bucket: Bucket, writer: str, number: int) -> None:
    """Makes a writer's next increment. Its last number stays in the object, by which it recognizes
    its own change even after others have made theirs."""
    while True:
        found = await bucket.read(COUNTER)
        if found is None:
            raise RuntimeError("the counter is gone")
        state = json.loads(found.data)
        if state["last"].get(writer) == number:
            return  # made by an attempt that was taken for a rival's
        state["sum"] += 1
        state["last"][writer] = number
        if (await bucket.replace(COUNTER, _json(state), found.tag)).is_own:
            return


class _Traced:
    """Attempts that are watched."""

    def __init__(self, attempts: Attempts) -> None:
        self._attempts = attempts
        self.name = attempts.name
        self.created: set[str] = set()
        """The keys whose creation the store has confirmed."""

    def __getattr__(self, verb: str) -> Callable[..., Awaitable[Any]]:
        async def attempt(*arguments: Any) -> Any:
            try:
                done = await getattr(self._attempts, verb)(*arguments)
            except Doubtful as error:
                # Without any fault, radosgw answers this to the loser of a race.
                if not str(error).startswith("500"):
                    _say(doubt=str(error))
                raise
            except asyncio.CancelledError:
                _say(doubt="silence")
                raise
            if verb == "create":
                self.created.add(arguments[0])
            return done

        return attempt


async def _compete(address: str, name: str) -> Done:
    traced = _Traced(s3_attempts(parse_bucket(address), attempt_seconds=_ATTEMPT_SECONDS))
    bucket = Bucket(
        cast(Attempts, traced),
        MachineClock(),
        machine_random(),
        attempt_seconds=_ATTEMPT_SECONDS,
        seconds=_CALL_SECONDS,
    )
    found: list[str] = []
    own: list[int] = []
    increments = 0
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.read))
    while not ended.done():
        numbers = range(len(found), len(found) + _AT_ONCE)
        made = await asyncio.gather(
            *(bucket.create(key_of(one), f"{name} {uuid.uuid4()}".encode()) for one in numbers)
        )
        for number, written in zip(numbers, made, strict=True):
            if written.found is None:
                raise RuntimeError(f"{number} was refused, but there is nothing")
            found.append(written.found.data.decode())
            if written.is_own:
                own.append(number)
        increments += 1
        await increment(bucket, name, increments)
        _say(at=len(found))
    silent = sum(key_of(number) not in traced.created for number in own)
    return Done(found, own, silent, increments)


def _say(**what: object) -> None:
    print(json.dumps(what), flush=True)


def _json(state: object) -> bytes:
    return json.dumps(state).encode()


if __name__ == "__main__":
    _say(done=asyncio.run(_compete(*sys.argv[1:])))
    os._exit(0)  # Python's end would meet threads of obstore
