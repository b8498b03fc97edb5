"""Directories as tar streams, in constant memory, both ways.

What comes out of a sandbox was shaped by an agent. Unpacking therefore never
resolves a path: it walks each name from a descriptor of the target directory,
component by component, and follows no link.
"""

from __future__ import annotations

import errno
import json
import os
import posixpath
import stat
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
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


def pack(
    root: StrPath, put: Callable[[bytes], None], *, top: bool = False, as_root: bool = False, at: str = ""
) -> list[str]:
    """Write what is below the directory root as a tar stream, names relative to root, in their order.

    Kept are modes, owners by number, times, links, attributes and names of any
    bytes. Sockets are left out, as tar does. With top, root itself is an entry,
    too: unpacked over a directory that is there, it would change that one's mode
    and owner. With as_root, all is root's.

    Returns:
        Remarks on what was left out, for a layer whose root becomes the directory at of a sandbox.
    """
    sink: Any = Writer(put)  # has all that stream mode uses
    left = {what: _Left() for what in (_SOCKETS, _ATTRIBUTES)}
    with tarfile.open(
        fileobj=sink,
        mode="w|",
        bufsize=_COPY,
        format=tarfile.PAX_FORMAT,
        encoding="utf-8",
        errors="surrogateescape",
    ) as tar:
        base = os.path.realpath(os.fsdecode(root))  # a link to a directory is no directory itself
        first: dict[tuple[int, int], str] = {}
        for name in _walk(base, top):
            path = os.path.join(base, name) if name != "." else base
            status = os.lstat(path)
            if stat.S_ISSOCK(status.st_mode):
                left[_SOCKETS].count(name)
            elif stat.S_ISREG(status.st_mode):
                _pack_file(tar, path, name, as_root, first, left[_ATTRIBUTES])
            else:
                info = _info(path, name, status, as_root, first)
                if info.isdir():
                    _put_attributes(info, path, name, left[_ATTRIBUTES])
                tar.addfile(info)
            vars(tar)["members"].clear()  # else it grows with every entry
    return [
        f"{what}: {t.n}, the first at {_quoted(posixpath.normpath(posixpath.join('/', at, t.first)))}"
        for what, t in left.items()
        if t.n
    ]


# As the server tells of what it leaves out of an archive.
_SOCKETS = "sockets left out"
_ATTRIBUTES = "attributes left out (a tar has none with = in its name)"


@dataclass
class _Left:
    """How many there were, and the name of the first."""

    n: int = 0
    first: str = ""

    def count(self, name: str) -> None:
        """Add one."""
        self.n += 1
        if self.n == 1:
            self.first = name


def _quoted(name: str) -> str:
    return json.dumps(name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace"))


def _walk(base: str, top: bool) -> Iterator[str]:
    """Yield the names below base, each directory's own in order, before what is below them."""
    if top:
        yield "."
    todo = _names(base, "")
    while todo:
        name = todo.pop()
        yield name
        path = os.path.join(base, name)
        if stat.S_ISDIR(os.lstat(path).st_mode):
            todo.extend(_names(path, name))


def _names(path: str, name: str) -> list[str]:
    return [os.path.join(name, n) for n in sorted(os.listdir(path), key=os.fsencode, reverse=True)]


def _pack_file(
    tar: tarfile.TarFile,
    path: str,
    name: str,
    as_root: bool,
    first: dict[tuple[int, int], str],
    left: _Left,
) -> None:
    # One descriptor, so that what was looked at is what is read.
    with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as f:
        status = os.fstat(f.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ESTALE, "changed while it was read", path)
        info = _info(path, name, status, as_root, first)
        if info.isreg():
            _put_attributes(info, path, name, left)
            broken: OSError | None = None
            try:
                tar.addfile(info, f)
            except OSError as e:  # also where the file has become too short
                broken = e
            if os.fstat(f.fileno()).st_size != info.size:  # of one that grew no more was read
                raise OSError(errno.ESTALE, "changed while it was read", path) from broken
            if broken is not None:
                raise broken
        else:
            tar.addfile(info)


def _info(
    path: str, name: str, status: os.stat_result, as_root: bool, first: dict[tuple[int, int], str]
) -> tarfile.TarInfo:
    """Make the header of a file; one more name of a file that had one is a hard link to that."""
    info = tarfile.TarInfo(name)
    info.mode = stat.S_IMODE(status.st_mode)
    # Names of users mean nothing on the other side; numbers do.
    info.uid, info.gid = (0, 0) if as_root else (status.st_uid, status.st_gid)
    info.mtime, nanos = divmod(status.st_mtime_ns, 10**9)
    if nanos:
        whole, part = divmod(abs(status.st_mtime_ns), 10**9)
        info.pax_headers = {"mtime": f"{'-' if status.st_mtime_ns < 0 else ''}{whole}.{part:09d}"}
    info.type = _TYPES[stat.S_IFMT(status.st_mode)]
    if info.type != tarfile.DIRTYPE and status.st_nlink > 1:
        inode = (status.st_dev, status.st_ino)
        if inode in first:
            info.type, info.linkname = tarfile.LNKTYPE, first[inode]
            return info
        first[inode] = name
    if info.isreg():
        info.size = status.st_size
    elif info.issym():
        info.linkname = os.readlink(path)
    elif info.isdev():
        info.devmajor, info.devminor = os.major(status.st_rdev), os.minor(status.st_rdev)
    return info


_TYPES = {
    stat.S_IFREG: tarfile.REGTYPE,
    stat.S_IFDIR: tarfile.DIRTYPE,
    stat.S_IFLNK: tarfile.SYMTYPE,
    stat.S_IFIFO: tarfile.FIFOTYPE,
    stat.S_IFCHR: tarfile.CHRTYPE,
    stat.S_IFBLK: tarfile.BLKTYPE,
}

# Where SELinux runs every file has it: the machine's word on the file, and nothing that was put there.
_OF_MACHINE = "security.selinux"


def _put_attributes(info: tarfile.TarInfo, path: str, name: str, left: _Left) -> None:
    """Put a file's attributes into its header; the server says which it does not take."""
    if not hasattr(os, "listxattr"):
        return
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as e:
        if e.errno == errno.ENOTSUP:
            return
        raise
    records = dict(info.pax_headers)
    for attribute in sorted(names):
        if attribute == _OF_MACHINE:
            continue
        if "=" in attribute:
            left.count(name)
            continue
        try:
            value = os.getxattr(path, attribute, follow_symlinks=False)
        except OSError as e:
            if e.errno == errno.ENODATA:
                continue
            if attribute.startswith("user."):
                raise
            value = b""  # that there is one is told all the same
        records[f"SCHILY.xattr.{attribute}"] = value.decode("utf-8", "surrogateescape")
    info.pax_headers = records


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
