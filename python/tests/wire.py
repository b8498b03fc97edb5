"""A Connect server that says exactly what a test tells it to, faults included.

It stands in for a broken platform, which the real server cannot be made to be.
"""

from __future__ import annotations

import asyncio
import base64
import json
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web
from google.protobuf.message import Message

from libdsec._connect import Method
from libdsec._proto.dsec.v1 import process_pb2, types_pb2

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Wire:
    """The server: what it answers to each method, and what it was asked."""

    def __init__(self) -> None:
        self.url = ""
        self.handlers: dict[str, Handler] = {}
        self.requests: list[web.Request] = []
        # Set once a peer went away in the middle of a call.
        self.gone = asyncio.Event()
        self._asked = asyncio.Event()

    def on(self, method: Method[Any, Any], handler: Handler) -> None:
        self.handlers[method.path] = handler

    def count(self, method: Method[Any, Any]) -> int:
        return sum(r.path == method.path for r in self.requests)

    async def asked(self, method: Method[Any, Any]) -> None:
        """Wait until the method was called."""
        while not self.count(method):
            await self._asked.wait()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.requests.append(request)
        self._asked.set()
        self._asked = asyncio.Event()
        try:
            return await self.handlers[request.path](request)
        except asyncio.CancelledError:
            self.gone.set()
            raise


@asynccontextmanager
async def serve(port: int = 0) -> AsyncIterator[Wire]:
    wire = Wire()
    app = web.Application(client_max_size=1 << 30)
    app.router.add_route("POST", "/{path:.*}", wire.handle)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    host, port = runner.addresses[0][:2]
    wire.url = f"http://{host}:{port}"
    try:
        yield wire
    finally:
        await runner.cleanup()


def frame(message: Message, flags: int = 0) -> bytes:
    data = message.SerializeToString()
    return struct.pack(">BI", flags, len(data)) + data


def end(error: object = None) -> bytes:
    data = json.dumps({} if error is None else {"error": error}).encode()
    return struct.pack(">BI", 2, len(data)) + data


def error(
    connect: str,
    code: str,
    message: str,
    *,
    field: str = "",
    retryable: bool = False,
    restarting: bool = False,
) -> dict[str, object]:
    detail = types_pb2.ErrorDetail(code=code, field=field, retryable=retryable, restarting=restarting)
    return {
        "code": connect,
        "message": message,
        "details": [
            {
                "type": "dsec.v1.ErrorDetail",
                "value": base64.b64encode(detail.SerializeToString()).decode().rstrip("="),
            }
        ],
    }


def fails(status: int, body: dict[str, object]) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.json_response(body, status=status)

    return handler


def answers(message: Message) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        return web.Response(body=message.SerializeToString(), content_type="application/proto")

    return handler


def streams(*pieces: bytes, abort: bool = False, hang: bool = False) -> Handler:
    """Send these bytes as they are; then end in order, break off, or say no more."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
        if hang:
            await asyncio.Event().wait()
        if abort:
            assert request.transport is not None
            request.transport.abort()
        return response

    return handler


async def messages(request: web.Request) -> AsyncIterator[bytes]:
    """Yield the data of each frame of a request's body; returns only at its proper end."""
    while True:
        try:
            _, length = struct.unpack(">BI", await request.content.readexactly(5))
        except asyncio.IncompleteReadError as e:
            if e.partial:
                raise
            return
        yield await request.content.readexactly(length)


def started(process_id: int = 7, pid: int = 3) -> bytes:
    return frame(process_pb2.ProcessEvent(started=process_pb2.Started(process_id=process_id, pid=pid)))


def output(seq: int, data: bytes, stream: int = process_pb2.STREAM_STDOUT) -> bytes:
    return frame(process_pb2.ProcessEvent(output=process_pb2.Output(stream=stream, seq=seq, data=data)))  # type: ignore[arg-type]


def exited(code: int = 0) -> bytes:
    return frame(
        process_pb2.ProcessEvent(exited=process_pb2.Exited(outcome=types_pb2.Outcome(exit_code=code)))
    )
