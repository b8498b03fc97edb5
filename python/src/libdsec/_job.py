"""All sandboxes of a training or evaluation run at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import suppress
from types import TracebackType

from typing_extensions import Self

from libdsec import _connect
from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._errors import ConflictError, DSecError, NotFoundError
from libdsec._jobtypes import JobInfo, JobResult
from libdsec._proto.dsec.v1 import job_pb2, sandbox_pb2
from libdsec._rpc import Rpc
from libdsec._types import SandboxInfo

_PAGE = 1000


class Job:
    """A job, known by its name: the sandboxes that name it in their create.

    `async with` sends heartbeats that keep its lease, until the block ends; the
    job and its sandboxes stay then, for as long as the lease lasts. Where the
    job ended meanwhile, the end of the block raises `ConflictError`. What blocks the
    event loop for longer than the lease keeps the heartbeats back: it belongs into a
    thread (`asyncio.to_thread`).

    Attributes:
        name: Names the job within the project.
    """

    def __init__(self, rpc: Rpc, name: str) -> None:
        self._rpc = rpc
        self.name = c.text(name, "name")
        self._heart: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<Job {self.name!r}>"

    async def __aenter__(self) -> Self:
        info = await self.heartbeat()
        if info.lease:
            self._heart = asyncio.create_task(self._beat(info.lease / 3))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        heart, self._heart = self._heart, None
        if heart is None:
            return
        ended = heart.done() and not heart.cancelled() and heart.exception()
        heart.cancel()
        with suppress(asyncio.CancelledError, DSecError):
            await heart
        if ended and error is None:
            raise ended

    async def _beat(self, every: float) -> None:
        while True:
            await asyncio.sleep(every)
            try:
                await self.heartbeat()
            except (ConflictError, NotFoundError):
                raise
            except DSecError:
                # The server may be on its way back; the lease has two thirds of its time left.
                continue

    async def info(self) -> JobInfo:
        """Return the state of the job.

        Raises:
            NotFoundError: No job was made of that name.
        """
        return c.job_info((await self._rpc.unary(m.GET_JOB, job_pb2.GetJobRequest(name=self.name))).job)

    async def heartbeat(self) -> JobInfo:
        """Have the lease begin anew; a job that had expired is active again.

        Raises:
            ConflictError: The job has ended.
        """
        request = job_pb2.HeartbeatRequest(name=self.name)
        return c.job_info((await self._rpc.unary(m.HEARTBEAT, request)).job)

    async def pause(
        self, *, wait: bool = False, max_paused: float | None = None, count_lifetime: bool = False
    ) -> list[JobResult]:
        """Pause every sandbox of the job; see `Sandbox.pause`.

        Returns:
            What became of each. One that failed is no exception: see `JobResult.error`.
        """
        request = job_pb2.PauseJobRequest(
            name=self.name, options=c.pause_options(wait, max_paused, count_lifetime)
        )
        return _results((await self._rpc.unary(m.PAUSE_JOB, request)).items)

    async def resume(self) -> list[JobResult]:
        """Resume every sandbox of the job. Using one does that too, for that one."""
        request = job_pb2.ResumeJobRequest(name=self.name)
        return _results((await self._rpc.unary(m.RESUME_JOB, request)).items)

    async def kill(self) -> list[JobResult]:
        """Kill every sandbox of the job, which itself goes on."""
        return _results((await self._rpc.unary(m.KILL_JOB, job_pb2.KillJobRequest(name=self.name))).items)

    async def end(self) -> list[JobResult]:
        """End the job and kill its sandboxes. Nothing can be made in it any more."""
        return _results((await self._rpc.unary(m.END_JOB, job_pb2.EndJobRequest(name=self.name))).items)

    async def sandboxes(self) -> AsyncIterator[SandboxInfo]:
        """Yield the sandboxes of the job that have not ended."""
        request = sandbox_pb2.ListRequest(job=self.name, page_size=_PAGE)
        while True:
            page = await self._rpc.unary(m.LIST, request)
            for sandbox in page.sandboxes:
                yield c.sandbox_info(sandbox)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token


def _results(items: Iterable[job_pb2.JobItem]) -> list[JobResult]:
    return [
        JobResult(
            sandbox_id=i.sandbox_id,
            state=i.state,
            error=_connect.error_of(i.error.detail, i.error.message) if i.HasField("error") else None,
        )
        for i in items
    ]
