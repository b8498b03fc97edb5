"""A server that is being restarted is waited for; on one that does as it is told."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from wire import Handler, Wire, answers, end, error, exited, fails, frame, messages, serve, started, streams

import libdsec
from libdsec import _methods as m
from libdsec import _rpc
from libdsec._connect import Method
from libdsec._proto.dsec.v1 import file_pb2, sandbox_pb2, types_pb2


def sandbox(client: libdsec.DSecClient) -> libdsec.Sandbox:
    return libdsec.Sandbox(client._rpc, "abcdefghijklmnopqrstuvwxy")


async def test_server_out_of_reach_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not as often as the call may be sent.
    monkeypatch.setattr(_rpc, "_OUT_OF_REACH", 0)
    async with serve() as wire:
        wire.on(m.GET, answers(sandbox_pb2.GetResponse(sandbox=types_pb2.Sandbox(id="x", state="running"))))
        client = libdsec.DSecClient(wire.url, "e2b_00")
        await client.get("x")
    transport, tries = client._rpc._pool.get(), 0
    unary = transport.unary

    async def counted(*args: Any) -> Any:
        nonlocal tries
        tries += 1
        return await unary(*args)

    monkeypatch.setattr(transport, "unary", counted)
    with pytest.raises(libdsec.UnavailableError):
        await client.get("x")
    assert tries <= 2  # with one on the connection that was kept
    await client.close()


async def test_server_out_of_reach_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    # Every call waits for a server that was there before, whether or not it could be sent twice.
    refused = asyncio.Event()

    def at_once(_low: float, _high: float) -> float:
        refused.set()
        return 0

    monkeypatch.setattr("random.uniform", at_once)
    ok = answers(sandbox_pb2.GetResponse(sandbox=types_pb2.Sandbox(id="x", state="running")))
    async with serve() as wire:
        url = wire.url
        wire.on(m.GET, ok)
        client = libdsec.DSecClient(url, "e2b_00", retries=0)
        await client.get("x")
    box = sandbox(client)
    calls = [
        asyncio.ensure_future(client.get("x")),
        asyncio.ensure_future(box.files.write("/tmp/x", b"x")),
        asyncio.ensure_future(box.run_shell("exit 3")),
    ]
    await refused.wait()
    async with serve(int(url.rsplit(":", 1)[1])) as wire:
        wire.on(m.GET, ok)
        wire.on(m.WRITE, streams(frame(file_pb2.WriteResponse()), end()))
        wire.on(m.START, streams(started(1), exited(3), end()))
        await asyncio.gather(*calls[:2])
        result = await calls[2]
        assert isinstance(result, libdsec.ExecResult)
        assert result.exit_code == 3
        assert (wire.count(m.WRITE), wire.count(m.START)) == (1, 1)
        await client.close()


class Restarting:
    """Refuses each method a few times, more often than a call is sent again, because the server restarts."""

    def __init__(self, wire: Wire, code: str = "unavailable") -> None:
        self.wire = wire
        self.reason = error("unavailable", code, "shuts down", retryable=True, restarting=True)
        self.ids: list[str] = []

    def on(self, method: Method[Any, Any], answer: Handler, times: int = 7) -> None:
        streamed = method in (m.START, m.WRITE, m.UPLOAD, m.READ)
        refuse = streams(end(self.reason)) if streamed else fails(503, self.reason)

        async def handler(request: web.Request) -> web.StreamResponse:
            self.ids.append(request.headers.get("Dsec-Action-Id", ""))
            return await (refuse if self.wire.count(method) <= times else answer)(request)

        self.wire.on(method, handler)


async def test_server_that_is_being_restarted_is_waited_for(
    wire: Wire, client: libdsec.DSecClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # As one that refuses connections: with every call, for none was accepted.
    monkeypatch.setattr("random.uniform", lambda _low, _high: 0)
    written: list[bytes] = []

    async def write(request: web.Request) -> web.StreamResponse:
        parts = [file_pb2.WriteRequest.FromString(d) async for d in messages(request)]
        written.append(b"".join(p.data for p in parts))
        return await streams(frame(file_pb2.WriteResponse(size=3)), end())(request)

    restarting = Restarting(wire)
    restarting.on(m.START, streams(started(1), exited(3), end()))
    restarting.on(m.WRITE, write)
    restarting.on(m.UPLOAD, streams(frame(file_pb2.UploadResponse()), end()))
    restarting.on(m.READ, streams(frame(file_pb2.FileChunk(data=b"x")), end()))
    restarting.on(m.MKDIR, answers(file_pb2.MkdirResponse()))
    box = sandbox(client)
    assert (await box.run_shell("exit 3")).exit_code == 3
    assert await box.files.write("/x", b"abc") == 3
    (tmp_path / "local").write_bytes(b"local")
    await box.files.upload(tmp_path / "local", "/x")
    assert written == [b"abc", b"local"]
    await box.files.upload(tmp_path, "/x")
    assert await box.files.read("/x") == b"x"
    await box.files.mkdir("/x")
    # What comes once is not sent again: some of it is gone.
    restarting.wire.requests.clear()
    with pytest.raises(libdsec.UnavailableError):
        await box.files.write("/x", iter([b"abc"]))
    assert wire.count(m.WRITE) == 1
    # Not for ever, and not as often as a call is sent again.
    monkeypatch.setattr(_rpc, "_OUT_OF_REACH", 0)
    with pytest.raises(libdsec.UnavailableError):
        await box.run_shell("exit 3")
    assert wire.count(m.START) == 1


async def test_action_asks_again_over_a_restart(
    wire: Wire, client: libdsec.DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Its outcome may be unknown to a server that goes, and is not to the next one.
    monkeypatch.setattr("random.uniform", lambda _low, _high: 0)
    restarting = Restarting(wire, "outcome_unknown")
    restarting.on(m.MKDIR, answers(file_pb2.MkdirResponse()), times=3)
    box = sandbox(client)
    with box.trajectory():
        await box.files.mkdir("/x")
    assert restarting.ids == ["#1"] * 4
    wire.requests.clear()
    with pytest.raises(libdsec.OutcomeUnknownError):
        await box.files.mkdir("/x")  # which nothing tells from another one
    assert wire.count(m.MKDIR) == 1


@pytest.mark.parametrize("code", ["unavailable", "exhausted"])
async def test_number_of_an_action_that_was_not_done_is_given_back(
    wire: Wire, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda _low, _high: 0)
    client = libdsec.DSecClient(wire.url, "e2b_00", retries=0)
    ids: list[str] = []

    def on(method: Method[Any, Any], *pieces: bytes) -> None:
        async def handler(request: web.Request) -> web.StreamResponse:
            ids.append(request.headers["Dsec-Action-Id"])
            refused = end(error("unavailable", code, "busy", retryable=True))
            return await streams(*(pieces if len(ids) % 2 == 0 else [refused]))(request)

        wire.on(method, handler)

    on(m.START, started(1), exited(), end())
    on(m.WRITE, frame(file_pb2.WriteResponse()), end())
    box = sandbox(client)
    with box.trajectory() as trajectory:
        for step in range(3):
            with pytest.raises((libdsec.UnavailableError, libdsec.ExhaustedError)):
                await box.run_shell(f"echo {step}")
            await box.run_shell(f"echo {step}")
        assert ids == ["#1", "#1", "#2", "#2", "#3", "#3"]
        # To a program that goes on with something else it stays that of what it asked for.
        with pytest.raises((libdsec.UnavailableError, libdsec.ExhaustedError)):
            await box.files.write("/x", b"x")
        await box.run_shell("echo 4")
        assert ids[6:] == ["#4", "#5"]
        assert trajectory.count == 5
    await client.close()


async def test_number_of_a_command_that_was_lost_sight_of_is_given_back(
    wire: Wire, client: libdsec.DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec._process._GO_ON_FOR", 0)
    ids: list[str] = []

    async def break_off(request: web.Request) -> web.StreamResponse:
        ids.append(request.headers["Dsec-Action-Id"])
        return await streams(started(1), abort=True)(request)

    wire.on(m.START, break_off)
    wire.on(m.ATTACH, streams(abort=True))
    box = sandbox(client)
    with box.trajectory():
        for _ in range(2):
            with pytest.raises(libdsec.OutcomeUnknownError, match="may go on"):
                await box.run_shell("echo")
    assert ids == ["#1", "#1"]
