from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Path(_message.Message):
    __slots__ = ("path", "raw")
    PATH_FIELD_NUMBER: _ClassVar[int]
    RAW_FIELD_NUMBER: _ClassVar[int]
    path: str
    raw: bytes
    def __init__(self, path: _Optional[str] = ..., raw: _Optional[bytes] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("name", "raw_name", "type", "size", "mode", "uid", "gid", "modified", "link_target")
    NAME_FIELD_NUMBER: _ClassVar[int]
    RAW_NAME_FIELD_NUMBER: _ClassVar[int]
    TYPE_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    UID_FIELD_NUMBER: _ClassVar[int]
    GID_FIELD_NUMBER: _ClassVar[int]
    MODIFIED_FIELD_NUMBER: _ClassVar[int]
    LINK_TARGET_FIELD_NUMBER: _ClassVar[int]
    name: str
    raw_name: bytes
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    modified: _timestamp_pb2.Timestamp
    link_target: bytes
    def __init__(self, name: _Optional[str] = ..., raw_name: _Optional[bytes] = ..., type: _Optional[str] = ..., size: _Optional[int] = ..., mode: _Optional[int] = ..., uid: _Optional[int] = ..., gid: _Optional[int] = ..., modified: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., link_target: _Optional[bytes] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "follow")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    FOLLOW_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    follow: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., follow: bool = ...) -> None: ...

class StatResponse(_message.Message):
    __slots__ = ("entry",)
    ENTRY_FIELD_NUMBER: _ClassVar[int]
    entry: Entry
    def __init__(self, entry: _Optional[_Union[Entry, _Mapping]] = ...) -> None: ...

class ListDirRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "page_size", "after")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    page_size: int
    after: bytes
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., page_size: _Optional[int] = ..., after: _Optional[bytes] = ...) -> None: ...

class ListDirResponse(_message.Message):
    __slots__ = ("entries", "more")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    MORE_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    more: bool
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ..., more: bool = ...) -> None: ...

class MkdirRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "mode", "parents")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    mode: int
    parents: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., mode: _Optional[int] = ..., parents: bool = ...) -> None: ...

class MkdirResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RenameRequest(_message.Message):
    __slots__ = ("sandbox_id", "to")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    FROM_FIELD_NUMBER: _ClassVar[int]
    TO_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    to: Path
    def __init__(self, sandbox_id: _Optional[str] = ..., to: _Optional[_Union[Path, _Mapping]] = ..., **kwargs) -> None: ...

class RenameResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RemoveRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "recursive")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RECURSIVE_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    recursive: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., recursive: bool = ...) -> None: ...

class RemoveResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("sandbox_id", "path", "offset", "length")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    offset: int
    length: int
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class FileChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("open", "data")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    open: WriteOpen
    data: bytes
    def __init__(self, open: _Optional[_Union[WriteOpen, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class WriteOpen(_message.Message):
    __slots__ = ("sandbox_id", "path", "mode", "user", "append")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    MODE_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    mode: int
    user: str
    append: bool
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., mode: _Optional[int] = ..., user: _Optional[str] = ..., append: bool = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("size",)
    SIZE_FIELD_NUMBER: _ClassVar[int]
    size: int
    def __init__(self, size: _Optional[int] = ...) -> None: ...

class DownloadRequest(_message.Message):
    __slots__ = ("sandbox_id", "path")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ...) -> None: ...

class UploadRequest(_message.Message):
    __slots__ = ("open", "data")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    open: UploadOpen
    data: bytes
    def __init__(self, open: _Optional[_Union[UploadOpen, _Mapping]] = ..., data: _Optional[bytes] = ...) -> None: ...

class UploadOpen(_message.Message):
    __slots__ = ("sandbox_id", "path", "user")
    SANDBOX_ID_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    USER_FIELD_NUMBER: _ClassVar[int]
    sandbox_id: str
    path: Path
    user: str
    def __init__(self, sandbox_id: _Optional[str] = ..., path: _Optional[_Union[Path, _Mapping]] = ..., user: _Optional[str] = ...) -> None: ...

class UploadResponse(_message.Message):
    __slots__ = ("entries", "bytes")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    entries: int
    bytes: int
    def __init__(self, entries: _Optional[int] = ..., bytes: _Optional[int] = ...) -> None: ...
