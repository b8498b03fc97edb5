"""The operator's calls, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from server import Server

import libdsec
from libdsec import DSecClient


@pytest.fixture
async def client(server: Server) -> AsyncIterator[DSecClient]:
    async with DSecClient(server.url, server.key) as c:
        yield c


async def test_collect_layers(client: DSecClient) -> None:
    named = {layer.digest for layer in await client.list_layers()}
    collected = await client.collect_layers(min_age=0, dry_run=True)
    assert not named & {layer.digest for layer in collected.removed}
    assert collected.kept >= len(named)
    with pytest.raises(libdsec.InvalidError) as e:
        await client.collect_layers(min_age=-1)
    assert e.value.field == "min_age"


async def test_keys(client: DSecClient, server: Server) -> None:
    made = await client.create_key("other")
    assert made.secret.startswith("e2b_")
    assert made.key.id in {k.id for k in await client.list_keys()}
    async with DSecClient(server.url, made.secret) as other:
        with pytest.raises(libdsec.DeniedError):
            await other.list_keys()
    await client.revoke_key(made.key.id)
    late = DSecClient(server.url, made.secret)
    with pytest.raises(libdsec.UnauthenticatedError):
        await late.open()
    await late.close()
