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

class Stream(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STREAM_UNSPECIFIED: _ClassVar[Stream]
    STREAM_STDOUT: _ClassVar[Stream]
    STREAM_STDERR: _ClassVar[Stream]
    STREAM_PTY: _ClassVar[Stream]
STREAM_UNSPECIFIED: Stream
STREAM_STDOUT: Stream
STREAM_STDERR: Stream
STREAM_PTY: Stream

class Command(_message.Message):
    __slots__ = ("argv", "shell", "raw_argv", "env", "cwd", "user", "timeout", "output_limit_bytes")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ARGV_FIELD_NUMBER: _ClassVar[int]
    SHELL_FIELD_NUMBER: _ClassVar[int]
    RAW_ARGV_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    CWD_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LIMIT_BYTES_FIELD_NUMBER: _ClassVar[int]
    argv: _containers.RepeatedScalarFieldContainer[str]
    shell: str
    raw_argv: _containers.RepeatedScalarFieldContainer[bytes]
    env: _containers.ScalarMap[str, str]
    cwd: str
    user: str
    timeout: _duration_pb2.Duration
    output_limit_bytes: int
    def __init__(self, argv: _Optional[_Iterable[str]] = ..., shell: _Optional[str] = ..., raw_argv: _Optional[_Iterable[bytes]] = ..., env: _Optional[_Mapping[str, str]] = ..., cwd: _Optional[str] = ..., user: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., output_limit_bytes: _Optional[int] = ...) -> None: ...

class ExecRequest(_message.Message):
    __slots__ = ("sandbox_id", "command", "stdin", "tag")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    command: Command
    stdin: bytes
    tag: str
    def __init__(self, sandbox_id: _Optional[str] = ..., command: _Optional[_Union[Command, _Mapping]] = ..., stdin: _Optional[bytes] = ..., tag: _Optional[str] = ...) -> None: ...

class ExecResponse(_message.Message):
    __slots__ = ("outcome", "stdout", "stderr", "process_id")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    STDOUT_FIELD_NUMBER: _ClassVar[int]
    STDERR_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    outcome: _types_pb2.Outcome
    stdout: bytes
    stderr: bytes
    process_id: int
    def __init__(self, outcome: _Optional[_Union[_types_pb2.Outcome, _Mapping]] = ..., stdout: _Optional[bytes] = ..., stderr: _Optional[bytes] = ..., process_id: _Optional[int] = ...) -> None: ...

class StartRequest(_message.Message):
    __slots__ = ("sandbox_id", "command", "stdin", "open_stdin", "detach", "pty")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_FIELD_NUMBER: _ClassVar[int]
    STDIN_FIELD_NUMBER: _ClassVar[int]
    OPEN_STDIN_FIELD_NUMBER: _ClassVar[int]
    DETACH_FIELD_NUMBER: _ClassVar[int]
    PTY_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    command: Command
    stdin: bytes
    open_stdin: bool
    detach: bool
    pty: TerminalSize
    def __init__(self, sandbox_id: _Optional[str] = ..., command: _Optional[_Union[Command, _Mapping]] = ..., stdin: _Optional[bytes] = ..., open_stdin: bool = ..., detach: bool = ..., pty: _Optional[_Union[TerminalSize, _Mapping]] = ...) -> None: ...

class TerminalSize(_message.Message):
    __slots__ = ("rows", "cols")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    COLS_FIELD_NUMBER: _ClassVar[int]
    rows: int
    cols: int
    def __init__(self, rows: _Optional[int] = ..., cols: _Optional[int] = ...) -> None: ...

class ProcessEvent(_message.Message):
    __slots__ = ("started", "output", "gap", "exited", "keepalive", "replayed")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    GAP_FIELD_NUMBER: _ClassVar[int]
    EXITED_FIELD_NUMBER: _ClassVar[int]
    KEEPALIVE_FIELD_NUMBER: _ClassVar[int]
    REPLAYED_FIELD_NUMBER: _ClassVar[int]
    started: Started
    output: Output
    gap: Gap
    exited: Exited
    keepalive: Keepalive
    replayed: bool
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., output: _Optional[_Union[Output, _Mapping]] = ..., gap: _Optional[_Union[Gap, _Mapping]] = ..., exited: _Optional[_Union[Exited, _Mapping]] = ..., keepalive: _Optional[_Union[Keepalive, _Mapping]] = ..., replayed: bool = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("process_id", "pid")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    pid: int
    def __init__(self, process_id: _Optional[int] = ..., pid: _Optional[int] = ...) -> None: ...

class Output(_message.Message):
    __slots__ = ("stream", "seq", "data")
    STREAM_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    stream: Stream
    seq: int
    data: bytes
    def __init__(self, stream: _Optional[_Union[Stream, str]] = ..., seq: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class Gap(_message.Message):
    __slots__ = ("to",)
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    to: int
    def __init__(self, to: _Optional[int] = ..., **kwargs) -> None: ...

class Exited(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: _types_pb2.Outcome
    def __init__(self, outcome: _Optional[_Union[_types_pb2.Outcome, _Mapping]] = ...) -> None: ...

class Keepalive(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AttachRequest(_message.Message):
    __slots__ = ("sandbox_id", "process_id", "from_seq", "own")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_SEQ_FIELD_NUMBER: _ClassVar[int]
    OWN_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process_id: int
    from_seq: int
    own: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., process_id: _Optional[int] = ..., from_seq: _Optional[int] = ..., own: bool = ...) -> None: ...

class ListProcessesRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class ListProcessesResponse(_message.Message):
    __slots__ = ("processes",)
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[Process]
    def __init__(self, processes: _Optional[_Iterable[_Union[Process, _Mapping]]] = ...) -> None: ...

class Process(_message.Message):
    __slots__ = ("process_id", "pid", "argv", "started", "outcome", "next_seq", "first_seq", "pty", "lingering", "session_id", "fault", "tag")
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    ARGV_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    NEXT_SEQ_FIELD_NUMBER: _ClassVar[int]
    FIRST_SEQ_FIELD_NUMBER: _ClassVar[int]
    PTY_FIELD_NUMBER: _ClassVar[int]
    LINGERING_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    process_id: int
    pid: int
    argv: _containers.RepeatedScalarFieldContainer[str]
    started: _timestamp_pb2.Timestamp
    outcome: _types_pb2.Outcome
    next_seq: int
    first_seq: int
    pty: bool
    lingering: bool
    session_id: str
    fault: str
    tag: str
    def __init__(self, process_id: _Optional[int] = ..., pid: _Optional[int] = ..., argv: _Optional[_Iterable[str]] = ..., started: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., outcome: _Optional[_Union[_types_pb2.Outcome, _Mapping]] = ..., next_seq: _Optional[int] = ..., first_seq: _Optional[int] = ..., pty: bool = ..., lingering: bool = ..., session_id: _Optional[str] = ..., fault: _Optional[str] = ..., tag: _Optional[str] = ...) -> None: ...

class SignalRequest(_message.Message):
    __slots__ = ("sandbox_id", "process_id", "signal", "tree")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    TREE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process_id: int
    signal: int
    tree: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., process_id: _Optional[int] = ..., signal: _Optional[int] = ..., tree: bool = ...) -> None: ...

class SignalResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WriteStdinRequest(_message.Message):
    __slots__ = ("sandbox_id", "process_id", "data", "eof")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    EOF_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process_id: int
    data: bytes
    eof: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., process_id: _Optional[int] = ..., data: _Optional[bytes] = ..., eof: bool = ...) -> None: ...

class WriteStdinResponse(_message.Message):
    __slots__ = ("written",)
    WRITTEN_FIELD_NUMBER: _ClassVar[int]
    written: int
    def __init__(self, written: _Optional[int] = ...) -> None: ...

class CloseStdinRequest(_message.Message):
    __slots__ = ("sandbox_id", "process_id")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process_id: int
    def __init__(self, sandbox_id: _Optional[str] = ..., process_id: _Optional[int] = ...) -> None: ...

class CloseStdinResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResizeRequest(_message.Message):
    __slots__ = ("sandbox_id", "process_id", "size")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    process_id: int
    size: TerminalSize
    def __init__(self, sandbox_id: _Optional[str] = ..., process_id: _Optional[int] = ..., size: _Optional[_Union[TerminalSize, _Mapping]] = ...) -> None: ...

class ResizeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
