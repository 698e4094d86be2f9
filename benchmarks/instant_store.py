"""A store that answers at once, as a process: the model of Bigtable behind gRPC, in plain text.

What it costs itself is not measured; it takes the place of a service that others run.
`python -m benchmarks.instant_store` prints its address, and serves until it is told to end.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from percolator.bigtable.methods import CHECK_AND_MUTATE_ROW, CREATE_TABLE, READ_ROWS
from percolator.testing.bigtable_in_memory import BigtableInMemory
from percolator.v1 import bigtable_pb2 as wire

_END_SECONDS = 10.0
_ROWS_PER_MESSAGE = 25


@contextmanager
def instant_store() -> Iterator[str]:
    """Starts an empty one, and yields its address."""
    command = [sys.executable, "-m", "benchmarks.instant_store"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("the store has no output")
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(_END_SECONDS)


async def main() -> None:
    model = BigtableInMemory()

    def unary(
        answer: Callable[[Any], Awaitable[Any]],
    ) -> Callable[[object, object], Awaitable[object]]:
        async def call(request: object, context: object) -> object:
            return await answer(request)

        return call

    async def read_rows(
        request: wire.BigtableReadRowsRequest, context: object
    ) -> AsyncIterator[object]:
        """Rows share messages, as they may in the service's answers."""
        answer, rows = wire.BigtableReadRowsResponse(), 0
        async for response in model.read_rows(request):
            answer.chunks.extend(response.chunks)
            rows += 1
            if rows == _ROWS_PER_MESSAGE:
                yield answer
                answer, rows = wire.BigtableReadRowsResponse(), 0
        if rows:
            yield answer

    server = grpc.aio.server()
    for method, make, answer in (
        (
            CHECK_AND_MUTATE_ROW,
            grpc.unary_unary_rpc_method_handler,
            unary(model.check_and_mutate_row),
        ),
        (CREATE_TABLE, grpc.unary_unary_rpc_method_handler, unary(model.create_table)),
        (READ_ROWS, grpc.unary_stream_rpc_method_handler, read_rows),
    ):
        _, service, name = method.path.split("/")
        handler = make(
            answer,
            request_deserializer=method.request.FromString,
            response_serializer=method.response.SerializeToString,
        )
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {name: handler}),)
        )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    await ended.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(main())
