"""The blocking twin: that nothing is missing from it, and that it works where it is called."""

from __future__ import annotations

import asyncio
import inspect
import threading
from typing import Any

import pytest
from wire import Wire, answers, end, exited, frame, messages, output, started, streams

import libdsec
import libdsec.sync
from libdsec import _methods as m
from libdsec._proto.dsec.v1 import sandbox_pb2, types_pb2

NAMES = ["ByteStream", "DSecClient", "Files", "Job", "Process", "Sandbox", "Session"]
RENAMED = {"__aenter__": "__enter__", "__aexit__": "__exit__", "__aiter__": "__iter__"}


@pytest.mark.parametrize("name", NAMES)
def test_twin_has_everything(name: str) -> None:
    original, twin = getattr(libdsec, name), getattr(libdsec.sync, name)
    for attribute, value in inspect.getmembers(original):
        if attribute.startswith("_") and attribute not in RENAMED:
            continue
        other = getattr(twin, RENAMED.get(attribute, attribute))
        if not attribute.startswith("_") and inspect.isfunction(value):
            want, have = (list(inspect.signature(f).parameters.values())[1:] for f in (value, other))
            assert [(p.name, p.kind, p.default) for p in have] == [(p.name, p.kind, p.default) for p in want]
            assert other.__doc__


def test_constructors_are_alike() -> None:
    want, have = (inspect.signature(m.DSecClient.__init__).parameters for m in (libdsec, libdsec.sync))
    assert want == have


def test_exports_are_the_same_objects() -> None:
    for name in libdsec.sync.__all__:
        if name not in NAMES:
            assert getattr(libdsec.sync, name) is getattr(libdsec, name)


async def in_thread(work: Any) -> Any:
    """Run blocking code beside the event loop that serves it."""
    return await asyncio.to_thread(work)


async def test_calls_and_streams(wire: Wire) -> None:
    wire.on(
        m.LIST,
        answers(sandbox_pb2.ListResponse(sandboxes=[types_pb2.Sandbox(id="a"), types_pb2.Sandbox(id="b")])),
    )
    wire.on(m.START, streams(started(), output(0, b"one"), output(3, b"two"), exited(0), end()))

    def work() -> None:
        with libdsec.sync.DSecClient(wire.url, "e2b_00") as client:
            assert [s.id for s in client.list()] == ["a", "b"]
            sandbox = libdsec.sync.Sandbox(libdsec.Sandbox(client._async._rpc, "x"), client._loop)
            assert sandbox.run_shell("x").stdout == b"onetwo"
            with sandbox.start(["x"]) as process:
                assert [e.data for e in process if isinstance(e, libdsec.Output)] == [b"one", b"two"]
                assert process.wait().stdout == b"onetwo"
            assert list(sandbox.start(["x"]).text()) == [("stdout", "one"), ("stdout", "two")]

    await in_thread(work)


async def test_errors_come_through(unused_url: str) -> None:
    def work() -> None:
        client = libdsec.sync.DSecClient(unused_url, "e2b_00", retries=0)
        with pytest.raises(libdsec.UnavailableError):
            client.__enter__()
        assert not any(t.name == "libdsec-loop" for t in threading.enumerate())

    await in_thread(work)


async def test_closed_client_leaves_no_thread_and_opens_again(wire: Wire) -> None:
    wire.on(m.LIST, answers(sandbox_pb2.ListResponse()))

    def work() -> None:
        client = libdsec.sync.DSecClient(wire.url, "e2b_00")
        for _ in range(2):
            client.open()
            assert any(t.name == "libdsec-loop" for t in threading.enumerate())
            client.close()
            assert not any(t.name == "libdsec-loop" for t in threading.enumerate())

    await in_thread(work)


async def test_interrupt_cancels_the_command(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    wire.on(m.START, streams(started(), hang=True))
    interrupted = threading.Event()

    def work() -> None:
        client = libdsec.sync.DSecClient(wire.url, "e2b_00")
        sandbox = libdsec.sync.Sandbox(libdsec.Sandbox(client._async._rpc, "x"), client._loop)
        process = sandbox.start(["sleep", "9"])

        def interrupt(self: Any, timeout: float | None = None) -> Any:
            monkeypatch.undo()
            interrupted.set()
            raise KeyboardInterrupt

        monkeypatch.setattr("concurrent.futures.Future.result", interrupt)
        with pytest.raises(KeyboardInterrupt):
            process.wait()
        client.close()

    await in_thread(work)
    assert interrupted.is_set()
    await asyncio.wait_for(wire.gone.wait(), 10)


async def test_blocking_source(wire: Wire) -> None:
    async def size(request: Any) -> Any:
        from aiohttp import web

        from libdsec._proto.dsec.v1 import file_pb2

        n = sum([len(file_pb2.WriteRequest.FromString(d).data) async for d in messages(request)])
        return web.Response(
            body=frame(file_pb2.WriteResponse(size=n)) + end(), content_type="application/connect+proto"
        )

    wire.on(m.WRITE, size)

    def work() -> None:
        client = libdsec.sync.DSecClient(wire.url, "e2b_00")
        sandbox = libdsec.sync.Sandbox(libdsec.Sandbox(client._async._rpc, "x"), client._loop)
        assert sandbox.files.write("/f", (b"x" * n for n in (1, 2, 3))) == 6
        client.close()

    await in_thread(work)
