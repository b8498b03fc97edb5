from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Layer(_message.Message):
    __slots__ = ("name", "digest", "size", "files", "created", "source", "source_digest", "config", "kind", "findings")
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
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., size: _Optional[int] = ..., files: _Optional[int] = ..., created: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., source: _Optional[str] = ..., source_digest: _Optional[str] = ..., config: _Optional[_Union[LayerConfig, _Mapping]] = ..., kind: _Optional[str] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

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
    __slots__ = ("name", "select", "kind", "at", "strict")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SELECT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    STRICT_FIELD_NUMBER: _ClassVar[int]
    name: str
    select: str
    kind: str
    at: str
    strict: bool
    def __init__(self, name: _Optional[str] = ..., select: _Optional[str] = ..., kind: _Optional[str] = ..., at: _Optional[str] = ..., strict: bool = ...) -> None: ...

class ImportLayerResponse(_message.Message):
    __slots__ = ("layer", "findings")
    LAYER_FIELD_NUMBER: _ClassVar[int]
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    layer: Layer
    findings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layer: _Optional[_Union[Layer, _Mapping]] = ..., findings: _Optional[_Iterable[str]] = ...) -> None: ...

class ListLayersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListLayersResponse(_message.Message):
    __slots__ = ("layers",)
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedCompositeFieldContainer[Layer]
    def __init__(self, layers: _Optional[_Iterable[_Union[Layer, _Mapping]]] = ...) -> None: ...

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
