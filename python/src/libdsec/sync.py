"""The SDK without async: the same names, methods and results as `libdsec`, each call blocking.

    from libdsec.sync import DSecClient, DSecContainerRunArgs

    with DSecClient() as client:
        with client.run_container(DSecContainerRunArgs(container_image="base")) as sandbox:
            print(sandbox.run_shell("echo hello").text)

A client runs the calls in an event loop of its own, in a thread of its own. It
may be used from any number of threads, from code that runs inside another
event loop (which it blocks, as every blocking call does), and in the child of
a fork. ^C during a call cancels it, which kills the command it waits for.
"""

from __future__ import annotations

import asyncio
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from typing_extensions import Self

import libdsec
from libdsec import _client, _files, _job, _process, _sandbox, _session
from libdsec._errors import DSecError
from libdsec._types import DSecContainerRunArgs, Gap, Output

A = TypeVar("A")
Of = TypeVar("Of", covariant=True)
B = TypeVar("B")
T = TypeVar("T")
P = ParamSpec("P")


class _Loop:
    """An event loop in a thread, started when it is needed, once in each process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Run work in the loop and wait for it; an exception here cancels it there."""

        async def main() -> T:
            return await work()

        loop = self._running()
        if threading.current_thread() is self._thread:
            raise RuntimeError(
                "a blocking call from inside the client's own event loop would wait for itself"
            )
        future = asyncio.run_coroutine_threadsafe(main(), loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                self._settle(loop)
            raise

    def stop(self) -> None:
        """Cancel what still runs in the loop, and end it and its thread."""

        async def settle() -> None:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

        with self._lock:
            loop, thread, pid = self._loop, self._thread, self._pid
            self._loop = self._thread = None
        if loop is None or thread is None or pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(settle(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()

    def _settle(self, loop: asyncio.AbstractEventLoop) -> None:
        # The cancelled call closes its connection in the loop's next rounds;
        # a program that ends at once must not end before that.
        async def rounds() -> None:
            for _ in range(3):
                await asyncio.sleep(0)

        try:
            asyncio.run_coroutine_threadsafe(rounds(), loop).result(timeout=5)
        except (CancelledError, TimeoutError):
            pass

    def _running(self) -> asyncio.AbstractEventLoop:
        if self._pid != os.getpid():
            # Of a fork's child only this thread lives. The inherited loop and
            # lock are the parent's; they are left alone, and kept.
            _inherited.append((self._loop, self._lock, self._thread))
            self._loop, self._lock, self._pid = None, threading.Lock(), os.getpid()
        with self._lock:
            if self._loop is None:
                loop = self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=loop.run_forever, name="libdsec-loop", daemon=True)
                self._thread.start()
            return self._loop


_inherited: list[object] = []


class _Twin(Generic[Of]):
    """The blocking side of an async object."""

    def __init__(self, of: Of, loop: _Loop) -> None:
        self._async = of
        self._loop = loop

    def __repr__(self) -> str:
        return repr(self._async)


class _Scope(_Twin[Of], ABC):
    # A twin that ends with the `with` block that it was opened for.

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


def _blocking(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[_Twin[A], P], T]:
    @wraps(method)
    def call(self: _Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return self._loop.run(lambda: method(self._async, *args, **kwargs))

    return call


def _making(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, B]], twin: Callable[[B, _Loop], T]
) -> Callable[Concatenate[_Twin[A], P], T]:
    @wraps(method)
    def call(self: _Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> T:
        return twin(self._loop.run(lambda: method(self._async, *args, **kwargs)), self._loop)

    return call


def _iterating(
    method: Callable[Concatenate[A, P], AsyncIterator[T]],
) -> Callable[Concatenate[_Twin[A], P], Iterator[T]]:
    @wraps(method)
    def call(self: _Twin[A], /, *args: P.args, **kwargs: P.kwargs) -> Iterator[T]:
        iterator = method(self._async, *args, **kwargs)
        try:
            while True:
                try:
                    item = self._loop.run(iterator.__anext__)
                except StopAsyncIteration:
                    return
                yield item
        finally:
            close = getattr(iterator, "aclose", None)
            if close is not None:
                self._loop.run(close)

    return call


class ByteStream(_Scope[_files.ByteStream]):
    """See `libdsec.ByteStream`."""

    receive = _blocking(_files.ByteStream.receive)

    def __iter__(self) -> Iterator[bytes]:
        while (data := self.receive()) is not None:
            yield data

    def close(self) -> None:
        """Stop the transfer."""
        self._loop.run(_later(self._async.close))


class Files(_Twin[_files.Files]):
    """See `libdsec.Files`."""

    stat = _blocking(_files.Files.stat)
    exists = _blocking(_files.Files.exists)
    list = _blocking(_files.Files.list)
    scan = _iterating(_files.Files.scan)
    mkdir = _blocking(_files.Files.mkdir)
    rename = _blocking(_files.Files.rename)
    remove = _blocking(_files.Files.remove)
    read = _blocking(_files.Files.read)
    read_text = _blocking(_files.Files.read_text)
    stream = _making(_files.Files.stream, ByteStream)
    write = _blocking(_files.Files.write)
    upload = _blocking(_files.Files.upload)
    upload_tar = _blocking(_files.Files.upload_tar)
    download = _blocking(_files.Files.download)
    download_tar = _making(_files.Files.download_tar, ByteStream)


class Process(_Scope[_process.Process]):
    """See `libdsec.Process`."""

    wait = _blocking(_process.Process.wait)
    text = _iterating(_process.Process.text)
    write = _blocking(_process.Process.write)
    send_all = _blocking(_process.Process.send_all)
    close_stdin = _blocking(_process.Process.close_stdin)
    send_signal = _blocking(_process.Process.send_signal)
    kill = _blocking(_process.Process.kill)
    resize = _blocking(_process.Process.resize)

    @property
    def process_id(self) -> int:
        """The platform's number of the process."""
        return self._async.process_id

    @property
    def pid(self) -> int:
        """Process number inside the sandbox; 0 where it is not known yet."""
        return self._async.pid

    @property
    def next_seq(self) -> int:
        """Number of the byte that is read next."""
        return self._async.next_seq

    @property
    def result(self) -> libdsec.ExecResult | None:
        """How the command ended, with all output that came through this handle; None before its end."""
        return self._async.result

    def __iter__(self) -> Iterator[Output | Gap]:
        while True:
            try:
                event = self._loop.run(self._async.__anext__)
            except StopAsyncIteration:
                return
            yield event

    def close(self) -> None:
        """Stop watching. Kills a command that was started without `detach` and has not ended."""
        self._loop.run(_later(self._async.close))


class Session(_Scope[_session.Session]):
    """See `libdsec.Session`. `on_output` is called in the client's thread."""

    run = _blocking(_session.Session.run)
    interrupt = _blocking(_session.Session.interrupt)
    close = _blocking(_session.Session.close)

    @property
    def session_id(self) -> str:
        """To attach by: `sandbox.session(session_id)`."""
        return self._async.session_id


class Sandbox(_Twin[_sandbox.Sandbox]):
    """See `libdsec.Sandbox`."""

    info = _blocking(_sandbox.Sandbox.info)
    stop = _blocking(_sandbox.Sandbox.stop)
    extend = _blocking(_sandbox.Sandbox.extend)
    pause = _blocking(_sandbox.Sandbox.pause)
    resume = _blocking(_sandbox.Sandbox.resume)
    pack = _blocking(_sandbox.Sandbox.pack)
    fork = _making(_sandbox.Sandbox.fork, lambda made, loop: _each(made, loop))
    migrate = _making(_sandbox.Sandbox.migrate, lambda moved, loop: Sandbox(moved, loop))
    usage = _blocking(_sandbox.Sandbox.usage)
    log = _iterating(_sandbox.Sandbox.log)
    log_output = _blocking(_sandbox.Sandbox.log_output)
    log_input = _blocking(_sandbox.Sandbox.log_input)
    replay = _blocking(_sandbox.Sandbox.replay)
    run_shell = _blocking(_sandbox.Sandbox.run_shell)
    exec = _blocking(_sandbox.Sandbox.exec)
    start = _making(_sandbox.Sandbox.start, Process)
    start_shell = _making(_sandbox.Sandbox.start_shell, Process)
    processes = _blocking(_sandbox.Sandbox.processes)
    open_session = _making(_sandbox.Sandbox.open_session, Session)
    sessions = _blocking(_sandbox.Sandbox.sessions)

    def __init__(self, of: _sandbox.Sandbox, loop: _Loop) -> None:
        super().__init__(of, loop)
        self.files = Files(of.files, loop)

    @property
    def id(self) -> str:
        """Names the sandbox."""
        return self._async.id

    @property
    def launch(self) -> str:
        """How its create was served: warm or cold; empty for one attached to."""
        return self._async.launch

    def process(self, process_id: int, *, from_seq: int = 0) -> Process:
        """Return a handle on a process that was started before, here or elsewhere."""
        return Process(self._async.process(process_id, from_seq=from_seq), self._loop)

    def trajectory(self, name: str = "") -> libdsec.Trajectory:
        """See `libdsec.Sandbox.trajectory`."""
        return self._async.trajectory(name)

    def session(self, session_id: str) -> Session:
        """Return a handle on a session that was opened before, here or elsewhere."""
        return Session(self._async.session(session_id), self._loop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.stop()


class Job(_Twin[_job.Job]):
    """See `libdsec.Job`. The heartbeats of a `with` block come from the client's thread."""

    info = _blocking(_job.Job.info)
    heartbeat = _blocking(_job.Job.heartbeat)
    pause = _blocking(_job.Job.pause)
    resume = _blocking(_job.Job.resume)
    kill = _blocking(_job.Job.kill)
    end = _blocking(_job.Job.end)
    sandboxes = _iterating(_job.Job.sandboxes)

    @property
    def name(self) -> str:
        """Names the job within the project."""
        return self._async.name

    def __enter__(self) -> Self:
        self._loop.run(self._async.__aenter__)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._loop.run(lambda: self._async.__aexit__(kind, error, tb))


def _each(items: list[_sandbox.Sandbox | DSecError], loop: _Loop) -> list[Sandbox | DSecError]:
    return [i if isinstance(i, DSecError) else Sandbox(i, loop) for i in items]


def _later(close: Callable[[], None]) -> Callable[[], Coroutine[Any, Any, None]]:
    async def run() -> None:
        close()

    return run


class DSecClient(_Twin[_client.DSecClient]):
    """See `libdsec.DSecClient`."""

    run_container = _making(_client.DSecClient.run_container, Sandbox)
    run_containers = _making(_client.DSecClient.run_containers, _each)
    attach = _making(_client.DSecClient.attach, Sandbox)
    replay = _blocking(_client.DSecClient.replay)
    get = _blocking(_client.DSecClient.get)
    list = _iterating(_client.DSecClient.list)
    kill = _blocking(_client.DSecClient.kill)
    create_job = _making(_client.DSecClient.create_job, Job)
    list_jobs = _iterating(_client.DSecClient.list_jobs)
    events = _iterating(_client.DSecClient.events)
    create_webhook = _blocking(_client.DSecClient.create_webhook)
    get_webhook = _blocking(_client.DSecClient.get_webhook)
    list_webhooks = _blocking(_client.DSecClient.list_webhooks)
    delete_webhook = _blocking(_client.DSecClient.delete_webhook)
    import_layer = _blocking(_client.DSecClient.import_layer)
    import_git = _blocking(_client.DSecClient.import_git)
    import_image = _blocking(_client.DSecClient.import_image)
    export_layers = _blocking(_client.DSecClient.export_layers)
    list_layers = _blocking(_client.DSecClient.list_layers)
    inspect_layer = _blocking(_client.DSecClient.inspect_layer)
    prefetch_layer = _blocking(_client.DSecClient.prefetch_layer)
    tag_layer = _blocking(_client.DSecClient.tag_layer)
    remove_layer = _blocking(_client.DSecClient.remove_layer)
    create_key = _blocking(_client.DSecClient.create_key)
    list_keys = _blocking(_client.DSecClient.list_keys)
    revoke_key = _blocking(_client.DSecClient.revoke_key)
    collect_layers = _blocking(_client.DSecClient.collect_layers)

    def __init__(
        self,
        url: str | None = None,
        api_key: str | None = None,
        *,
        key_file: str | os.PathLike[str] | None = None,
        ca_file: str | os.PathLike[str] | None = None,
        retries: int = 4,
        call_timeout: float | None = 120,
    ) -> None:
        client = _client.DSecClient(
            url, api_key, key_file=key_file, ca_file=ca_file, retries=retries, call_timeout=call_timeout
        )
        super().__init__(client, _Loop())

    def job(self, name: str) -> Job:
        """Return the handle of a job that is there already."""
        return Job(self._async.job(name), self._loop)

    def open(self) -> Self:
        """Check that the server answers and knows the key. Other methods work without it, too."""
        self._loop.run(self._async.open)
        return self

    def close(self) -> None:
        """Close the connections and end the client's thread."""
        self._loop.run(self._async.close)
        self._loop.stop()

    def __enter__(self) -> Self:
        try:
            return self.open()
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.close()


__all__ = [
    "ByteStream",
    "DSecClient",
    "DSecContainerRunArgs",
    "Files",
    "Job",
    "Process",
    "Sandbox",
    "Session",
]
