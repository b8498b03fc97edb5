from libdsec._proto.dsec.v1 import layer_pb2 as _layer_pb2
from libdsec._proto.dsec.v1 import sandbox_pb2 as _sandbox_pb2
from libdsec._proto.dsec.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Scrub(_message.Message):
    __slots__ = ("remove", "keep", "no_defaults", "secrets")
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    KEEP_FIELD_NUMBER: _ClassVar[int]
    NO_DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    SECRETS_FIELD_NUMBER: _ClassVar[int]
    remove: _containers.RepeatedScalarFieldContainer[str]
    keep: _containers.RepeatedScalarFieldContainer[str]
    no_defaults: bool
    secrets: str
    def __init__(self, remove: _Optional[_Iterable[str]] = ..., keep: _Optional[_Iterable[str]] = ..., no_defaults: bool = ..., secrets: _Optional[str] = ...) -> None: ...

class PackReport(_message.Message):
    __slots__ = ("removed", "removed_more", "files", "bytes", "frozen", "collapsed")
    REMOVED_FIELD_NUMBER: _ClassVar[int]
    REMOVED_MORE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    FROZEN_FIELD_NUMBER: _ClassVar[int]
    COLLAPSED_FIELD_NUMBER: _ClassVar[int]
    removed: _containers.RepeatedCompositeFieldContainer[PackRemoval]
    removed_more: int
    files: int
    bytes: int
    frozen: _duration_pb2.Duration
    collapsed: int
    def __init__(self, removed: _Optional[_Iterable[_Union[PackRemoval, _Mapping]]] = ..., removed_more: _Optional[int] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., frozen: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., collapsed: _Optional[int] = ...) -> None: ...

class PackRemoval(_message.Message):
    __slots__ = ("path", "reason", "files", "bytes", "note")
    PATH_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    path: str
    reason: str
    files: int
    bytes: int
    note: str
    def __init__(self, path: _Optional[str] = ..., reason: _Optional[str] = ..., files: _Optional[int] = ..., bytes: _Optional[int] = ..., note: _Optional[str] = ...) -> None: ...

class PackRequest(_message.Message):
    __slots__ = ("sandbox_id", "name", "scrub")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    name: str
    scrub: Scrub
    def __init__(self, sandbox_id: _Optional[str] = ..., name: _Optional[str] = ..., scrub: _Optional[_Union[Scrub, _Mapping]] = ...) -> None: ...

class PackResponse(_message.Message):
    __slots__ = ("layer", "report")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    layer: _layer_pb2.Layer
    report: PackReport
    def __init__(self, layer: _Optional[_Union[_layer_pb2.Layer, _Mapping]] = ..., report: _Optional[_Union[PackReport, _Mapping]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("sandbox_id", "count", "request_id", "job", "labels", "env", "scrub")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    SCRUB_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    count: int
    request_id: str
    job: str
    labels: _containers.ScalarMap[str, str]
    env: _containers.ScalarMap[str, str]
    scrub: Scrub
    def __init__(self, sandbox_id: _Optional[str] = ..., count: _Optional[int] = ..., request_id: _Optional[str] = ..., job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., env: _Optional[_Mapping[str, str]] = ..., scrub: _Optional[_Union[Scrub, _Mapping]] = ...) -> None: ...

class ForkResponse(_message.Message):
    __slots__ = ("items", "digest", "report")
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[_sandbox_pb2.BatchCreateItem]
    digest: str
    report: PackReport
    def __init__(self, items: _Optional[_Iterable[_Union[_sandbox_pb2.BatchCreateItem, _Mapping]]] = ..., digest: _Optional[str] = ..., report: _Optional[_Union[PackReport, _Mapping]] = ...) -> None: ...

class MigrateRequest(_message.Message):
    __slots__ = ("sandbox_id", "lose_memory", "lose_actions")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    LOSE_MEMORY_FIELD_NUMBER: _ClassVar[int]
    LOSE_ACTIONS_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    lose_memory: bool
    lose_actions: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., lose_memory: bool = ..., lose_actions: bool = ...) -> None: ...

class MigrateResponse(_message.Message):
    __slots__ = ("sandbox", "report")
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    sandbox: _types_pb2.Sandbox
    report: PackReport
    def __init__(self, sandbox: _Optional[_Union[_types_pb2.Sandbox, _Mapping]] = ..., report: _Optional[_Union[PackReport, _Mapping]] = ...) -> None: ...
