"""Gateways die, answers are lost, callers ask twice: every transaction still has one outcome.

Each seed is a bank whose tellers send every commit to random gateways, repeatedly and to several at
once, until they learn its outcome. Other callers ask about the outcome meanwhile.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict

from percolator.errors import ConflictError, ExecutionUnknown, NotExecuted, OutcomeUnknown
from percolator.v1 import gateway_pb2 as pb
from percolator.v1.gateway_pb2 import ResolveResponse
from percolator.v1.tabletserver_pb2 import MutateRequest

from .gateways import Gateway, Site, a_site, write

SEEDS = 15
FAULTS = {
    "killed gateway", "left", "lost answer", "lost request", "question", "slow", "unknown",
}  # fmt: skip
ACCOUNTS = [b"ann", b"bob", b"max", b"tom", b"zoe"]
OPENING_BALANCE = 100
TELLERS = 4
TRANSFERS = 8
GATEWAYS = 3
COMMIT_SECONDS = 3.0
ABORTED = 0


class Bank:
    """One seed."""

    def __init__(self, site: Site, seed: int) -> None:
        self._site = site
        self._chance = random.Random(seed)
        self._gateways: list[Gateway] = []
        self.told: dict[int, set[int]] = defaultdict(set)
        """By start timestamp: every outcome that a caller was told."""
        self.occurred: Counter[str] = Counter()

    async def run(self) -> int:
        """Returns the sum of all accounts at the end."""
        self._gateways = [await self._started() for _ in range(GATEWAYS)]
        opening = [write(row, b"%d" % OPENING_BALANCE) for row in ACCOUNTS]
        await self._gateways[0].commit(await self._gateways[0].begin(), opening)
        cluster = self._site.cluster
        cluster.delay = self._delay
        cluster.loses_answer = lambda _: self._occurs("lost answer", 0.04)
        cluster.loses_request = lambda: self._occurs("lost request", 0.03)
        killing = asyncio.ensure_future(self._kill_now_and_then())
        await asyncio.gather(*(self._teller() for _ in range(TELLERS)))
        killing.cancel()
        cluster.loses_answer, cluster.loses_request = lambda _: False, lambda: False
        last = await self._started()
        return sum(int(value or b"0") for value in await last.read(*ACCOUNTS))

    async def _started(self) -> Gateway:
        return await self._site.start(commit_seconds=COMMIT_SECONDS)

    def _delay(self, _: MutateRequest) -> float:
        if self._occurs("slow", 0.02):
            return self._chance.uniform(0.5, 6.0)
        return self._chance.uniform(0.001, 0.02)

    def _occurs(self, name: str, share: float) -> bool:
        if self._chance.random() >= share:
            return False
        self.occurred[name] += 1
        return True

    async def _kill_now_and_then(self) -> None:
        while True:
            await asyncio.sleep(self._chance.uniform(0.1, 1.5))
            place = self._chance.randrange(GATEWAYS)
            killed, self._gateways[place] = self._gateways[place], await self._started()
            self._site.kill(killed)
            self.occurred["killed gateway"] += 1

    async def _teller(self) -> None:
        for _ in range(TRANSFERS):
            await self._transfer()
            await asyncio.sleep(self._chance.uniform(0, 0.2))

    async def _transfer(self) -> None:
        source, target = self._chance.sample(ACCOUNTS, 2)
        gateway = self._chance.choice(self._gateways)
        try:
            start = await gateway.begin()
            has, gets = (int(value or b"") for value in await gateway.get(start, source, target))
        except (ExecutionUnknown, NotExecuted):
            return  # the gateway was killed meanwhile
        writes = [write(source, b"%d" % (has - 1)), write(target, b"%d" % (gets + 1))]
        while not self.told[start]:
            asked = [self._commit(start, writes) for _ in range(self._chance.choice((1, 1, 2, 3)))]
            if self._occurs("question", 0.1):
                asked.append(self._resolve(start, source, target))
            patience = self._chance.choice((0.01, 0.1, 1.0, 5.0))
            pending = [asyncio.ensure_future(one) for one in asked]
            await asyncio.wait(pending, timeout=patience)
            for one in pending:
                if one.done():
                    one.result()
                else:
                    self.occurred["left"] += 1
                    one.cancel()

    async def _commit(self, start: int, writes: list[pb.CellWrite]) -> None:
        try:
            commit = await self._chance.choice(self._gateways).commit(start, writes)
        except ConflictError:
            self.told[start].add(ABORTED)
        except (OutcomeUnknown, ExecutionUnknown, NotExecuted):
            self.occurred["unknown"] += 1
        else:
            self.told[start].add(commit)

    async def _resolve(self, start: int, *rows: bytes) -> None:
        try:
            told = await self._chance.choice(self._gateways).resolve(start, *rows)
        except (OutcomeUnknown, ExecutionUnknown, NotExecuted):
            return
        committed = told.fate == ResolveResponse.FATE_COMMITTED
        self.told[start].add(told.commit_timestamp if committed else ABORTED)


async def test_every_caller_is_told_the_same_outcome_and_no_money_is_made_or_lost() -> None:
    occurred: Counter[str] = Counter()
    for seed in range(SEEDS):
        async with a_site() as site:
            bank = Bank(site, seed)
            total = await bank.run()
        contradictions = {start: told for start, told in bank.told.items() if len(told) != 1}
        assert contradictions == {}, f"seed {seed}"
        assert total == OPENING_BALANCE * len(ACCOUNTS), f"seed {seed}"
        occurred += bank.occurred
    assert set(occurred) == FAULTS, "a fault never occurred"
