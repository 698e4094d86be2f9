"""Bigtable as a row store, and the bound on calls in flight to it.

A call beyond the bound waits, in the order of arrival. When the store refuses a call, or is silent
for too long, the bound is halved, once for all calls that were sent before that; each answer raises
it a little. While the store asks for a pause, nothing is sent.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import TypeVar

from percolator.bigtable.errors import FamilyMissing, missing_family, named
from percolator.bigtable.messages import (
    CHECK_AND_MUTATE_ROW,
    MUTATE_ROWS,
    READ_ROWS,
    SAMPLE_ROW_KEYS,
    Rows,
    add_mutation,
    checking,
    selecting,
)
from percolator.bigtable.place import Place
from percolator.errors import (
    DeadlineExceeded,
    ExecutionUnknown,
    InvalidArgument,
    Overloaded,
    PercolatorError,
)
from percolator.rowstore.port import Change, Check, RowChange, Sample, Selection, SetCell, StoredRow
from percolator.v1.bigtable_pb2 import (
    BigtableCheckAndMutateRowRequest,
    BigtableMutateRowsRequest,
    BigtableMutateRowsResponse,
    BigtableReadRowsRequest,
    BigtableRowRange,
    BigtableSampleRowKeysRequest,
)
from percolator.world import Network, RequestT

AnswerT = TypeVar("AnswerT")

CALLS_MAX = 900
"""The bound when nothing is wrong: ten connections carry these calls without waiting."""
_PAUSE_SECONDS_MAX = 30.0
"""A pause that is asked for is kept up to this; longer ones are for the callers to wait."""
_FILTER_BYTES_MAX = 20_480
"""The service's limit on a filter."""
_READ_BYTES_MAX = 524_288
"""The service's limit on a request to read: not documented, but users of Google's clients met it.
"""
_SAFETY = 2
"""How far requests stay below these."""
_RANGES_MAX = 600
"""Each takes 34 bytes of the filter of a check."""
_KEY_BYTES_MAX = 4_096
_VALUE_BYTES_MAX = 100 * 1024 * 1024
_TIMEOUT_SECONDS_MIN = 0.001
_NOT_ANSWERED = ExecutionUnknown("the call was cancelled")


class Admission:
    """Lets calls through. Belongs to one event loop."""

    def __init__(self, most: int = CALLS_MAX) -> None:
        self._most = most
        self._bound = float(most)
        self.in_flight = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._tickets = self._halved_until = 0
        self._pause: asyncio.TimerHandle | None = None

    @property
    def bound(self) -> int:
        """How many calls may be in flight at present."""
        return int(self._bound)

    def enter_at_once(self) -> int:
        """The ticket of a call that need not wait; 0 if it has to wait in `enter`."""
        if self._pause is not None or self._waiting or self.in_flight >= int(self._bound):
            return 0
        self.in_flight += 1
        self._tickets += 1
        return self._tickets

    async def enter(self, timeout_seconds: float) -> int:
        """The ticket of a call, once it may be made. Raises `Overloaded` if that takes too long:
        the call was not made."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._admit()
        try:
            await asyncio.wait([waiter], timeout=timeout_seconds)
        except asyncio.CancelledError:
            self._withdraw(waiter)
            raise
        if not waiter.done():
            self._withdraw(waiter)
            raise Overloaded(
                f"Bigtable answers too slowly: {self.in_flight} calls are in flight, and "
                f"{len(self._waiting)} more wait",
                retry_after_seconds=0.0,
            )
        self._tickets += 1
        return self._tickets

    def leave(self, ticket: int, error: PercolatorError | None = None) -> None:
        """Called when a call has ended."""
        self.in_flight -= 1
        if error is None:
            if self._bound < self._most:
                self._bound = min(self._bound + 1.0 / self._bound, float(self._most))
        elif isinstance(error, (Overloaded, DeadlineExceeded)) or error.retry_after_seconds:
            self._slow_down(ticket, error.retry_after_seconds)
        if self._waiting:
            self._admit()

    def _slow_down(self, ticket: int, asked_seconds: float) -> None:
        if ticket > self._halved_until:
            self._halved_until = self._tickets
            self._bound = max(self._bound / 2.0, 1.0)
        if asked_seconds > 0:
            loop = asyncio.get_running_loop()
            until = loop.time() + min(asked_seconds, _PAUSE_SECONDS_MAX)
            if self._pause is None or self._pause.when() < until:
                if self._pause is not None:
                    self._pause.cancel()
                self._pause = loop.call_at(until, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._pause is None and self.in_flight < int(self._bound):
            waiter = self._waiting.popleft()
            if not waiter.done():
                self.in_flight += 1
                waiter.set_result(None)

    def _withdraw(self, waiter: asyncio.Future[None]) -> None:
        """Called if a waiting call is not made any more."""
        if waiter.done():  # it was let through meanwhile
            self.in_flight -= 1
            self._admit()
        else:
            self._waiting.remove(waiter)
            waiter.cancel()


class BigtableStore:
    """The tables of one cluster in an instance of Bigtable (`percolator.rowstore.port.RowStore`).

    No call is repeated here, whatever its answer. Calls in flight are bounded, but not scans: a
    caller that makes other calls during a scan would wait for itself.
    """

    check_bytes_max = _FILTER_BYTES_MAX // _SAFETY
    keys_bytes_max = _READ_BYTES_MAX // _SAFETY
    ranges_max = _RANGES_MAX

    def __init__(self, network: Network, place: Place) -> None:
        self._place = place
        self._network = network
        self.name_of: Callable[[int], str] = _unknown
        self._admission = Admission()
        self._check_and_mutate = network.unary(place.address, CHECK_AND_MUTATE_ROW)
        self._mutate_rows = network.stream(place.address, MUTATE_ROWS)
        self._read_rows = network.stream(place.address, READ_ROWS)
        self._sample_row_keys = network.stream(place.address, SAMPLE_ROW_KEYS)

    @property
    def scans_backwards(self) -> bool:
        return self._place.scans_backwards

    async def check_and_mutate(
        self,
        table_id: int,
        key: bytes,
        check: Check,
        changes: Sequence[Change],
        timeout_seconds: float,
    ) -> bool:
        _require_key(key)
        request = BigtableCheckAndMutateRowRequest(
            table_name=self._place.table(table_id),
            app_profile_id=self._place.app_profile,
            row_key=key,
        )
        request.predicate_filter.MergeFromString(checking(check))
        made_if = request.true_mutations if check.found else request.false_mutations
        for change in changes:
            if isinstance(change, SetCell) and len(change.value) > _VALUE_BYTES_MAX:
                raise _too_long("value", change.value, _VALUE_BYTES_MAX)
            add_mutation(made_if, change)
        response = await self._admitted(table_id, self._check_and_mutate, request, timeout_seconds)
        return response.predicate_matched is check.found

    async def write(self, table_id: int, rows: Sequence[RowChange], timeout_seconds: float) -> None:
        request = BigtableMutateRowsRequest(
            table_name=self._place.table(table_id), app_profile_id=self._place.app_profile
        )
        for row in rows:
            entry = request.entries.add(row_key=row.key)
            for change in row.changes:
                add_mutation(entry.mutations, change)
        await self._admitted(table_id, self._written, request, timeout_seconds)

    async def read(
        self,
        table_id: int,
        keys: Sequence[bytes],
        selections: Sequence[Selection],
        timeout_seconds: float,
    ) -> list[StoredRow]:
        for key in keys:
            _require_key(key)
        request = self._reading(table_id, selections)
        request.rows.row_keys.extend(keys)
        return await self._admitted(table_id, self._all_rows, request, timeout_seconds)

    async def scan(
        self,
        table_id: int,
        first: bytes,
        end: bytes,
        selections: Sequence[Selection],
        *,
        rows_max: int,
        reverse: bool,
        timeout_seconds: float,
        marks: bool = False,
    ) -> AsyncGenerator[StoredRow, None]:
        request = self._reading(table_id, selections)
        request.rows_limit, request.reversed = rows_max, reverse
        rows = BigtableRowRange()
        if first:
            rows.start_key_closed = first
        if end:
            rows.end_key_open = end
        request.rows.row_ranges.append(rows)
        async with aclosing(self._stream(request, timeout_seconds, marks=marks)) as found:
            try:
                async for row in found:
                    yield row
            except FamilyMissing as error:
                told = await named(self._network, self._place, error)
                self._locate(told, table_id)
                raise told from error
            except PercolatorError as error:
                self._locate(error, table_id)
                raise

    async def _admitted(
        self,
        table_id: int,
        call: Callable[[RequestT, float], Awaitable[AnswerT]],
        request: RequestT,
        timeout_seconds: float,
    ) -> AnswerT:
        ticket = self._admission.enter_at_once()
        if not ticket:
            now = asyncio.get_running_loop().time
            deadline = now() + timeout_seconds
            ticket = await self._admission.enter(timeout_seconds)
            timeout_seconds = max(deadline - now(), _TIMEOUT_SECONDS_MIN)
        problem: PercolatorError | None = _NOT_ANSWERED
        try:
            answer = await call(request, timeout_seconds)
            problem = None
        except FamilyMissing as error:
            problem = error
            told = await named(self._network, self._place, error)
            self._locate(told, table_id)
            raise told from error
        except PercolatorError as error:
            problem = error
            self._locate(error, table_id)
            raise
        finally:
            self._admission.leave(ticket, problem)
        return answer

    def _locate(self, error: PercolatorError, table_id: int) -> None:
        """Adds the table's own name to the one that it has in the store."""
        name = self.name_of(table_id)
        if name:
            error.where = f"{error.where}, table {name!r}" if error.where else f"table {name!r}"

    async def _written(self, request: BigtableMutateRowsRequest, timeout_seconds: float) -> None:
        left = set(range(len(request.entries)))
        async with aclosing(self._mutate_rows(request, timeout_seconds)) as responses:
            async for response in responses:
                for entry in response.entries:
                    if entry.status.code:
                        raise _not_written(entry.status, request.table_name)
                    left.discard(entry.index)
        if left:
            raise ExecutionUnknown(f"{len(left)} rows have no answer", where=request.table_name)

    async def _all_rows(
        self, request: BigtableReadRowsRequest, timeout_seconds: float
    ) -> list[StoredRow]:
        async with aclosing(self._stream(request, timeout_seconds)) as rows:
            return [row async for row in rows]

    async def sample(self, table_id: int, timeout_seconds: float) -> list[Sample]:
        request = BigtableSampleRowKeysRequest(
            table_name=self._place.table(table_id), app_profile_id=self._place.app_profile
        )
        async with aclosing(self._sample_row_keys(request, timeout_seconds)) as answers:
            return [Sample(one.row_key, one.offset_bytes) async for one in answers]

    def _reading(self, table_id: int, selections: Sequence[Selection]) -> BigtableReadRowsRequest:
        request = BigtableReadRowsRequest(
            table_name=self._place.table(table_id), app_profile_id=self._place.app_profile
        )
        request.filter.MergeFromString(selecting(selections))
        return request

    async def _stream(
        self, request: BigtableReadRowsRequest, timeout_seconds: float, *, marks: bool = False
    ) -> AsyncGenerator[StoredRow, None]:
        rows = Rows(reverse=request.reversed)
        async with aclosing(self._read_rows(request, timeout_seconds)) as responses:
            async for response in responses:
                for row in rows.take(response.chunks):
                    yield row
                if response.last_scanned_row_key and not response.chunks:
                    rows.pass_over(response.last_scanned_row_key)
                    if marks:
                        yield StoredRow(response.last_scanned_row_key, [])
        rows.end()


def _unknown(table_id: int) -> str:
    return ""


def _not_written(status: BigtableMutateRowsResponse.Status, table: str) -> PercolatorError:
    why = status.message or str(status.code)
    lacking = missing_family(why, table)
    return lacking or ExecutionUnknown(f"a row was not written: {why}", where=table)


def _require_key(key: bytes) -> None:
    if len(key) > _KEY_BYTES_MAX:
        raise _too_long("row", key, _KEY_BYTES_MAX)


def _too_long(field: str, found: bytes, most: int) -> InvalidArgument:
    return InvalidArgument(
        field,
        f"has {len(found):,} bytes, and Bigtable accepts at most {most:,}: store a shorter one",
    )
