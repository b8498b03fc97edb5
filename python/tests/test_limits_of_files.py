"""Files that say they are larger than anybody wants them."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest
from test_calls import sandbox as on_wire
from wire import Wire, answers, end, frame, streams

import libdsec
from libdsec import InvalidError, _tar
from libdsec import _methods as m
from libdsec._proto.dsec.v1 import file_pb2


def chunks(n: int) -> list[bytes]:
    return [frame(file_pb2.FileChunk(data=b"\0" * 100)) for _ in range(n)]


async def test_read_asks_for_no_more_than_it_takes(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.STAT, answers(file_pb2.StatResponse(entry=file_pb2.Entry(type="file", size=1 << 40))))
    wire.on(m.READ, streams(*chunks(3), hang=True))  # never ends
    with pytest.raises(InvalidError, match=rf"'/f' has {1 << 40} bytes, and at most 250 are") as caught:
        await on_wire(client).files.read("/f", max_bytes=250)
    assert caught.value.field == "max_bytes"
    await wire.gone.wait()
    wire.on(m.READ, streams(*chunks(3), end()))
    assert await on_wire(client).files.read("/f", max_bytes=300) == b"\0" * 300
    for wrong in (-1, 1 << 63):
        with pytest.raises(InvalidError):
            await on_wire(client).files.read("/f", max_bytes=wrong)


async def test_a_file_that_says_less_than_it_sends(
    wire: Wire, client: libdsec.DSecClient, tmp_path: Path
) -> None:
    wire.on(m.STAT, answers(file_pb2.StatResponse(entry=file_pb2.Entry(type="file", size=0))))
    wire.on(m.READ, streams(*chunks(3), hang=True))
    with pytest.raises(InvalidError, match="at most 250"):
        await on_wire(client).files.download("/f", tmp_path / "f", max_bytes=250)
    assert list(tmp_path.iterdir()) == []


def test_unpack_refuses_by_the_header(tmp_path: Path) -> None:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        small = tarfile.TarInfo("small")
        small.size = 5
        tar.addfile(small, io.BytesIO(b"small"))
        huge = tarfile.TarInfo("huge")
        huge.size = 1 << 40
        raw.write(huge.tobuf(tarfile.GNU_FORMAT))
        pieces = iter([raw.getvalue()])
    with pytest.raises(InvalidError, match=f"'huge', of {1 << 40} bytes.*at most 1000"):
        _tar.unpack(lambda: next(pieces, None), tmp_path / "d", max_bytes=1000)
    assert [p.name for p in (tmp_path / "d").iterdir()] == ["small"]
