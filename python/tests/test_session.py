"""Sessions against a real server, on the backend that DSEC_TEST_BACKEND names."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import pytest
from server import Server

import libdsec
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox


@pytest.fixture
async def sandbox(server: Server, args: DSecContainerRunArgs) -> AsyncIterator[Sandbox]:
    async with (
        DSecClient(server.url, server.key) as client,
        await client.run_container(args, timeout=120) as sandbox,
    ):
        yield sandbox


async def test_session_remembers(sandbox: Sandbox) -> None:
    async with await sandbox.open_session(env={"START": "here"}, cwd="/tmp") as session:
        assert (await session.run("pwd; echo $START")).text == "/tmp\nhere\n"
        await session.run("mkdir -p /tmp/deep; cd /tmp/deep; export A=b")
        result = await session.run("pwd; echo $A; echo err >&2")
        assert (result.text, result.stderr, result.exit_code) == ("/tmp/deep\nb\n", b"err\n", 0)
        assert result.claimed
        assert (await session.run("sh -c 'exit 9'")).exit_code == 9
        assert [s.session_id for s in await sandbox.sessions()] == [session.session_id]
        seen: list[Any] = []
        await session.run("echo streamed", on_output=seen.append)
        assert b"".join(e.data for e in seen) == b"streamed\n"
        # Another handle, another stream, the same shell.
        assert (await sandbox.session(session.session_id).run("echo $A")).text == "b\n"
    assert await sandbox.sessions() == []


async def test_a_dropped_handle_closes_its_stream(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        other = sandbox.session(session.session_id)
        await other.run("true")
        stream = other._stream
        assert stream is not None
        pump = stream._pump
        assert pump is not None
        del other, stream
        gc.collect()
        await asyncio.wait({pump}, timeout=60)
        assert pump.cancelled()
        assert (await session.run("echo on")).text == "on\n"


async def test_session_runs_one_after_the_other(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        results = await asyncio.gather(*(session.run(f"echo {i}") for i in range(50)))
        assert [r.text for r in results] == [f"{i}\n" for i in range(50)]


async def test_session_survives_much_output_and_a_timeout(sandbox: Sandbox) -> None:
    # More than any window of the transport.
    data = os.urandom(5 << 20)
    await sandbox.files.write("/tmp/much", data)
    async with await sandbox.open_session() as session:
        much = await session.run("cat /tmp/much", output_limit=8 << 20, timeout=120)
        assert much.stdout == data
        late = await session.run("echo before; sleep 60", timeout=0.3)
        assert (late.timed_out, late.text) == (True, "before\n")


async def test_cancelling_interrupts_a_sessions_command(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        await session.run("cd /tmp; export KEPT=yes")
        begun = asyncio.Event()
        for _ in range(2):
            begun.clear()
            task = asyncio.create_task(session.run("echo begun; sleep 600", on_output=lambda _: begun.set()))
            await asyncio.wait_for(begun.wait(), 60)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            after = await asyncio.wait_for(session.run("pwd; echo $KEPT"), 60)
            assert after.text == "/tmp\nyes\n"


async def test_cancelling_reaches_one_client_of_a_session(sandbox: Sandbox) -> None:
    async with await sandbox.open_session() as session:
        waits = sandbox.session(session.session_id)
        begun = asyncio.Event()
        runs = asyncio.create_task(session.run("echo begun; sleep 600", on_output=lambda _: begun.set()))
        await asyncio.wait_for(begun.wait(), 60)
        task = asyncio.create_task(waits.run("sleep 600 && export BAD=yes"))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        done, _ = await asyncio.wait([runs], timeout=0.2)
        assert not done
        # From another handle, and the result comes to the one that runs it.
        await waits.interrupt()
        result = await asyncio.wait_for(runs, 60)
        assert result.claimed
        assert not result.timed_out
        assert result.signal == 9 or result.exit_code == 137
        assert (await asyncio.wait_for(session.run("echo $BAD"), 60)).text == "\n"
        with pytest.raises(libdsec.ConflictError):
            await session.interrupt()
    with pytest.raises(libdsec.NotFoundError):
        await session.interrupt()


async def test_session_that_is_not_there(sandbox: Sandbox) -> None:
    with pytest.raises(libdsec.NotFoundError):
        await sandbox.session("nosuchsession").run("true")


@asynccontextmanager
async def relayed(url: str) -> AsyncIterator[tuple[str, list[str], list[asyncio.StreamWriter]]]:
    """Stand before a server: its URL, what becomes of each next connection, and all that there are."""
    target = urlsplit(url)
    fates: list[str] = []
    peers: list[asyncio.StreamWriter] = []

    async def pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peers.append(writer)
        if fates and fates.pop(0) == "lost":
            await reader.read(1)  # which had been sent before it is clear that nobody is there
            writer.transport.abort()
            return
        there, back = await asyncio.open_connection(target.hostname, target.port)
        peers.append(back)
        await asyncio.gather(pipe(reader, back), pipe(there, writer))

    relay = await asyncio.start_server(take, "127.0.0.1", 0)
    host, port = relay.sockets[0].getsockname()[:2]
    try:
        yield f"http://{host}:{port}", fates, peers
    finally:
        relay.close()
        for writer in peers:
            writer.close()


async def test_session_outlives_a_server_that_leaves_its_connection(
    server: Server, sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One that was killed may leave connections that nobody took: what is sent into them was not done.
    monkeypatch.setattr("random.uniform", lambda _low, _high: 0)
    async with relayed(server.url) as (url, fates, _), DSecClient(url, server.key) as client:
        session = await (await client.attach(sandbox.id)).open_session()
        fates += ["lost"] * 3
        assert (await session.run("echo once >> /tmp/ran; cat /tmp/ran")).text == "once\n"
        assert fates == []
        await session.close()


async def test_sessions_action_is_asked_for_again(server: Server, sandbox: Sandbox) -> None:
    async with relayed(server.url) as (url, _, peers), DSecClient(url, server.key) as client:
        box = await client.attach(sandbox.id)
        session = await box.open_session()
        broken = 0

        def break_off(_: object) -> None:
            nonlocal broken
            if not broken:
                broken = len(peers)
                for writer in peers:
                    writer.transport.abort()

        with box.trajectory():
            command = "echo once >> /tmp/ran; echo begun; sleep 1; cat /tmp/ran"
            result = await session.run(command, on_output=break_off)
        assert result.text == "begun\nonce\n"
        assert 0 < broken < len(peers)
        await session.close()
