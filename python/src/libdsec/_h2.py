"""Bidirectional streams: one HTTP/2 connection that carries one call.

HTTP/1.1 cannot serve them, and one stream to a connection needs none of what
makes an HTTP/2 client large. Without TLS the connection starts with HTTP/2
("prior knowledge"), which the server of `dsec` speaks on its one port.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Callable
from typing import Generic
from urllib.parse import urlsplit

import h2.config
import h2.connection
import h2.errors
import h2.events
import h2.exceptions
from h2.settings import SettingCodes

from libdsec import _connect
from libdsec._connect import FrameReader, Method, Req, Resp
from libdsec._errors import DSecError, InternalError, OutcomeUnknownError, UnavailableError

_READ_SIZE = 64 << 10
# How much may be on its way to us unread; more waits in the server.
_WINDOW = 1 << 20
_MAX_ERROR_BODY = 1 << 20
_FRAME_HEADER = 9
_GOAWAY = 7
# Streams leads only weakly to what reads them: a task that nobody else holds may be
# finalised while it waits.
_pumps: set[asyncio.Task[None] | None] = set()


class BidiStream(Generic[Req, Resp]):
    """One call with messages both ways. One task may send while another receives."""

    def __init__(
        self, method: Method[Req, Resp], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._method = method
        self._reader = reader
        self._writer = writer
        self._h2 = h2.connection.H2Connection(
            h2.config.H2Configuration(client_side=True, header_encoding="utf-8")
        )
        self._stream = 0
        self._headers: dict[str, str] = {}
        self._buffer = bytearray()
        self._unacknowledged = 0
        self._greeted = False
        self._leaving = False  # the server is, once this stream has ended
        self._raw = bytearray()  # of a frame that is not whole
        self._ended = False  # the server sent all it had
        self._failure: DSecError | None = None
        self._changed = asyncio.Event()
        self._pump: asyncio.Task[None] | None = None
        self._frames = FrameReader(method.response, self._read)

    @classmethod
    async def open(
        cls,
        base: str,
        tls: ssl.SSLContext | None,
        method: Method[Req, Resp],
        headers: dict[str, str],
        connect_timeout: float,
    ) -> BidiStream[Req, Resp]:
        """Connect and send the headers of the call. The TLS context must offer h2 by ALPN."""
        url = urlsplit(base)
        secure = url.scheme == "https"
        port = url.port or (443 if secure else 80)

        async def connect() -> BidiStream[Req, Resp]:
            reader, writer = await asyncio.open_connection(url.hostname, port, ssl=tls if secure else None)
            stream = cls(method, reader, writer)
            try:
                await stream._greet()
            except BaseException:
                stream.close()
                raise
            return stream

        try:
            stream = await asyncio.wait_for(connect(), connect_timeout)
        except (OSError, asyncio.TimeoutError) as e:
            error = UnavailableError(f"cannot reach {base}: {str(e) or 'no answer'}", retryable=True)
            error.unreached = True
            raise error from None
        pseudo = {
            ":method": "POST",
            ":scheme": url.scheme,
            ":authority": url.netloc.rpartition("@")[2],
            ":path": url.path + method.path,
        }
        stream._begin({**pseudo, **{k.lower(): v for k, v in headers.items()}})
        return stream

    async def _greet(self) -> None:
        """Open the connection, and wait for the server's part of that.

        A server that dies may leave a connection that it never took: nothing of a call
        is sent into one.
        """
        self._h2.initiate_connection()
        self._h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW, SettingCodes.ENABLE_PUSH: 0})
        # h2 gives back the connection's window by halves only. It is far larger
        # than the stream's, so that the rest of a message never waits for that.
        self._h2.increment_flow_control_window(4 * _WINDOW)
        self._flush()
        self._pump = asyncio.create_task(self._receive_bytes())
        _pumps.add(self._pump)
        await self._until(lambda: self._greeted)
        if self._failure is not None and self._failure.link_broke:
            raise ConnectionError(self._failure.message)
        if self._failure is not None:
            raise self._failure

    def _begin(self, headers: dict[str, str]) -> None:
        self._stream = self._h2.get_next_available_stream_id()
        self._h2.send_headers(self._stream, list(headers.items()))
        self._flush()

    async def send(self, message: Req) -> None:
        """Send a message; waits while the server takes no more.

        Where the server has ended the stream already this does nothing:
        `receive` tells why it did.

        Raises:
            DSecError: The stream broke.
        """
        data = memoryview(_connect.frame(message))
        while data:
            await self._until(lambda: self._window() > 0)
            if self._failure is not None:
                raise self._failure
            if self._ended:
                return
            n = min(len(data), self._window())
            self._h2.send_data(self._stream, bytes(data[:n]))
            self._flush()
            data = data[n:]
            await self._drain()

    async def close_send(self) -> None:
        """Say that no more messages follow."""
        if not self._over():
            self._h2.end_stream(self._stream)
            self._flush()
            await self._drain()

    async def receive(self) -> Resp | None:
        """Return the next message; None once the server ended the stream in order.

        Raises:
            DSecError: The server ended it with an error, or it broke.
        """
        await self._until(lambda: bool(self._headers))
        if not self._headers and self._failure is not None:
            raise self._failure
        status, kind = self._headers.get(":status", ""), self._headers.get("content-type", "")
        if status != "200" or kind != _connect.STREAM_TYPE:
            body = await self._read(_MAX_ERROR_BODY)
            raise _connect.parse_failure(self._method, int(status or 0), kind, body)
        return await self._frames.next()

    def close(self) -> None:
        """Drop the connection, which cancels the call where it has not ended. May be called again."""
        if self._pid != os.getpid():
            return  # inherited by a fork: socket and event loop are the parent's
        if self._pump is not None:
            self._pump.cancel()
        self._fail(OutcomeUnknownError("the stream was closed"))
        self._writer.close()
        self._notify()

    def forsake(self) -> None:
        """Close from any thread, for an owner that is finalised and forgot to."""
        if self._pid == os.getpid() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.close)

    def usable(self) -> bool:
        """Whether more can be sent, from the running event loop of this process."""
        return self.here() and not self._over() and not self._leaving

    def here(self) -> bool:
        """Whether the stream belongs to the running event loop, and was not inherited by a fork."""
        return self._pid == os.getpid() and self._loop is asyncio.get_running_loop()

    def _over(self) -> bool:
        return self._failure is not None or self._ended

    def _window(self) -> int:
        return min(self._h2.local_flow_control_window(self._stream), self._h2.max_outbound_frame_size)

    def _flush(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._writer.is_closing():
            self._writer.write(data)

    async def _drain(self) -> None:
        try:
            await self._writer.drain()
        except OSError as e:
            self._lose(f"the connection to the server was lost: {e}")

    def _fail(self, error: DSecError) -> None:
        if self._failure is None:
            self._failure = error

    def _lose(self, reason: str) -> None:
        error = OutcomeUnknownError(reason)
        error.link_broke = True
        self._fail(error)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, ready: Callable[[], bool]) -> None:
        """Wait until ready() or the end of the stream."""
        while not ready() and not self._over():
            await self._changed.wait()

    async def _read(self, n: int) -> bytes:
        await self._until(lambda: len(self._buffer) >= n)
        if len(self._buffer) < n and self._failure is not None:
            raise self._failure
        data = bytes(self._buffer[:n])
        del self._buffer[:n]
        self._acknowledge(len(data))
        return data

    def _acknowledge(self, n: int) -> None:
        # Only what was consumed opens the window again: a reader that stops
        # reading stops the server.
        self._unacknowledged += n
        if self._over() or self._unacknowledged < _WINDOW // 2:
            return
        self._h2.acknowledge_received_data(self._unacknowledged, self._stream)
        self._unacknowledged = 0
        self._flush()

    async def _receive_bytes(self) -> None:
        try:
            while not self._over():
                data = await self._reader.read(_READ_SIZE)
                if data:
                    self._take(data)
                else:
                    self._lose("the server closed the connection")
                self._notify()
        except OSError as e:
            self._lose(f"the connection to the server was lost: {e}")
        except h2.exceptions.ProtocolError as e:
            self._fail(InternalError(f"the server broke the HTTP/2 protocol: {e}"))
        finally:
            self._writer.close()  # one call to a connection
            _pumps.discard(self._pump)
        self._notify()

    def _frames_of(self, data: bytes) -> bytes:
        """Return the whole frames, without the word that no streams are taken any more.

        A server sends that before it ends, and goes on with those that there are. h2
        takes nothing from a connection on which it was said.
        """
        self._raw += data
        out, at = bytearray(), 0
        while len(self._raw) - at >= _FRAME_HEADER:
            length = int.from_bytes(self._raw[at : at + 3], "big")
            if length > self._h2.max_inbound_frame_size:  # which h2 refuses
                out += self._raw[at:]
                at = len(self._raw)
                break
            frame = self._raw[at : at + _FRAME_HEADER + length]
            if len(frame) < _FRAME_HEADER + length:
                break
            at += len(frame)
            if frame[3] == _GOAWAY and not any(frame[_FRAME_HEADER + 4 : _FRAME_HEADER + 8]):
                self._leaving = True
            else:
                out += frame
        del self._raw[:at]
        return bytes(out)

    def _take(self, data: bytes) -> None:
        for event in self._h2.receive_data(self._frames_of(data)):
            if isinstance(event, h2.events.RemoteSettingsChanged):
                self._greeted = True
            elif isinstance(event, h2.events.ResponseReceived):
                self._headers = {str(k): str(v) for k, v in event.headers or ()}
            elif isinstance(event, h2.events.DataReceived):
                self._buffer += event.data or b""
                # Padding is window used up that no read will give back.
                self._unacknowledged += (event.flow_controlled_length or 0) - len(event.data or b"")
            elif isinstance(event, h2.events.StreamEnded):
                self._ended = True
            elif isinstance(event, h2.events.StreamReset):
                # A server that is done may refuse the rest of our side.
                if not (self._ended and event.error_code == h2.errors.ErrorCodes.NO_ERROR):
                    self._lose("the server cancelled the stream")
            elif isinstance(event, h2.events.ConnectionTerminated):
                self._fail(UnavailableError("the server is going away"))
        self._flush()
