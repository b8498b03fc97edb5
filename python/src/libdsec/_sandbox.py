"""One sandbox and the commands in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from types import TracebackType

from typing_extensions import Self

from libdsec import _convert as c
from libdsec import _log, _packs, _replay
from libdsec import _methods as m
from libdsec._errors import ConflictError, DSecError, NotFoundError
from libdsec._files import Files
from libdsec._jobtypes import LogEntry, ReplayResult
from libdsec._packs import Packed, Scrub
from libdsec._process import MAX_FIRST_STDIN, Process, start
from libdsec._proto.dsec.v1 import process_pb2, sandbox_pb2, session_pb2
from libdsec._rpc import Rpc
from libdsec._session import Session
from libdsec._source import Source, is_data
from libdsec._trajectory import Trajectory
from libdsec._types import ExecResult, ProcessInfo, SandboxInfo, SessionInfo, Usage

# What a command may write whose output is held here.
_OUTPUT_LIMIT = 16 << 20


class Sandbox:
    """A sandbox that runs.

    `async with` stops it at the end. The ID is all that is needed to get the
    same handle again, in any process: `client.attach(sandbox.id)`.

    Attributes:
        id: Names the sandbox.
        files: Its files.
        launch: How its create was served: warm or cold; empty for one attached to.
    """

    def __init__(self, rpc: Rpc, sandbox_id: str, *, launch: str = "") -> None:
        self._rpc = rpc
        self.id = sandbox_id
        self.launch = launch
        self.files = Files(rpc, sandbox_id)

    def __repr__(self) -> str:
        return f"<Sandbox {self.id}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.stop()

    async def info(self) -> SandboxInfo:
        """Return the state of the sandbox."""
        response = await self._rpc.unary(m.GET, sandbox_pb2.GetRequest(sandbox_id=self.id))
        return c.sandbox_info(response.sandbox)

    async def stop(self) -> None:
        """End the sandbox and free all it held. Stopping an ended one is a success."""
        await self._rpc.unary(m.KILL, sandbox_pb2.KillRequest(sandbox_id=self.id))

    async def extend(
        self, *, ttl_running_stop: float | None = None, max_lifetime: float | None = None
    ) -> SandboxInfo:
        """Set new deadlines.

        Args:
            ttl_running_stop: Seconds without activity after which the sandbox
                is stopped; 0 is never, None leaves it.
            max_lifetime: Seconds from now after which it is stopped in any
                case; 0 is never, None leaves it.
        """
        request = sandbox_pb2.ExtendRequest(sandbox_id=self.id)
        if ttl_running_stop is not None:
            request.idle_timeout.CopyFrom(c.duration(ttl_running_stop, "ttl_running_stop"))
        if max_lifetime is not None:
            request.max_lifetime.CopyFrom(c.duration(max_lifetime, "max_lifetime"))
        return c.sandbox_info((await self._rpc.unary(m.EXTEND, request)).sandbox)

    async def pause(
        self, *, wait: bool = False, max_paused: float | None = None, count_lifetime: bool = False
    ) -> SandboxInfo:
        """Stop every process of the sandbox where it is; the node takes its memory back.

        Commands in progress wait. A call that comes later resumes the sandbox
        first, by itself. Pausing a paused one is a success.

        Args:
            wait: Return only once the memory was moved out, as far as that goes:
                `SandboxInfo.pause` then tells how far.
            max_paused: Seconds after which a paused sandbox is killed; 0 is
                never, None is the server's default.
            count_lifetime: Have its maximum lifetime run on meanwhile.

        Raises:
            UnsupportedError: Sandboxes of this backend cannot be paused.
        """
        request = sandbox_pb2.PauseRequest(
            sandbox_id=self.id, options=c.pause_options(wait, max_paused, count_lifetime)
        )
        return c.sandbox_info((await self._rpc.unary(m.PAUSE, request)).sandbox)

    async def resume(self) -> SandboxInfo:
        """Have a paused sandbox go on. Resuming a running one is a success.

        Raises:
            ExhaustedError: The node has no memory for it now; it stays paused.
        """
        request = sandbox_pb2.ResumeRequest(sandbox_id=self.id)
        return c.sandbox_info((await self._rpc.unary(m.RESUME, request)).sandbox)

    async def pack(self, name: str, *, scrub: Scrub | None = None) -> Packed:
        """Make a layer of what was written in the sandbox, as it is at one moment.

        Its processes stand still for that, and go on while the layer is made.
        Sandboxes are made of the name as of any base: `container_image=name`.
        Memory and processes are not part of it.

        Args:
            name: `name:tag`, or `name` for `name:latest`.
            scrub: What is left out; None is caches, histories and secrets.

        Raises:
            InvalidError: A secret was found, and is to be refused.
            ConflictError: The sandbox has ended.
        """
        return await _packs.pack(self._rpc, self.id, name, scrub)

    async def fork(
        self,
        count: int = 1,
        *,
        request_id: str = "",
        job: str | None = None,
        labels: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        scrub: Scrub | None = None,
    ) -> list[Sandbox | DSecError]:
        """Make sandboxes of what was written in this one, with its limits and environment.

        Nothing of its memory or processes is in them.

        Args:
            count: How many, at most 1000.
            request_id: Makes it one that can be repeated by another program: the
                same ID, the same sandboxes.
            job: Theirs; None is this one's.
            labels: Added to this one's; they win.
            env: Added to this one's; it wins.
            scrub: What is left out; None is nothing that a program could miss.

        Returns:
            For each the sandbox, or the error that kept it from being made.
            An error of the whole call is raised.
        """
        made = await _packs.fork(self._rpc, self.id, count, request_id, job, labels, env, scrub)
        return [
            r if isinstance(r, DSecError) else Sandbox(self._rpc, r.sandbox.id, launch=r.launch) for r in made
        ]

    async def migrate(self, *, lose_memory: bool = False, lose_actions: bool = False) -> Sandbox:
        """Have a new sandbox with what is on this one's disk take its place, on another node if one takes it.

        The old ID leads to the new one as long as the server keeps the old one's record; by it this
        does nothing more, and returns the new one.

        Args:
            lose_memory: Processes and their memory end: must be True.
            lose_actions: What was done in a `trajectory()` block is done again where it is asked for again:
                must be True where there is any.

        Raises:
            UnsupportedError: Memory may not be lost.
            ConflictError: Actions may not be lost, and there are some.
            DSecError: It was not moved, and goes on where it is.
        """
        return Sandbox(self._rpc, await _packs.migrate(self._rpc, self.id, lose_memory, lose_actions))

    async def usage(self) -> Usage:
        """Return what the sandbox uses now and has used so far."""
        return c.usage(await self._rpc.unary(m.USAGE, sandbox_pb2.UsageRequest(sandbox_id=self.id)))

    async def run_shell(
        self,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: Source = b"",
        timeout: float | None = None,
        output_limit: int = 0,
        detach: bool = False,
    ) -> ExecResult:
        """Run `bash -c command` to its end (`sh -c` where there is no bash; not a login shell).

        Args:
            command: Text for the shell.
            env: Added to the sandbox's environment; wins over it.
            cwd: Where it starts; empty is the sandbox's workdir.
            user: Who it runs as; empty is the sandbox's user.
            stdin: The whole input: bytes, str (as UTF-8), a binary file or an iterable of bytes.
            timeout: Seconds after which the whole process tree is killed; the
                result is then `timed_out` and holds the output so far.
            output_limit: Bytes of output after which it is killed, with
                `output_limit` in the result; 0 is 16 MiB.
            detach: Let the command go on where the calling task is cancelled,
                or the connection lost; `processes` then finds it again.
                Without it, either kills the command.

        Returns:
            How the command ended, whatever it did. `.check()` raises where it did not succeed.

        Where the server is restarted meanwhile, or the connection breaks, this
        goes on with the same command once the server is back, within a minute;
        but not with one of which not all the input was sent.

        Raises:
            DSecError: The platform failed; nothing is known about the command.
        """
        request = c.command(
            None, command, env=env, cwd=cwd, user=user, timeout=timeout, output_limit=output_limit
        )
        return await self._run(request, stdin, detach)

    async def exec(
        self,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: Source = b"",
        timeout: float | None = None,
        output_limit: int = 0,
        detach: bool = False,
    ) -> ExecResult:
        """Run a program with arguments to its end; no shell has a part in it.

        The program is looked up in PATH unless it has a slash. Arguments that
        are no UTF-8 go as bytes. For the rest see `run_shell`.
        """
        request = c.command(
            argv, None, env=env, cwd=cwd, user=user, timeout=timeout, output_limit=output_limit
        )
        return await self._run(request, stdin, detach)

    async def start(
        self,
        argv: Sequence[str | bytes],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: str | bytes = b"",
        open_stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout: float | None = None,
        output_limit: int = 0,
        detach: bool = False,
    ) -> Process:
        """Start a program and return its handle.

        Args:
            argv: Program and arguments.
            env: See `run_shell`.
            cwd: See `run_shell`.
            user: See `run_shell`.
            stdin: First input, at most 1 MiB; the input ends after it unless open_stdin.
            open_stdin: Leave the input open for `Process.write`.
            pty: Rows and columns: run on a terminal of that size.
            timeout: See `run_shell`.
            output_limit: See `run_shell`.
            detach: Let the command outlive the handle. Without it, closing
                the handle, cancelling a task that reads from it, or losing
                the connection kills the command.
        """
        request = c.command(
            argv, None, env=env, cwd=cwd, user=user, timeout=timeout, output_limit=output_limit
        )
        return await self._start(request, c.stdin_bytes(stdin), open_stdin, pty, detach)

    async def start_shell(
        self,
        command: str,
        *,
        env: Mapping[str, str] | None = None,
        cwd: str = "",
        user: str = "",
        stdin: str | bytes = b"",
        open_stdin: bool = False,
        pty: tuple[int, int] | None = None,
        timeout: float | None = None,
        output_limit: int = 0,
        detach: bool = False,
    ) -> Process:
        """Start `bash -c command`, as `run_shell` does, and return its handle; for the rest see `start`."""
        request = c.command(
            None, command, env=env, cwd=cwd, user=user, timeout=timeout, output_limit=output_limit
        )
        return await self._start(request, c.stdin_bytes(stdin), open_stdin, pty, detach)

    def process(self, process_id: int, *, from_seq: int = 0) -> Process:
        """Return a handle on a process that was started before, here or elsewhere.

        Args:
            process_id: From `Process.process_id` or `processes`.
            from_seq: Number of the first byte of output wanted; `Process.next_seq` of an earlier handle.
        """
        return Process(self._rpc, self.id, process_id, from_seq=c.count(from_seq, "from_seq"))

    async def processes(self) -> list[ProcessInfo]:
        """Return the processes started through the API, those that ended lately included."""
        request = process_pb2.ListProcessesRequest(sandbox_id=self.id)
        return [c.process_info(p) for p in (await self._rpc.unary(m.LIST_PROCESSES, request)).processes]

    async def open_session(
        self, *, env: Mapping[str, str] | None = None, cwd: str = "", user: str = ""
    ) -> Session:
        """Open a shell that keeps cwd, environment and functions from one command to the next."""
        response = await self._rpc.unary(
            m.OPEN_SESSION,
            session_pb2.OpenSessionRequest(
                sandbox_id=self.id,
                env=c.texts(env or {}, "env"),
                cwd=c.text(cwd, "cwd"),
                user=c.text(user, "user"),
            ),
        )
        return Session(self._rpc, self.id, response.session_id)

    def session(self, session_id: str) -> Session:
        """Return a handle on a session that was opened before, here or elsewhere."""
        return Session(self._rpc, self.id, c.text(session_id, "session_id"))

    async def sessions(self) -> list[SessionInfo]:
        """Return the open sessions."""
        request = session_pb2.ListSessionsRequest(sandbox_id=self.id)
        return [c.session_info(s) for s in (await self._rpc.unary(m.LIST_SESSIONS, request)).sessions]

    def trajectory(self, name: str = "") -> Trajectory:
        """Return a block in which what is done in the sandbox is done once, however often the program runs.

            with sandbox.trajectory():
                result = await sandbox.run_shell("make test")

        See `Trajectory`. A command in it goes on where its caller goes away, and a
        program that is started again finds it by its number.

        Args:
            name: Tells trajectories of one sandbox apart, of at most 64 bytes.
        """
        return Trajectory(self.id, name)

    async def log(
        self, *, from_seq: int = 1, kinds: Sequence[str] = (), follow: bool = False
    ) -> AsyncIterator[LogEntry]:
        """Yield what was done to the sandbox and what came of it, in order.

        Args:
            from_seq: Number of the first entry.
            kinds: Only of these kinds; empty is all.
            follow: Go on with each entry that comes, until the sandbox has ended.
        """
        async for entry in _log.entries(self._rpc, self.id, from_seq, kinds, follow):
            yield entry

    async def log_output(self, seq: int) -> bytes:
        """Return the output of the action that ended with entry seq, of all its streams together.

        Raises:
            NotFoundError: That entry has none.
        """
        return await _log.content(self._rpc, self.id, seq, False)

    async def log_input(self, seq: int) -> bytes:
        """Return what entry seq says that its action was given.

        Of one that began that is its request, as a message of the API; of one that
        ended, what was streamed after it: the content of a file, a tar, standard input.

        Raises:
            NotFoundError: That entry has none.
        """
        return await _log.content(self._rpc, self.id, seq, True)

    async def replay(
        self,
        *,
        layers: Sequence[str] = (),
        until: int = 0,
        ignore_output: bool = False,
        mask: Sequence[str] = (),
        keep: bool = False,
    ) -> ReplayResult:
        """Do again, in a fresh sandbox, what the log tells, up to the first difference.

        Args:
            layers: What the fresh sandbox is made of; empty is what this one was made of.
            until: Number of the last entry; 0 is the last there is.
            ignore_output: Compare how actions ended, and not what they wrote or answered.
            mask: Regular expressions; what matches in output is taken for equal.
            keep: Leave the fresh sandbox running.

        Raises:
            OutcomeUnknownError: The log does not hold what it takes to go on; it names the entry.
        """
        bounds = (c.names(layers, "layers"), c.count(until, "until"), ignore_output, _replay.patterns(mask))
        return await _replay.Replayer(self._rpc, self.id, *bounds).run(keep)

    async def _start(
        self,
        command: process_pb2.Command,
        stdin: bytes,
        open_stdin: bool,
        pty: tuple[int, int] | None,
        detach: bool,
    ) -> Process:
        request = process_pb2.StartRequest(
            sandbox_id=self.id, command=command, stdin=stdin, open_stdin=open_stdin, detach=detach
        )
        if pty is not None:
            request.pty.CopyFrom(c.terminal_size(pty))
        return await start(self._rpc, request)

    async def _run(self, command: process_pb2.Command, stdin: Source, detach: bool) -> ExecResult:
        data = c.stdin_bytes(stdin) if is_data(stdin) else None
        small = data is not None and len(data) <= MAX_FIRST_STDIN
        if not command.output_limit_bytes:
            command.output_limit_bytes = _OUTPUT_LIMIT
        process = await self._start(command, data or b"" if small else b"", not small, None, detach)
        async with process:
            if small:
                return await process.wait()
            return await _feed(process, stdin if data is None else data)


async def _feed(process: Process, stdin: Source) -> ExecResult:
    """Wait for the process while its input is sent."""
    feeding = asyncio.create_task(process.send_all(stdin))
    waiting = asyncio.create_task(process.wait())
    try:
        await asyncio.wait((feeding, waiting), return_when=asyncio.FIRST_COMPLETED)
        if feeding.done() and (error := feeding.exception()) is not None and not _input_unwanted(error):
            if isinstance(error, DSecError) and error.link_broke:
                raise process._may_go_on(error) from None
            raise error
        return await waiting
    finally:
        for task in (feeding, waiting):
            task.cancel()
        await asyncio.gather(feeding, waiting, return_exceptions=True)


def _input_unwanted(error: BaseException) -> bool:
    # A command may end, or close its stdin, before it has read everything.
    return isinstance(error, (ConflictError, NotFoundError))
