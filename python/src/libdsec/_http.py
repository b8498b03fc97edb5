"""Unary, server-streaming and client-streaming calls over HTTP/1.1.

One connection carries one call at a time, so closing it is how a call is
cancelled, and no call waits behind another. A transport belongs to one event
loop of one process; `TransportPool` finds the right one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import ssl
import sys
import weakref
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Generic

import aiohttp
from yarl import URL

from libdsec import _connect
from libdsec._config import Config
from libdsec._connect import FrameReader, Method, Req, Resp
from libdsec._errors import DSecError, InternalError, OutcomeUnknownError, RequestTimeout, UnavailableError
from libdsec._h2 import BidiStream
from libdsec._limits import connection_limits
from libdsec._version import __version__

if sys.version_info >= (3, 11):
    from asyncio import timeout as deadline
else:
    from async_timeout import timeout as deadline

_USER_AGENT = f"libdsec/{__version__}"
_CONNECT_TIMEOUT = 10.0
# Well below the server's own idle timeout, so that a call is not sent into a
# connection that the server is just closing.
_KEEPALIVE = 10.0
_READ_BUFFER = 256 << 10
_MAX_ERROR_BODY = 1 << 20

# How long a silent peer is believed in. Commands may say nothing for hours, so
# the kernel asks the peer's kernel instead.
_KEEPALIVE_OPTIONS = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 6))


def _make_socket(info: tuple[Any, ...]) -> socket.socket:
    family, kind, proto, _, _ = info
    s = socket.socket(family, kind, proto)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE_OPTIONS:
        option = getattr(socket, name, None)
        if option is not None:
            s.setsockopt(socket.IPPROTO_TCP, option, value)
    return s


def lost(method: Method[Any, Any], cause: BaseException) -> DSecError:
    """Return the error for a connection that broke after the request may have arrived.

    It says what its cause says, so it is raised from None: the inside of a
    transport's library above it would tell a user nothing more.
    """
    reason = f"the connection to the server was lost: {str(cause) or type(cause).__name__}"
    error: DSecError = (
        UnavailableError(reason, retryable=True) if method.repeatable else OutcomeUnknownError(reason)
    )
    error.link_broke = True
    return error


class ServerStream(Generic[Resp]):
    """The messages of one server-streaming call. Closing it early cancels the call."""

    def __init__(self, method: Method[Any, Resp], response: aiohttp.ClientResponse, owner: Transport) -> None:
        self._method = method
        self._response = response
        self._owner = owner
        self._frames = FrameReader(method.response, self._read)
        self.action = _connect.current_action.get()
        self._first: list[Resp | None] = []  # what begin has received

    async def begin(self) -> None:
        """Wait for the first message, or raise what the server ended the stream with in its place.

        Raises:
            DSecError: As `receive`. The stream is closed then.
        """
        try:
            self._first.append(await self.receive())
        except BaseException:
            self.close()
            raise

    async def receive(self) -> Resp | None:
        """Return the next message; None once the server ended the stream in order.

        Raises:
            DSecError: The server ended it with an error, or it broke.
        """
        if self._first:
            return self._first.pop()
        try:
            return await self._frames.next()
        except aiohttp.ClientError as e:
            raise lost(self._method, e) from None

    def close(self) -> None:
        """Drop the connection. May be called again."""
        if self._owner.mine():
            self._owner.drop(self._response)

    def usable(self) -> bool:
        """Whether the stream belongs to the running event loop, and was not inherited by a fork."""
        return self._owner.mine() and self._owner.loop is asyncio.get_running_loop()

    async def _read(self, n: int) -> bytes:
        return await _read_up_to(self._response, n)


async def _read_up_to(response: aiohttp.ClientResponse, n: int) -> bytes:
    try:
        return await response.content.readexactly(n)
    except asyncio.IncompleteReadError as e:
        return e.partial


class _Body(Generic[Req]):
    """The body of a client-streaming request, which remembers how its source failed."""

    def __init__(self, messages: AsyncIterable[Req]) -> None:
        self._messages = messages
        self._task: asyncio.Task[Any] | None = None
        self.error: Exception | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        self._task = asyncio.current_task()
        try:
            async for m in self._messages:
                yield _connect.frame(m)
        except Exception as e:
            # Leaving by the exception keeps the body from being ended in
            # order: the server must not take half of a file for all of it.
            self.error = e
            raise

    async def stop(self) -> None:
        """Return once nothing reads from the source any more."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def _forsake(connector: aiohttp.BaseConnector) -> None:
    """Close a connector's connections without its event loop.

    aiohttp has no public way to: `close()` is a coroutine that leaves a task to
    the loop, which may be over, and a connector that is not closed complains
    when it is collected. `_close` is what both of these call, in every version
    that we allow; test_unclosed.py fails where one comes without it. There the
    connections are left to the collector, with its warning.
    """
    close = getattr(connector, "_close", None)
    if callable(close):
        with contextlib.suppress(Exception):
            close()


class Transport:
    """All HTTP/1.1 connections of one client in one event loop."""

    def __init__(self, config: Config) -> None:
        self.loop = asyncio.get_running_loop()
        self._pid = os.getpid()
        self._config = config
        self._tls = config.tls("http/1.1")
        self._h2_tls: ssl.SSLContext | None = None
        short, long = connection_limits()
        self._short = self._session(short)
        self._long = self._session(long)
        # What is not yet read to its end. Held here so that a process that
        # forks in the middle of a call can keep it from being finalised.
        self._open: set[aiohttp.ClientResponse] = set()
        self._bidi: weakref.WeakSet[BidiStream[Any, Any]] = weakref.WeakSet()

    def _session(self, limit: int) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=limit,
            keepalive_timeout=_KEEPALIVE,
            ssl=self._tls or True,
            socket_factory=_make_socket,
        )
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("Accept-Encoding", "User-Agent"),
            read_bufsize=_READ_BUFFER,
        )

    async def close(self) -> None:
        """Close every connection, which cancels the calls that are under way."""
        for response in list(self._open):
            self.drop(response)
        for stream in list(self._bidi):
            stream.close()
        await self._short.close()
        await self._long.close()

    def forsake(self) -> None:
        """Close from outside of the event loop, which may be over: for who forgot to close."""
        for response in list(self._open):
            with contextlib.suppress(Exception):
                self.drop(response)
        for stream in list(self._bidi):
            with contextlib.suppress(Exception):
                stream.close()
        for session in (self._short, self._long):
            connector = session.connector
            session.detach()
            if connector is not None:
                _forsake(connector)

    def mine(self) -> bool:
        """Whether this process made the transport, and did not inherit it by a fork."""
        return self._pid == os.getpid()

    def drop(self, response: aiohttp.ClientResponse) -> None:
        """Close the connection of a response, read or not."""
        self._open.discard(response)
        response.close()

    async def unary(self, method: Method[Req, Resp], request: Req, timeout: float | None) -> Resp:
        """Make a call with one message each way, once."""
        data = request.SerializeToString()
        session = self._long if method.slow else self._short
        async with self._call(session, method, _connect.UNARY_TYPE, data, timeout) as response:
            body = await response.read()
        return _connect.parse_message(method.response, body)

    async def server_stream(self, method: Method[Req, Resp], request: Req) -> ServerStream[Resp]:
        """Start a call that answers with a stream; it is the caller's to close."""
        data = _connect.frame(request)
        response = await self._send(self._long, method, _connect.STREAM_TYPE, data, None)
        return ServerStream(method, response, self)

    async def client_stream(self, method: Method[Req, Resp], messages: AsyncIterable[Req]) -> Resp:
        """Send a stream and return the one answer. An exception of `messages` comes out as it is."""
        body = _Body(messages)
        try:
            async with self._call(self._long, method, _connect.STREAM_TYPE, body, None) as response:
                stream = ServerStream(method, response, self)
                answer = await stream.receive()
                if answer is None or await stream.receive() is not None:
                    raise InternalError("the server must answer with one message and did not")
                return answer
        except DSecError:
            if body.error is not None:
                raise body.error from None
            raise
        finally:
            await body.stop()

    async def bidi(self, method: Method[Req, Resp]) -> BidiStream[Req, Resp]:
        """Open a stream with messages both ways; it has an HTTP/2 connection to itself."""
        if self._h2_tls is None:
            self._h2_tls = self._config.tls("h2")
        headers = _connect.headers(_connect.STREAM_TYPE, self._config.api_key, _USER_AGENT, None)
        stream = await BidiStream.open(self._config.url, self._h2_tls, method, headers, _CONNECT_TIMEOUT)
        self._bidi.add(stream)
        return stream

    @asynccontextmanager
    async def _call(
        self,
        session: aiohttp.ClientSession,
        method: Method[Any, Any],
        content_type: str,
        data: Any,
        timeout: float | None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        response = await self._send(session, method, content_type, data, timeout)
        try:
            yield response
        except aiohttp.ClientError as e:
            raise lost(method, e) from None
        finally:
            # Gives the connection back where the answer was read to its end,
            # and closes it where not.
            if response.content.at_eof() and not isinstance(data, _Body):
                self._open.discard(response)
                response.release()
            else:
                self.drop(response)

    async def _send(
        self,
        session: aiohttp.ClientSession,
        method: Method[Any, Any],
        content_type: str,
        data: Any,
        timeout: float | None,
    ) -> aiohttp.ClientResponse:
        try:
            response = await session.post(
                URL(self._config.url + method.path, encoded=True),
                data=data,
                headers=_connect.headers(content_type, self._config.api_key, _USER_AGENT, timeout),
                # A redirect would carry the key to wherever it points.
                allow_redirects=False,
            )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as e:
            certificate = isinstance(e, (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError))
            error = UnavailableError(
                f"cannot reach {self._config.url}: {str(e) or 'no answer'}; is `dsec up` running?",
                retryable=not certificate,
            )
            error.unreached = not certificate
            raise error from None
        except aiohttp.ClientError as e:
            raise lost(method, e) from None
        self._open.add(response)
        if response.status == 200 and response.content_type == content_type:
            _connect.answered(response.headers)
            return response
        try:
            body = await _read_up_to(response, _MAX_ERROR_BODY)
        except aiohttp.ClientError as e:
            raise lost(method, e) from None
        finally:
            self.drop(response)
        raise _connect.parse_failure(method, response.status, response.content_type, body)


class TransportPool:
    """The transports of one client, one for each event loop that uses it.

    After a fork the child starts with none. What it inherited stays untouched
    and unfinalised: the sockets, and the epoll instance that watches them, are
    shared with the parent.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._transports: dict[asyncio.AbstractEventLoop, Transport] = {}
        _pools.add(self)

    def get(self) -> Transport:
        """Return the transport of the running loop."""
        loop = asyncio.get_running_loop()
        transport = self._transports.get(loop)
        if transport is None:
            for closed in [old for old in self._transports if old.is_closed()]:
                del self._transports[closed]
            transport = self._transports[loop] = Transport(self._config)
        return transport

    async def close(self) -> None:
        """Close the transport of the running loop."""
        transport = self._transports.pop(asyncio.get_running_loop(), None)
        if transport is not None:
            await transport.close()

    def __del__(self) -> None:
        # A client that is dropped, or left open at the end of the program.
        self.forsake()

    def forsake(self) -> None:
        """Close all that this process made, from outside of any event loop."""
        transports, self._transports = self._transports, {}
        for transport in transports.values():
            if transport.mine():
                transport.forsake()

    def abandon(self) -> list[object]:
        """Forget all transports; return what must live on for them not to be finalised."""
        transports, self._transports = self._transports, {}
        return [transports, *(list(t._bidi) for t in transports.values())]


_pools: weakref.WeakSet[TransportPool] = weakref.WeakSet()
_inherited: list[object] = []


def _after_fork() -> None:
    for pool in list(_pools):
        _inherited.append(pool.abandon())


os.register_at_fork(after_in_child=_after_fork)


@atexit.register
def _at_exit() -> None:
    for pool in list(_pools):
        pool.forsake()


@asynccontextmanager
async def within(timeout: float | None) -> AsyncIterator[None]:
    """Bound what happens inside to timeout seconds.

    Raises:
        RequestTimeout: The time is over.
    """
    try:
        async with deadline(timeout):
            yield
    except DSecError:
        raise
    except (TimeoutError, asyncio.TimeoutError):  # two classes before Python 3.11
        raise RequestTimeout(
            f"no answer within {timeout:g} s; the request may have been carried out"
        ) from None
