from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from wire import Wire, serve

import libdsec


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A server that says what the test tells it to."""
    async with serve() as w:
        yield w


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[libdsec.DSecClient]:
    """A client of `wire`."""
    c = libdsec.DSecClient(wire.url, "e2b_00")
    yield c
    await c.close()


@pytest.fixture
def unused_url() -> Iterator[str]:
    """An address where nothing listens: bound, so that nobody else takes it, and not listening."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{s.getsockname()[1]}"
