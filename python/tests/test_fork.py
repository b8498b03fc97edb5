"""A process that used a client and forks: the child must work, and the parent must not notice."""

from __future__ import annotations

import asyncio
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from server import Server

import libdsec
import libdsec.sync
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox


def start(child: Callable[[], object]) -> int:
    """Run child in a forked process and return its number."""
    with warnings.catch_warnings():
        # Python warns where threads are running; that the child works all the same is what is tested.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        status = 1
        try:
            child()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def fork(child: Callable[[], object]) -> int:
    """Run child in a forked process and return its exit status."""
    return os.waitstatus_to_exitcode(os.waitpid(start(child), 0)[1])


async def fork_beside(child: Callable[[], object]) -> int:
    """Do the same from the running loop, which goes on meanwhile."""
    pid = start(child)
    return os.waitstatus_to_exitcode((await asyncio.to_thread(os.waitpid, pid, 0))[1])


def fresh_loop(work: Coroutine[Any, Any, object]) -> object:
    """Run work as a forked child does: the parent's loop is none of it."""
    asyncio.set_event_loop(None)
    return asyncio.run(work)


async def test_child_of_a_running_loop(server: Server, args: DSecContainerRunArgs) -> None:
    async with (
        DSecClient(server.url, server.key) as client,
        await client.run_container(args) as sandbox,
        await sandbox.open_session() as session,
    ):
        await session.run("export A=parent")
        # In the middle of everything: kept connections, a stream, an open session, a running command.
        process = await sandbox.start_shell("echo first; cat", open_stdin=True)
        await process.__anext__()
        waiting = asyncio.create_task(sandbox.run_shell("sleep 0.2; echo parent"))
        await asyncio.sleep(0)

        async def child() -> None:
            assert (await sandbox.run_shell("echo child")).text == "child\n"
            assert (await session.run("echo $A")).text == "parent\n"
            results = await asyncio.gather(*(sandbox.exec(["echo", str(i)]) for i in range(20)))
            assert [r.text for r in results] == [f"{i}\n" for i in range(20)]
            process.close()  # inherited: must not touch the parent's connection
            await client.close()

        assert await fork_beside(lambda: fresh_loop(child())) == 0
        assert (await waiting).text == "parent\n"
        await process.write("second\n")
        await process.close_stdin()
        assert (await process.wait()).stdout == b"first\nsecond\n"
        assert (await session.run("echo $A")).text == "parent\n"


async def test_many_children_at_once(server: Server, args: DSecContainerRunArgs) -> None:
    async with DSecClient(server.url, server.key) as client, await client.run_container(args) as sandbox:
        await sandbox.run_shell("true")

        async def child() -> None:
            for i in range(5):
                assert (await sandbox.exec(["echo", str(i)])).text == f"{i}\n"

        statuses = await asyncio.gather(*(fork_beside(lambda: fresh_loop(child())) for _ in range(8)))
        assert statuses == [0] * 8
        assert (await sandbox.run_shell("echo parent")).text == "parent\n"


def test_child_of_the_blocking_twin(server: Server, args: DSecContainerRunArgs) -> None:
    with libdsec.sync.DSecClient(server.url, server.key) as client, client.run_container(args) as sandbox:
        assert sandbox.run_shell("echo parent").text == "parent\n"

        def child() -> None:
            assert sandbox.run_shell("echo child").text == "child\n"
            assert fork(lambda: sandbox.run_shell("echo grandchild").check()) == 0
            client.close()

        assert fork(child) == 0
        assert sandbox.run_shell("echo parent").text == "parent\n"


def test_client_of_several_loops(server: Server, args: DSecContainerRunArgs) -> None:
    client = DSecClient(server.url, server.key)
    ids = []

    async def one() -> None:
        sandbox = await client.run_container(args)
        ids.append(sandbox.id)
        assert (await sandbox.run_shell("echo x")).text == "x\n"
        await client.close()

    async def end() -> None:
        for i in ids:
            await client.kill(i)
        await client.close()

    for _ in range(3):
        asyncio.run(one())
    asyncio.run(end())


async def test_blocking_twin_inside_a_running_loop(server: Server, args: DSecContainerRunArgs) -> None:
    with libdsec.sync.DSecClient(server.url, server.key) as client, client.run_container(args) as sandbox:
        assert sandbox.run_shell("echo x").text == "x\n"


def test_blocking_twin_from_many_threads(server: Server, args: DSecContainerRunArgs) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with (
        libdsec.sync.DSecClient(server.url, server.key) as client,
        client.run_container(args) as sandbox,
        ThreadPoolExecutor(50) as threads,
    ):
        results = list(threads.map(lambda i: sandbox.exec(["echo", str(i)]).text, range(200)))
    assert results == [f"{i}\n" for i in range(200)]


@pytest.mark.parametrize("soft", [256])
def test_few_descriptors(server: Server, args: DSecContainerRunArgs, soft: int) -> None:
    """More calls at once than the process may open descriptors: they wait for one another."""

    async def run() -> None:
        async with DSecClient(server.url, server.key) as client:
            items = await client.run_containers(args, 10)
            sandboxes = [s for s in items if isinstance(s, Sandbox)]
            results = await asyncio.gather(
                *(sandboxes[i % len(sandboxes)].exec(["echo", str(i)]) for i in range(500))
            )
            assert [r.text for r in results] == [f"{i}\n" for i in range(500)]
            await asyncio.gather(*(s.stop() for s in sandboxes))

    def child() -> None:
        import resource

        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, soft))
        asyncio.run(run())

    assert fork(child) == 0
