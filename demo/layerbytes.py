"""Bytes of layers that a node has read, told by the kernel."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import mmap
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path

LOOP_GET_STATUS64 = 0x4C05
SECTOR = 512


@dataclass(frozen=True)
class Layer:
    """One layer, in a store that is a directory."""

    kind: str
    digest: str
    store: Path
    cache: Path | None  # where the node keeps what it fetches; None: the kernel reads the store's own file
    sectors: dict[str, int] = field(default_factory=dict)  # that loop devices had read at the start

    def _blob(self, part: str) -> Path:
        return self.store / self._key(part)

    def _key(self, part: str) -> str:
        return f"layers/{self.digest.removeprefix('sha256:')}/{part}"

    def start(self) -> None:
        """Count from here; the data are taken from the page cache."""
        self.sectors.update(sectors_read())
        fd = os.open(self._blob("data"), os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def bytes_of(self) -> tuple[int, int]:
        """Bytes that came to the node, and all that the store has of the layer.

        The index and the hashes always come whole. Of the data it is what a loop device
        has read, or what is in the page cache, or in the node's file of what it fetched.
        """
        index = next(path for part in ("index.zst", "index") if (path := self._blob(part)).is_file())
        whole = index.stat().st_size + self._blob("chunks").stat().st_size
        data = self._blob("data")
        if self.cache is not None:
            file = self.cache / (hashlib.sha256(self._key("data").encode()).hexdigest() + ".data")
            read = file.stat().st_blocks * SECTOR
        elif loop := loop_of(data):
            read = (sectors_read()[loop] - self.sectors.get(loop, 0)) * SECTOR
        else:
            read = resident(data)
        return whole + read, whole + data.stat().st_size


def sectors_read() -> dict[str, int]:
    """Return how much each loop device has ever read, by its name."""
    return {p.parent.name: int(p.read_text().split()[2]) for p in Path("/sys/block").glob("loop*/stat")}


def loop_of(path: Path) -> str:
    """Return the name of the loop device of a file, or nothing."""
    of = path.stat()
    for device in Path("/sys/block").glob("loop*/loop"):
        name = device.parent.name
        status = bytearray(232)
        fd = os.open(f"/dev/{name}", os.O_RDONLY)
        try:
            fcntl.ioctl(fd, LOOP_GET_STATUS64, status)
        except OSError:  # detached meanwhile
            continue
        finally:
            os.close(fd)
        if struct.unpack_from("QQ", status) == (of.st_dev, of.st_ino):
            return name
    return ""


def resident(path: Path) -> int:
    """Bytes of a file that are in the page cache, in whole pages."""
    size = path.stat().st_size
    fd = os.open(path, os.O_RDWR)
    try:
        with mmap.mmap(fd, size) as m:
            pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
            there = (ctypes.c_ubyte * pages)()
            start = ctypes.c_char.from_buffer(m)
            address = ctypes.c_void_p(ctypes.addressof(start))
            failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), there)
            del start  # else the map could not be closed
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
            return sum(byte & 1 for byte in there) * mmap.PAGESIZE
    finally:
        os.close(fd)
