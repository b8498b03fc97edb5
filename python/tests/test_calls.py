"""Calls: retries, deadlines, cancellation, uploads that fail; on a server that does as it is told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from aiohttp import web
from wire import (
    Wire,
    answers,
    end,
    error,
    exited,
    fails,
    frame,
    messages,
    output,
    started,
    streams,
)

import libdsec
from libdsec import _methods as m
from libdsec import _rpc
from libdsec._connect import Method
from libdsec._proto.dsec.v1 import (
    admin_pb2,
    event_pb2,
    file_pb2,
    job_pb2,
    layer_pb2,
    process_pb2,
    sandbox_pb2,
    session_pb2,
    snapshot_pb2,
    trajectory_pb2,
    types_pb2,
    webhook_pb2,
)
from libdsec._source import Source

UNAVAILABLE = fails(503, error("unavailable", "unavailable", "busy", retryable=True))
ARGS = libdsec.DSecContainerRunArgs(container_image="base")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_rpc, "_FIRST_PAUSE", 0.001)


def sandbox(client: libdsec.DSecClient) -> libdsec.Sandbox:
    return libdsec.Sandbox(client._rpc, "abcdefghijklmnopqrstuvwxy")


def test_every_rpc_of_the_api_has_a_method() -> None:
    have = {v.path: v for v in vars(m).values() if isinstance(v, Method)}
    want = {}
    for module in (
        *(admin_pb2, event_pb2, file_pb2, job_pb2, layer_pb2),
        *(process_pb2, sandbox_pb2, session_pb2, snapshot_pb2, trajectory_pb2, webhook_pb2),
    ):
        for service in module.DESCRIPTOR.services_by_name.values():
            for rpc in service.methods:
                want[f"/{service.full_name}/{rpc.name}"] = (rpc.input_type, rpc.output_type)
    assert {p: (v.request.DESCRIPTOR, v.response.DESCRIPTOR) for p, v in have.items()} == want


async def test_refused_call_is_sent_again_until_it_is_taken(wire: Wire, client: libdsec.DSecClient) -> None:
    async def third_time(request: web.Request) -> web.StreamResponse:
        if wire.count(m.GET) < 3:
            return await UNAVAILABLE(request)
        return await answers(sandbox_pb2.GetResponse(sandbox=types_pb2.Sandbox(id="x", state="running")))(
            request
        )

    wire.on(m.GET, third_time)
    assert (await client.get("x")).state == "running"
    assert wire.count(m.GET) == 3


async def test_retries_are_bounded(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.GET, UNAVAILABLE)
    with pytest.raises(libdsec.UnavailableError):
        await client.get("x")
    assert wire.count(m.GET) == 5


async def test_create_keeps_its_request_id_over_retries(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.CREATE, UNAVAILABLE)
    with pytest.raises(libdsec.UnavailableError):
        await client.run_container(ARGS)
    ids = set()
    for r in wire.requests:
        ids.add(sandbox_pb2.CreateRequest.FromString(await r.read()).request_id)
    assert wire.count(m.CREATE) == 5
    assert len(ids) == 1
    assert ids != {""}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("code", ["unavailable", "exhausted"])
async def test_command_is_never_sent_twice(
    wire: Wire, client: libdsec.DSecClient, code: str, late: bool
) -> None:
    refuse = error("unavailable", code, "busy", retryable=True)
    wire.on(m.START, streams(end(refuse)) if late else fails(503, refuse))
    for run in (
        sandbox(client).exec(["true"]),
        sandbox(client).run_shell("true"),
        sandbox(client).start(["true"]),
        sandbox(client).exec(["true"], detach=True),
    ):
        with pytest.raises((libdsec.UnavailableError, libdsec.ExhaustedError)):
            await run
    assert wire.count(m.START) == len(wire.requests) == 4


async def test_connection_lost_in_a_command_is_an_unknown_outcome(
    wire: Wire, client: libdsec.DSecClient
) -> None:
    async def drop(request: web.Request) -> web.StreamResponse:
        await request.read()
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    wire.on(m.START, drop)
    wire.on(m.MKDIR, drop)
    wire.on(m.GET, drop)
    with pytest.raises(libdsec.OutcomeUnknownError):
        await sandbox(client).exec(["true"])
    with pytest.raises(libdsec.OutcomeUnknownError):
        await sandbox(client).files.mkdir("/x")
    assert (wire.count(m.START), wire.count(m.MKDIR)) == (1, 1)
    # A question may be asked again.
    with pytest.raises(libdsec.UnavailableError):
        await client.get("x")
    assert wire.count(m.GET) == 5


async def test_server_that_is_not_there(unused_url: str) -> None:
    client = libdsec.DSecClient(unused_url, "e2b_00", retries=1)
    with pytest.raises(libdsec.UnavailableError, match="cannot reach") as caught:
        await client.open()
    assert caught.value.retryable
    session = sandbox(client).session("s")
    with pytest.raises(libdsec.UnavailableError, match="cannot reach"):
        await session.run("true")
    await client.close()


def test_which_errors_are_the_platforms() -> None:
    platform = {
        code for code, kind in libdsec._errors.ERRORS.items() if issubclass(kind, libdsec.PlatformError)
    }
    assert platform == {"outcome_unknown", "unavailable", "lost", "internal"}


async def hang(request: web.Request) -> web.StreamResponse:
    await request.read()
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_timeout_of_a_create(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.CREATE, hang)
    with pytest.raises(libdsec.RequestTimeout) as caught:
        await client.run_container(ARGS, timeout=0.05)
    assert isinstance(caught.value, TimeoutError)
    assert isinstance(caught.value, libdsec.OutcomeUnknownError)
    await wire.gone.wait()
    assert 0 < int(wire.requests[0].headers["Connect-Timeout-Ms"]) <= 50


async def test_timeout_bounds_all_retries_together(
    wire: Wire, client: libdsec.DSecClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("libdsec._rpc.random.uniform", lambda low, high: 3600)
    wire.on(m.CREATE, UNAVAILABLE)
    with pytest.raises(libdsec.RequestTimeout):
        await client.run_container(ARGS, timeout=0.05)


async def test_server_that_hangs_does_not_hang_its_callers(wire: Wire) -> None:
    wire.on(m.GET, hang)
    client = libdsec.DSecClient(wire.url, "e2b_00", call_timeout=0.05)
    with pytest.raises(libdsec.RequestTimeout):
        await client.get("x")
    await client.close()


async def test_deadline_that_the_server_saw_first(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.CREATE, fails(504, {"code": "deadline_exceeded", "message": "too late"}))
    with pytest.raises(libdsec.RequestTimeout, match="too late"):
        await client.run_container(ARGS, timeout=60)


@pytest.mark.parametrize("stream", [False, True])
async def test_cancelling_a_command_closes_its_connection(
    wire: Wire, client: libdsec.DSecClient, stream: bool
) -> None:
    wire.on(m.START, streams(started(), output(0, b"x"), hang=True))

    async def execute() -> None:
        await sandbox(client).exec(["sleep", "9"])

    if stream:
        process = await sandbox(client).start(["sleep", "9"])
        await process.__anext__()
        reading = asyncio.Event()

        async def read() -> None:
            reading.set()
            await process.wait()

        task = asyncio.create_task(read())
        await reading.wait()
    else:
        task = asyncio.create_task(execute())
        await wire.asked(m.START)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(wire.gone.wait(), 10)


async def test_leaving_a_process_closes_its_connection(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.START, streams(started(), hang=True))
    async with await sandbox(client).start(["sleep", "9"]):
        pass
    await asyncio.wait_for(wire.gone.wait(), 10)


async def test_detached_command_survives_cancellation(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.START, streams(started(), end()))
    wire.on(m.ATTACH, streams(output(0, b"x"), hang=True))
    task = asyncio.create_task(sandbox(client).run_shell("sleep 9", detach=True))
    await wire.asked(m.ATTACH)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert process_pb2.StartRequest.FromString((await wire.requests[0].read())[5:]).detach
    # Only the watching ended: nothing was signalled.
    assert {r.path for r in wire.requests} == {m.START.path, m.ATTACH.path}


async def written(request: web.Request) -> web.StreamResponse:
    size = 0
    async for data in messages(request):
        size += len(file_pb2.WriteRequest.FromString(data).data)
    body = frame(file_pb2.WriteResponse(size=size)) + end()
    return web.Response(body=body, content_type="application/connect+proto")


async def pieces() -> AsyncIterator[bytes]:
    yield b"a" * 1000
    yield b"b" * 1_000_000


def sync_pieces() -> Iterator[bytes]:
    yield b"a" * 1000
    yield b"b" * 1_000_000


@pytest.mark.parametrize("kind", ["bytes", "str", "async", "iterable", "file", "memoryview"])
async def test_every_kind_of_source(
    wire: Wire, client: libdsec.DSecClient, kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 1_001_000)
    wire.on(m.WRITE, written)
    files = sandbox(client).files
    with path.open("rb") as f:
        sources: dict[str, Source] = {
            "bytes": b"x" * 1_001_000,
            "str": "é" * 500_500,
            "async": pieces(),
            "iterable": sync_pieces(),
            "file": f,
            "memoryview": memoryview(b"x" * 1_001_000),
        }
        assert await files.write("/f", sources[kind]) == 1_001_000


async def test_source_that_fails_is_not_taken_for_a_whole_file(
    wire: Wire, client: libdsec.DSecClient
) -> None:
    ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def handler(request: web.Request) -> web.StreamResponse:
        try:
            response = await written(request)
            ended.set_result("whole")
            return response
        except BaseException as e:
            ended.set_result(type(e).__name__)
            raise

    async def broken() -> AsyncIterator[bytes]:
        yield b"half"
        raise LookupError("no more")

    wire.on(m.WRITE, handler)
    with pytest.raises(LookupError, match="no more"):
        await sandbox(client).files.write("/f", broken())
    assert await asyncio.wait_for(ended, 10) != "whole"


async def test_source_of_no_bytes_is_invalid(wire: Wire, client: libdsec.DSecClient) -> None:
    wire.on(m.WRITE, written)
    for source in (3, [1, 2], ["text"]):
        with pytest.raises(libdsec.InvalidError) as caught:
            await sandbox(client).files.write("/f", source)  # type: ignore[arg-type]
        assert caught.value.field == "data"


async def test_early_refusal_of_an_upload_stops_its_source(wire: Wire, client: libdsec.DSecClient) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        await request.content.readexactly(100)
        body = end(error("not_found", "not_found", "no such sandbox", field="sandbox_id"))
        return web.Response(body=body, content_type="application/connect+proto")

    closed = asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 100_000
                await asyncio.sleep(0)
        finally:
            closed.set()

    wire.on(m.WRITE, refuse)
    source = endless()
    with pytest.raises(libdsec.NotFoundError):
        await sandbox(client).files.write("/f", source)
    await source.aclose()  # type: ignore[attr-defined]
    assert closed.is_set()


async def test_large_stdin_goes_in_pieces(wire: Wire, client: libdsec.DSecClient) -> None:
    got = bytearray()
    done = asyncio.Event()

    async def stdin(request: web.Request) -> web.StreamResponse:
        async for data in messages(request):
            message = process_pb2.WriteStdinRequest.FromString(data)
            got.extend(message.data)
            if message.eof:
                done.set()
        body = frame(process_pb2.WriteStdinResponse(written=len(got))) + end()
        return web.Response(body=body, content_type="application/connect+proto")

    async def start(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        await response.prepare(request)
        await response.write(started())
        await done.wait()
        await response.write(exited(0) + end())
        return response

    wire.on(m.START, start)
    wire.on(m.STREAM_STDIN, stdin)
    data = bytes(range(256)) * 4097 * 4
    result = await sandbox(client).exec(["cat"], stdin=data)
    assert result.ok
    assert bytes(got) == data


@pytest.mark.parametrize("code", ["conflict", "not_found"])
async def test_command_may_end_before_its_input(wire: Wire, client: libdsec.DSecClient, code: str) -> None:
    refused = asyncio.Event()

    async def refuse(request: web.Request) -> web.StreamResponse:
        await request.content.readexactly(5)
        refused.set()
        body = end(error("already_exists", code, "the input has ended"))
        return web.Response(body=body, content_type="application/connect+proto")

    async def start(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "application/connect+proto"})
        await response.prepare(request)
        await response.write(started())
        await refused.wait()
        await response.write(exited(3) + end())
        return response

    wire.on(m.START, start)
    wire.on(m.STREAM_STDIN, refuse)
    result = await sandbox(client).exec(["head", "-c1"], stdin=pieces())
    assert result.exit_code == 3


async def test_key_is_sent_and_never_shown(wire: Wire) -> None:
    client = libdsec.DSecClient(wire.url, "e2b_5ec2e7")
    wire.on(m.LIST, answers(sandbox_pb2.ListResponse()))
    async with client:
        pass
    assert wire.requests[0].headers["Authorization"] == "Bearer e2b_5ec2e7"
    for thing in (client, client._rpc, client._rpc.__dict__, client._rpc._pool._config):
        assert "5ec2e7" not in repr(thing)


async def test_list_asks_for_every_page(wire: Wire, client: libdsec.DSecClient) -> None:
    async def page(request: web.Request) -> web.StreamResponse:
        token = sandbox_pb2.ListRequest.FromString(await request.read()).page_token
        n = int(token or 0)
        response = sandbox_pb2.ListResponse(
            sandboxes=[types_pb2.Sandbox(id=f"s{n}")], next_page_token="" if n == 2 else str(n + 1)
        )
        return web.Response(body=response.SerializeToString(), content_type="application/proto")

    wire.on(m.LIST, page)
    assert [s.id async for s in client.list(job="j")] == ["s0", "s1", "s2"]


async def test_cancelling_a_download_ends_its_thread(
    wire: Wire, client: libdsec.DSecClient, tmp_path: Path
) -> None:
    wire.on(m.STAT, answers(file_pb2.StatResponse(entry=file_pb2.Entry(name="d", type="dir"))))
    wire.on(m.DOWNLOAD, streams(frame(file_pb2.FileChunk(data=b"\0" * 100)), hang=True))
    task = asyncio.create_task(sandbox(client).files.download("/d", tmp_path / "d"))
    await wire.asked(m.DOWNLOAD)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    await asyncio.wait_for(wire.gone.wait(), 10)
    assert not [t for t in threading.enumerate() if t.name.startswith("libdsec-transfer")]


async def test_cancelling_an_upload_ends_its_thread(
    wire: Wire, client: libdsec.DSecClient, tmp_path: Path
) -> None:
    with (tmp_path / "big").open("wb") as f:
        f.truncate(64 << 20)

    async def read_a_little(request: web.Request) -> web.StreamResponse:
        await request.content.readexactly(1000)
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    wire.on(m.UPLOAD, read_a_little)
    task = asyncio.create_task(sandbox(client).files.upload(tmp_path, "/d"))
    await wire.asked(m.UPLOAD)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 30)
    await asyncio.wait_for(wire.gone.wait(), 10)
    assert not [t for t in threading.enumerate() if t.name.startswith("libdsec-transfer")]
