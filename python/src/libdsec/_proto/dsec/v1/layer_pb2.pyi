from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layer(_message.Message):
    __slots__ = ("name", "digest", "size", "files", "created", "source", "source_digest", "config", "kind", "findings", "origin", "at", "parents")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    size: int
    files: int
    created: _timestamp_pb2.Timestamp
    source: str
    source_digest: str
    config: LayerConfig
    kind: str
    findings: _containers.RepeatedScalarFieldContainer[str]
    origin: LayerOrigin
    at: str
    parents: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., size: _Optional[int] = ..., files: _Optional[int] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., source: _Optional[str] = ..., source_digest: _Optional[str] = ..., config: _Optional[_Union[LayerConfig, _Mapping]] = ..., kind: _Optional[str] = ..., findings: _Optional[_Iterable[str]] = ..., origin: _Optional[_Union[LayerOrigin, _Mapping]] = ..., at: _Optional[str] = ..., parents: _Optional[_Iterable[str]] = ...) -> None: ...

class LayerOrigin(_message.Message):
    __slots__ = ("type", "location", "revision", "entry")
    TYPE_FIELD_NUMBER: _ClassVar[int]
    LOCATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    type: str
    location: str
    revision: str
    entry: int
    def __init__(self, type: _Optional[str] = ..., location: _Optional[str] = ..., revision: _Optional[str] = ..., entry: _Optional[int] = ...) -> None: ...

class LayerConfig(_message.Message):
    __slots__ = ("env", "user", "workdir", "entrypoint", "cmd")
    ENV_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    WORKDIR_FIELD_NUMBER: _ClassVar[int]
    ENTRYPOINT_FIELD_NUMBER: _ClassVar[int]
    CMD_FIELD_NUMBER: _ClassVar[int]
    env: _containers.RepeatedScalarFieldContainer[str]
    user: str
    workdir: str
    entrypoint: _containers.RepeatedScalarFieldContainer[str]
    cmd: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, env: _Optional[_Iterable[str]] = ..., user: _Optional[str] = ..., workdir: _Optional[str] = ..., entrypoint: _Optional[_Iterable[str]] = ..., cmd: _Optional[_Iterable[str]] = ...) -> None: ...

class StoredLayer(_message.Message):
    __slots__ = ("digest", "size", "created")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    CREATED_FIELD_NUMBER: _ClassVar[int]
    digest: str
    size: int
    created: _timestamp_pb2.Timestamp
    def __init__(self, digest: _Optional[str] = ..., size: _Optional[int] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ...) -> None: ...

class ImportLayerRequest(_message.Message):
    __slots__ = ("open", "data")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    open: ImportLayerOpen
    data: bytes
    def __init__(self, open: _Optional[_Union[ImportLayerOpen, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ImportLayerOpen(_message.Message):
    __slots__ = ("name", "select", "kind", "at", "strict", "origin")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    name: str
    select: str
    kind: str
    at: str
    strict: bool
    origin: LayerOrigin
    def __init__(self, name: _Optional[str] = ..., select: _Optional[str] = ..., kind: _Optional[str] = ..., at: _Optional[str] = ..., strict: bool = ..., origin: _Optional[_Union[LayerOrigin, _Mapping]] = ...) -> None: ...

class ImportLayerResponse(_message.Message):
    __slots__ = ("layer", "findings")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    layer: Layer
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layer: _Optional[_Union[Layer, _Mapping]] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class PullLayerRequest(_message.Message):
    __slots__ = ("name", "ref", "platform", "credentials", "kind", "at", "strict", "verify")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REF_FIELD_NUMBER: _ClassVar[int]
    PLATFORM_FIELD_NUMBER: _ClassVar[int]
    CREDENTIALS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    name: str
    ref: str
    platform: str
    credentials: RegistryCredentials
    kind: str
    at: str
    strict: bool
    verify: bool
    def __init__(self, name: _Optional[str] = ..., ref: _Optional[str] = ..., platform: _Optional[str] = ..., credentials: _Optional[_Union[RegistryCredentials, _Mapping]] = ..., kind: _Optional[str] = ..., at: _Optional[str] = ..., strict: bool = ..., verify: bool = ...) -> None: ...

class RegistryCredentials(_message.Message):
    __slots__ = ("username", "password", "token")
    USERNAME_FIELD_NUMBER: _ClassVar[int]
    PASSWORD_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    username: str
    password: str
    token: str
    def __init__(self, username: _Optional[str] = ..., password: _Optional[str] = ..., token: _Optional[str] = ...) -> None: ...

class PullLayerResponse(_message.Message):
    __slots__ = ("progress", "done")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    progress: PullProgress
    done: ImportLayerResponse
    def __init__(self, progress: _Optional[_Union[PullProgress, _Mapping]] = ..., done: _Optional[_Union[ImportLayerResponse, _Mapping]] = ...) -> None: ...

class PullProgress(_message.Message):
    __slots__ = ("bytes", "size")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    size: int
    def __init__(self, bytes: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class ExportLayerRequest(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layers: _Optional[_Iterable[str]] = ...) -> None: ...

class ExportLayerResponse(_message.Message):
    __slots__ = ("open", "data")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    open: ExportLayerOpen
    data: bytes
    def __init__(self, open: _Optional[_Union[ExportLayerOpen, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class ExportLayerOpen(_message.Message):
    __slots__ = ("size", "digest")
    SIZE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    size: int
    digest: str
    def __init__(self, size: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class ListLayersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLayersResponse(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ...) -> None: ...

class PrefetchLayerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class PrefetchLayerResponse(_message.Message):
    __slots__ = ("bytes", "size")
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    bytes: int
    size: int
    def __init__(self, bytes: _Optional[int] = ..., size: _Optional[int] = ...) -> None: ...

class InspectLayerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class InspectLayerResponse(_message.Message):
    __slots__ = ("layer", "names")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    NAMES_FIELD_NUMBER: _ClassVar[int]
    layer: Layer
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layer: _Optional[_Union[Layer, _Mapping]] = ..., names: _Optional[_Iterable[str]] = ...) -> None: ...

class TagLayerRequest(_message.Message):
    __slots__ = ("name", "new_name", "replace")
    NAME_FIELD_NUMBER: _ClassVar[int]
    NEW_NAME_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    name: str
    new_name: str
    replace: bool
    def __init__(self, name: _Optional[str] = ..., new_name: _Optional[str] = ..., replace: bool = ...) -> None: ...

class TagLayerResponse(_message.Message):
    __slots__ = ("layer",)
    LAYER_FIELD_NUMBER: _ClassVar[int]
    layer: Layer
    def __init__(self, layer: _Optional[_Union[Layer, _Mapping]] = ...) -> None: ...

class RemoveLayerRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class RemoveLayerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
