"""Bytes of layers that a node has read, told by the kernel."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layer:
    """One layer, in a store that is a directory."""

    kind: str
    digest: str
    store: Path
    cache: Path | None  # where the node keeps what it fetches; None: the kernel reads the store's own file

    def _blob(self, part: str) -> Path:
        return self.store / self._key(part)

    def _key(self, part: str) -> str:
        return f"layers/{self.digest.removeprefix('sha256:')}/{part}"

    def forget(self) -> None:
        """Take the files' contents from the page cache."""
        fd = os.open(self._blob("data"), os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def bytes_of(self) -> tuple[int, int]:
        """Bytes that came to the node, and all of the layer's.

        The index and the hashes always come whole. Of the data it is what is in the
        page cache, or in the node's file of what it fetched.
        """
        whole = self._blob("index").stat().st_size + self._blob("chunks").stat().st_size
        data = self._blob("data")
        if self.cache is None:
            read = resident(data)
        else:
            file = self.cache / (hashlib.sha256(self._key("data").encode()).hexdigest() + ".data")
            read = file.stat().st_blocks * 512
        return whole + read, whole + data.stat().st_size


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
