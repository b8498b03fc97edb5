"""Errors of the platform: their classes, and that no answer is mistaken for a result."""

from __future__ import annotations

import pickle
import re
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from wire import Wire, answers, end, error, exited, fails, frame, output, started, streams

import libdsec
import libdsec._process
import libdsec.sync
from libdsec import DSecError
from libdsec import _methods as m
from libdsec._errors import ERRORS
from libdsec._proto.dsec.v1 import process_pb2, sandbox_pb2, types_pb2

ERROR_GO = Path(__file__).parents[2] / "error.go"


def table() -> list[tuple[str, int, str, str, bool]]:
    names = dict(re.findall(r'(Code\w+)\s+Code = "(\w+)"', ERROR_GO.read_text()))
    rows = re.findall(r'(Code\w+):\s+\{(\d+), "(\w+)", "(\w+)", \d+, (\w+)\}', ERROR_GO.read_text())
    return [(names[c], int(http), connect, cls, retry == "true") for c, http, connect, cls, retry in rows]


def test_table_is_read() -> None:
    assert len(table()) == len(ERRORS) == 12


@pytest.mark.parametrize(("code", "http", "connect", "cls", "retry"), table())
async def test_each_code_has_its_class(
    wire: Wire, client: libdsec.DSecClient, code: str, http: int, connect: str, cls: str, retry: bool
) -> None:
    wire.on(m.START, fails(http, error(connect, code, "no such thing", field="a.b", retryable=retry)))
    with pytest.raises(DSecError) as caught:
        await client_sandbox(client).exec(["true"])
    e = caught.value
    assert type(e).__name__ == cls
    assert getattr(libdsec, cls) is type(e)
    assert (e.code, e.field, e.message, e.retryable) == (code, "a.b", "no such thing", retry)
    assert str(e) == f"a.b: no such thing ({code})"


def client_sandbox(client: libdsec.DSecClient) -> libdsec.Sandbox:
    return libdsec.Sandbox(client._rpc, "abcdefghijklmnopqrstuvwxy")


def test_platform_and_command_failures_are_apart() -> None:
    assert not issubclass(libdsec.CommandFailed, DSecError)
    for cls in ERRORS.values():
        assert not issubclass(cls, libdsec.CommandFailed)
        assert libdsec.CommandFailed.__mro__[1] is Exception


def test_errors_survive_pickling() -> None:
    e = libdsec.SandboxLost("gone", field="sandbox_id", retryable=True)
    copy = pickle.loads(pickle.dumps(e))
    assert type(copy) is libdsec.SandboxLost
    assert (copy.message, copy.field, copy.retryable) == ("gone", "sandbox_id", True)


@pytest.mark.parametrize("status", [400, 403, 404, 418, 429, 500, 502, 503, 504])
async def test_answer_of_a_proxy_is_no_result(wire: Wire, client: libdsec.DSecClient, status: int) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=status, text="<html>nope</html>", content_type="text/html")

    wire.on(m.START, handler)
    with pytest.raises(DSecError) as caught:
        await client_sandbox(client).run_shell("true")
    # Only what says that nothing was done may read so.
    assert not isinstance(caught.value, libdsec.UnavailableError | libdsec.ExhaustedError)
    assert wire.count(m.START) == 1


async def test_redirect_is_not_followed(wire: Wire, client: libdsec.DSecClient) -> None:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(status=307, headers={"Location": "/elsewhere"})

    wire.on(m.GET, handler)
    with pytest.raises(libdsec.OutcomeUnknownError):
        await client.get("x")
    assert [r.path for r in wire.requests] == [m.GET.path]


@pytest.mark.parametrize("outcome", [None, types_pb2.Outcome(oom=True)])
async def test_outcome_without_end_is_no_success(
    wire: Wire, client: libdsec.DSecClient, outcome: types_pb2.Outcome | None
) -> None:
    event = process_pb2.ProcessEvent(exited=process_pb2.Exited(outcome=outcome))
    wire.on(m.START, streams(started(), output(0, b"x"), frame(event), end()))
    with pytest.raises(libdsec.InternalError):
        await client_sandbox(client).exec(["true"])


BROKEN = {
    "empty": (),
    "no end": (started(), output(0, b"half")),
    "end without exited": (started(), output(0, b"half"), end()),
    "half a prefix": (started(), b"\x00\x00"),
    "half a frame": (started(), exited(0)[:-1]),
    "exited that says nothing": (
        started(),
        frame(process_pb2.ProcessEvent(exited=process_pb2.Exited())),
        end(),
    ),
    "compressed": (started(), frame(process_pb2.ProcessEvent(), flags=1)),
    "unknown flags": (started(), b"\xf0\x00\x00\x00\x00"),
    "huge frame": (started(), b"\x00\xff\xff\xff\xff"),
    "no protobuf": (started(), b"\x00\x00\x00\x00\x02\xff\xff"),
    "unknown event": (started(), b"\x00\x00\x00\x00\x00", exited(0), end()),
    "unknown stream": (started(), output(0, b"x", 9), exited(0), end()),
    "end is no JSON": (started(), b"\x02\x00\x00\x00\x02{["),
    "end is no object": (started(), b"\x02\x00\x00\x00\x02[]"),
    "error is no object": (started(), end("no")),
    "lost": (started(), end(error("data_loss", "lost", "the node is gone"))),
}


@pytest.mark.parametrize("abort", [False, True])
@pytest.mark.parametrize("name", BROKEN)
async def test_broken_stream_is_no_result(
    wire: Wire, client: libdsec.DSecClient, name: str, abort: bool
) -> None:
    wire.on(m.START, streams(*BROKEN[name], abort=abort))

    async def run() -> None:
        await (await client_sandbox(client).start(["true"])).wait()

    with pytest.raises(DSecError) as caught:
        await run()
    if name == "lost" and not abort:
        assert type(caught.value) is libdsec.SandboxLost


async def test_handle_goes_on_after_a_broken_stream(wire: Wire, client: libdsec.DSecClient) -> None:
    broken = streams(output(0, b"one "), output(4, b"two "), abort=True)
    whole = streams(output(8, b"three"), exited(5), end())

    async def attach(request: web.Request) -> web.StreamResponse:
        return await (broken if wire.count(m.ATTACH) == 1 else whole)(request)

    wire.on(m.ATTACH, attach)
    result = await client_sandbox(client).process(7).wait()
    assert (result.exit_code, result.stdout, result.missed_bytes) == (5, b"one two three", 0)
    request = process_pb2.AttachRequest()
    request.ParseFromString((await wire.requests[-1].read())[5:])
    assert (request.from_seq, request.own) == (8, False)


async def test_started_command_is_attached_to_and_never_started_again(
    wire: Wire, client: libdsec.DSecClient
) -> None:
    wire.on(m.START, streams(started(7), output(0, b"one "), abort=True))
    wire.on(m.ATTACH, streams(output(4, b"two"), exited(3), end()))
    async with await client_sandbox(client).start(["x"]) as process:
        result = await process.wait()
    assert (result.exit_code, result.stdout, result.process_id) == (3, b"one two", 7)
    assert [r.path for r in wire.requests] == [m.START.path, m.ATTACH.path]
    request = process_pb2.AttachRequest()
    request.ParseFromString((await wire.requests[-1].read())[5:])
    assert (request.process_id, request.from_seq, request.own) == (7, 4, True)


async def test_exec_goes_on_after_a_broken_stream(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.START, streams(started(7), output(0, b"one "), abort=True))
    wire.on(m.ATTACH, streams(output(4, b"two"), exited(3), end()))
    result = await client_sandbox(client).run_shell("x")
    assert (result.exit_code, result.stdout, result.missed_bytes) == (3, b"one two", 0)
    assert [r.path for r in wire.requests] == [m.START.path, m.ATTACH.path]


async def test_command_out_of_reach_is_named(
    wire: Wire, client: libdsec.DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libdsec._process, "_GO_ON_FOR", 0.2)
    wire.on(m.START, streams(started(7), output(0, b"one "), abort=True))
    wire.on(m.ATTACH, streams(output(0, b"one "), abort=True))  # never gets on
    async with await client_sandbox(client).start(["x"]) as process:
        with pytest.raises(libdsec.OutcomeUnknownError, match=r"process\(7, from_seq=4\) attaches to it"):
            await process.wait()
    assert wire.count(m.START) == 1


async def test_what_an_attach_is_told_is_final(wire: Wire, client: libdsec.DSecClient) -> None:
    full = end(error("unknown", "outcome_unknown", "the disk was full"))
    wire.on(m.START, streams(started(7), full))
    wire.on(m.ATTACH, streams(full))
    async with await client_sandbox(client).start(["x"]) as process:
        with pytest.raises(libdsec.OutcomeUnknownError, match="the disk was full"):
            await process.wait()
    assert wire.count(m.ATTACH) == 1


CUT = streams(started(7), abort=True)
TRACED: dict[str, Callable[[libdsec.DSecClient], Awaitable[Any]]] = {
    "told": lambda c: c.get("x"),
    "no answer": lambda c: c.run_container(libdsec.DSecContainerRunArgs(container_image="x"), timeout=0.05),
    "broken call": lambda c: client_sandbox(c).info(),
    "broken command": lambda c: client_sandbox(c).exec(["x"]),
    "broken upload": lambda c: client_sandbox(c).files.write("/x", b"x"),
    "no server": lambda c: libdsec.DSecClient("http://127.0.0.1:1", "e2b_00", retries=0).open(),
    "no server for a session": lambda _: (
        client_sandbox(libdsec.DSecClient("http://127.0.0.1:1", "e2b_00")).session("s").run("x")
    ),
    "path": lambda c: client_sandbox(c).files.stat(3),  # type: ignore[arg-type]
    "text": lambda c: client_sandbox(c).run_shell("\ud800"),
    "url": lambda _: libdsec.DSecClient("http://host:port", "e2b_00").open(),
    "ca_file": lambda _: libdsec.DSecClient("https://127.0.0.1:1", "e2b_00", ca_file="/nothing").open(),
}


@pytest.mark.parametrize("case", TRACED)
async def test_an_error_has_one_traceback(
    wire: Wire, client: libdsec.DSecClient, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    # What a user did or met is told by its last line: the insides of libraries above it say no more.
    monkeypatch.setattr(libdsec._process, "_GO_ON_FOR", 0.05)
    failed = fails(404, error("not_found", "not_found", "no such sandbox"))
    wire.on(m.GET, failed if case == "told" else streams(abort=True))
    wire.on(m.CREATE, streams(hang=True))
    for method in (m.START, m.ATTACH, m.WRITE):
        wire.on(method, CUT)
    with pytest.raises(DSecError) as caught:
        await TRACED[case](client)
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback (most recent call last)") == 1, text


def test_an_error_of_the_twin_has_one_traceback(unused_url: str) -> None:
    client = libdsec.sync.DSecClient(unused_url, "e2b_00", retries=0)
    with pytest.raises(DSecError) as caught:
        client.open()
    client.close()
    text = "".join(traceback.format_exception(caught.value))
    assert text.count("Traceback (most recent call last)") == 1, text


@pytest.mark.parametrize(
    ("told", "named"),
    [("data", "archive"), ("open.name", "name"), ("select", "select"), ("manifest", "manifest")],
)
async def test_an_import_names_what_was_given(
    wire: Wire, client: libdsec.DSecClient, told: str, named: str
) -> None:
    wire.on(m.IMPORT_LAYER, streams(end(error("invalid_argument", "invalid", f"{told}: bad", field=told))))
    with pytest.raises(libdsec.InvalidError) as caught:
        await client.import_layer([b"no tar"], name="x")
    assert (caught.value.field, str(caught.value)) == (named, f"{named}: bad (invalid)")


async def test_field_is_told_once(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.START, fails(400, error("invalid_argument", "invalid", "command: want one", field="command")))
    with pytest.raises(libdsec.InvalidError) as caught:
        await client_sandbox(client).exec(["x"])
    assert str(caught.value) == "command: want one (invalid)"
    assert (caught.value.field, caught.value.message) == ("command", "want one")


async def test_gap_and_skipped_bytes_are_counted(wire: Wire, client: libdsec.DSecClient) -> None:
    gap = process_pb2.ProcessEvent()
    setattr_gap(gap, 10, 15)
    wire.on(m.ATTACH, streams(frame(gap), output(15, b"end"), exited(0), end()))
    result = await client_sandbox(client).process(7, from_seq=10).wait()
    assert (result.stdout, result.missed_bytes) == (b"end", 15)


def setattr_gap(event: process_pb2.ProcessEvent, start: int, stop: int) -> None:
    setattr(event.gap, "from", start)
    event.gap.to = stop


async def test_batch_item_without_result_is_an_error(wire: Wire, client: libdsec.DSecClient) -> None:
    detail = types_pb2.ErrorDetail(code="exhausted", retryable=True)
    wire.on(
        m.BATCH_CREATE,
        answers(
            sandbox_pb2.BatchCreateResponse(
                items=[
                    sandbox_pb2.BatchCreateItem(
                        created=sandbox_pb2.CreateResponse(sandbox=types_pb2.Sandbox(id="one"), launch="warm")
                    ),
                    sandbox_pb2.BatchCreateItem(error=sandbox_pb2.ItemError(detail=detail, message="full")),
                    sandbox_pb2.BatchCreateItem(),
                ]
            )
        ),
    )
    args = libdsec.DSecContainerRunArgs(container_image="base")
    one, two, three = await client.run_containers(args, 3)
    assert isinstance(one, libdsec.Sandbox)
    assert (one.id, one.launch) == ("one", "warm")
    assert isinstance(two, libdsec.ExhaustedError)
    assert two.message == "full"
    assert isinstance(three, libdsec.InternalError)
    with pytest.raises(libdsec.InternalError):
        await client.run_containers(args, 4)
