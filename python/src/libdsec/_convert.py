"""Between the messages of the API and the types of the SDK."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from libdsec import _admin as admin
from libdsec import _types as t
from libdsec._errors import DSecError, InternalError, InvalidError
from libdsec._jobtypes import JobInfo, Pause
from libdsec._proto.dsec.v1 import (
    admin_pb2,
    file_pb2,
    job_pb2,
    layer_pb2,
    process_pb2,
    sandbox_pb2,
    session_pb2,
    types_pb2,
)

_MIB = 1 << 20
INT64_MAX = (1 << 63) - 1
# What google.protobuf.Duration can hold.
_MAX_SECONDS = 315_576_000_000

StrPath = str | bytes | os.PathLike[str] | os.PathLike[bytes]

_STREAMS: dict[int, t.StreamName] = {
    process_pb2.STREAM_STDOUT: "stdout",
    process_pb2.STREAM_STDERR: "stderr",
    process_pb2.STREAM_PTY: "pty",
}


def duration(seconds: float, field: str) -> Duration:
    """Encode seconds; the server judges if they are in range."""
    if not isinstance(seconds, (int, float)) or not math.isfinite(seconds) or abs(seconds) > _MAX_SECONDS:
        raise InvalidError(f"want a number of seconds, got {seconds!r}", field=field)
    # Apart, for a float cannot hold both a large whole and single nanoseconds.
    rest, whole = math.modf(seconds)
    nanos = int(whole) * 1_000_000_000 + round(rest * 1_000_000_000)
    if nanos == 0 and seconds != 0:
        raise InvalidError(f"want 0 or at least a nanosecond, got {seconds!r}", field=field)
    sign = -1 if nanos < 0 else 1
    whole, rest = divmod(abs(nanos), 1_000_000_000)
    return Duration(seconds=sign * whole, nanos=sign * rest)


def seconds(d: Duration) -> float:
    """Decode a duration."""
    return d.seconds + d.nanos / 1_000_000_000


def when(ts: Timestamp) -> datetime:
    """Decode a time, in UTC."""
    return ts.ToDatetime(tzinfo=timezone.utc)


def timestamp(moment: datetime, field: str) -> Timestamp:
    """Encode a time; one without a zone is refused, because it names no moment."""
    if moment.tzinfo is None:
        raise InvalidError("want a datetime with a time zone", field=field)
    ts = Timestamp()
    ts.FromDatetime(moment)
    return ts


def text(value: str, field: str) -> str:
    """Check that a value can travel as text."""
    if not isinstance(value, str):
        raise InvalidError(f"want str, got {type(value).__name__}", field=field)
    try:
        value.encode()
    except UnicodeEncodeError as e:
        raise InvalidError(
            f"want valid Unicode, got {value[e.start]!r} at character {e.start}", field=field
        ) from None
    return value


def names(values: Sequence[str], field: str) -> list[str]:
    """Check a list of names; one string is not taken for a list of its characters."""
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise InvalidError(f"want a list of names, got {type(values).__name__}", field=field)
    return [text(name, f"{field}[{i}]") for i, name in enumerate(values)]


def texts(values: Mapping[str, str], field: str) -> dict[str, str]:
    """Check a mapping of text to text."""
    if not isinstance(values, Mapping):
        raise InvalidError(f"want a mapping of str to str, got {type(values).__name__}", field=field)
    return {text(k, field): text(v, f"{field}.{k}") for k, v in values.items()}


def int32(value: int, field: str) -> int:
    """Check that a number can travel; the server judges if it is in range."""
    if not isinstance(value, int) or not -(1 << 31) <= value < 1 << 31:
        raise InvalidError(f"want a whole number of 32 bits, got {value!r}", field=field)
    return int(value)


def count(value: int, field: str) -> int:
    """Check a number of bytes; 0 stands for the server's default or for no bound."""
    if not isinstance(value, int) or not 0 <= value <= INT64_MAX:
        raise InvalidError(f"want a whole number from 0 to {INT64_MAX}, got {value!r}", field=field)
    return value


def file_mode(value: int) -> int:
    """Check permission bits."""
    if not isinstance(value, int) or not 0 <= value <= 0o7777:
        raise InvalidError(f"want 0 to 0o7777, got {value!r}", field="mode")
    return value


def terminal_size(size: tuple[int, int]) -> process_pb2.TerminalSize:
    """Encode rows and columns."""
    rows, cols = size
    for name, value in (("rows", rows), ("cols", cols)):
        if not isinstance(value, int) or not 1 <= value <= 65535:
            raise InvalidError(f"want a whole number from 1 to 65535, got {value!r}", field=f"pty.{name}")
    return process_pb2.TerminalSize(rows=rows, cols=cols)


def _at_least_one(value: int | None, unit: int, field: str) -> int:
    # 0 means the server's default on the wire; a caller who wants that leaves the field out.
    if value is None:
        return 0
    if not isinstance(value, int) or value < 1 or value > INT64_MAX // unit:
        raise InvalidError(f"want a whole number from 1 to {INT64_MAX // unit}, got {value!r}", field=field)
    return value * unit


def _milli_cpu(cores: float | None) -> int:
    if cores is None:
        return 0
    if not isinstance(cores, (int, float)) or not math.isfinite(cores) or not 0.001 <= cores <= 1_000_000:
        raise InvalidError(f"want a number of CPUs of at least 0.001, got {cores!r}", field="cpu_cores_limit")
    return round(cores * 1000)


def create_request(
    args: t.DSecContainerRunArgs, request_id: str, backend: str = ""
) -> sandbox_pb2.CreateRequest:
    """Encode what to make; backend is for args that name none."""
    layers = _layers(args)
    if not isinstance(args.network_rules, Mapping):
        raise InvalidError(
            f"want a mapping of names to True or False, got {type(args.network_rules).__name__}",
            field="network_rules",
        )
    for name, allowed in args.network_rules.items():
        if not isinstance(allowed, bool):
            raise InvalidError(f"want True or False, got {allowed!r}", field=f"network_rules.{name}")
    request = sandbox_pb2.CreateRequest(
        backend=text(args.backend or backend, "backend"),
        layers=[name for _, name, _ in layers],
        layer_kinds=[kind for _, _, kind in layers],
        limits=types_pb2.Limits(
            milli_cpu=_milli_cpu(args.cpu_cores_limit),
            memory_bytes=_at_least_one(args.memory_limit_mb, _MIB, "memory_limit_mb"),
            disk_bytes=_at_least_one(args.disk_limit_mb, _MIB, "disk_limit_mb"),
            disk_inodes=_at_least_one(args.disk_inodes_limit, 1, "disk_inodes_limit"),
            pids=_at_least_one(args.pids_limit, 1, "pids_limit"),
        ),
        env=texts(args.env, "env"),
        user=text(args.init_user, "init_user"),
        workdir=text(args.workdir, "workdir"),
        labels=texts(args.labels, "labels"),
        job=text(args.job, "job"),
        idle_action=text(args.idle_action, "idle_action"),
        request_id=text(request_id, "request_id"),
        network_rules={text(k, "network_rules"): v for k, v in args.network_rules.items()},
    )
    if args.ttl_running_stop is not None:
        request.idle_timeout.CopyFrom(duration(args.ttl_running_stop, "ttl_running_stop"))
    if args.max_lifetime is not None:
        request.max_lifetime.CopyFrom(duration(args.max_lifetime, "max_lifetime"))
    return request


def _layers(args: t.DSecContainerRunArgs) -> list[tuple[str, str, str]]:
    """Of each layer, lowest first: the argument that names it, its name, and what it must be."""
    return [
        *(
            (field, text(name, field), kind)
            for field, name, kind in (
                ("container_image", args.container_image, "base"),
                ("workspace", args.workspace, "workspace"),
            )
            if name != ""
        ),
        *((f"toolkits[{i}]", name, "toolkit") for i, name in enumerate(names(args.toolkits, "toolkits"))),
        *((f"layers[{i}]", name, "") for i, name in enumerate(names(args.layers, "layers"))),
    ]


def of_layers(e: DSecError, args: t.DSecContainerRunArgs) -> DSecError:
    """Have an error about one of the layers name the argument that it came from."""
    found = re.fullmatch(r"(?:template\.)?layers\[([0-9]+)\]", e.field)
    layers = _layers(args)
    if found and int(found[1]) < len(layers):
        e.field = layers[int(found[1])][0]
    return e


def command(
    argv: Sequence[str | bytes] | None,
    shell: str | None,
    *,
    env: Mapping[str, str] | None,
    cwd: str,
    user: str,
    timeout: float | None,
    output_limit: int,
) -> process_pb2.Command:
    """Encode what to run; exactly one of argv and shell is set."""
    c = process_pb2.Command(
        env=texts(env or {}, "env"),
        cwd=text(cwd, "cwd"),
        user=text(user, "user"),
        output_limit_bytes=count(output_limit, "output_limit"),
    )
    if timeout is not None:
        c.timeout.CopyFrom(duration(timeout, "timeout"))
    if shell is not None:
        if not shell:
            raise InvalidError("want a command, got an empty one", field="command")
        c.shell = text(shell, "command")
    if argv is not None:
        _set_argv(c, argv)
    return c


def _set_argv(c: process_pb2.Command, argv: Sequence[str | bytes]) -> None:
    if isinstance(argv, (str, bytes)):
        raise InvalidError(
            "want a list of program and arguments; a command line is for run_shell", field="argv"
        )
    args = list(argv)
    if not args:
        raise InvalidError("want at least the program", field="argv")
    for i, a in enumerate(args):
        if not isinstance(a, (str, bytes)):
            raise InvalidError(f"want str or bytes, got {type(a).__name__}", field=f"argv[{i}]")
    # As os.fsencode does: bytes that are no text pass through str unharmed.
    raw = [a if isinstance(a, bytes) else a.encode("utf-8", "surrogateescape") for a in args]
    try:
        c.argv.extend(a.decode() for a in raw)
    except UnicodeDecodeError:
        del c.argv[:]
        c.raw_argv.extend(raw)


def stdin_bytes(data: str | bytes | bytearray | memoryview) -> bytes:
    """Return what a caller gave as input; text goes as UTF-8."""
    return data.encode("utf-8", "surrogateescape") if isinstance(data, str) else bytes(data)


def path(p: StrPath, field: str = "path") -> file_pb2.Path:
    """Encode a path; str may hold surrogate escapes, as those of os.fsdecode do."""
    try:
        value = os.fspath(p)
    except TypeError:
        raise InvalidError(f"want str, bytes or os.PathLike, got {type(p).__name__}", field=field) from None
    raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogateescape")
    if not raw:
        raise InvalidError("want a path, got an empty one", field=field)
    try:
        return file_pb2.Path(path=raw.decode())
    except UnicodeDecodeError:
        return file_pb2.Path(raw=raw)


def outcome_fields(o: types_pb2.Outcome) -> dict[str, Any]:
    """Decode an outcome. One that does not say how the process ended is no outcome."""
    end = o.WhichOneof("end")
    if end is None:
        raise InternalError("the server's outcome holds neither exit code nor signal")
    return {
        "exit_code": o.exit_code if end == "exit_code" else None,
        "signal": o.signal if end == "signal" else None,
        "oom": o.oom,
        "timed_out": o.timed_out,
        "output_limit": o.output_limit,
        "claimed": o.claimed,
        "started": when(o.started),
        "duration": seconds(o.duration),
        "cpu": seconds(o.cpu),
        "max_rss_bytes": o.max_rss_bytes,
    }


def stream_name(stream: int) -> t.StreamName:
    """Decode where output went."""
    name = _STREAMS.get(stream)
    if name is None:
        raise InternalError(f"the server sent output of stream {stream}, want 1 to 3")
    return name


def limits(m: types_pb2.Limits) -> t.Limits:
    """Decode limits."""
    return t.Limits(
        milli_cpu=m.milli_cpu,
        memory_bytes=m.memory_bytes,
        disk_bytes=m.disk_bytes,
        disk_inodes=m.disk_inodes,
        pids=m.pids,
    )


def sandbox_info(m: types_pb2.Sandbox) -> t.SandboxInfo:
    """Decode the state of a sandbox."""
    return t.SandboxInfo(
        id=m.id,
        backend=m.backend,
        state=m.state,
        reason=m.reason,
        layers=tuple(m.layers),
        layer_names=tuple(m.layer_names),
        limits=limits(m.limits),
        labels=dict(m.labels),
        job=m.job,
        user=m.user,
        workdir=m.workdir,
        created=when(m.created),
        idle_timeout=seconds(m.idle_timeout),
        deadline=when(m.deadline) if m.HasField("deadline") else None,
        active=when(m.active),
        conditions=tuple(m.conditions),
        idle_action=m.idle_action or "kill",
        pause=pause(m.pause) if m.HasField("pause") else None,
    )


def pause(m: types_pb2.Pause) -> Pause:
    """Decode what came of a pause."""
    return Pause(
        since=when(m.since),
        memory_before_bytes=m.memory_before_bytes if m.HasField("memory_before_bytes") else None,
        memory_bytes=m.memory_bytes if m.HasField("memory_bytes") else None,
        note=m.note,
        until=when(m.until) if m.HasField("until") else None,
    )


def pause_options(wait: bool, max_paused: float | None, count_lifetime: bool) -> sandbox_pb2.PauseOptions:
    """Encode what holds while a sandbox is paused."""
    options = sandbox_pb2.PauseOptions(wait=bool(wait), count_lifetime=bool(count_lifetime))
    if max_paused is not None:
        options.max_paused.CopyFrom(duration(max_paused, "max_paused"))
    return options


def job_info(m: job_pb2.Job) -> JobInfo:
    """Decode the state of a job."""
    return JobInfo(
        name=m.name,
        labels=dict(m.labels),
        state=m.state,
        created=when(m.created),
        lease=seconds(m.lease),
        on_expiry=m.on_expiry,
        grace=seconds(m.grace),
        changed=when(m.changed),
    )


def usage(m: sandbox_pb2.UsageResponse) -> t.Usage:
    """Decode usage."""
    u = m.usage
    return t.Usage(
        cpu=seconds(u.cpu),
        cpu_throttled=seconds(u.cpu_throttled),
        memory_bytes=u.memory_bytes,
        memory_peak_bytes=u.memory_peak_bytes,
        disk_bytes=u.disk_bytes,
        disk_inodes=u.disk_inodes if u.HasField("disk_inodes") else None,
        pids=u.pids,
        oom_kills=u.oom_kills,
        limits=limits(u.limits),
        at=when(m.at),
    )


def process_info(m: process_pb2.Process) -> t.ProcessInfo:
    """Decode a process of a listing."""
    return t.ProcessInfo(
        process_id=m.process_id,
        pid=m.pid,
        argv=tuple(m.argv),
        started=when(m.started),
        outcome=t.Outcome(**outcome_fields(m.outcome)) if m.HasField("outcome") else None,
        next_seq=m.next_seq,
        first_seq=m.first_seq,
        pty=m.pty,
        lingering=m.lingering,
        session_id=m.session_id,
        fault=m.fault,
    )


def session_info(m: session_pb2.Session) -> t.SessionInfo:
    """Decode a session of a listing."""
    return t.SessionInfo(session_id=m.session_id, process_id=m.process_id, busy=m.busy)


def entry(m: file_pb2.Entry) -> t.Entry:
    """Decode a file."""
    return t.Entry(
        name=m.raw_name or m.name,
        type=m.type,
        size=m.size,
        mode=m.mode,
        uid=m.uid,
        gid=m.gid,
        modified=when(m.modified),
        link_target=m.link_target,
    )


def layer(m: layer_pb2.Layer) -> t.Layer:
    """Decode a layer."""
    return t.Layer(
        name=m.name,
        digest=m.digest,
        kind=m.kind,
        at=m.at,
        size=m.size,
        files=m.files,
        created=when(m.created),
        source=m.source,
        source_digest=m.source_digest,
        origin=t.LayerOrigin(
            type=m.origin.type,
            location=m.origin.location,
            revision=m.origin.revision,
            entry=m.origin.entry,
        )
        if m.HasField("origin")
        else None,
        config=t.LayerConfig(
            env=tuple(m.config.env),
            user=m.config.user,
            workdir=m.config.workdir,
            entrypoint=tuple(m.config.entrypoint),
            cmd=tuple(m.config.cmd),
        ),
        parents=tuple(m.parents),
    )


def collected(m: admin_pb2.CollectLayersResponse) -> admin.Collected:
    """Decode what a collection did."""
    removed = (admin.StoredLayer(digest=x.digest, size=x.size, created=when(x.created)) for x in m.removed)
    return admin.Collected(removed=tuple(removed), kept=m.kept)


def key(m: admin_pb2.Key) -> admin.Key:
    """Decode a key."""
    return admin.Key(
        id=m.id,
        project=m.project,
        created=when(m.created),
        expires=when(m.expires) if m.HasField("expires") else None,
        admin=m.admin,
    )
