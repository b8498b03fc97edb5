"""Handles of started commands."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, AsyncIterator
from functools import partial
from types import TracebackType

from typing_extensions import Self

from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._connect import Action
from libdsec._errors import (
    ConflictError,
    DSecError,
    InternalError,
    InvalidError,
    OutcomeUnknownError,
    UnavailableError,
)
from libdsec._http import ServerStream, within
from libdsec._proto.dsec.v1 import process_pb2
from libdsec._rpc import Rpc
from libdsec._source import Source, chunks, is_data
from libdsec._text import TextDecoder
from libdsec._trajectory import unanswered
from libdsec._types import ExecResult, Gap, Output, StreamName

MAX_FIRST_STDIN = 1 << 20
_SIGKILL = 9

# How long a handle tries to get back to its process: a restart of the server takes seconds.
_GO_ON_FOR = 60.0
_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 2.0
_KILL_TIMEOUT = 5.0


class Collector:
    """Puts the events of one command together to its result."""

    def __init__(self) -> None:
        self._out = bytearray()
        self._err = bytearray()
        self._missed = 0

    def add(self, event: Output | Gap) -> None:
        """Take one event."""
        if isinstance(event, Gap):
            self._missed += event.end - event.start
        elif event.stream == "stderr":
            self._err += event.data
        else:
            self._out += event.data

    def result(
        self, exited: process_pb2.Exited, process_id: int, skipped: int, replayed: bool = False
    ) -> ExecResult:
        """Return the result of a command that ended."""
        return ExecResult(
            **c.outcome_fields(exited.outcome),
            stdout=bytes(self._out),
            stderr=bytes(self._err),
            missed_bytes=self._missed + skipped,
            process_id=process_id,
            replayed=replayed,
        )


class Process:
    """A command that was started, or that was attached to.

    `async for event in process` yields `Output` and `Gap` until the command
    has ended; `wait()` collects what is left and returns the result. Where the
    server is restarted meanwhile, or the connection breaks, both go on with the
    same command once the server is back, within a minute. After a platform
    error either may be called again: it attaches where it stopped.

    A command that was started without `detach` lives no longer than its
    handle: leaving `async with`, `close()`, or a task cancelled in the middle
    of reading kills it. Any other handle only watches.

    Attributes:
        process_id: The platform's number of the process.
        pid: Process number inside the sandbox; 0 where it is not known yet.
        next_seq: Number of the byte that is read next.
    """

    def __init__(
        self,
        rpc: Rpc,
        sandbox_id: str,
        process_id: int,
        *,
        pid: int = 0,
        from_seq: int = 0,
        stream: ServerStream[process_pb2.ProcessEvent] | None = None,
        owned: bool = False,
        action: Action | None = None,
    ) -> None:
        self._rpc = rpc
        self._action = action
        self._replayed = action is not None and action.replayed
        self._sandbox_id = sandbox_id
        self._stream = stream
        self._owned = owned
        self._collector = Collector()
        self._skipped = from_seq
        # Whether the server has told anything of the process.
        self._known = stream is not None
        # Streams that broke since the last progress, and when it becomes too long.
        self._tries = 0
        self._give_up = 0.0
        # Whether all input was sent: what is cut short must not look complete.
        self._fed = True
        self._exited: process_pb2.Exited | None = None
        self.process_id = process_id
        self.pid = pid
        self.next_seq = from_seq

    def __repr__(self) -> str:
        return f"<Process {self.process_id} of {self._sandbox_id}>"

    @property
    def result(self) -> ExecResult | None:
        """How the command ended, with all output that came through this handle; None before its end."""
        if self._exited is None:
            return None
        return self._collector.result(self._exited, self.process_id, self._skipped, self._replayed)

    def __aiter__(self) -> AsyncIterator[Output | Gap]:
        return self

    async def __anext__(self) -> Output | Gap:
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def wait(self) -> ExecResult:
        """Read to the end of the command and return its result.

        The result holds all output that came through this handle, also what
        was read from it before.

        Raises:
            DSecError: The end of the command did not arrive, so nothing is known about it.
        """
        while await self._next() is not None:
            pass
        result = self.result
        assert result is not None
        return result

    async def text(
        self, encoding: str = "utf-8", errors: str = "replace"
    ) -> AsyncIterator[tuple[StreamName, str]]:
        """Yield the output as pairs of stream and text, each stream decoded on its own.

        A character that is split over two chunks comes out whole.
        """
        decoder = TextDecoder(encoding, errors)
        async for event in self:
            if isinstance(event, Gap):
                # What follows a gap does not complete what came before it.
                for pair in decoder.flush():
                    yield pair
            elif piece := decoder.decode(event.stream, event.data):
                yield event.stream, piece
        for pair in decoder.flush():
            yield pair

    async def write(self, data: Source) -> None:
        """Append to the command's stdin; waits while the command does not read.

        Raises:
            ConflictError: The input has ended.
        """
        await self._send_stdin(data, eof=False)

    async def send_all(self, data: Source) -> None:
        """Append to the command's stdin and end it."""
        await self._send_stdin(data, eof=True)

    async def close_stdin(self) -> None:
        """End the command's stdin; on a terminal, as ^D does."""
        await self._rpc.unary(
            m.CLOSE_STDIN,
            process_pb2.CloseStdinRequest(sandbox_id=self._sandbox_id, process_id=self.process_id),
        )

    async def send_signal(self, signal: int, *, tree: bool = False) -> None:
        """Send a signal to the process, or with tree to every process that the command started."""
        await self._rpc.unary(
            m.SIGNAL,
            process_pb2.SignalRequest(
                sandbox_id=self._sandbox_id,
                process_id=self.process_id,
                signal=c.int32(signal, "signal"),
                tree=tree,
            ),
        )

    async def kill(self) -> None:
        """Kill every process that the command started. Killing one that has ended is a success."""
        with contextlib.suppress(ConflictError):
            await self._rpc.unary(m.SIGNAL, self._kill_request())

    def _kill_request(self) -> process_pb2.SignalRequest:
        return process_pb2.SignalRequest(
            sandbox_id=self._sandbox_id, process_id=self.process_id, signal=_SIGKILL, tree=True
        )

    async def resize(self, rows: int, cols: int) -> None:
        """Set the size of the command's terminal."""
        await self._rpc.unary(
            m.RESIZE,
            process_pb2.ResizeRequest(
                sandbox_id=self._sandbox_id, process_id=self.process_id, size=c.terminal_size((rows, cols))
            ),
        )

    def close(self) -> None:
        """Stop watching. Kills a command that was started without `detach` and has not ended."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()

    async def _send_stdin(self, data: Source, *, eof: bool) -> None:
        self._fed = False
        messages = partial(self._stdin_messages, data, eof)
        await self._rpc.client_stream(m.STREAM_STDIN, None, messages, again=is_data(data))
        self._fed = True

    async def _stdin_messages(
        self, data: Source, eof: bool
    ) -> AsyncGenerator[process_pb2.WriteStdinRequest, None]:
        yield process_pb2.WriteStdinRequest(sandbox_id=self._sandbox_id, process_id=self.process_id)
        async for piece in chunks(data, "stdin"):
            yield process_pb2.WriteStdinRequest(data=piece)
        if eof:
            yield process_pb2.WriteStdinRequest(eof=True)

    async def _next(self) -> Output | Gap | None:
        """Return the next event, None after the command's end."""
        if self._exited is not None:
            return None
        try:
            return await self._go_on()
        except BaseException as e:
            # Cancelled or broken, the stream is of no more use. Where the
            # command is ours this is also what kills it.
            attached = self._stream is not None
            self.close()
            if self._owned and not attached and isinstance(e, asyncio.CancelledError):
                await asyncio.shield(self._kill_once())
            raise

    async def _go_on(self) -> Output | Gap | None:
        """Read the next event, over as many streams as it takes."""
        loop = asyncio.get_running_loop()
        while True:
            fresh = self._stream is None
            if fresh and self._tries > 1:
                await asyncio.sleep(
                    random.uniform(0.5, 1) * min(_FIRST_PAUSE * 2**self._tries, _LONGEST_PAUSE)
                )
            try:
                if self._stream is None or not self._stream.usable():
                    self._stream = await self._attach()
                return await self._read(self._stream)
            except (OutcomeUnknownError, UnavailableError) as e:
                if not self._known or not (e.link_broke or isinstance(e, UnavailableError) or not fresh):
                    raise  # what an attach is told of the process is final
                if self._tries == 0:
                    self._give_up = loop.time() + _GO_ON_FOR
                self._tries += 1
                if not self._fed or loop.time() > self._give_up:
                    self._tries = 0
                    raise self._may_go_on(e) from None
            self.close()

    async def _kill_once(self) -> None:
        with contextlib.suppress(DSecError):  # where the server is away nothing more can be done
            async with within(_KILL_TIMEOUT):
                await self._rpc.once(m.SIGNAL, self._kill_request())

    def _may_go_on(self, error: DSecError) -> OutcomeUnknownError:
        if self._action is not None:
            self._action.give_back()
        return OutcomeUnknownError(
            f"process {self.process_id} of sandbox {self._sandbox_id} may go on; sandbox.process"
            f"({self.process_id}, from_seq={self.next_seq}) attaches to it: {error.message}"
        )

    async def _attach(self) -> ServerStream[process_pb2.ProcessEvent]:
        return await self._rpc.server_stream(
            m.ATTACH,
            process_pb2.AttachRequest(
                sandbox_id=self._sandbox_id,
                process_id=self.process_id,
                from_seq=self.next_seq,
                own=self._owned,
            ),
            first=False,
        )

    async def _read(self, stream: ServerStream[process_pb2.ProcessEvent]) -> Output | Gap | None:
        while True:
            message = await stream.receive()
            if message is None:
                error = OutcomeUnknownError("the stream ended and did not say how the command ended")
                error.link_broke = True
                raise error
            self._known = True
            event = decode(message)
            if event is None:  # the process says nothing, and the link lives
                self._tries = 0
            if isinstance(event, process_pb2.Exited):
                self._exited = event
                self.close()
                return None
            if isinstance(event, process_pb2.Started):
                self.pid = event.pid
            elif event is not None:
                self._collector.add(event)
                before = self.next_seq
                self.next_seq = event.end if isinstance(event, Gap) else event.seq + len(event.data)
                if self.next_seq > before:
                    self._tries = 0
                return event


def decode(
    message: process_pb2.ProcessEvent,
) -> Output | Gap | process_pb2.Started | process_pb2.Exited | None:
    """Decode an event of a stream; None for one that means nothing but that the link lives.

    Raises:
        InternalError: It is no event that this version knows.
    """
    kind = message.WhichOneof("event")
    if kind == "output":
        output = message.output
        return Output(c.stream_name(output.stream), output.seq, output.data)
    if kind == "gap":
        return Gap(getattr(message.gap, "from"), message.gap.to)
    if kind == "exited":
        c.outcome_fields(message.exited.outcome)  # refuses an outcome that says nothing
        return message.exited
    if kind == "started":
        return message.started
    if kind == "keepalive":
        return None
    raise InternalError("the server sent an event that this version does not know")


async def start(rpc: Rpc, request: process_pb2.StartRequest) -> Process:
    """Start a command and return its handle once it runs."""
    if len(request.stdin) > MAX_FIRST_STDIN:
        raise InvalidError(f"want at most {MAX_FIRST_STDIN} bytes; write the rest", field="stdin")
    stream = await rpc.server_stream(m.START, request)
    try:
        event = None
        # One that is under way already, by another call, may be long in coming.
        while event is None and (message := await stream.receive()) is not None:
            event = decode(message)
        if not isinstance(event, process_pb2.Started):
            raise InternalError("the server did not say which process it started")
    except BaseException as e:
        stream.close()
        unanswered(stream.action, e)
        raise
    if request.detach:
        stream.close()
    return Process(
        rpc,
        request.sandbox_id,
        event.process_id,
        pid=event.pid,
        stream=None if request.detach else stream,
        # What has an action ID goes on without its caller, who may come back.
        owned=not request.detach and stream.action is None,
        action=stream.action,
    )
