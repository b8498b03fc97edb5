"""The server dies without a word under running commands, and they go on, once each."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from server import _binary, _unmount, backend, rootfs

import libdsec
from libdsec import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.skipif(
    "DSEC_TEST_URL" in os.environ, reason="a server that is not ours is not killed"
)


class Killable:
    """A server whose sandboxes outlive it: on the fake backend the half of it that clients talk to."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self._dsec = _binary(work)
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            self._listen = f"127.0.0.1:{s.getsockname()[1]}"
        self.url = f"http://{self._listen}"
        self._edge = self._run("edge", "--backend", "fake") if backend() == "fake" else None
        self.start()

    def start(self) -> None:
        if self._edge is not None:
            self._server = self._run("apiserver", "--listen", self._listen)
        else:
            self._server = self._run("up", "--backend", backend(), "--listen", self._listen)

    def kill(self) -> None:
        self._server.kill()
        self._server.communicate()

    def restart(self) -> None:
        self._server.terminate()
        self._server.communicate(timeout=60)
        assert self._server.returncode == 0
        self.start()

    def stop(self) -> None:
        for process in (self._server, self._edge):
            if process is not None:
                process.terminate()
                process.communicate(timeout=30)
                assert process.returncode == 0

    @property
    def key(self) -> str:
        return (self.work / "data" / "admin.key").read_text().strip()

    def _run(self, verb: str, *args: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DSEC_")}
        environment["DSEC_CONTAINER_DISK_IMAGE_BYTES"] = str(1 << 30)
        environment["DSEC_EDGE_METRICS_LISTEN"] = ""
        process = subprocess.Popen(
            [self._dsec, verb, *args, "--data-dir", self.work / "data", "--run-dir", self.work / "run"],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready "), verb
        return process


@pytest.fixture
def killable(tmp_path: Path) -> Iterator[Killable]:
    server = Killable(tmp_path)
    yield server
    server.stop()
    _unmount(tmp_path)
    shutil.rmtree(tmp_path / "data")


@asynccontextmanager
async def sandbox_on(server: Killable) -> AsyncIterator[libdsec.Sandbox]:
    async with DSecClient(server.url, server.key) as client:
        image = ""
        if backend() != "fake":
            image = "restart"
            await client.import_layer(rootfs(), name=image)
        args = DSecContainerRunArgs(container_image=image, backend=backend())
        async with await client.run_container(args, timeout=120) as sandbox:
            yield sandbox


async def test_commands_go_on_over_a_killed_server(killable: Killable) -> None:
    async with sandbox_on(killable) as sandbox:
        command = "echo ran >> /tmp/ran; echo before; cat; sleep 3; echo after; exit 3"
        running = asyncio.create_task(sandbox.run_shell(command, stdin="input\n"))
        process = await sandbox.start_shell(command)
        first = await process.__anext__()
        assert isinstance(first, libdsec.Output)
        while len(await sandbox.processes()) < 2:  # noqa: ASYNC110 - asks the server
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(process.wait())
        killable.kill()
        await asyncio.to_thread(killable.start)
        if backend() == "fake":
            # To the edge, which lives, the death of the server is that of all callers: it
            # kills their commands, and says so in place of an outcome, or they were in time.
            for task in (running, waiting):
                try:
                    assert (await task).exit_code == 3
                except libdsec.OutcomeUnknownError as e:
                    assert "was killed" in e.message  # noqa: PT017
            return
        result = await running
        assert (result.exit_code, result.stdout) == (3, b"before\ninput\nafter\n")
        result = await waiting
        assert (result.exit_code, result.stdout, result.missed_bytes) == (3, b"before\nafter\n", 0)
        assert await sandbox.files.read_text("/tmp/ran") == "ran\nran\n"


async def test_session_over_a_killed_server(killable: Killable) -> None:
    # It goes on with the next command, on the handle that was there before; how the one
    # ended that was under way is not known, which is what its error says, and it ran once.
    async with sandbox_on(killable) as sandbox:
        idle, busy = await sandbox.open_session(), await sandbox.open_session()
        for session in (idle, busy):
            await session.run("cd /tmp; KEPT=yes")
        begun = asyncio.Event()
        command = "echo ran >> /tmp/ran; echo begun; sleep 2; echo over >> /tmp/ran"
        running = asyncio.create_task(busy.run(command, on_output=lambda _: begun.set()))
        await begun.wait()
        killable.kill()
        with pytest.raises(libdsec.OutcomeUnknownError):
            await running
        await asyncio.to_thread(killable.start)
        assert (await idle.run("echo $KEPT $PWD")).text == "yes /tmp\n"
        after = await busy.run("echo $KEPT $PWD; cat /tmp/ran")
        # Where the edge lives its callers have gone, and their commands are interrupted.
        ran = "ran\n" if backend() == "fake" else "ran\nover\n"
        assert after.text == "yes /tmp\n" + ran


async def test_command_that_is_cancelled_after_a_restart_is_killed(killable: Killable) -> None:
    async with sandbox_on(killable) as sandbox:
        process = await sandbox.start_shell("echo x; sleep 1000")
        await process.__anext__()
        waiting = asyncio.create_task(process.wait())
        killable.kill()
        await asyncio.to_thread(killable.start)
        # Attached again it would be, and is cancelled before or after that.
        await sandbox.info()
        waiting.cancel()
        with pytest.raises((asyncio.CancelledError, libdsec.OutcomeUnknownError)):
            await waiting
        while True:
            (info,) = await sandbox.processes()
            if info.ended:
                break
            await asyncio.sleep(0.01)
        # By the server, whose caller has gone, or by the SDK, whose stream was not there.
        assert "was killed" in info.fault if info.outcome is None else info.outcome.signal == 9


async def test_calls_wait_for_a_server_that_is_restarted(killable: Killable) -> None:
    # In order, as an upgrade does, while a command runs that holds its end up: what has
    # numbers does not fail, and is done once; of the rest only what was under way.
    async with sandbox_on(killable) as sandbox:
        session = await sandbox.open_session()
        long = await sandbox.start_shell("sleep 3", detach=True)
        restarted = asyncio.Event()
        steps = 0

        async def work() -> None:
            nonlocal steps
            with sandbox.trajectory() as trajectory:
                last = False
                while not last:
                    last = restarted.is_set()
                    steps += 1
                    await sandbox.run_shell(f"echo {steps} >> /tmp/ran")
                    await sandbox.files.write("/tmp/written", str(steps))
                assert trajectory.count == 2 * steps

        async def talk() -> None:
            last = False
            while not last:
                last = restarted.is_set()
                with suppress(libdsec.OutcomeUnknownError):
                    await session.run("true")

        async def write() -> None:
            last = False
            while not last:
                last = restarted.is_set()
                with suppress(libdsec.OutcomeUnknownError):
                    await sandbox.files.write("/tmp/x", b"x")

        tasks = [asyncio.create_task(f()) for f in (work, talk, write)]
        waiting = asyncio.create_task(long.wait())
        await sandbox.run_shell("true")
        await asyncio.to_thread(killable.restart)
        restarted.set()
        await asyncio.gather(*tasks)
        assert (await waiting).exit_code == 0
        ran = await sandbox.files.read_text("/tmp/ran")
        assert ran.split() == [str(i + 1) for i in range(steps)]
        assert await sandbox.files.read_text("/tmp/written") == str(steps)
