"""Doing again, in a fresh sandbox, what a trajectory tells."""

from __future__ import annotations

import asyncio
import json
import re
import uuid
from collections.abc import AsyncGenerator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, cast

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError, Message

from libdsec import _convert as c
from libdsec import _log, _replaydiff
from libdsec import _methods as m
from libdsec._connect import Action, Method
from libdsec._errors import ERRORS, DSecError, InvalidError, OutcomeUnknownError, UnsupportedError
from libdsec._jobtypes import ReplayDifference, ReplayResult
from libdsec._proto.dsec.v1 import (
    file_pb2,
    process_pb2,
    sandbox_pb2,
    session_pb2,
    types_pb2,
)
from libdsec._proto.dsec.v1 import trajectory_pb2 as t
from libdsec._rpc import Rpc
from libdsec._trajectory import Trajectory, active

# What is called again to do an action again, and how it is answered.
_UNARY: dict[int, Method[Any, Any]] = {
    t.TRAJECTORY_KIND_EXEC: m.EXEC,
    t.TRAJECTORY_KIND_SIGNAL: m.SIGNAL,
    t.TRAJECTORY_KIND_STDIN: replace(m.WRITE_STDIN, action=True),
    t.TRAJECTORY_KIND_RESIZE: replace(m.RESIZE, action=True),
    t.TRAJECTORY_KIND_SESSION_OPEN: m.OPEN_SESSION,
    t.TRAJECTORY_KIND_SESSION_INTERRUPT: m.INTERRUPT_COMMAND,
    t.TRAJECTORY_KIND_SESSION_CLOSE: m.CLOSE_SESSION,
    t.TRAJECTORY_KIND_FILE_STAT: m.STAT,
    t.TRAJECTORY_KIND_FILE_LIST: m.LIST_DIR,
    t.TRAJECTORY_KIND_FILE_MKDIR: m.MKDIR,
    t.TRAJECTORY_KIND_FILE_RENAME: m.RENAME,
    t.TRAJECTORY_KIND_FILE_REMOVE: m.REMOVE,
}
_ANSWERED_BY_STREAM: dict[int, Method[Any, Any]] = {
    t.TRAJECTORY_KIND_START: m.START,
    t.TRAJECTORY_KIND_SESSION_COMMAND: replace(m.RUN_COMMAND, action=True),
    t.TRAJECTORY_KIND_FILE_READ: m.READ,
    t.TRAJECTORY_KIND_FILE_DOWNLOAD: m.DOWNLOAD,
}
_STREAM_STDIN = replace(m.STREAM_STDIN, action=True)
_CHUNK = 256 << 10
_BEGIN_TIMEOUT = 60.0
_PACE_TIMEOUT = 10.0


class _Fixed(Trajectory):
    """A trajectory whose one action has a name of its own."""

    def __init__(self, sandbox_id: str, action: str) -> None:
        super().__init__(sandbox_id, "")
        self._action = action

    def _next(self, asked: bytes) -> Action:
        return Action(self._action, self._note, lambda: None)


@dataclass
class _Step:
    """One action under way."""

    begun: t.TrajectoryEntry
    end: t.TrajectoryEntry | None
    action: str
    data: bytes = b""
    process: int = 0
    seq: int = 0  # of the fresh sandbox's entry with which it began
    ended: t.TrajectoryEntry | None = None
    failed: BaseException | None = None  # it was not begun
    task: asyncio.Task[None] | None = None
    wrote: int = 0  # what the command that it starts has written
    short: int = 0  # so much less than the original wrote
    over: bool = False  # nothing more comes


@dataclass
class Replayer:
    """A replay under way."""

    rpc: Rpc
    sandbox_id: str
    layers: Sequence[str]
    until: int
    ignore_output: bool
    mask: Sequence[re.Pattern[bytes]]
    fresh: str = ""
    result: ReplayResult = field(default_factory=ReplayResult)
    _last: int = 0
    _ends: dict[int, t.TrajectoryEntry] = field(default_factory=dict)
    _over: set[int] = field(default_factory=set)
    _steps: dict[int, _Step] = field(default_factory=dict)
    _processes: dict[int, int] = field(default_factory=dict)
    _sessions: dict[str, str] = field(default_factory=dict)
    _commands: dict[int, _Step] = field(default_factory=dict)  # by the fresh sandbox's processes
    _before: float = 0.0  # the time of the entry before
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)
    _broken: BaseException | None = None

    async def run(self, keep: bool) -> ReplayResult:
        """Replay the trajectory, and end the fresh sandbox unless it is to be kept."""
        spec = await self._plan()
        request = _request(spec, self.layers)
        self.fresh = (await self.rpc.unary(m.CREATE, request)).sandbox.id
        self.result.sandbox_id = self.fresh
        follower = asyncio.create_task(self._follow())
        try:
            await self._go()
        finally:
            tasks = [follower, *(s.task for s in self._steps.values() if s.task is not None)]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            if not keep:
                with suppress(DSecError):  # its lifetime ends it else
                    await self.rpc.unary(m.KILL, sandbox_pb2.KillRequest(sandbox_id=self.fresh))
        return self.result

    async def _plan(self) -> dict[str, Any]:
        """Read the trajectory once: of what overlapped the first must know of the last."""
        spec: dict[str, Any] | None = None
        begun, ended = 0, False
        async for e in _log.messages(self.rpc, self.sandbox_id, 1, [], False):
            if self.until and e.seq > self.until:
                break
            self._last = max(e.seq, e.gap.last_seq)
            if e.kind == t.TRAJECTORY_KIND_CREATE and e.spec and spec is None:
                spec = json.loads(e.spec)
            elif e.kind == t.TRAJECTORY_KIND_STATE:
                ended = ended or e.state in ("stopped", "failed", "lost")
            elif e.phase == t.TRAJECTORY_PHASE_BEGUN:
                begun = e.seq
            elif e.phase == t.TRAJECTORY_PHASE_ENDED:
                e.ClearField("output")
                self._ends[e.begun_seq] = e
        if spec is None:
            raise OutcomeUnknownError("entry 1 is to tell of what the sandbox was made, and does not")
        if ended:
            cut = ("conflict", "lost")
            self._over = {b for b, e in self._ends.items() if e.seq > begun and e.error.detail.code in cut}
        return spec

    async def _go(self) -> None:
        async for e in _log.messages(self.rpc, self.sandbox_id, 1, [], False):
            if e.seq > self._last or self.result.difference is not None:
                break
            if e.phase == t.TRAJECTORY_PHASE_GAP:
                gone = f"entries {e.seq} to {e.gap.last_seq} are gone ({e.gap.reason})"
                raise OutcomeUnknownError(f"{gone}: what was done then cannot be replayed")
            if e.phase == t.TRAJECTORY_PHASE_BEGUN:
                await self._begin(e)
            elif e.phase == t.TRAJECTORY_PHASE_ENDED:
                await self._end(e)
            elif e.kind != t.TRAJECTORY_KIND_CREATE:
                self.result.skipped += 1
            self._before = _time(e)
        if self.result.difference is None:
            self.result.unended += len(self._steps)

    async def _begin(self, e: t.TrajectoryEntry) -> None:
        end = self._ends.get(e.seq)
        code = "" if end is None else end.error.detail.code
        if e.kind == t.TRAJECTORY_KIND_PACK or code in _replaydiff.NOT_DONE:
            self.result.skipped += 1
            return
        if end is not None and _replaydiff.platform(code) and e.seq not in self._over:
            why = f"what came of entry {e.seq} the platform does not know ({end.error.message})"
            raise OutcomeUnknownError(f"{why}: it cannot be replayed")
        step = _Step(e, end, f"replay-{e.seq}")
        call = await self._call(step)
        # What was typed once a command had asked for it is typed then again.
        process = self._processes.get(e.request.process_id, e.request.process_id)
        await self._has_written(process, e.request.output_bytes, _time(e) - self._before)
        self._steps[e.seq] = step
        step.task = asyncio.create_task(self._do(step, call))
        if e.kind == t.TRAJECTORY_KIND_START:
            await self._until(step, _BEGIN_TIMEOUT, lambda: step.process > 0 or step.ended is not None)
            self._commands[step.process] = step
            if end is not None and end.process_id and step.process:
                self._processes[end.process_id] = step.process
        else:
            await self._until(step, _BEGIN_TIMEOUT, lambda: step.seq > 0)

    async def _end(self, e: t.TrajectoryEntry) -> None:
        step = self._steps.get(e.begun_seq)
        if step is None:
            return  # it was skipped
        if e.begun_seq in self._over:
            del self._steps[e.begun_seq]
            self.result.unended += 1
            return
        original = c.seconds(e.duration)
        in_time = await self._until(step, 60 + 10 * original, lambda: step.ended is not None)
        del self._steps[e.begun_seq]
        mine = step.ended
        if step.failed is not None:
            mine = _refused(step.failed)
        self.result.steps += 1
        self.result.original += original
        if mine is not None:
            self.result.replayed += c.seconds(mine.duration)
        found: _replaydiff.Found | None = ("end", _replaydiff.end_text(e), "it goes on")
        if in_time or mine is not None:
            found = await self._compare(e, cast("t.TrajectoryEntry", mine))
        if found is not None:
            what, expected, got = found
            self.result.difference = ReplayDifference(
                seq=e.begun_seq, kind=_log.kind_name(e.kind), what=what, expected=expected, got=got
            )

    async def _compare(self, e: t.TrajectoryEntry, mine: t.TrajectoryEntry) -> tuple[str, str, str] | None:
        code = mine.error.detail.code
        if _replaydiff.platform(code) or code in _replaydiff.NOT_DONE:
            raise ERRORS[code](f"the replay of entry {e.begun_seq}: {mine.error.message}")
        if e.kind == t.TRAJECTORY_KIND_SESSION_OPEN:
            then, now = (session_pb2.OpenSessionResponse.FromString(x.response) for x in (e, mine))
            self._sessions[then.session_id] = now.session_id
        found = _replaydiff.outcome(e, mine)
        if found is not None or self.ignore_output or e.HasField("error"):
            return found
        return await _replaydiff.output(self._read, self.sandbox_id, self.fresh, e, mine, self.mask)

    async def _read(self, sandbox_id: str, seq: int) -> dict[int, bytes]:
        return await _log.streams(self.rpc, sandbox_id, seq, False)

    async def _given(self, seq: int, given: t.TrajectoryOutput) -> bytes:
        """Return all that an entry says that its action was given."""
        if lost := given.total_bytes - given.kept_bytes:
            why = f"of what entry {seq} was given {lost} bytes were not kept ({given.gap_reason})"
            raise OutcomeUnknownError(f"{why}: it cannot be replayed")
        if given.digest:
            return await _log.content(self.rpc, self.sandbox_id, seq, True)
        return b"".join(p.data for p in given.head)

    async def _call(self, step: _Step) -> Message:
        """Return the request of an action, with the names that things have in the fresh sandbox."""
        e = step.begun
        if not e.HasField("input"):
            why = f"entry {e.seq} has no request: it was written before requests were kept"
            raise OutcomeUnknownError(why)
        body = await self._given(e.seq, e.input)
        kinds: dict[int, type[Message]] = {
            t.TRAJECTORY_KIND_FILE_WRITE: file_pb2.WriteOpen,
            t.TRAJECTORY_KIND_FILE_UPLOAD: file_pb2.UploadOpen,
        }
        method = _UNARY.get(e.kind) or _ANSWERED_BY_STREAM.get(e.kind)
        of = method.request if method is not None else kinds.get(e.kind)
        if of is None:
            raise UnsupportedError(f"entry {e.seq} is of a kind that this client cannot replay: {e.kind}")
        try:
            request: Any = of.FromString(body)
        except DecodeError:
            raise OutcomeUnknownError(f"the request of entry {e.seq} is damaged") from None
        request.sandbox_id = self.fresh
        if getattr(request, "session_id", ""):
            request.session_id = self._sessions.get(request.session_id, request.session_id)
        if getattr(request, "process_id", 0):
            request.process_id = self._processes.get(request.process_id, request.process_id)
        if e.kind in kinds or _streamed(request):
            if step.end is None:
                raise OutcomeUnknownError(f"entry {e.seq} has not ended: what is streamed to it is not known")
            if step.end.HasField("input"):
                step.data = await self._given(step.end.seq, step.end.input)
        return cast("Message", request)

    async def _do(self, step: _Step, request: Any) -> None:
        active.set(MappingProxyType({self.fresh: _Fixed(self.fresh, step.action)}))
        try:
            await self._make(step, request)
        except DSecError as e:
            # Where it was begun, the trajectory tells how it ended.
            if not step.seq and not await self._began(step):
                step.failed = e
                await self._notify()

    async def _make(self, step: _Step, request: Any) -> None:
        kind, data = step.begun.kind, step.data
        if kind == t.TRAJECTORY_KIND_FILE_WRITE:
            first = file_pb2.WriteRequest(open=request)
            write = partial(_parts, first, data, lambda b: file_pb2.WriteRequest(data=b))
            await self.rpc.client_stream(m.WRITE, request, write, again=True)
        elif kind == t.TRAJECTORY_KIND_FILE_UPLOAD:
            opened = file_pb2.UploadRequest(open=request)
            tar = partial(_parts, opened, data, lambda b: file_pb2.UploadRequest(data=b))
            await self.rpc.client_stream(m.UPLOAD, request, tar, again=True)
        elif _streamed(request):
            await self.rpc.client_stream(
                _STREAM_STDIN, request, partial(self._stdin, step, request), again=True
            )
        elif kind in _UNARY:
            await self.rpc.unary(_UNARY[kind], request)
        else:
            try:
                await self._events(step, _ANSWERED_BY_STREAM[kind], request)
                if kind == t.TRAJECTORY_KIND_START and request.detach and step.process:
                    attach = process_pb2.AttachRequest(sandbox_id=self.fresh, process_id=step.process)
                    await self._events(step, m.ATTACH, attach)
            finally:
                step.over = True
                await self._notify()

    async def _events(self, step: _Step, method: Method[Any, Any], request: Any) -> None:
        stream = await self.rpc.server_stream(method, request)
        try:
            while (message := await stream.receive()) is not None:
                if not isinstance(message, process_pb2.ProcessEvent):
                    continue
                if message.HasField("started"):
                    step.process = message.started.process_id
                elif message.HasField("output"):
                    step.wrote = max(step.wrote, message.output.seq + len(message.output.data))
                elif message.HasField("gap"):
                    step.wrote = max(step.wrote, message.gap.to)
                else:
                    continue
                await self._notify()
        finally:
            stream.close()

    async def _stdin(self, step: _Step, request: Any) -> AsyncGenerator[Any, None]:
        """Yield what was streamed to a command, each part once that has written what it had then."""
        yield request
        at, before = 0, 0
        marks = [] if step.end is None else list(step.end.marks)
        while at < len(step.data):
            while marks and marks[0].input_bytes <= at:
                mark = marks.pop(0)
                took = (mark.milliseconds - before) / 1000
                await self._has_written(request.process_id, mark.output_bytes, took)
                before = mark.milliseconds
            to = min(at + _CHUNK, len(step.data), *(x.input_bytes for x in marks[:1]))
            yield process_pb2.WriteStdinRequest(
                sandbox_id=self.fresh, process_id=request.process_id, data=step.data[at:to]
            )
            at = to

    async def _has_written(self, process: int, count: int, took: float) -> None:
        """Wait until a command has written so much, or does not come so far: then it writes less."""
        command = self._commands.get(process)
        if command is None:
            return

        def enough() -> bool:
            return command.over or command.wrote + command.short >= count

        if not await self._until(command, _PACE_TIMEOUT + 2 * max(0.0, took), enough):
            command.short = max(0, count - command.wrote)

    async def _began(self, step: _Step) -> bool:
        """Ask whether the fresh sandbox's trajectory has an action of which it has not told yet."""
        async for e in _log.messages(self.rpc, self.fresh, 1, [], False):
            if e.action_id == step.action:
                return True
        return False

    async def _follow(self) -> None:
        """Take in what the fresh sandbox's own trajectory tells, in the words of the original."""
        try:
            async for e in _log.messages(self.rpc, self.fresh, 1, [], True):
                for step in self._steps.values():
                    if e.action_id == step.action:
                        step.seq = e.seq
                    elif e.begun_seq and e.begun_seq == step.seq:
                        step.ended = e
                await self._notify()
            self._broken = ERRORS["lost"](f"sandbox {self.fresh} ended in mid-replay")
        except DSecError as e:
            self._broken = e
        await self._notify()

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _until(self, step: _Step, timeout: float, done: Any) -> bool:
        """Wait until the step is so far, or was refused; false where it takes too long."""

        def over() -> bool:
            return bool(done()) or step.failed is not None or self._broken is not None

        try:
            async with self._changed:
                await asyncio.wait_for(self._changed.wait_for(over), timeout)
        except asyncio.TimeoutError:
            return False
        if self._broken is not None and not done() and step.failed is None:
            raise self._broken
        return True


def _streamed(request: Any) -> bool:
    return isinstance(request, process_pb2.WriteStdinRequest) and not request.data and not request.eof


async def _parts(first: Any, data: bytes, make: Any) -> AsyncGenerator[Any, None]:
    yield first
    for at in range(0, len(data), _CHUNK):
        yield make(data[at : at + _CHUNK])


def _refused(error: BaseException) -> t.TrajectoryEntry:
    """Return the end of an action that was not begun."""
    if not isinstance(error, DSecError) or _replaydiff.platform(error.code) or error.retryable:
        raise error  # it says nothing of the action
    detail = types_pb2.ErrorDetail(code=error.code)
    return t.TrajectoryEntry(error=t.TrajectoryError(detail=detail, message=str(error)))


def _request(spec: dict[str, Any], layers: Sequence[str]) -> sandbox_pb2.CreateRequest:
    """Return the create of the fresh sandbox, which belongs to no job: one may have ended."""
    return sandbox_pb2.CreateRequest(
        backend=spec["backend"],
        layers=list(layers) or spec["layers"],
        limits=types_pb2.Limits(**spec["limits"]),
        env=dict(kv.partition("=")[::2] for kv in spec.get("env", [])),
        user=spec.get("user", ""),
        workdir=spec.get("workdir", ""),
        labels=spec.get("labels", {}),
        idle_timeout=_duration(spec.get("idle_timeout", 0)),
        max_lifetime=_duration(spec.get("max_lifetime", 0)),
        idle_action=spec.get("idle_action", ""),
        request_id=uuid.uuid4().hex,
    )


def _time(e: t.TrajectoryEntry) -> float:
    return e.time.seconds + e.time.nanos / 1e9


def _duration(nanoseconds: int) -> Duration:
    return Duration(seconds=nanoseconds // 10**9, nanos=nanoseconds % 10**9)


def patterns(mask: Sequence[str]) -> list[re.Pattern[bytes]]:
    """Compile what is taken for equal in output."""
    out = []
    for text in c.names(mask, "mask"):
        try:
            out.append(re.compile(text.encode()))
        except re.error as e:
            raise InvalidError(f"want a regular expression, got {text!r}: {e}", field="mask") from None
    return out
