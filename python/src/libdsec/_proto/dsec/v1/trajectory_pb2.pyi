from libdsec._proto.dsec.v1 import process_pb2 as _process_pb2
from libdsec._proto.dsec.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TrajectoryPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAJECTORY_PHASE_UNSPECIFIED: _ClassVar[TrajectoryPhase]
    TRAJECTORY_PHASE_BEGUN: _ClassVar[TrajectoryPhase]
    TRAJECTORY_PHASE_ENDED: _ClassVar[TrajectoryPhase]
    TRAJECTORY_PHASE_EVENT: _ClassVar[TrajectoryPhase]
    TRAJECTORY_PHASE_GAP: _ClassVar[TrajectoryPhase]

class TrajectoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TRAJECTORY_KIND_UNSPECIFIED: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_CREATE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_KILL: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_EXTEND: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_STATE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_POLICY: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_PAUSE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_RESUME: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_PACK: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_EXEC: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_START: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_SIGNAL: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_STDIN: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_RESIZE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_SESSION_OPEN: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_SESSION_COMMAND: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_SESSION_INTERRUPT: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_SESSION_CLOSE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_READ: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_WRITE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_MKDIR: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_RENAME: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_REMOVE: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_UPLOAD: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_DOWNLOAD: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_STAT: _ClassVar[TrajectoryKind]
    TRAJECTORY_KIND_FILE_LIST: _ClassVar[TrajectoryKind]
TRAJECTORY_PHASE_UNSPECIFIED: TrajectoryPhase
TRAJECTORY_PHASE_BEGUN: TrajectoryPhase
TRAJECTORY_PHASE_ENDED: TrajectoryPhase
TRAJECTORY_PHASE_EVENT: TrajectoryPhase
TRAJECTORY_PHASE_GAP: TrajectoryPhase
TRAJECTORY_KIND_UNSPECIFIED: TrajectoryKind
TRAJECTORY_KIND_CREATE: TrajectoryKind
TRAJECTORY_KIND_KILL: TrajectoryKind
TRAJECTORY_KIND_EXTEND: TrajectoryKind
TRAJECTORY_KIND_STATE: TrajectoryKind
TRAJECTORY_KIND_POLICY: TrajectoryKind
TRAJECTORY_KIND_PAUSE: TrajectoryKind
TRAJECTORY_KIND_RESUME: TrajectoryKind
TRAJECTORY_KIND_PACK: TrajectoryKind
TRAJECTORY_KIND_EXEC: TrajectoryKind
TRAJECTORY_KIND_START: TrajectoryKind
TRAJECTORY_KIND_SIGNAL: TrajectoryKind
TRAJECTORY_KIND_STDIN: TrajectoryKind
TRAJECTORY_KIND_RESIZE: TrajectoryKind
TRAJECTORY_KIND_SESSION_OPEN: TrajectoryKind
TRAJECTORY_KIND_SESSION_COMMAND: TrajectoryKind
TRAJECTORY_KIND_SESSION_INTERRUPT: TrajectoryKind
TRAJECTORY_KIND_SESSION_CLOSE: TrajectoryKind
TRAJECTORY_KIND_FILE_READ: TrajectoryKind
TRAJECTORY_KIND_FILE_WRITE: TrajectoryKind
TRAJECTORY_KIND_FILE_MKDIR: TrajectoryKind
TRAJECTORY_KIND_FILE_RENAME: TrajectoryKind
TRAJECTORY_KIND_FILE_REMOVE: TrajectoryKind
TRAJECTORY_KIND_FILE_UPLOAD: TrajectoryKind
TRAJECTORY_KIND_FILE_DOWNLOAD: TrajectoryKind
TRAJECTORY_KIND_FILE_STAT: TrajectoryKind
TRAJECTORY_KIND_FILE_LIST: TrajectoryKind

class TrajectoryEntry(_message.Message):
    __slots__ = ("seq", "sandbox_id", "time", "phase", "kind", "caller", "action_id", "request_digest", "request", "begun_seq", "outcome", "error", "output", "usage", "duration", "process_id", "session_id", "response", "state", "reason", "gap", "spec", "input", "origin", "marks")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    CALLER_FIELD_NUMBER: _ClassVar[int]
    ACTION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_DIGEST_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    BEGUN_SEQ_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    SPEC_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    MARKS_FIELD_NUMBER: _ClassVar[int]
    seq: int
    sandbox_id: str
    time: _timestamp_pb2.Timestamp
    phase: TrajectoryPhase
    kind: TrajectoryKind
    caller: str
    action_id: str
    request_digest: bytes
    request: TrajectoryRequest
    begun_seq: int
    outcome: _types_pb2.Outcome
    error: TrajectoryError
    output: TrajectoryOutput
    usage: _types_pb2.Usage
    duration: _duration_pb2.Duration
    process_id: int
    session_id: str
    response: bytes
    state: str
    reason: str
    gap: TrajectoryGap
    spec: bytes
    input: TrajectoryOutput
    origin: TrajectoryOrigin
    marks: _containers.RepeatedCompositeFieldContainer[TrajectoryMark]
    def __init__(self, seq: _Optional[int] = ..., sandbox_id: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., phase: _Optional[_Union[TrajectoryPhase, str]] = ..., kind: _Optional[_Union[TrajectoryKind, str]] = ..., caller: _Optional[str] = ..., action_id: _Optional[str] = ..., request_digest: _Optional[bytes] = ..., request: _Optional[_Union[TrajectoryRequest, _Mapping]] = ..., begun_seq: _Optional[int] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, _Mapping]] = ..., error: _Optional[_Union[TrajectoryError, _Mapping]] = ..., output: _Optional[_Union[TrajectoryOutput, _Mapping]] = ..., usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., process_id: _Optional[int] = ..., session_id: _Optional[str] = ..., response: _Optional[bytes] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., gap: _Optional[_Union[TrajectoryGap, _Mapping]] = ..., spec: _Optional[bytes] = ..., input: _Optional[_Union[TrajectoryOutput, _Mapping]] = ..., origin: _Optional[_Union[TrajectoryOrigin, _Mapping]] = ..., marks: _Optional[_Iterable[_Union[TrajectoryMark, _Mapping]]] = ...) -> None: ...

class TrajectoryRequest(_message.Message):
    __slots__ = ("argv", "shell", "cwd", "user", "path", "new_path", "session_id", "process_id", "signal", "input_bytes", "timeout", "note", "cut", "output_bytes")
    ARGV_FIELD_NUMBER: _ClassVar[int]
    SHELL_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    NEW_PATH_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[bytes]
    shell: str
    cwd: str
    user: str
    path: bytes
    new_path: bytes
    session_id: str
    process_id: int
    signal: int
    input_bytes: int
    timeout: _duration_pb2.Duration
    note: str
    cut: bool
    output_bytes: int
    def __init__(self, argv: _Optional[_Iterable[bytes]] = ..., shell: _Optional[str] = ..., cwd: _Optional[str] = ..., user: _Optional[str] = ..., path: _Optional[bytes] = ..., new_path: _Optional[bytes] = ..., session_id: _Optional[str] = ..., process_id: _Optional[int] = ..., signal: _Optional[int] = ..., input_bytes: _Optional[int] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., note: _Optional[str] = ..., cut: bool = ..., output_bytes: _Optional[int] = ...) -> None: ...

class TrajectoryError(_message.Message):
    __slots__ = ("detail", "message")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    detail: _types_pb2.ErrorDetail
    message: str
    def __init__(self, detail: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class TrajectoryOutput(_message.Message):
    __slots__ = ("head", "tail", "total_bytes", "kept_bytes", "digest", "gap_reason")
    HEAD_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BYTES_FIELD_NUMBER: _ClassVar[int]
    KEPT_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GAP_REASON_FIELD_NUMBER: _ClassVar[int]
    head: _containers.RepeatedCompositeFieldContainer[TrajectoryOutputPiece]
    tail: _containers.RepeatedCompositeFieldContainer[TrajectoryOutputPiece]
    total_bytes: int
    kept_bytes: int
    digest: bytes
    gap_reason: str
    def __init__(self, head: _Optional[_Iterable[_Union[TrajectoryOutputPiece, _Mapping]]] = ..., tail: _Optional[_Iterable[_Union[TrajectoryOutputPiece, _Mapping]]] = ..., total_bytes: _Optional[int] = ..., kept_bytes: _Optional[int] = ..., digest: _Optional[bytes] = ..., gap_reason: _Optional[str] = ...) -> None: ...

class TrajectoryOutputPiece(_message.Message):
    __slots__ = ("stream", "data", "missing_bytes")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    MISSING_BYTES_FIELD_NUMBER: _ClassVar[int]
    stream: _process_pb2.Stream
    data: bytes
    missing_bytes: int
    def __init__(self, stream: _Optional[_Union[_process_pb2.Stream, str]] = ..., data: _Optional[bytes] = ..., missing_bytes: _Optional[int] = ...) -> None: ...

class TrajectoryGap(_message.Message):
    __slots__ = ("last_seq", "reason")
    LAST_SEQ_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    last_seq: int
    reason: str
    def __init__(self, last_seq: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ListTrajectoryRequest(_message.Message):
    __slots__ = ("sandbox_id", "from_seq", "kinds", "page_size")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    from_seq: int
    kinds: _containers.RepeatedScalarFieldContainer[TrajectoryKind]
    page_size: int
    def __init__(self, sandbox_id: _Optional[str] = ..., from_seq: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[TrajectoryKind, str]]] = ..., page_size: _Optional[int] = ...) -> None: ...

class ListTrajectoryResponse(_message.Message):
    __slots__ = ("entries", "next_seq")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[TrajectoryEntry]
    next_seq: int
    def __init__(self, entries: _Optional[_Iterable[_Union[TrajectoryEntry, _Mapping]]] = ..., next_seq: _Optional[int] = ...) -> None: ...

class FollowTrajectoryRequest(_message.Message):
    __slots__ = ("sandbox_id", "from_seq", "kinds")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    from_seq: int
    kinds: _containers.RepeatedScalarFieldContainer[TrajectoryKind]
    def __init__(self, sandbox_id: _Optional[str] = ..., from_seq: _Optional[int] = ..., kinds: _Optional[_Iterable[_Union[TrajectoryKind, str]]] = ...) -> None: ...

class FollowTrajectoryResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: TrajectoryEntry
    def __init__(self, entry: _Optional[_Union[TrajectoryEntry, _Mapping]] = ...) -> None: ...

class ReadTrajectoryOutputRequest(_message.Message):
    __slots__ = ("sandbox_id", "seq", "input")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    INPUT_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    seq: int
    input: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., seq: _Optional[int] = ..., input: bool = ...) -> None: ...

class ReadTrajectoryOutputResponse(_message.Message):
    __slots__ = ("piece",)
    PIECE_FIELD_NUMBER: _ClassVar[int]
    piece: TrajectoryOutputPiece
    def __init__(self, piece: _Optional[_Union[TrajectoryOutputPiece, _Mapping]] = ...) -> None: ...

class TrajectoryOrigin(_message.Message):
    __slots__ = ("sandbox_id", "seq", "layer")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    LAYER_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    seq: int
    layer: str
    def __init__(self, sandbox_id: _Optional[str] = ..., seq: _Optional[int] = ..., layer: _Optional[str] = ...) -> None: ...

class TrajectoryMark(_message.Message):
    __slots__ = ("input_bytes", "output_bytes", "milliseconds")
    INPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_BYTES_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    input_bytes: int
    output_bytes: int
    milliseconds: int
    def __init__(self, input_bytes: _Optional[int] = ..., output_bytes: _Optional[int] = ..., milliseconds: _Optional[int] = ...) -> None: ...
