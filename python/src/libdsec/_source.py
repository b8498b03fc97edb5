"""Byte sources that a caller may hand over, read in pieces without blocking the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Iterable
from typing import IO, Any, TypeGuard

from libdsec._convert import stdin_bytes
from libdsec._errors import InvalidError

# Large enough that the cost of a message does not count, small enough that a
# thousand transfers at once stay small.
CHUNK = 256 << 10

Data = bytes | bytearray | memoryview | str
Source = Data | IO[bytes] | Iterable[bytes] | AsyncIterable[bytes]

_END = object()


def is_data(source: object) -> TypeGuard[Data]:
    """Whether the source is in memory already."""
    return isinstance(source, (bytes, bytearray, memoryview, str))


async def chunks(source: Source, field: str) -> AsyncGenerator[bytes, None]:
    """Yield the source's bytes in pieces of at most CHUNK.

    Raises:
        InvalidError: The source is none, or gives something that is no bytes.
    """
    async for piece in _pieces(source, field):
        if not isinstance(piece, (bytes, bytearray, memoryview)):
            raise InvalidError(f"want bytes, got {type(piece).__name__}", field=field)
        view = memoryview(piece)
        for at in range(0, len(view), CHUNK):
            yield bytes(view[at : at + CHUNK])


async def _pieces(source: Any, field: str) -> AsyncIterator[Any]:
    if is_data(source):
        yield stdin_bytes(source)
    elif isinstance(source, AsyncIterable):
        async for piece in source:
            yield piece
    elif hasattr(source, "read"):
        while piece := await asyncio.to_thread(source.read, CHUNK):
            yield piece
    elif isinstance(source, Iterable):
        it = iter(source)
        while (piece := await asyncio.to_thread(next, it, _END)) is not _END:
            yield piece
    else:
        raise InvalidError(
            f"want bytes, str, a binary file or an iterable of bytes, got {type(source).__name__}",
            field=field,
        )
