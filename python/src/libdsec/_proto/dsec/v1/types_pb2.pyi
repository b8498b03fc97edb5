from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Limits(_message.Message):
    __slots__ = ("milli_cpu", "memory_bytes", "disk_bytes", "disk_inodes", "pids")
    MILLI_CPU_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_INODES_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    milli_cpu: int
    memory_bytes: int
    disk_bytes: int
    disk_inodes: int
    pids: int
    def __init__(self, milli_cpu: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_inodes: _Optional[int] = ..., pids: _Optional[int] = ...) -> None: ...

class Sandbox(_message.Message):
    __slots__ = ("id", "backend", "state", "reason", "layers", "limits", "labels", "job", "created", "idle_timeout", "deadline", "active", "conditions", "user", "workdir", "layer_names", "pause", "idle_action")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ID_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    LAYER_NAMES_FIELD_NUMBER: _ClassVar[int]
    PAUSE_FIELD_NUMBER: _ClassVar[int]
    IDLE_ACTION_FIELD_NUMBER: _ClassVar[int]
    id: str
    backend: str
    state: str
    reason: str
    layers: _containers.RepeatedScalarFieldContainer[str]
    limits: Limits
    labels: _containers.ScalarMap[str, str]
    job: str
    created: _timestamp_pb2.Timestamp
    idle_timeout: _duration_pb2.Duration
    deadline: _timestamp_pb2.Timestamp
    active: _timestamp_pb2.Timestamp
    conditions: _containers.RepeatedScalarFieldContainer[str]
    user: str
    workdir: str
    layer_names: _containers.RepeatedScalarFieldContainer[str]
    pause: Pause
    idle_action: str
    def __init__(self, id: _Optional[str] = ..., backend: _Optional[str] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., layers: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., job: _Optional[str] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., idle_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., deadline: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., active: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., conditions: _Optional[_Iterable[str]] = ..., user: _Optional[str] = ..., workdir: _Optional[str] = ..., layer_names: _Optional[_Iterable[str]] = ..., pause: _Optional[_Union[Pause, _Mapping]] = ..., idle_action: _Optional[str] = ...) -> None: ...

class Pause(_message.Message):
    __slots__ = ("since", "memory_before_bytes", "memory_bytes", "note", "until")
    SINCE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BEFORE_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    UNTIL_FIELD_NUMBER: _ClassVar[int]
    since: _timestamp_pb2.Timestamp
    memory_before_bytes: int
    memory_bytes: int
    note: str
    until: _timestamp_pb2.Timestamp
    def __init__(self, since: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., memory_before_bytes: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., note: _Optional[str] = ..., until: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("cpu", "cpu_throttled", "memory_bytes", "memory_peak_bytes", "disk_bytes", "disk_inodes", "pids", "oom_kills", "limits")
    CPU_FIELD_NUMBER: _ClassVar[int]
    CPU_THROTTLED_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PEAK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_INODES_FIELD_NUMBER: _ClassVar[int]
    PIDS_FIELD_NUMBER: _ClassVar[int]
    OOM_KILLS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    cpu: _duration_pb2.Duration
    cpu_throttled: _duration_pb2.Duration
    memory_bytes: int
    memory_peak_bytes: int
    disk_bytes: int
    disk_inodes: int
    pids: int
    oom_kills: int
    limits: Limits
    def __init__(self, cpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cpu_throttled: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory_bytes: _Optional[int] = ..., memory_peak_bytes: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., disk_inodes: _Optional[int] = ..., pids: _Optional[int] = ..., oom_kills: _Optional[int] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("exit_code", "signal", "oom", "timed_out", "output_limit", "claimed", "started", "duration", "cpu", "max_rss_bytes")
    EXIT_CODE_FIELD_NUMBER: _ClassVar[int]
    SIGNAL_FIELD_NUMBER: _ClassVar[int]
    OOM_FIELD_NUMBER: _ClassVar[int]
    TIMED_OUT_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_LIMIT_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_FIELD_NUMBER: _ClassVar[int]
    STARTED_FIELD_NUMBER: _ClassVar[int]
    DURATION_FIELD_NUMBER: _ClassVar[int]
    CPU_FIELD_NUMBER: _ClassVar[int]
    MAX_RSS_BYTES_FIELD_NUMBER: _ClassVar[int]
    exit_code: int
    signal: int
    oom: bool
    timed_out: bool
    output_limit: bool
    claimed: bool
    started: _timestamp_pb2.Timestamp
    duration: _duration_pb2.Duration
    cpu: _duration_pb2.Duration
    max_rss_bytes: int
    def __init__(self, exit_code: _Optional[int] = ..., signal: _Optional[int] = ..., oom: bool = ..., timed_out: bool = ..., output_limit: bool = ..., claimed: bool = ..., started: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., duration: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., cpu: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_rss_bytes: _Optional[int] = ...) -> None: ...

class ErrorDetail(_message.Message):
    __slots__ = ("code", "field", "retryable", "moved_to", "restarting")
    CODE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    RESTARTING_FIELD_NUMBER: _ClassVar[int]
    code: str
    field: str
    retryable: bool
    moved_to: str
    restarting: bool
    def __init__(self, code: _Optional[str] = ..., field: _Optional[str] = ..., retryable: bool = ..., moved_to: _Optional[str] = ..., restarting: bool = ...) -> None: ...
