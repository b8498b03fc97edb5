from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Event(_message.Message):
    __slots__ = ("kind", "time", "sandbox_id", "job", "labels", "state", "reason", "conditions", "node", "repeated", "moved_to", "id")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KIND_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    CONDITIONS_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    REPEATED_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    kind: str
    time: _timestamp_pb2.Timestamp
    sandbox_id: str
    job: str
    labels: _containers.ScalarMap[str, str]
    state: str
    reason: str
    conditions: _containers.RepeatedScalarFieldContainer[str]
    node: str
    repeated: bool
    moved_to: str
    id: str
    def __init__(self, kind: _Optional[str] = ..., time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., sandbox_id: _Optional[str] = ..., job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., conditions: _Optional[_Iterable[str]] = ..., node: _Optional[str] = ..., repeated: bool = ..., moved_to: _Optional[str] = ..., id: _Optional[str] = ...) -> None: ...

class EventFilter(_message.Message):
    __slots__ = ("kinds", "sandbox_ids", "job", "labels", "states")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    KINDS_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_IDS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    kinds: _containers.RepeatedScalarFieldContainer[str]
    sandbox_ids: _containers.RepeatedScalarFieldContainer[str]
    job: str
    labels: _containers.ScalarMap[str, str]
    states: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kinds: _Optional[_Iterable[str]] = ..., sandbox_ids: _Optional[_Iterable[str]] = ..., job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., states: _Optional[_Iterable[str]] = ...) -> None: ...

class WatchEventsRequest(_message.Message):
    __slots__ = ("cursor", "from_start", "filter")
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    FROM_START_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    cursor: str
    from_start: bool
    filter: EventFilter
    def __init__(self, cursor: _Optional[str] = ..., from_start: bool = ..., filter: _Optional[_Union[EventFilter, _Mapping]] = ...) -> None: ...

class WatchEventsResponse(_message.Message):
    __slots__ = ("event", "cursor")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    CURSOR_FIELD_NUMBER: _ClassVar[int]
    event: Event
    cursor: str
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ..., cursor: _Optional[str] = ...) -> None: ...

class NodePosition(_message.Message):
    __slots__ = ("log", "seq")
    LOG_FIELD_NUMBER: _ClassVar[int]
    SEQ_FIELD_NUMBER: _ClassVar[int]
    log: str
    seq: int
    def __init__(self, log: _Optional[str] = ..., seq: _Optional[int] = ...) -> None: ...

class EventCursor(_message.Message):
    __slots__ = ("nodes", "jobs", "began")
    class NodesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: NodePosition
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[NodePosition, _Mapping]] = ...) -> None: ...
    NODES_FIELD_NUMBER: _ClassVar[int]
    JOBS_FIELD_NUMBER: _ClassVar[int]
    BEGAN_FIELD_NUMBER: _ClassVar[int]
    nodes: _containers.MessageMap[str, NodePosition]
    jobs: int
    began: _timestamp_pb2.Timestamp
    def __init__(self, nodes: _Optional[_Mapping[str, NodePosition]] = ..., jobs: _Optional[int] = ..., began: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class WatchNodeRequest(_message.Message):
    __slots__ = ("from_start", "filter")
    FROM_FIELD_NUMBER: _ClassVar[int]
    FROM_START_FIELD_NUMBER: _ClassVar[int]
    FILTER_FIELD_NUMBER: _ClassVar[int]
    from_start: bool
    filter: EventFilter
    def __init__(self, from_start: bool = ..., filter: _Optional[_Union[EventFilter, _Mapping]] = ..., **kwargs) -> None: ...

class WatchNodeResponse(_message.Message):
    __slots__ = ("event", "next")
    EVENT_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    event: Event
    next: NodePosition
    def __init__(self, event: _Optional[_Union[Event, _Mapping]] = ..., next: _Optional[_Union[NodePosition, _Mapping]] = ...) -> None: ...
