"""A sandbox's files."""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
from functools import partial
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from libdsec import _convert as c
from libdsec import _methods as m
from libdsec import _tar
from libdsec._bridge import consume, produce
from libdsec._convert import StrPath
from libdsec._errors import InvalidError, NotFoundError
from libdsec._http import ServerStream
from libdsec._proto.dsec.v1 import file_pb2
from libdsec._rpc import Rpc
from libdsec._source import Source, chunks, is_data
from libdsec._types import Entry

_PAGE = 1000

# A file may say that it is as large as it likes: one without a single byte on
# the sandbox's disk can have a size of terabytes, all zeros.
READ_LIMIT = 256 << 20
DOWNLOAD_LIMIT = 16 << 30


class ByteStream:
    """The bytes of a file, as they come. Close it, or leave `async with`, where not all are wanted."""

    def __init__(self, stream: ServerStream[file_pb2.FileChunk]) -> None:
        self._stream = stream

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        data = await self.receive()
        if data is None:
            raise StopAsyncIteration
        return data

    async def receive(self) -> bytes | None:
        """Return the next bytes; None at the end of the file."""
        try:
            chunk = await self._stream.receive()
        except BaseException:
            self.close()
            raise
        if chunk is None:
            self.close()
            return None
        return chunk.data

    def close(self) -> None:
        """Stop the transfer."""
        self._stream.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


class Files:
    """Works on the files of one sandbox.

    Paths are resolved inside the sandbox; relative ones start at its workdir.
    A path is str, bytes or os.PathLike; a name that is no UTF-8 goes as bytes
    or with surrogate escapes. Every method may raise `NotFoundError`,
    `DeniedError` (the sandbox's permissions), `ConflictError` (the thing is of
    another type) and the errors of any call.
    """

    def __init__(self, rpc: Rpc, sandbox_id: str) -> None:
        self._rpc = rpc
        self._sandbox_id = sandbox_id

    async def stat(self, path: StrPath, *, follow: bool = True) -> Entry:
        """Return what the path names; with follow, what a symlink there points to."""
        request = file_pb2.StatRequest(sandbox_id=self._sandbox_id, path=c.path(path), follow=follow)
        return c.entry((await self._rpc.unary(m.STAT, request)).entry)

    async def exists(self, path: StrPath) -> bool:
        """Whether there is anything at the path, be it a dangling symlink."""
        try:
            await self.stat(path, follow=False)
        except NotFoundError as e:
            if e.field == "sandbox_id":
                raise  # that the sandbox is gone says nothing about the file
            return False
        return True

    async def list(self, path: StrPath = ".") -> list[Entry]:
        """Return the entries of a directory, sorted by the bytes of their names."""
        return [e async for e in self.scan(path)]

    async def scan(self, path: StrPath = ".") -> AsyncIterator[Entry]:
        """Yield the entries of a directory of any size, sorted by the bytes of their names."""
        request = file_pb2.ListDirRequest(sandbox_id=self._sandbox_id, path=c.path(path), page_size=_PAGE)
        while True:
            page = await self._rpc.unary(m.LIST_DIR, request)
            for e in page.entries:
                yield c.entry(e)
            if not page.more or not page.entries:
                return
            last = page.entries[-1]
            request.after = last.raw_name or last.name.encode()

    async def mkdir(self, path: StrPath, *, mode: int = 0o755, parents: bool = False) -> None:
        """Make a directory; with parents, also those above it, and succeed where it is there."""
        await self._rpc.unary(
            m.MKDIR,
            file_pb2.MkdirRequest(
                sandbox_id=self._sandbox_id, path=c.path(path), mode=c.file_mode(mode), parents=parents
            ),
        )

    async def rename(self, source: StrPath, target: StrPath) -> None:
        """Give a file or directory another name."""
        request = file_pb2.RenameRequest(sandbox_id=self._sandbox_id, to=c.path(target, "target"))
        getattr(request, "from").CopyFrom(c.path(source, "source"))
        await self._rpc.unary(m.RENAME, request)

    async def remove(self, path: StrPath, *, recursive: bool = False) -> None:
        """Remove a file or an empty directory; with recursive, a directory with all that is in it."""
        await self._rpc.unary(
            m.REMOVE,
            file_pb2.RemoveRequest(sandbox_id=self._sandbox_id, path=c.path(path), recursive=recursive),
        )

    async def read(self, path: StrPath, *, max_bytes: int = READ_LIMIT) -> bytes:
        """Return the content of a regular file, which is in memory then.

        Args:
            path: The file.
            max_bytes: How many bytes it may have, 256 MiB where not given. A larger one
                is an `InvalidError` that tells its size; `stream` and `download` take it.
        """
        c.count(max_bytes, "max_bytes")
        pieces: list[bytes] = []
        have = 0
        async with await self.stream(path, length=min(max_bytes, c.INT64_MAX - 1) + 1) as stream:
            async for data in stream:
                have += len(data)
                if have > max_bytes:
                    break
                pieces.append(data)
        if have > max_bytes:
            # Not before: files of /proc do not tell their size.
            size = max((await self.stat(path)).size, have)
            raise _too_large(f"the file {os.fsdecode(path)!r}", size, max_bytes, "stream or download it")
        return b"".join(pieces)

    async def read_text(
        self,
        path: StrPath,
        encoding: str = "utf-8",
        errors: str = "strict",
        *,
        max_bytes: int = READ_LIMIT,
    ) -> str:
        """Return the content of a regular file as text; max_bytes as for `read`."""
        return (await self.read(path, max_bytes=max_bytes)).decode(encoding, errors)

    async def stream(self, path: StrPath, *, offset: int = 0, length: int = 0) -> ByteStream:
        """Open a regular file for reading in pieces.

        Args:
            path: The file.
            offset: First byte wanted.
            length: How many; 0 is to the end.
        """
        request = file_pb2.ReadRequest(
            sandbox_id=self._sandbox_id,
            path=c.path(path),
            offset=c.count(offset, "offset"),
            length=c.count(length, "length"),
        )
        return ByteStream(await self._rpc.server_stream(m.READ, request))

    async def write(
        self, path: StrPath, data: Source, *, mode: int = 0, user: str = "", append: bool = False
    ) -> int:
        """Replace a file atomically, or append to it; missing parents are made.

        Args:
            path: The file.
            data: bytes, str (as UTF-8), a binary file or an iterable of bytes.
            mode: Permissions; 0 is those of the file replaced, or 0644.
            user: Owner of a new file; empty is the sandbox's user.
            append: Add to the file in place of replacing it.

        Returns:
            How many bytes were written.
        """
        target = file_pb2.WriteOpen(
            sandbox_id=self._sandbox_id,
            path=c.path(path),
            mode=c.file_mode(mode),
            user=c.text(user, "user"),
            append=append,
        )
        return await self._write(target, partial(chunks, data, "data"), again=is_data(data))

    async def _write(
        self, target: file_pb2.WriteOpen, pieces: Callable[[], AsyncGenerator[bytes, None]], *, again: bool
    ) -> int:
        async def messages() -> AsyncGenerator[file_pb2.WriteRequest, None]:
            yield file_pb2.WriteRequest(open=target)
            async with aclosing(pieces()) as data:
                async for piece in data:
                    yield file_pb2.WriteRequest(data=piece)

        return (await self._rpc.client_stream(m.WRITE, target, messages, again=again)).size

    async def upload(self, local: StrPath, remote: StrPath, *, user: str = "") -> None:
        """Copy a local file to the file remote, or what is below a local directory to below remote.

        Memory does not grow with the size. Modes, symlinks, hard links and
        names of any bytes are kept.

        Args:
            local: File or directory of this machine.
            remote: File or directory of the sandbox; made where missing.
            user: Owner of everything; empty is the sandbox's user for a file,
                and the numbers that the local files have for a directory.
        """
        mode = (await asyncio.to_thread(os.stat, local)).st_mode
        if stat.S_ISDIR(mode):
            tar = partial(produce, partial(_tar.pack, local))
            await self._upload(self._below(remote, user), tar, again=True)
            return
        target = file_pb2.WriteOpen(
            sandbox_id=self._sandbox_id, path=c.path(remote), mode=mode & 0o7777, user=c.text(user, "user")
        )
        # A pipe gives its content once.
        await self._write(target, partial(_content, local), again=stat.S_ISREG(mode))

    async def upload_tar(self, tar: AsyncIterable[bytes], remote: StrPath, *, user: str = "") -> None:
        """Unpack a tar stream below the directory remote, which is made where missing.

        What was unpacked before an error stays, as with tar: for all or nothing,
        upload to a new directory and `rename` it.
        """
        await self._upload(self._below(remote, user), partial(chunks, tar, "tar"), again=False)

    def _below(self, remote: StrPath, user: str) -> file_pb2.UploadOpen:
        return file_pb2.UploadOpen(
            sandbox_id=self._sandbox_id, path=c.path(remote, "remote"), user=c.text(user, "user")
        )

    async def _upload(
        self, target: file_pb2.UploadOpen, tar: Callable[[], AsyncGenerator[bytes, None]], *, again: bool
    ) -> None:
        async def messages() -> AsyncGenerator[file_pb2.UploadRequest, None]:
            yield file_pb2.UploadRequest(open=target)
            async with aclosing(tar()) as data:
                async for piece in data:
                    yield file_pb2.UploadRequest(data=piece)

        names = {"data": "tar", "path": "remote"}
        await self._rpc.client_stream(m.UPLOAD, target, messages, names, again=again)

    async def download(self, remote: StrPath, local: StrPath, *, max_bytes: int = DOWNLOAD_LIMIT) -> None:
        """Copy a file to the local file, or what is below a directory to below the local directory.

        Memory does not grow with the size. Modes, times, links and names of
        any bytes are kept; owners, setuid bits and device nodes are not.
        Symlinks are kept as they are and may point anywhere on this machine:
        an agent made them, so look before following one.

        Args:
            remote: File or directory of the sandbox.
            local: File or directory of this machine; made where missing.
            max_bytes: How many bytes all files together may have, 16 GiB where not given:
                holes of the sandbox's files count and take space here. More is an
                `InvalidError` that tells the size, before the file that is too much is
                received; of a directory, what came before stays.
        """
        c.count(max_bytes, "max_bytes")
        entry = await self.stat(remote)
        if entry.is_dir:
            tar = await self.download_tar(remote)
            await consume(tar.receive, tar.close, lambda get: _tar.unpack(get, local, max_bytes=max_bytes))
        elif entry.is_file:
            name = f"the file {os.fsdecode(remote)!r}"
            if entry.size > max_bytes:
                raise _too_large(name, entry.size, max_bytes, "give a higher max_bytes")
            stream = await self.stream(remote)
            mode = entry.mode & 0o777
            await consume(stream.receive, stream.close, lambda get: _save(get, local, mode, name, max_bytes))
        else:
            raise InvalidError(f"want a file or a directory, it is a {entry.type}", field="remote")

    async def download_tar(self, remote: StrPath) -> ByteStream:
        """Open a tar stream of a file, or of what is below a directory."""
        request = file_pb2.DownloadRequest(sandbox_id=self._sandbox_id, path=c.path(remote, "remote"))
        return ByteStream(await self._rpc.server_stream(m.DOWNLOAD, request))


async def _content(local: StrPath) -> AsyncGenerator[bytes, None]:
    with await asyncio.to_thread(open, local, "rb") as f:
        async for piece in chunks(f, "data"):
            yield piece


def _too_large(what: str, size: int, limit: int, instead: str) -> InvalidError:
    return InvalidError(
        f"{what} has {size} bytes, and at most {limit} are taken: {instead}", field="max_bytes"
    )


def _save(get: Callable[[], bytes | None], local: StrPath, mode: int, name: str, limit: int) -> None:
    # Beside the target first: half a file must not take the place of a whole one.
    target = Path(os.fsdecode(os.fspath(local)))
    part = target.with_name(f".{target.name}.{os.getpid()}.{id(get):x}.part")
    try:
        with open(part, "xb") as f:
            while (piece := get()) is not None:
                f.write(piece)
                if f.tell() > limit:  # it grew, or is one of /proc
                    raise _too_large(name, f.tell(), limit, "give a higher max_bytes")
            f.flush()
            os.fchmod(f.fileno(), mode)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
