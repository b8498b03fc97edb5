"""Decoding of text whose characters are split over chunks."""

from __future__ import annotations

import pytest
from wire import Wire, end, exited, output, streams

import libdsec
from libdsec import TextDecoder
from libdsec import _methods as m
from libdsec._proto.dsec.v1 import process_pb2

TEXT = "aé\u2013𝄞\u0301z\r\n"
DATA = TEXT.encode()


@pytest.mark.parametrize("at", range(len(DATA) + 1))
def test_character_split_at_any_byte_survives(at: int) -> None:
    d = TextDecoder()
    assert d.decode("stdout", DATA[:at]) + d.decode("stdout", DATA[at:]) == TEXT
    assert d.flush() == []


def test_each_byte_alone() -> None:
    d = TextDecoder()
    assert "".join(d.decode("stdout", DATA[i : i + 1]) for i in range(len(DATA))) == TEXT


def test_streams_do_not_mix() -> None:
    d = TextDecoder()
    got: dict[str, str] = {"stdout": "", "stderr": ""}
    for i in range(len(DATA)):
        got["stdout"] += d.decode("stdout", DATA[i : i + 1])
        got["stderr"] += d.decode("stderr", DATA[i : i + 1])
    assert got == {"stdout": TEXT, "stderr": TEXT}


def test_unfinished_character_is_told_at_the_end() -> None:
    d = TextDecoder()
    assert d.decode("stdout", b"a\xe2\x80") == "a"
    assert d.flush() == [("stdout", "\ufffd")]


def test_strict() -> None:
    with pytest.raises(UnicodeDecodeError):
        TextDecoder(errors="strict").decode("stdout", b"\xff")


@pytest.mark.parametrize("at", range(1, len(DATA)))
async def test_text_of_a_process(wire: Wire, client: libdsec.DSecClient, at: int) -> None:
    err = process_pb2.STREAM_STDERR
    n = len(DATA)
    wire.on(
        m.ATTACH,
        streams(
            output(0, DATA[:at]),
            output(at, DATA[:at], err),
            output(2 * at, DATA[at:], err),
            output(n + at, DATA[at:]),
            exited(0),
            end(),
        ),
    )
    process = libdsec.Sandbox(client._rpc, "x").process(7)
    got = {"stdout": "", "stderr": "", "pty": ""}
    async for stream, piece in process.text():
        assert "\ufffd" not in piece
        got[stream] += piece
    assert got == {"stdout": TEXT, "stderr": TEXT, "pty": ""}
    assert process.result is not None
    assert process.result.stdout == process.result.stderr == DATA
