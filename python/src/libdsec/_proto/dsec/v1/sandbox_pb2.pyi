from libdsec._proto.dsec.v1 import types_pb2 as _types_pb2
from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class CreateRequest(_message.Message):
    __slots__ = ("backend", "layers", "limits", "env", "user", "workdir", "idle_timeout", "max_lifetime", "labels", "job", "request_id", "network_rules", "layer_kinds", "idle_action")
    class EnvEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class NetworkRulesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bool
        def __init__(self, key: _Optional[str] = ..., value: bool = ...) -> None: ...
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ENV_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_LIFETIME_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NETWORK_RULES_FIELD_NUMBER: _ClassVar[int]
    LAYER_KINDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_ACTION_FIELD_NUMBER: _ClassVar[int]
    backend: str
    layers: _containers.RepeatedScalarFieldContainer[str]
    limits: _types_pb2.Limits
    env: _containers.ScalarMap[str, str]
    user: str
    workdir: str
    idle_timeout: _duration_pb2.Duration
    max_lifetime: _duration_pb2.Duration
    labels: _containers.ScalarMap[str, str]
    job: str
    request_id: str
    network_rules: _containers.ScalarMap[str, bool]
    layer_kinds: _containers.RepeatedScalarFieldContainer[str]
    idle_action: str
    def __init__(self, backend: _Optional[str] = ..., layers: _Optional[_Iterable[str]] = ..., limits: _Optional[_Union[_types_pb2.Limits, _Mapping]] = ..., env: _Optional[_Mapping[str, str]] = ..., user: _Optional[str] = ..., workdir: _Optional[str] = ..., idle_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_lifetime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., labels: _Optional[_Mapping[str, str]] = ..., job: _Optional[str] = ..., request_id: _Optional[str] = ..., network_rules: _Optional[_Mapping[str, bool]] = ..., layer_kinds: _Optional[_Iterable[str]] = ..., idle_action: _Optional[str] = ...) -> None: ...

class CreateResponse(_message.Message):
    __slots__ = ("sandbox", "launch")
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    LAUNCH_FIELD_NUMBER: _ClassVar[int]
    sandbox: _types_pb2.Sandbox
    launch: str
    def __init__(self, sandbox: _Optional[_Union[_types_pb2.Sandbox, _Mapping]] = ..., launch: _Optional[str] = ...) -> None: ...

class BatchCreateRequest(_message.Message):
    __slots__ = ("template", "count")
    TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    template: CreateRequest
    count: int
    def __init__(self, template: _Optional[_Union[CreateRequest, _Mapping]] = ..., count: _Optional[int] = ...) -> None: ...

class BatchCreateResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[BatchCreateItem]
    def __init__(self, items: _Optional[_Iterable[_Union[BatchCreateItem, _Mapping]]] = ...) -> None: ...

class BatchCreateItem(_message.Message):
    __slots__ = ("created", "error")
    CREATED_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    created: CreateResponse
    error: ItemError
    def __init__(self, created: _Optional[_Union[CreateResponse, _Mapping]] = ..., error: _Optional[_Union[ItemError, _Mapping]] = ...) -> None: ...

class ItemError(_message.Message):
    __slots__ = ("detail", "message")
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    detail: _types_pb2.ErrorDetail
    message: str
    def __init__(self, detail: _Optional[_Union[_types_pb2.ErrorDetail, _Mapping]] = ..., message: _Optional[str] = ...) -> None: ...

class GetRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class GetResponse(_message.Message):
    __slots__ = ("sandbox",)
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    sandbox: _types_pb2.Sandbox
    def __init__(self, sandbox: _Optional[_Union[_types_pb2.Sandbox, _Mapping]] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ("job", "labels", "states", "page_size", "page_token")
    class LabelsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    JOB_FIELD_NUMBER: _ClassVar[int]
    LABELS_FIELD_NUMBER: _ClassVar[int]
    STATES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    job: str
    labels: _containers.ScalarMap[str, str]
    states: _containers.RepeatedScalarFieldContainer[str]
    page_size: int
    page_token: str
    def __init__(self, job: _Optional[str] = ..., labels: _Optional[_Mapping[str, str]] = ..., states: _Optional[_Iterable[str]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListResponse(_message.Message):
    __slots__ = ("sandboxes", "next_page_token")
    SANDBOXES_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    sandboxes: _containers.RepeatedCompositeFieldContainer[_types_pb2.Sandbox]
    next_page_token: str
    def __init__(self, sandboxes: _Optional[_Iterable[_Union[_types_pb2.Sandbox, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class KillRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class KillResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: str
    def __init__(self, state: _Optional[str] = ...) -> None: ...

class ExtendRequest(_message.Message):
    __slots__ = ("sandbox_id", "idle_timeout", "max_lifetime")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    IDLE_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    MAX_LIFETIME_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    idle_timeout: _duration_pb2.Duration
    max_lifetime: _duration_pb2.Duration
    def __init__(self, sandbox_id: _Optional[str] = ..., idle_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., max_lifetime: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ExtendResponse(_message.Message):
    __slots__ = ("sandbox",)
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    sandbox: _types_pb2.Sandbox
    def __init__(self, sandbox: _Optional[_Union[_types_pb2.Sandbox, _Mapping]] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class UsageResponse(_message.Message):
    __slots__ = ("usage", "at")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    usage: _types_pb2.Usage
    at: _timestamp_pb2.Timestamp
    def __init__(self, usage: _Optional[_Union[_types_pb2.Usage, _Mapping]] = ..., at: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class PauseOptions(_message.Message):
    __slots__ = ("wait", "max_paused", "count_lifetime")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    MAX_PAUSED_FIELD_NUMBER: _ClassVar[int]
    COUNT_LIFETIME_FIELD_NUMBER: _ClassVar[int]
    wait: bool
    max_paused: _duration_pb2.Duration
    count_lifetime: bool
    def __init__(self, wait: bool = ..., max_paused: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., count_lifetime: bool = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("sandbox_id", "options")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    options: PauseOptions
    def __init__(self, sandbox_id: _Optional[str] = ..., options: _Optional[_Union[PauseOptions, _Mapping]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("sandbox",)
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    sandbox: _types_pb2.Sandbox
    def __init__(self, sandbox: _Optional[_Union[_types_pb2.Sandbox, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("sandbox_id",)
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    def __init__(self, sandbox_id: _Optional[str] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("sandbox",)
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    sandbox: _types_pb2.Sandbox
    def __init__(self, sandbox: _Optional[_Union[_types_pb2.Sandbox, _Mapping]] = ...) -> None: ...
