"""What outlives interruptions: paused sandboxes, jobs, and what was done in a trajectory."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import subprocess
import sys
import textwrap
import time
from contextlib import aclosing
from dataclasses import replace
from uuid import uuid4

import pytest
from server import Server, backend

import libdsec
import libdsec.sync
from libdsec import DSecClient, DSecContainerRunArgs


async def test_pause_and_resume(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.files.write("/tmp/f", b"kept")
        info = await sandbox.pause(wait=True, max_paused=3600)
        assert info.state == "paused"
        assert info.pause is not None
        assert info.pause.memory_bytes is not None
        assert info.pause.until is not None
        assert (await sandbox.usage()).memory_bytes >= 0
        assert (await client.get(sandbox.id)).state == "paused"
        assert await sandbox.files.read("/tmp/f") == b"kept"
        info = await sandbox.info()
        assert info.state == "running"
        assert info.pause is None
        await sandbox.pause()
        assert (await sandbox.resume()).state == "running"
        await sandbox.pause()
        results = await asyncio.gather(*(sandbox.run_shell(f"echo {i}") for i in range(8)))
        assert [r.text for r in results] == [f"{i}\n" for i in range(8)]


async def test_command_waits_while_paused(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        process = await sandbox.start_shell("echo begun; cat", open_stdin=True)
        async with process:
            await anext(process)
            await sandbox.pause()
            await process.send_all(b"x\n")  # which resumes it
            assert (await process.wait()).text == "begun\nx\n"


async def test_job(server: Server, args: DSecContainerRunArgs) -> None:
    name = f"job {uuid4()}"
    async with DSecClient(server.url, server.key) as client:
        async with await client.create_job(name, labels={"a": "b"}, lease=60) as job:
            args = replace(args, job=name)
            made = [s for s in await client.run_containers(args, 3) if isinstance(s, libdsec.Sandbox)]
            ids = sorted(s.id for s in made)
            assert sorted([i.id async for i in job.sandboxes()]) == ids
            for act, state in ((job.pause, "paused"), (job.pause, "paused"), (job.resume, "running")):
                results = await act()
                assert [r.sandbox_id for r in results] == ids
                assert all(r.state == state and r.error is None for r in results)
            assert [j.name async for j in client.list_jobs(labels={"a": "b"}) if j.name == name] == [name]
            assert (await job.info()).state == "active"
            with pytest.raises(libdsec.ConflictError):
                await client.create_job(name, lease=30)
        assert all(r.state == "stopped" for r in await client.job(name).end())
        assert (await client.job(name).info()).state == "ended"
        with pytest.raises(libdsec.ConflictError):
            await client.run_container(args)
        with pytest.raises(libdsec.ConflictError):
            async with client.job(name):
                raise AssertionError("it has ended")
        with pytest.raises(libdsec.NotFoundError):
            await client.job("none").info()


async def test_attach_by_name(server: Server, args: DSecContainerRunArgs) -> None:
    job = str(uuid4())
    async with DSecClient(server.url, server.key) as client:
        first = await client.attach(job=job, name="a", args=args)
        again = await client.attach(job=job, name="a", args=args)
        other = await client.attach(job=job, name="b", args=args)
        assert first.id == again.id != other.id
        assert (await client.attach(job=job, name="a")).id == first.id
        await first.pause()
        assert (await client.attach(job=job, name="a")).id == first.id
        assert (await client.get(first.id)).state == "paused"
        wrong = replace(args, env={"A": "b"})
        elsewhere = replace(args, job="elsewhere")
        for field, kind, call in (
            ("sandbox_id", libdsec.InvalidError, client.attach()),
            ("name", libdsec.InvalidError, client.attach(job=job)),
            ("job", libdsec.InvalidError, client.attach(name="a", args=args)),
            ("args.job", libdsec.InvalidError, client.attach(job=job, name="c", args=elsewhere)),
            ("name", libdsec.NotFoundError, client.attach(job=job, name="c")),
            ("args", libdsec.ConflictError, client.attach(job=job, name="a", args=wrong)),
        ):
            with pytest.raises(kind) as caught:
                await call
            assert caught.value.field == field
        await first.stop()
        for call in (client.attach(job=job, name="a", args=args), client.attach(job=job, name="a")):
            with pytest.raises(libdsec.ConflictError, match=r"'a' of job .* is stopped.*another name") as e:
                await call
            assert e.value.field == "name"
        await other.stop()


_ROLLOUT = """
import sys
from libdsec.sync import DSecClient, DSecContainerRunArgs

url, key, sandbox_id, steps = sys.argv[1:]
with DSecClient(url, key) as client:
    sandbox = client.attach(sandbox_id)
    with sandbox.trajectory() as trajectory:
        session = sandbox.open_session()
        for step in range(int(steps)):
            result = sandbox.run_shell(f"echo {step} >> /tmp/count; cat /tmp/count; exit {step % 3}")
            sandbox.files.write(f"/tmp/{step}", b"x")
            text = sandbox.files.read("/tmp/count").decode()
            said = session.run("echo x >> /tmp/said; cat /tmp/said").text
            print(step, result.exit_code, *(len(t.split()) for t in (result.text, text, said)), flush=True)
    print("replayed", trajectory.replayed)
"""


async def test_rollout_from_its_beginning(server: Server, args: DSecContainerRunArgs) -> None:
    """A script that is started again gets what it got, and goes on where it was."""

    async def run(steps: int) -> tuple[list[str], int]:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-c",
                textwrap.dedent(_ROLLOUT),
                server.url,
                server.key,
                sandbox.id,
                str(steps),
            ),
            stdout=subprocess.PIPE,
        )
        out, _ = await process.communicate()
        assert process.returncode == 0
        *lines, last = out.decode().splitlines()
        return lines, int(last.split()[1])

    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        first, replayed = await run(4)
        assert replayed == 0
        again, replayed = await run(4)
        assert again == first
        assert replayed == 1 + 4 * 4
        longer, replayed = await run(6)
        assert longer[:4] == first
        assert len(longer) == 6
        assert replayed == 1 + 4 * 4
        assert longer == [f"{i} {i % 3} {i + 1} {i + 1} {i + 1}" for i in range(6)]
        assert (await sandbox.files.read("/tmp/count")).split() == [str(i).encode() for i in range(6)]


async def test_pack(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.files.write("/tmp/kept", b"kept")
        await sandbox.files.write("/tmp/x.log", b"12345")
        await sandbox.files.write("/root/.bash_history", b"ls")
        packed = await sandbox.pack("packed:1", scrub=libdsec.Scrub(remove=["/**/*.log"]))
        assert packed.layer.name == "packed:1"
        assert packed.layer.source == "pack"
        assert packed.report.files > 0
        assert packed.report.frozen > 0
        removed = {r.path: (r.reason, r.files, r.bytes) for r in packed.report.removed}
        assert removed == {"/tmp/x.log": ("path", 1, 5), "/root/.bash_history": ("history", 1, 2)}
        assert [x.name for x in await client.list_layers() if x.digest == packed.layer.digest] == ["packed:1"]
        for scrub, field in (
            (libdsec.Scrub(keep=["relative"]), "scrub.keep[0]"),
            (libdsec.Scrub(secrets="sell"), "scrub.secrets"),
            (libdsec.Scrub(remove="/one"), "scrub.remove"),
        ):
            with pytest.raises(libdsec.InvalidError) as e:
                await sandbox.pack("packed:2", scrub=scrub)
            assert e.value.field == field


async def test_fork_and_migrate(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.files.write("/tmp/f", b"kept")
        made = await sandbox.fork(3, labels={"fork": "yes"})
        ids = {s.id for s in made if isinstance(s, libdsec.Sandbox)}
        assert len(ids) == 3
        assert sandbox.id not in ids
        for s in made:
            assert isinstance(s, libdsec.Sandbox)
            assert (await s.info()).labels["fork"] == "yes"
            await s.stop()
        with pytest.raises(libdsec.InvalidError):
            await sandbox.fork(0)
        with pytest.raises(libdsec.UnsupportedError):
            await sandbox.migrate()
        with sandbox.trajectory():
            await sandbox.run_shell("true")
        with pytest.raises(libdsec.ConflictError):
            await sandbox.migrate(lose_memory=True)
        moved = await sandbox.migrate(lose_memory=True, lose_actions=True)
        assert moved.id != sandbox.id
        assert (await sandbox.migrate(lose_memory=True)).id == moved.id
        assert (await sandbox.info()).id == moved.id
        if args.backend == "container":
            assert await sandbox.files.read("/tmp/f") == b"kept"


async def test_fork_by_the_twin(server: Server, args: DSecContainerRunArgs) -> None:
    def work() -> None:
        with libdsec.sync.DSecClient(server.url, server.key) as client, client.run_container(args) as sandbox:
            (made,) = sandbox.fork()
            assert isinstance(made, libdsec.sync.Sandbox)
            with made, made.migrate(lose_memory=True) as moved:
                assert moved.run_shell("echo works").text == "works\n"
            assert client.get(made.id).ended

    await asyncio.to_thread(work)


async def test_events(server: Server, args: DSecContainerRunArgs) -> None:
    label = str(uuid4())

    async def watch(count: int, cursor: str = "") -> list[libdsec.Event]:
        seen: list[libdsec.Event] = []
        async with aclosing(
            client.events(cursor=cursor, from_start=not cursor, labels={"l": label})
        ) as events:
            async for event in events:
                seen.append(event)
                if len(seen) == count:
                    break
        return seen

    async with DSecClient(server.url, server.key) as client:
        watching = asyncio.create_task(watch(5))
        sandbox = await client.run_container(replace(args, labels={"l": label}))
        await sandbox.pause()
        await sandbox.resume()
        await sandbox.stop()
        seen = await asyncio.wait_for(watching, 60)
        assert [e.state for e in seen] == ["running", "paused", "running", "stopping", "stopped"]
        assert {(e.kind, e.sandbox_id, e.repeated) for e in seen} == {("sandbox", sandbox.id, False)}
        again = await asyncio.wait_for(watch(3, seen[1].cursor), 60)
        assert [e.time for e in again] == [e.time for e in seen[2:]]
        with pytest.raises(libdsec.InvalidError):
            await anext(client.events(cursor="nonsense"))


async def test_webhooks(server: Server) -> None:
    async with DSecClient(server.url, server.key) as client:
        new = await client.create_webhook("https://example.com/hook", states=["failed"])
        assert new.secret.startswith("whsec_")
        assert new.webhook.state == "ok"
        assert (await client.get_webhook(new.webhook.id)).url == "https://example.com/hook"
        assert new.webhook.id in [w.id for w in await client.list_webhooks()]
        for url in ("ftp://example.com", "http://127.0.0.1/", "https://a:b@example.com/", ""):
            with pytest.raises(libdsec.InvalidError) as e:
                await client.create_webhook(url)
            assert e.value.field == "url"
        for _ in range(2):
            await client.delete_webhook(new.webhook.id)
        with pytest.raises(libdsec.NotFoundError):
            await client.get_webhook(new.webhook.id)


def test_verify_webhook() -> None:
    secret = "whsec_" + base64.b64encode(b"k" * 24).decode()
    stamp, body = str(int(time.time())), b'{"a": 1}'
    digest = hmac.new(b"k" * 24, f"id.{stamp}.".encode() + body, hashlib.sha256).digest()
    headers = {
        "Webhook-Id": "id",
        "webhook-timestamp": stamp,
        "Webhook-Signature": "v1,AAAA v1," + base64.b64encode(digest).decode(),
    }
    libdsec.verify_webhook(secret, headers, body)
    for change in ({"Webhook-Id": "other"}, {"webhook-timestamp": "1"}, {"Webhook-Signature": "v1,AAAA"}):
        with pytest.raises(libdsec.DeniedError):
            libdsec.verify_webhook(secret, {**headers, **change}, body)
    with pytest.raises(libdsec.DeniedError):
        libdsec.verify_webhook(secret, headers, body + b" ")
    for key in (b"", b"\0", b"k" * 23, b"k" * 65):  # with which anybody could sign
        digest = hmac.new(key, f"id.{stamp}.".encode() + body, hashlib.sha256).digest()
        forged = {**headers, "Webhook-Signature": "v1," + base64.b64encode(digest).decode()}
        for secret in (base64.b64encode(key).decode(), "whsec_" + base64.b64encode(key).decode()):
            with pytest.raises(libdsec.InvalidError) as caught:
                libdsec.verify_webhook(secret, forged, body)
            assert caught.value.field == "secret"


async def test_trajectory_diverges(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        with sandbox.trajectory("one") as t:
            assert not (await sandbox.run_shell("echo a")).replayed
            assert not await sandbox.files.exists("/tmp/none")
        assert (t.count, t.replayed) == (2, 0)
        with sandbox.trajectory("one") as t:
            assert (await sandbox.run_shell("echo a")).replayed
            assert not await sandbox.files.exists("/tmp/none")
            assert t.replayed >= 1
        with sandbox.trajectory("one"), pytest.raises(libdsec.DivergedError):
            await sandbox.run_shell("echo b")
        with sandbox.trajectory("two"):
            assert not (await sandbox.run_shell("echo b")).replayed
        assert not (await sandbox.run_shell("echo a")).replayed


async def test_log(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.run_shell("echo out; exit 3")
        entries = [e async for e in sandbox.log()]
        assert [(e.seq, e.kind, e.phase) for e in entries] == [
            (1, "create", "event"),
            (2, "start", "begun"),
            (3, "start", "ended"),
        ]
        assert entries[2].begun_seq == 2
        assert entries[2].fields["outcome"]["exit_code"] == 3
        assert await sandbox.log_output(3) == b"out\n"
        assert [e.seq async for e in sandbox.log(from_seq=2, kinds=["start"])] == [2, 3]
        with pytest.raises(libdsec.NotFoundError):
            await sandbox.log_output(1)
        with pytest.raises(libdsec.InvalidError):
            _ = [e async for e in sandbox.log(kinds=["nonsense"])]
        followed = asyncio.create_task(_kinds(sandbox))
        await sandbox.stop()
        assert (await followed)[-1] == "state"


async def _kinds(sandbox: libdsec.Sandbox) -> list[str]:
    return [e.kind async for e in sandbox.log(follow=True)]


async def test_command_outlives_its_caller(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:

        async def run() -> libdsec.ExecResult:
            with sandbox.trajectory():
                return await sandbox.run_shell("echo x >> /tmp/n; echo a; sleep 2; echo b; exit 3")

        left = asyncio.create_task(run())
        while not await sandbox.files.exists("/tmp/n"):  # noqa: ASYNC110 - there is no event of it
            await asyncio.sleep(0.01)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        result = await run()
        assert (result.text, result.exit_code) == ("a\nb\n", 3)
        assert await sandbox.files.read("/tmp/n") == b"x\n"


async def test_replay(server: Server, args: DSecContainerRunArgs) -> None:
    big = b"0123456789" * 30_000
    args = replace(args, env={"GREETING": "hello"})
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.files.write("/tmp/in/seven", b"7\n")
        await sandbox.files.write("/tmp/in/big", big)
        await sandbox.files.mkdir("/tmp/dir")
        await sandbox.files.rename("/tmp/in/seven", "/tmp/dir/seven")
        await sandbox.run_shell('cat /tmp/dir/seven /tmp/in/big; echo "$GREETING" >&2; exit 3')
        await sandbox.exec(["cat"], stdin=big * 5)
        assert await sandbox.files.read("/tmp/in/big") == big
        await sandbox.files.stat("/tmp/in/big")
        assert [e.name for e in await sandbox.files.list("/tmp/dir")] == ["seven"]
        with pytest.raises(libdsec.NotFoundError):
            await sandbox.files.read("/tmp/none")
        await sandbox.files.remove("/tmp/in", recursive=True)
        async with await sandbox.open_session(cwd="/tmp/dir") as session:
            await session.run("X=9")
            assert (await session.run("pwd; echo $X")).text == "/tmp/dir\n9\n"
        beside = await sandbox.start_shell("sleep 100", detach=True)
        await sandbox.run_shell("echo beside")
        await beside.kill()
        await beside.wait()
        begun = [e async for e in sandbox.log() if e.phase == "begun"]
        assert b"GREETING" in await sandbox.log_input(begun[4].seq)
        result = await sandbox.replay()
        assert result.equal, result
        assert result.steps == len(begun), result
        assert result.unended == 0
        assert (await client.get(result.sandbox_id)).state == "stopped"
        assert (await sandbox.replay(until=3, ignore_output=True)).steps == 1
        with pytest.raises(libdsec.InvalidError):
            await sandbox.replay(mask=["("])


# Answers each line after a while: what is typed ahead shows elsewhere.
ECHOES = (
    'while read -r x; do j=0; while [ $j -lt 20000 ]; do j=$((j+1)); done; stty size; echo "got $x"; done'
)


@pytest.mark.parametrize("detach", [False, True])
async def test_replay_of_a_terminal(server: Server, args: DSecContainerRunArgs, detach: bool) -> None:
    command = "cat" if backend() == "fake" else ECHOES
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        p = await sandbox.start_shell(command, pty=(24, 80), open_stdin=True, detach=detach)
        seen = b""
        for i, line in enumerate(("one", "two", "three")):
            await p.write(line + "\n")
            while seen.count(line.encode()) < 2:  # typed, and answered
                event = await anext(p)
                assert isinstance(event, libdsec.Output)
                seen += event.data
            await p.resize(30 + i, 100)
        await p.close_stdin()
        assert (await p.wait()).exit_code == 0
        kinds = [e.kind for e in [e async for e in sandbox.log()] if e.phase == "begun"]
        assert kinds.count("resize") == 3
        result = await sandbox.replay()
        assert result.equal, result
        assert result.steps == len(kinds)


async def test_replay_finds_a_difference(server: Server, args: DSecContainerRunArgs) -> None:
    chance = "echo one; echo at $(od -An -N8 -tx1 /dev/urandom)"
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.run_shell("echo same")
        await sandbox.run_shell(chance)
        result = await sandbox.replay(keep=True)
        assert (await client.get(result.sandbox_id)).state == "running"
        await (await client.attach(result.sandbox_id)).stop()
        assert result.equal == (backend() == "fake")  # which has nothing that is chance
        if result.difference is not None:
            assert (result.difference.seq, result.difference.what) == (4, "stdout")
            assert result.difference.expected.startswith("line 2: 'at ")
            assert result.difference.got != result.difference.expected
        assert (await sandbox.replay(mask=["at .*"])).equal
        assert (await sandbox.replay(ignore_output=True)).steps == 2
        await sandbox.stop()
        assert (await client.replay(sandbox.id, ignore_output=True)).steps == 2
