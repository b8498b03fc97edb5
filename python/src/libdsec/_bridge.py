"""Between streams of the event loop and code that reads or writes files in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from libdsec._errors import OutcomeUnknownError

# Pieces under way between the thread and the loop.
_AHEAD = 4


def _thread() -> ThreadPoolExecutor:
    # A thread for each transfer: the loop's own few would let one stalled
    # transfer hold up the others.
    return ThreadPoolExecutor(1, thread_name_prefix="libdsec-transfer")


async def produce(work: Callable[[Callable[[bytes], None]], object]) -> AsyncGenerator[bytes, None]:
    """Run work(put) in a thread and yield what it puts. Work's exception comes out as it is."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[bytes | None] = asyncio.Queue(_AHEAD)
    stopped = False

    def put(data: bytes | None) -> None:
        if stopped and data is not None:
            raise OutcomeUnknownError("the transfer was cancelled")
        asyncio.run_coroutine_threadsafe(queue.put(data), loop).result()

    def run() -> None:
        try:
            work(put)
        finally:
            put(None)

    with _thread() as thread:
        done = loop.run_in_executor(thread, run)
        ended = False
        try:
            while (piece := await queue.get()) is not None:
                yield piece
            ended = True
            await done
        finally:
            # A thread cannot be cancelled: its next put fails, once there is room for it.
            stopped = True
            while not ended:
                ended = await queue.get() is None
            await asyncio.gather(done, return_exceptions=True)


async def consume(
    receive: Callable[[], Awaitable[bytes | None]],
    close: Callable[[], None],
    work: Callable[[Callable[[], bytes | None]], None],
) -> None:
    """Run work(get) in a thread, where get returns what receive gives and None at its end.

    Where this is cancelled, close ends the stream, work's get raises, and
    this returns only after work has.
    """
    loop = asyncio.get_running_loop()
    stopped = False

    async def step() -> bytes | None:
        if stopped:
            raise OutcomeUnknownError("the transfer was cancelled")
        return await receive()

    def get() -> bytes | None:
        return asyncio.run_coroutine_threadsafe(step(), loop).result()

    with _thread() as thread:
        done = loop.run_in_executor(thread, work, get)
        try:
            await asyncio.shield(done)
        finally:
            stopped = True
            close()
            await asyncio.gather(done, return_exceptions=True)
