"""Packing and unpacking of directories; the second on tars that mean harm."""

from __future__ import annotations

import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from libdsec import InternalError, InvalidError, _tar


def getter(data: bytes, size: int = 1000) -> Callable[[], bytes | None]:
    pieces = [data[i : i + size] for i in range(0, len(data), size)]
    return lambda: pieces.pop(0) if pieces else None


def pack(root: Path, *, top: bool = False) -> bytes:
    out = bytearray()
    _tar.pack(root, out.extend, top=top)
    return bytes(out)


def tree(root: Path) -> dict[bytes, tuple[object, ...]]:
    found: dict[bytes, tuple[object, ...]] = {}
    top = os.fsencode(root)
    for where, dirs, files in os.walk(top):
        for name in (*dirs, *files):
            p = os.path.join(where, name)
            st = os.lstat(p)
            kind = stat.S_IFMT(st.st_mode)
            if kind == stat.S_IFLNK:
                what: object = os.readlink(p)
            else:
                what = Path(os.fsdecode(p)).read_bytes() if kind == stat.S_IFREG else None
            found[os.path.relpath(p, top)] = (
                kind,
                what,
                *([stat.S_IMODE(st.st_mode), int(st.st_mtime)] if kind != stat.S_IFLNK else []),
            )
    return found


def make(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "b" / "file").write_bytes(bytes(range(256)) * 5000)
    (root / "a" / "run").write_text("#!/bin/sh\n")
    (root / "a" / "run").chmod(0o751)
    (root / "link").symlink_to("a/b/file")
    (root / "dangling").symlink_to("/nowhere/at/all")
    os.link(root / "a" / "run", root / "hard")
    (root / ("long" * 60)).write_text("long name")
    (root / "a" / ("x" * 120)).symlink_to("y" * 150)
    Path(os.fsdecode(os.fsencode(root) + b"/\xff\xfe name")).write_bytes(b"binary name")
    os.utime(root / "a" / "run", (1_000_000_000, 1_000_000_000))
    (root / "locked").mkdir()
    (root / "locked" / "inside").write_text("x")
    (root / "locked").chmod(0o555)


def test_a_link_to_a_directory_is_packed_as_that(tmp_path: Path) -> None:
    source, link = tmp_path / "source", tmp_path / "to source"
    source.mkdir()
    make(source)
    link.symlink_to("source")
    assert pack(link, top=True) == pack(source, top=True)


@pytest.mark.parametrize("size", [1, 511, 1 << 20])
def test_round_trip(tmp_path: Path, size: int) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    make(source)
    data = pack(source)
    if size == 1:
        data = data[: 1 << 20]  # each byte alone, of the smaller entries
        (source / "a" / "b" / "file").write_bytes(b"short")
        data = pack(source)
    _tar.unpack(getter(data, size), target)
    assert tree(target) == tree(source)
    assert (target / "hard").stat().st_ino == (target / "a" / "run").stat().st_ino
    # Again, over what is there.
    _tar.unpack(getter(data), target)
    assert tree(target) == tree(source)


@pytest.mark.parametrize("size", [10, 3 << 20])
def test_a_file_that_changes_its_size_is_an_error(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(2 << 20))
    with pytest.raises(OSError, match="changed while it was read") as e:
        _tar.pack(tmp_path, lambda _: os.truncate(file, size))
    assert e.value.filename == str(file)


def test_memory_does_not_grow_with_entries(tmp_path: Path) -> None:
    import tracemalloc

    def peak(entries: int) -> int:
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as t:
            for i in range(entries):
                t.addfile(tarfile.TarInfo(f"f{i % 10}"))
        data = buffer.getvalue()
        at = 0

        def get() -> bytes | None:
            nonlocal at
            piece = data[at : at + 10_000]
            at += len(piece)
            return piece or None

        tracemalloc.start()
        _tar.unpack(get, tmp_path / "t")
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top

    peak(100)  # what the first use allocates for good
    assert peak(4000) < peak(400) * 2


def entry(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", data: bytes = b""
) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, link, len(data)
    return info, data


def tar(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as t:
        for info, data in entries:
            t.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


HOSTILE = {
    "parent": [entry("../escaped", data=b"x")],
    "parent inside": [entry("a/../../escaped", data=b"x")],
    "absolute": [entry("{outside}/escaped", data=b"x")],
    "file below a link": [entry("l", tarfile.SYMTYPE, "{outside}"), entry("l/escaped", data=b"x")],
    "dir over a link": [entry("l", tarfile.SYMTYPE, "{outside}"), entry("l", tarfile.DIRTYPE)],
    "deep link": [entry("l", tarfile.SYMTYPE, ".."), entry("l/outside/escaped", data=b"x")],
    "link to a link": [
        entry("a", tarfile.SYMTYPE, "b"),
        entry("b", tarfile.SYMTYPE, "{outside}"),
        entry("a/escaped", data=b"x"),
    ],
    "hard link out": [entry("h", tarfile.LNKTYPE, "../outside/secret")],
    "hard link absolute": [entry("h", tarfile.LNKTYPE, "{outside}/secret")],
    "hard link through a link": [
        entry("l", tarfile.SYMTYPE, "{outside}"),
        entry("h", tarfile.LNKTYPE, "l/secret"),
    ],
    "top is a file": [entry(".", data=b"x")],
    "hard link to the top": [entry("h", tarfile.LNKTYPE, ".")],
    "file below a file": [entry("f", data=b"x"), entry("f/g", data=b"x")],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_tar_is_refused_and_touches_nothing_outside(tmp_path: Path, name: str) -> None:
    outside, target = tmp_path / "outside", tmp_path / "target"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    entries = []
    for info, data in HOSTILE[name]:
        copy = tarfile.TarInfo(info.name.replace("{outside}", str(outside)))
        copy.type, copy.size = info.type, info.size
        copy.linkname = info.linkname.replace("{outside}", str(outside))
        entries.append((copy, data))
    before = tree(outside)
    with pytest.raises(InvalidError) as caught:
        _tar.unpack(getter(tar(*entries)), target)
    assert caught.value.field == "path"
    assert tree(outside) == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["outside", "target"]
    assert not any(
        p.stat().st_ino == (outside / "secret").stat().st_ino
        for p in target.rglob("*")
        if p.is_file() and not p.is_symlink()
    )


def test_directory_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    source, there, fresh = tmp_path / "source", tmp_path / "there", tmp_path / "fresh"
    source.mkdir(mode=0o750)
    there.mkdir(mode=0o711)
    for target in (there, fresh):
        _tar.unpack(getter(pack(source, top=True)), target)
    assert (stat.S_IMODE(there.stat().st_mode), stat.S_IMODE(fresh.stat().st_mode)) == (0o711, 0o750)


def test_link_in_the_target_is_replaced_and_not_followed(tmp_path: Path) -> None:
    victim, target = tmp_path / "victim", tmp_path / "target"
    victim.write_text("keep")
    target.mkdir()
    (target / "f").symlink_to(victim)
    _tar.unpack(getter(tar(entry("f", data=b"new"))), target)
    assert victim.read_text() == "keep"
    assert (target / "f").read_bytes() == b"new"
    assert not (target / "f").is_symlink()


def test_setuid_bits_and_devices_are_left_out(tmp_path: Path) -> None:
    suid, _ = entry("suid", data=b"x")
    suid.mode = 0o6755
    fifo, _ = entry("fifo", tarfile.FIFOTYPE)
    device, _ = entry("null", tarfile.CHRTYPE)
    device.devmajor, device.devminor = 1, 3
    _tar.unpack(getter(tar((suid, b"x"), (fifo, b""), (device, b""), entry("after", data=b"y"))), tmp_path)
    assert stat.S_IMODE((tmp_path / "suid").stat().st_mode) == 0o755
    assert sorted(p.name for p in tmp_path.iterdir()) == ["after", "suid"]


@pytest.mark.parametrize("cut", [1, 100, 512, 600, 1400])
def test_torn_tar_is_an_error(tmp_path: Path, cut: int) -> None:
    data = tar(entry("f", data=b"x" * 1000))
    with pytest.raises(InternalError):
        _tar.unpack(getter(data[:cut]), tmp_path)


def test_directory_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "f" / "g").mkdir(parents=True)
    with pytest.raises(InvalidError) as caught:
        _tar.unpack(getter(tar(entry("f", data=b"x"))), tmp_path)
    assert caught.value.field == "target"


def test_fuzz_seed(tmp_path: Path) -> None:
    """Any bytes: an error or a tree below the target, and nothing else anywhere."""
    import random

    r = random.Random(1)
    source = tmp_path / "source"
    source.mkdir()
    make(source)
    (source / "a" / "b" / "file").write_bytes(b"short")
    good = pack(source)
    for i in range(300):
        data = bytearray(good)
        for _ in range(r.randrange(1, 30)):
            data[r.randrange(len(data))] = r.randrange(256)
        target = tmp_path / f"t{i}"
        try:
            _tar.unpack(getter(bytes(data[: r.randrange(len(data))]), 4096), target)
        except (InvalidError, InternalError, OSError, ValueError):
            pass
    assert {p.name for p in tmp_path.iterdir()} <= {"source", *(f"t{i}" for i in range(300))}
