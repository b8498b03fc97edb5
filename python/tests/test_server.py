"""The whole SDK against a real server, on the backend that DSEC_TEST_BACKEND names."""

from __future__ import annotations

import asyncio
import os
import stat
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from server import Server

import libdsec
from libdsec import DSecClient, DSecContainerRunArgs, Output, Sandbox


@pytest.fixture
async def client(server: Server) -> AsyncIterator[DSecClient]:
    async with DSecClient(server.url, server.key) as c:
        yield c


@pytest.fixture
async def sandbox(client: DSecClient, args: DSecContainerRunArgs) -> AsyncIterator[Sandbox]:
    async with await client.run_container(args, timeout=120) as s:
        yield s


async def test_published_shape(
    server: Server, args: DSecContainerRunArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DSEC_URL", server.url)
    monkeypatch.setenv("DSEC_API_KEY", server.key)
    monkeypatch.setenv("DSEC_BACKEND", args.backend)
    client = DSecClient()
    await client.open()
    sandbox = await client.run_container(
        DSecContainerRunArgs(
            container_image=args.container_image,
            memory_limit_mb=64,
            cpu_cores_limit=0.5,
            ttl_running_stop=300,
            network_rules={"npm": False, "pypi": False},
            init_user="root",
        ),
        timeout=120,
    )
    result = await sandbox.run_shell("echo hello; exit 3", timeout=30)
    assert (result.exit_code, result.text) == (3, "hello\n")
    info = await sandbox.info()
    assert (info.limits.memory_bytes, info.limits.milli_cpu, info.idle_timeout) == (64 << 20, 500, 300)
    await sandbox.stop()
    assert (await client.get(sandbox.id)).state in ("stopping", "stopped")
    await client.close()


async def test_network_rule_that_is_true_is_unsupported(
    client: DSecClient, args: DSecContainerRunArgs
) -> None:
    with pytest.raises(libdsec.UnsupportedError) as caught:
        await client.run_container(replace(args, network_rules={"npm": False, "pypi": True}))
    assert "network_rules" in caught.value.field


async def test_wrong_key(server: Server) -> None:
    client = DSecClient(server.url, "e2b_" + "0" * 40)
    with pytest.raises(libdsec.UnauthenticatedError):
        await client.__aenter__()


async def test_key_file(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("DSEC_API_KEY", raising=False)
    (tmp_path / "key").write_text(server.key + "\n")
    async with DSecClient(server.url, key_file=tmp_path / "key"):
        pass


async def test_create_by_request_id(client: DSecClient, args: DSecContainerRunArgs) -> None:
    name = uuid.uuid4().hex
    one = await client.run_container(args, request_id=name)
    two = await client.run_container(args, request_id=name)
    assert one.id == two.id
    with pytest.raises(libdsec.ConflictError):
        await client.run_container(replace(args, labels={"other": "body"}), request_id=name)
    await one.stop()


async def test_batch_list_kill(client: DSecClient, args: DSecContainerRunArgs) -> None:
    job = uuid.uuid4().hex
    items = await client.run_containers(replace(args, job=job, labels={"a": "1"}), 5)
    sandboxes = [s for s in items if isinstance(s, Sandbox)]
    assert len(sandboxes) == 5
    ids = {s.id for s in sandboxes}
    assert {s.id async for s in client.list(job=job)} == ids
    assert {s.id async for s in client.list(labels={"a": "1"}, job=job, states=["running"])} == ids
    assert [s async for s in client.list(job=job, labels={"a": "2"})] == []
    await asyncio.gather(*(client.kill(i) for i in ids))
    assert [s async for s in client.list(job=job)] == []
    assert await client.kill(next(iter(ids))) in ("stopping", "stopped")


async def test_attach(client: DSecClient, sandbox: Sandbox) -> None:
    again = await client.attach(sandbox.id)
    assert (await again.run_shell("echo here")).text == "here\n"
    with pytest.raises(libdsec.NotFoundError):
        await client.attach(sandbox.id[:-1] + ("a" if sandbox.id[-1] != "a" else "b"))
    with pytest.raises(libdsec.InvalidError) as caught:
        await client.attach("../x")
    assert caught.value.field == "sandbox_id"
    await sandbox.stop()
    with pytest.raises((libdsec.ConflictError, libdsec.NotFoundError)):
        await client.attach(sandbox.id)


async def test_command_in_a_stopped_sandbox_is_an_error(
    client: DSecClient, args: DSecContainerRunArgs
) -> None:
    sandbox = await client.run_container(args)
    await sandbox.stop()
    with pytest.raises(libdsec.DSecError):
        await sandbox.run_shell("true")


async def test_extend_and_usage(sandbox: Sandbox) -> None:
    info = await sandbox.extend(ttl_running_stop=77, max_lifetime=7200)
    assert info.idle_timeout == 77
    assert info.deadline is not None
    assert 7000 < (info.deadline - info.created).total_seconds() < 9000
    assert (await sandbox.extend(max_lifetime=0)).deadline is None
    usage = await sandbox.usage()
    assert usage.limits.memory_bytes > 0
    assert usage.at >= info.created


async def test_exec_keeps_streams_apart(sandbox: Sandbox) -> None:
    result = await sandbox.run_shell("printf out; printf err >&2; exit 7")
    assert (result.stdout, result.stderr, result.exit_code, result.signal) == (b"out", b"err", 7, None)
    assert not result.claimed
    assert result.duration >= 0
    with pytest.raises(libdsec.CommandFailed):
        result.check()


async def test_exec_takes_argv_env_cwd_stdin(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["echo", "a b", "$HOME;", "é"])).text == "a b $HOME; é\n"
    assert "X=y z" in (await sandbox.exec(["env"], env={"X": "y z"})).text.splitlines()
    assert (await sandbox.exec(["pwd"], cwd="/tmp")).text == "/tmp\n"
    assert (await sandbox.exec(["cat"], stdin="in é")).text == "in é"
    assert (await sandbox.exec(["cat"], stdin=b"\x00\xff")).stdout == b"\x00\xff"


async def test_bytes_arguments(sandbox: Sandbox) -> None:
    assert (await sandbox.exec(["echo", b"\xff\xfe"])).stdout == b"\xff\xfe\n"


async def test_signal_timeout_and_output_limit_are_results(sandbox: Sandbox) -> None:
    killed = await sandbox.run_shell("kill -9 $$")
    assert (killed.exit_code, killed.signal, killed.ok) == (None, 9, False)
    late = await sandbox.run_shell("echo before; sleep 60", timeout=0.3)
    assert (late.timed_out, late.ok, late.text) == (True, False, "before\n")
    much = await sandbox.exec(["yes"], output_limit=1000, timeout=60)
    assert much.output_limit
    assert not much.ok
    assert 0 < len(much.stdout) <= 1000


async def test_program_that_is_not_there(sandbox: Sandbox) -> None:
    with pytest.raises((libdsec.InvalidError, libdsec.NotFoundError)):
        await sandbox.exec(["/no/such/program"])
    assert (await sandbox.run_shell("/no/such/program")).exit_code == 127


async def test_large_stdin_and_output(sandbox: Sandbox) -> None:
    data = os.urandom(5 << 20)
    result = await sandbox.exec(["cat"], stdin=data, output_limit=8 << 20, timeout=120)
    assert result.check().stdout == data
    assert result.missed_bytes == 0


async def test_command_that_leaves_its_input(sandbox: Sandbox) -> None:
    result = await sandbox.exec(["head", "-c", "1"], stdin=b"x" * (3 << 20), timeout=60)
    assert result.stdout == b"x"


async def test_streaming(sandbox: Sandbox) -> None:
    async with await sandbox.start_shell("echo one; echo two >&2; cat", open_stdin=True) as p:
        events = [await p.__anext__(), await p.__anext__()]
        assert {(e.stream, e.data) for e in events if isinstance(e, Output)} == {
            ("stdout", b"one\n"),
            ("stderr", b"two\n"),
        }
        await p.write("three\n")
        third = await p.__anext__()
        assert isinstance(third, Output)
        assert (third.data, third.seq) == (b"three\n", 8)
        await p.close_stdin()
        result = await p.wait()
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"one\nthree\n", b"two\n")


async def test_split_character(sandbox: Sandbox) -> None:
    p = await sandbox.start(["cat"], open_stdin=True)
    got: list[str] = []
    reading = p.text()
    for byte in "é𝄞".encode():
        await p.write(bytes([byte]))
    await p.close_stdin()
    async for _, piece in reading:
        got.append(piece)
    assert "".join(got) == "é𝄞"


async def test_background_process(client: DSecClient, sandbox: Sandbox) -> None:
    p = await sandbox.start_shell("echo first; cat; exit 5", open_stdin=True, detach=True)
    other = (await client.attach(sandbox.id)).process(p.process_id)
    first = await other.__anext__()
    assert isinstance(first, Output)
    assert first.data == b"first\n"
    other.close()
    assert [i.process_id for i in await sandbox.processes() if not i.ended] == [p.process_id]
    await p.send_all("second\n")
    late = await sandbox.process(p.process_id, from_seq=other.next_seq).wait()
    assert (late.stdout, late.missed_bytes, late.exit_code) == (b"second\n", 6, 5)
    whole = await p.wait()
    assert (whole.stdout, whole.missed_bytes) == (b"first\nsecond\n", 0)
    listed = {i.process_id: i for i in await sandbox.processes()}
    if p.process_id in listed:
        outcome = listed[p.process_id].outcome
        assert outcome is not None
        assert outcome.exit_code == 5


async def test_kill_and_signal(sandbox: Sandbox) -> None:
    p = await sandbox.start(["sleep", "600"], detach=True)
    await p.kill()
    assert (await p.wait()).signal == 9
    p = await sandbox.start(["sleep", "600"], detach=True)
    await p.send_signal(15)
    assert (await p.wait()).signal == 15
    with pytest.raises(libdsec.InvalidError) as caught:
        await p.send_signal(65)
    assert caught.value.field == "signal"


async def end_of(sandbox: Sandbox, process_id: int) -> libdsec.ExecResult:
    return await asyncio.wait_for(sandbox.process(process_id).wait(), 60)


async def is_cut_off(sandbox: Sandbox, process_id: int) -> None:
    """Wait for its end, which is no outcome: the platform killed it, as all are told."""
    with pytest.raises(libdsec.OutcomeUnknownError, match="was killed"):
        await end_of(sandbox, process_id)
    (info,) = [i for i in await sandbox.processes() if i.process_id == process_id]
    assert info.ended
    assert info.outcome is None
    assert "was killed" in info.fault


async def test_cancelling_kills_the_command(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.exec(["sleep", "600"]))
    process_id = await running(sandbox)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await is_cut_off(sandbox, process_id)


async def test_cancelling_a_reader_kills_its_command(sandbox: Sandbox) -> None:
    p = await sandbox.start_shell("echo go; sleep 600")
    await p.__anext__()
    task = asyncio.create_task(p.wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await is_cut_off(sandbox, p.process_id)


async def test_cancelling_a_detached_command_leaves_it(sandbox: Sandbox) -> None:
    task = asyncio.create_task(sandbox.exec(["sleep", "600"], detach=True))
    process_id = await running(sandbox)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    # It takes a signal, so it is there.
    p = sandbox.process(process_id)
    await p.send_signal(15)
    assert (await end_of(sandbox, process_id)).signal == 15


async def running(sandbox: Sandbox) -> int:
    """Wait for the sandbox's one running process."""
    for _ in range(2000):
        found = [i.process_id for i in await sandbox.processes() if not i.ended]
        if found:
            return found[0]
    raise AssertionError("no process was started")


async def test_terminal(sandbox: Sandbox) -> None:
    p = await sandbox.start(["sh"], pty=(24, 80), open_stdin=True)
    await p.resize(40, 120)
    await p.write("exit 4\n")
    result = await p.wait()
    assert result.exit_code == 4
    assert result.stderr == b""
    infos = [i for i in await sandbox.processes() if i.process_id == p.process_id]
    assert all(i.pty for i in infos)


async def test_files(sandbox: Sandbox) -> None:
    f = sandbox.files
    assert await f.write("/tmp/d/e/file", "text é") == 7
    assert await f.write("/tmp/d/e/file", b"\x00", append=True) == 1
    assert await f.read("/tmp/d/e/file") == "text é\0".encode()
    assert await f.read_text("/tmp/d/e/file") == "text é\0"
    entry = await f.stat("/tmp/d/e/file")
    assert (entry.name, entry.type, entry.size, entry.is_file) == ("file", "file", 8, True)
    await f.write("/tmp/d/run", b"#!/bin/sh\n", mode=0o755)
    assert (await f.stat("/tmp/d/run")).mode == 0o755
    await f.mkdir("/tmp/d/new", mode=0o700)
    await f.mkdir("/tmp/d/new", parents=True)
    with pytest.raises(libdsec.ConflictError):
        await f.mkdir("/tmp/d/new")
    assert [e.name for e in await f.list("/tmp/d")] == ["e", "new", "run"]
    await f.rename("/tmp/d/run", "/tmp/d/new/run2")
    assert await f.exists("/tmp/d/new/run2")
    assert not await f.exists("/tmp/d/run")
    await f.remove("/tmp/d", recursive=True)
    with pytest.raises(libdsec.NotFoundError):
        await f.read("/tmp/d/e/file")


async def test_file_in_pieces(sandbox: Sandbox) -> None:
    f = sandbox.files
    data = os.urandom(3_000_000)
    await f.write("/tmp/big", (data[i : i + 7777] for i in range(0, len(data), 7777)))
    assert await f.read("/tmp/big") == data
    async with await f.stream("/tmp/big", offset=1000, length=2_000_000) as stream:
        assert b"".join([d async for d in stream]) == data[1000:2_001_000]
    async with await f.stream("/tmp/big") as stream:
        await stream.__anext__()  # and leave the rest
    assert (await sandbox.run_shell("wc -c < /tmp/big")).text.split() == ["3000000"]


async def test_failed_write_leaves_the_old_file(sandbox: Sandbox) -> None:
    await sandbox.files.write("/tmp/keep", b"old")

    async def broken() -> AsyncIterator[bytes]:
        yield b"new" * 100_000
        raise LookupError

    with pytest.raises(LookupError):
        await sandbox.files.write("/tmp/keep", broken())
    assert await sandbox.files.read("/tmp/keep") == b"old"


async def test_names_of_any_bytes(sandbox: Sandbox) -> None:
    await sandbox.files.write(b"/tmp/b/\xff\xfe", b"x")
    await sandbox.files.write("/tmp/b/é", b"y")
    assert [e.name for e in await sandbox.files.list("/tmp/b")] == ["é", b"\xff\xfe"]
    assert await sandbox.files.read(os.fsdecode(b"/tmp/b/\xff\xfe")) == b"x"


def touch_many(where: Path) -> None:
    for i in range(2500):
        (where / f"{i:04}").touch()


async def test_list_of_many(sandbox: Sandbox, tmp_path: Path) -> None:
    touch_many(tmp_path)
    await sandbox.files.upload(tmp_path, "/tmp/many")
    assert [e.name async for e in sandbox.files.scan("/tmp/many")] == [f"{i:04}" for i in range(2500)]


async def test_directory_there_and_back(sandbox: Sandbox, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "a" / "b").mkdir(parents=True)
    (source / "a" / "b" / "data").write_bytes(os.urandom(1_000_000))
    (source / "a" / "run").write_text("x")
    (source / "a" / "run").chmod(0o751)
    (source / "link").symlink_to("a/b/data")
    (source / "dangling").symlink_to("/no/where")
    Path(os.fsdecode(os.fsencode(source) + b"/\xff\xfe")).write_bytes(b"binary name")
    await sandbox.files.upload(source, "/tmp/up")
    assert (await sandbox.files.stat("/tmp/up/a/run")).mode == 0o751
    await sandbox.files.download("/tmp/up", target)
    assert shape(target) == shape(source)
    await sandbox.files.download("/tmp/up/a/run", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "x"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o751
    await sandbox.files.upload(tmp_path / "file", "/tmp/one")
    assert (await sandbox.files.stat("/tmp/one")).mode == 0o751


def shape(root: Path) -> dict[str, object]:
    return {
        os.fsdecode(p.relative_to(root)): os.readlink(p)
        if p.is_symlink()
        else (stat.S_IMODE(p.stat().st_mode), p.read_bytes() if p.is_file() else None)
        for p in root.rglob("*")
    }


async def test_download_of_nothing(sandbox: Sandbox, tmp_path: Path) -> None:
    with pytest.raises(libdsec.NotFoundError):
        await sandbox.files.download("/no/such", tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        await sandbox.files.upload(tmp_path / "missing", "/tmp/x")
    assert list(tmp_path.iterdir()) == []


def make_big(path: Path) -> None:
    with path.open("wb") as f:
        f.truncate(64 << 20)


async def test_upload_that_is_refused_early(
    client: DSecClient, args: DSecContainerRunArgs, tmp_path: Path
) -> None:
    sandbox = await client.run_container(args)
    await sandbox.stop()
    (tmp_path / "dir").mkdir()
    make_big(tmp_path / "dir" / "big")
    for call in (
        sandbox.files.upload(tmp_path / "dir", "/tmp/x"),
        sandbox.files.upload(tmp_path / "dir" / "big", "/tmp/x"),
    ):
        with pytest.raises((libdsec.NotFoundError, libdsec.ConflictError)):
            await call


async def test_other_projects_sandbox_is_not_found(
    client: DSecClient, server: Server, sandbox: Sandbox
) -> None:
    made = await client.create_key("stranger")
    async with DSecClient(server.url, made.secret) as other:
        for call in (other.get(sandbox.id), other.attach(sandbox.id), other.kill(sandbox.id)):
            with pytest.raises(libdsec.NotFoundError):
                await call
    assert (await sandbox.info()).state == "running"


async def test_a_thousand_calls_at_once(client: DSecClient, args: DSecContainerRunArgs) -> None:
    items = await client.run_containers(args, 10)
    sandboxes = [s for s in items if isinstance(s, Sandbox)]
    assert len(sandboxes) == 10
    results = await asyncio.gather(
        *(sandboxes[i % 10].exec(["echo", str(i)], timeout=300) for i in range(1000))
    )
    assert [r.check().text for r in results] == [f"{i}\n" for i in range(1000)]
    await asyncio.gather(*(s.stop() for s in sandboxes))


async def refuses_more_than(sandbox: Sandbox, tmp_path: Path, size: int, most: int) -> None:
    """/tmp/d/z, which has size bytes, is refused whichever way it is asked for, and nothing is left."""
    for call in (
        sandbox.files.read("/tmp/d/z", max_bytes=most),
        sandbox.files.download("/tmp/d/z", tmp_path / "file", max_bytes=most),
        sandbox.files.download("/tmp/d", tmp_path / "tree", max_bytes=most),
    ):
        with pytest.raises(libdsec.InvalidError, match=f"{size} bytes.*at most") as caught:
            await call
        assert caught.value.field == "max_bytes"
    assert not (tmp_path / "file").exists()


async def test_a_file_larger_than_wanted(sandbox: Sandbox, tmp_path: Path) -> None:
    await sandbox.files.write("/tmp/d/small", "hello\n")
    await sandbox.files.write("/tmp/d/z", bytes(1 << 20))
    await refuses_more_than(sandbox, tmp_path, 1 << 20, 1 << 19)
    async with await sandbox.files.stream("/tmp/d/z", offset=1 << 19, length=10) as stream:
        assert b"".join([data async for data in stream]) == bytes(10)


@pytest.mark.holes
async def test_a_sparse_file_of_a_terabyte(sandbox: Sandbox, tmp_path: Path) -> None:
    make = "mkdir /tmp/d && cd /tmp/d && echo hello > small && truncate -s 1099511627776 z"
    (await sandbox.run_shell(make)).check()
    await refuses_more_than(sandbox, tmp_path, 1 << 40, 1 << 20)
    async with await sandbox.files.stream("/tmp/d/z", offset=1 << 39, length=10) as stream:
        assert b"".join([data async for data in stream]) == bytes(10)
