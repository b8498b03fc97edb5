"""Comparing what an action came to with what it comes to when it is done again."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Sequence

from libdsec._errors import ERRORS, OutcomeUnknownError, PlatformError
from libdsec._proto.dsec.v1 import file_pb2, process_pb2, types_pb2
from libdsec._proto.dsec.v1 import trajectory_pb2 as t

Found = tuple[str, str, str]
Read = Callable[[str, int], Awaitable[dict[int, bytes]]]

# Whether these come before the end of the command is chance: it shows in what the
# command does, if at all.
_CHANCE = (
    t.TRAJECTORY_KIND_STDIN,
    t.TRAJECTORY_KIND_SIGNAL,
    t.TRAJECTORY_KIND_RESIZE,
    t.TRAJECTORY_KIND_SESSION_INTERRUPT,
)
_COMMANDS = (t.TRAJECTORY_KIND_EXEC, t.TRAJECTORY_KIND_START, t.TRAJECTORY_KIND_SESSION_COMMAND)
_CONTENTS = (t.TRAJECTORY_KIND_FILE_READ, t.TRAJECTORY_KIND_FILE_WRITE, t.TRAJECTORY_KIND_FILE_UPLOAD)
_STREAMS = {
    process_pb2.STREAM_UNSPECIFIED: "output",
    process_pb2.STREAM_STDOUT: "stdout",
    process_pb2.STREAM_STDERR: "stderr",
    process_pb2.STREAM_PTY: "output",
}
_SHOWN = 200

# Codes of errors of what was provably not done.
NOT_DONE = ("exhausted", "unavailable")


def platform(code: str) -> bool:
    """Tell whether an error of that code says nothing about what was done."""
    return code in ERRORS and issubclass(ERRORS[code], PlatformError)


def end_text(e: t.TrajectoryEntry) -> str:
    """Tell how an action ended."""
    if e.HasField("error"):
        return f"{e.error.detail.code}: {e.error.message}"
    return _outcome_text(e.outcome) if e.HasField("outcome") else "success"


def _outcome_text(o: types_pb2.Outcome) -> str:
    text = f"signal {o.signal}" if o.WhichOneof("end") == "signal" else f"exit code {o.exit_code}"
    flags = ((o.oom, "out of memory"), (o.timed_out, "timed out"), (o.output_limit, "output limit"))
    return ", ".join([text, *(name for is_so, name in flags if is_so)])


def outcome(e: t.TrajectoryEntry, mine: t.TrajectoryEntry) -> Found | None:
    """Compare how an action ended."""
    if e.kind in _CHANCE:
        return None
    if e.error.detail.code != mine.error.detail.code:
        return "error", end_text(e), end_text(mine)
    want, got = _outcome_text(e.outcome), _outcome_text(mine.outcome)
    return None if want == got else ("outcome", want, got)


async def output(
    read: Read,
    of: str,
    fresh: str,
    e: t.TrajectoryEntry,
    mine: t.TrajectoryEntry,
    mask: Sequence[re.Pattern[bytes]],
) -> Found | None:
    """Compare what an action wrote, or was answered."""
    if e.kind in _COMMANDS or (e.kind in _CONTENTS and e.HasField("output") and mine.HasField("output")):
        return await _compare_streams(read, of, fresh, e, mine, mask)
    if e.kind in _CONTENTS and e.reason != mine.reason:  # how much it was, and its digest
        return "output", e.reason, mine.reason
    if e.kind in (t.TRAJECTORY_KIND_FILE_STAT, t.TRAJECTORY_KIND_FILE_LIST):
        want, got = await _files(read, of, e), await _files(read, fresh, mine)
        return None if want == got else ("answer", *_first_difference(want, got))
    return None  # a tar has times in it, and the others have no answer


async def _whole(read: Read, sandbox_id: str, e: t.TrajectoryEntry) -> tuple[dict[int, bytes], int]:
    """Return what an action wrote, and how many bytes of it are not kept."""
    streams: dict[int, bytes] = {}
    if e.output.digest:
        streams = await read(sandbox_id, e.seq)
    else:
        for p in e.output.head:
            streams[p.stream] = streams.get(p.stream, b"") + p.data
    return streams, e.output.total_bytes - e.output.kept_bytes


async def _compare_streams(
    read: Read,
    of: str,
    fresh: str,
    e: t.TrajectoryEntry,
    mine: t.TrajectoryEntry,
    mask: Sequence[re.Pattern[bytes]],
) -> Found | None:
    (then, missing), (now, missing_now) = await _whole(read, of, e), await _whole(read, fresh, mine)
    for stream, name in _STREAMS.items():
        want, got = then.get(stream, b""), now.get(stream, b"")
        for pattern in mask:
            want, got = pattern.sub(b"\xe2\x80\xa6", want), pattern.sub(b"\xe2\x80\xa6", got)
        if missing or missing_now:  # what is there may differ all the same
            n = min(len(want), len(got))
            want, got = want[:n], got[:n]
        if want != got:
            return name, *_first_difference(want, got)
    if missing or missing_now:
        lost = f"{missing or missing_now} bytes of the output of entry {e.begun_seq} were not kept"
        raise OutcomeUnknownError(f"{lost}: it cannot be compared, but without its output")
    return None


async def _files(read: Read, sandbox_id: str, e: t.TrajectoryEntry) -> bytes:
    """Return what was told of files, but for times and the sizes of directories, one a line."""
    data = e.response
    if e.output.total_bytes:
        streams, missing = await _whole(read, sandbox_id, e)
        if missing:
            raise OutcomeUnknownError(f"{missing} bytes of the answer of entry {e.begun_seq} were not kept")
        data = streams.get(process_pb2.STREAM_UNSPECIFIED, b"")
    if e.kind == t.TRAJECTORY_KIND_FILE_STAT:
        entries = [file_pb2.StatResponse.FromString(data).entry]
    else:
        entries = list(file_pb2.ListDirResponse.FromString(data).entries)
    lines = (
        f"{f.name or f.raw_name!r} {f.type} {f.mode:o} {f.uid}:{f.gid} {0 if f.type == 'dir' else f.size}"
        f" {f.link_target!r}\n"
        for f in entries
    )
    return "".join(lines).encode()


def _first_difference(want: bytes, got: bytes) -> tuple[str, str]:
    """Return the first lines that differ."""
    a, b = want.split(b"\n"), got.split(b"\n")
    n = 0
    while n < min(len(a), len(b)) - 1 and a[n] == b[n]:
        n += 1
    at = 0
    while at < min(len(a[n]), len(b[n])) and a[n][at] == b[n][at]:
        at += 1
    at = max(0, at - _SHOWN // 2)
    texts = (line[at : at + _SHOWN].decode(errors="replace") for line in (a[n], b[n]))
    first, second = (f"line {n + 1}: {text!r}" for text in texts)
    return first, second
