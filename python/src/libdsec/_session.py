"""Shells that remember."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType

from typing_extensions import Self

from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._connect import Action, Method
from libdsec._errors import DSecError, InvalidError, OutcomeUnknownError
from libdsec._h2 import BidiStream
from libdsec._process import Collector, decode
from libdsec._proto.dsec.v1 import process_pb2, session_pb2
from libdsec._rpc import Rpc
from libdsec._trajectory import next_action, unanswered
from libdsec._types import ExecResult, Gap, Output

_Stream = BidiStream[session_pb2.RunCommandRequest, process_pb2.ProcessEvent]
_RUN: Method[session_pb2.RunCommandRequest, process_pb2.ProcessEvent] = m.RUN_COMMANDS


class Session:
    """A shell that keeps cwd, environment and functions from one command to the next.

    The status of a session's command is told by the shell itself, so every
    result is `claimed` and unfit for rewards; `Sandbox.exec` and
    `Sandbox.run_shell` return what the kernel says.

    Attributes:
        session_id: To attach by: `sandbox.session(session_id)`.
    """

    def __init__(self, rpc: Rpc, sandbox_id: str, session_id: str) -> None:
        self._rpc = rpc
        self._sandbox_id = sandbox_id
        self._turn = asyncio.Lock()
        self._stream: _Stream | None = None
        self.session_id = session_id

    def __repr__(self) -> str:
        return f"<Session {self.session_id} of {self._sandbox_id}>"

    async def run(
        self,
        command: str,
        *,
        timeout: float | None = None,
        output_limit: int = 0,
        on_output: Callable[[Output | Gap], object] | None = None,
    ) -> ExecResult:
        """Run one command in the shell; a second one waits for the first.

        Cancelling the task interrupts the command, and the session goes on.

        Where the server is restarted the session goes on, too; a command that was
        under way runs on, and how it ended is not known: `OutcomeUnknownError`. In a
        trajectory it is asked for again first.

        Args:
            command: Text for the shell.
            timeout: Seconds after which the command's processes are killed;
                where the shell itself does not come back, the session ends.
            output_limit: Bytes of output after which they are killed; 0 is the server's default.
            on_output: Called with each piece of output as it comes; from the first one
                again where the command is asked for again.

        Raises:
            DSecError: The end of the command did not arrive, so nothing is known about it.
        """
        if not command:
            raise InvalidError("want a command, got an empty one", field="command")
        request = session_pb2.RunCommandRequest(
            sandbox_id=self._sandbox_id,
            session_id=self.session_id,
            command=c.text(command, "command"),
            output_limit_bytes=c.count(output_limit, "output_limit"),
        )
        if timeout is not None:
            request.timeout.CopyFrom(c.duration(timeout, "timeout"))
        if (action := next_action(_RUN.path, request)) is not None:
            request.action_id = action.id

        async def once() -> ExecResult:
            try:
                if self._stream is not None and not self._stream.usable():
                    # The server has ended it, or it is of another event loop or process.
                    old, self._stream = self._stream, None
                    if old.here():
                        old.close()
                if self._stream is None:
                    self._stream = await self._rpc.open(_RUN)
                return await self._exchange(self._stream, request, on_output, action)
            except BaseException:
                # What a stream still carries of this command must not be
                # taken for the next one's.
                self._drop()
                raise

        async with self._turn:
            try:
                return await self._rpc.retrying(_RUN, action, once)
            except DSecError as e:
                unanswered(action, e)
                raise

    async def interrupt(self) -> None:
        """Kill what the command under way has started, whoever runs it; the session goes on.

        It does not wait: that command's `run` returns its result, mostly with
        the exit code 137. A shell that does not come back ends with its session.

        Raises:
            ConflictError: No command runs.
        """
        await self._rpc.unary(
            m.INTERRUPT_COMMAND,
            session_pb2.InterruptCommandRequest(sandbox_id=self._sandbox_id, session_id=self.session_id),
        )

    async def close(self) -> None:
        """End the shell and every process that it started."""
        self._drop()
        await self._rpc.unary(
            m.CLOSE_SESSION,
            session_pb2.CloseSessionRequest(sandbox_id=self._sandbox_id, session_id=self.session_id),
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    def __del__(self) -> None:
        if self._stream is not None:
            self._stream.forsake()

    def _drop(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    @staticmethod
    async def _exchange(
        stream: _Stream,
        request: session_pb2.RunCommandRequest,
        on_output: Callable[[Output | Gap], object] | None,
        action: Action | None,
    ) -> ExecResult:
        await stream.send(request)
        collector = Collector()
        process_id = 0
        while (message := await stream.receive()) is not None:
            if action is not None:
                action.answered(message.replayed)
            event = decode(message)
            if isinstance(event, process_pb2.Exited):
                return collector.result(event, process_id, 0, message.replayed)
            if isinstance(event, process_pb2.Started):
                process_id = event.process_id
            elif event is not None:
                collector.add(event)
                if on_output is not None:
                    on_output(event)
        raise OutcomeUnknownError("the stream ended and did not say how the command ended")
