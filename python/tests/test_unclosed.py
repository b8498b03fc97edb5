"""A client that nobody closed makes no noise, and keeps no connection."""

from __future__ import annotations

import asyncio
import itertools
import os
import subprocess
import sys

import pytest
from wire import Wire, answers, exited, started, streams
from wire import end as end_of_stream

from libdsec import _methods as m
from libdsec._proto.dsec.v1 import sandbox_pb2

LIST = "await client.open()"
RUN = "await libdsec.Sandbox(client._rpc, 'x').run_shell('x')"
DROPPED = """
import asyncio, gc, libdsec
async def main():
    client = libdsec.DSecClient({url!r}, "e2b_00")
    {call}
    del client
    gc.collect()
    await asyncio.sleep(0)
asyncio.run(main())
"""
LEFT = """
import asyncio, libdsec
client = libdsec.DSecClient({url!r}, "e2b_00")
async def main():
    {call}
asyncio.run(main())
"""
LEFT_IN_A_CYCLE = LEFT + "client.self = client\ndel client\n"
SYNC = """
import libdsec.sync
client = libdsec.sync.DSecClient({url!r}, "e2b_00")
client.open()
"""
SYNC_DROPPED = SYNC + "del client\n"


@pytest.mark.parametrize(
    ("program", "call"),
    [*itertools.product([DROPPED, LEFT, LEFT_IN_A_CYCLE], [LIST, RUN]), (SYNC, ""), (SYNC_DROPPED, "")],
)
async def test_unclosed_client_is_silent(wire: Wire, program: str, call: str) -> None:
    wire.on(m.LIST, answers(sandbox_pb2.ListResponse()))
    wire.on(m.START, streams(started(), exited(0), end_of_stream()))
    result = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-W", "default", "-c", program.format(url=wire.url, call=call)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert result.returncode == 0, result.stderr
    assert "nclosed client" not in result.stderr
    assert "nclosed connect" not in result.stderr
    assert "Traceback" not in result.stderr
    assert wire.requests
