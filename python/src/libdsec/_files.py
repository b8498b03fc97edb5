"""A sandbox's files."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable
from contextlib import aclosing
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
from libdsec._source import Source, chunks
from libdsec._types import Entry

_PAGE = 1000


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

    async def read(self, path: StrPath) -> bytes:
        """Return the content of a regular file."""
        async with await self.stream(path) as stream:
            return b"".join([data async for data in stream])

    async def read_text(self, path: StrPath, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the content of a regular file as text."""
        return (await self.read(path)).decode(encoding, errors)

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

        async def messages() -> AsyncGenerator[file_pb2.WriteRequest, None]:
            yield file_pb2.WriteRequest(open=target)
            async for piece in chunks(data, "data"):
                yield file_pb2.WriteRequest(data=piece)

        async with aclosing(messages()) as stream:
            return (await self._rpc.client_stream(m.WRITE, stream)).size

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
        if not await asyncio.to_thread(_tar.is_dir, local):
            with await asyncio.to_thread(open, local, "rb") as f:
                await self.write(remote, f, mode=os.fstat(f.fileno()).st_mode & 0o7777, user=user)
            return
        async with aclosing(produce(lambda put: _tar.pack(local, put))) as tar:
            await self.upload_tar(tar, remote, user=user)

    async def upload_tar(self, tar: AsyncIterable[bytes], remote: StrPath, *, user: str = "") -> None:
        """Unpack a tar stream below the directory remote, which is made where missing."""
        target = file_pb2.UploadOpen(
            sandbox_id=self._sandbox_id, path=c.path(remote, "remote"), user=c.text(user, "user")
        )

        async def messages() -> AsyncGenerator[file_pb2.UploadRequest, None]:
            yield file_pb2.UploadRequest(open=target)
            async for piece in chunks(tar, "tar"):
                yield file_pb2.UploadRequest(data=piece)

        async with aclosing(messages()) as stream:
            await self._rpc.client_stream(m.UPLOAD, stream)

    async def download(self, remote: StrPath, local: StrPath) -> None:
        """Copy a file to the local file, or what is below a directory to below the local directory.

        Memory does not grow with the size. Modes, times, links and names of
        any bytes are kept; owners, setuid bits and device nodes are not.
        Symlinks are kept as they are and may point anywhere on this machine:
        an agent made them, so look before following one.

        Args:
            remote: File or directory of the sandbox.
            local: File or directory of this machine; made where missing.
        """
        entry = await self.stat(remote)
        if entry.is_dir:
            tar = await self.download_tar(remote)
            await consume(tar.receive, tar.close, lambda get: _tar.unpack(get, local))
        elif entry.is_file:
            stream = await self.stream(remote)
            await consume(stream.receive, stream.close, lambda get: _save(get, local, entry.mode & 0o777))
        else:
            raise InvalidError(f"want a file or a directory, it is a {entry.type}", field="remote")

    async def download_tar(self, remote: StrPath) -> ByteStream:
        """Open a tar stream of a file, or of what is below a directory."""
        request = file_pb2.DownloadRequest(sandbox_id=self._sandbox_id, path=c.path(remote, "remote"))
        return ByteStream(await self._rpc.server_stream(m.DOWNLOAD, request))


def _save(get: Callable[[], bytes | None], local: StrPath, mode: int) -> None:
    # Beside the target first: half a file must not take the place of a whole one.
    target = Path(os.fsdecode(os.fspath(local)))
    part = target.with_name(f".{target.name}.{os.getpid()}.{id(get):x}.part")
    try:
        with open(part, "xb") as f:
            while (piece := get()) is not None:
                f.write(piece)
            f.flush()
            os.fchmod(f.fileno(), mode)
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
