"""Directories as tar streams, in constant memory, both ways.

What comes out of a sandbox was shaped by an agent. Unpacking therefore never
resolves a path: it walks each name from a descriptor of the target directory,
component by component, and follows no link.
"""

from __future__ import annotations

import errno
import os
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from libdsec._convert import StrPath
from libdsec._errors import InternalError, InvalidError

_DIR_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_COPY = 256 << 10


class Writer:
    """A file that tarfile can write a stream to."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def write(self, data: bytes) -> int:
        """Pass data on."""
        self._put(bytes(data))
        return len(data)


class Reader:
    """A file that tarfile can read a stream from.

    Args:
        get: Returns the next piece of the stream; None at its end.
    """

    def __init__(self, get: Callable[[], bytes | None]) -> None:
        self._get = get
        self._rest = b""

    def read(self, size: int) -> bytes:
        """Return up to size bytes, fewer only at the end."""
        pieces, have = [self._rest], len(self._rest)
        while have < size:
            piece = self._get()
            if piece is None:
                break
            pieces.append(piece)
            have += len(piece)
        data = b"".join(pieces)
        self._rest = data[size:]
        return data[:size]


def pack(root: StrPath, put: Callable[[bytes], None], *, top: bool = False) -> None:
    """Write what is below the directory root as a tar stream, names relative to root.

    Sockets are left out, as tar does. With top, root itself is an entry, too:
    unpacked over a directory that is there, it would change that one's mode
    and owner.
    """
    # GNU format keeps any bytes in a name and needs no extra header for most files.
    sink: Any = Writer(put)  # has all that stream mode uses
    with tarfile.open(
        fileobj=sink,
        mode="w|",
        bufsize=_COPY,
        format=tarfile.GNU_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        base = os.fsdecode(os.fspath(root))
        for path in _walk(base, top):
            info = tar.gettarinfo(path, arcname=os.path.relpath(path, base))
            if info is None:  # a socket
                continue
            # Names of users mean nothing on the other side; numbers do.
            info.uname = info.gname = ""
            if info.isreg():
                with open(path, "rb") as f:
                    tar.addfile(info, f)
            else:
                tar.addfile(info)
            vars(tar)["members"].clear()  # else it grows with every entry


def _walk(base: str, top: bool) -> Iterator[str]:
    def fail(e: OSError) -> None:
        raise e  # os.walk leaves out what it cannot list, and half a tree is none

    if top:
        yield base
    for where, dirs, files in os.walk(base, onerror=fail):
        for name in (*dirs, *files):
            yield os.path.join(where, name)


def unpack(get: Callable[[], bytes | None], target: StrPath, *, max_bytes: int | None = None) -> None:
    """Unpack a tar stream below the directory target, which is made if missing, and else keeps its mode.

    Modes, times, symbolic and hard links are kept; owners, setuid and setgid
    bits are not. Device nodes, FIFOs and sockets are left out. Symbolic links
    are made as they are and may point anywhere: they are the sandbox's word,
    so look before following one.

    Args:
        get: Returns the next piece of the stream; None at its end.
        target: The directory.
        max_bytes: How many bytes all files together may have; None is no bound.

    Raises:
        InvalidError: An entry would leave target, the target holds something in its place,
            or the files have more bytes than max_bytes.
        InternalError: The stream is no whole tar.
    """
    fresh = not os.path.isdir(target)
    os.makedirs(target, exist_ok=True)
    top = os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    modes: list[tuple[list[bytes], int, float]] = []
    total = 0
    try:
        source: Any = Reader(get)  # has all that stream mode uses
        with tarfile.open(
            fileobj=source,
            mode="r|",
            bufsize=_COPY,
            encoding="utf-8",
            errors="surrogateescape",
        ) as tar:
            while (info := tar.next()) is not None:
                total += info.size if info.isreg() else 0
                if max_bytes is not None and total > max_bytes:
                    raise InvalidError(
                        f"with the file {info.name!r}, of {info.size} bytes, all files have {total}, "
                        f"and at most {max_bytes} are taken: give a higher max_bytes",
                        field="max_bytes",
                    )
                _unpack_entry(tar, info, top, modes)
                vars(tar)["members"].clear()  # else it grows with every entry
        # Last, so that a read-only directory could be filled; deepest first.
        for parts, mode, mtime in reversed(modes):
            if not parts and not fresh:
                continue
            with _open_dir(top, parts, make=False) as fd:
                os.fchmod(fd, mode)
                os.utime(fd, (mtime, mtime))
    except tarfile.TarError as e:
        raise InternalError(f"the download is no whole tar: {e}") from None
    finally:
        os.close(top)


def _unpack_entry(
    tar: tarfile.TarFile, info: tarfile.TarInfo, top: int, modes: list[tuple[list[bytes], int, float]]
) -> None:
    parts = _parts(info.name)
    mode = info.mode & 0o777
    if info.isdir():
        with _open_dir(top, parts, make=True):
            modes.append((parts, mode, info.mtime))
        return
    if not parts:
        raise InvalidError("the tar holds a file in place of its top directory", field="path")
    with _open_dir(top, parts[:-1], make=True) as parent:
        name = parts[-1]
        if info.isreg() or info.issym() or info.islnk():
            _make_room(parent, name)
        if info.issym():
            os.symlink(os.fsencode(info.linkname), name, dir_fd=parent)
        elif info.islnk():
            source = _parts(info.linkname)
            if not source:
                raise InvalidError("the tar holds a hard link to its top directory", field="path")
            with _open_dir(top, source[:-1], make=False) as fd:
                os.link(source[-1], name, src_dir_fd=fd, dst_dir_fd=parent, follow_symlinks=False)
        elif info.isreg():
            _unpack_file(tar, info, parent, name, mode)


def _unpack_file(tar: tarfile.TarFile, info: tarfile.TarInfo, parent: int, name: bytes, mode: int) -> None:
    source = tar.extractfile(info)
    assert source is not None
    with os.fdopen(os.open(name, _FILE_FLAGS, 0o600, dir_fd=parent), "wb") as f:
        left = info.size
        while left:
            piece = source.read(min(_COPY, left))
            if not piece:
                raise tarfile.ReadError("unexpected end of data")
            f.write(piece)
            left -= len(piece)
        f.flush()
        os.fchmod(f.fileno(), mode)
        os.utime(f.fileno(), (info.mtime, info.mtime))


def _parts(name: str) -> list[bytes]:
    raw = os.fsencode(name)
    parts = [p for p in raw.split(b"/") if p not in (b"", b".")]
    if raw.startswith(b"/") or b".." in parts:
        raise InvalidError(f"the tar holds an entry that leaves the directory: {name!r}", field="path")
    return parts


def _make_room(parent: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=parent)
    except FileNotFoundError:
        pass
    except OSError as e:
        raise InvalidError(f"{os.fsdecode(name)!r} is in the way: {e.strerror}", field="target") from None


@contextmanager
def _open_dir(top: int, parts: list[bytes], *, make: bool) -> Iterator[int]:
    """Open the directory of that name below top, following no link."""
    fd = os.dup(top)
    try:
        for part in parts:
            if make:
                try:
                    os.mkdir(part, 0o700, dir_fd=fd)
                except FileExistsError:
                    pass
            try:
                below = os.open(part, _DIR_FLAGS, dir_fd=fd)
            except OSError as e:
                if e.errno not in (errno.ELOOP, errno.ENOTDIR, errno.ENOENT):
                    raise
                raise InvalidError(
                    f"an entry lies below {os.fsdecode(part)!r}, which is no directory", field="path"
                ) from e
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def is_dir(path: StrPath) -> bool:
    """Whether a local path is a directory; a missing one raises FileNotFoundError."""
    return stat.S_ISDIR(os.stat(path).st_mode)
