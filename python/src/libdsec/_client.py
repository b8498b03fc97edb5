"""The client: where sandboxes come from."""

from __future__ import annotations

import builtins
import hashlib
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from types import TracebackType

from typing_extensions import Self

from libdsec import _config, _connect, _events
from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._admin import Collected, Key, NewKey
from libdsec._errors import ConflictError, DSecError, InternalError, InvalidError, NotFoundError
from libdsec._events import Event, event_filter
from libdsec._job import Job
from libdsec._jobtypes import JobInfo, ReplayResult
from libdsec._layers import LayerCalls
from libdsec._proto.dsec.v1 import admin_pb2, job_pb2, sandbox_pb2
from libdsec._rpc import Rpc
from libdsec._sandbox import Sandbox
from libdsec._types import DSecContainerRunArgs, SandboxInfo
from libdsec._webhooks import WebhookCalls

_PAGE = 1000
# Of sandboxes, those that have ended included.
_STATES = ("pending", "starting", "running", "paused", "stopping", "stopped", "failed", "lost")


class DSecClient(LayerCalls, WebhookCalls):
    """A connection to a dsec server.

    One client serves any number of calls at once, from any number of event
    loops, and goes on working in the child of a fork. Every method raises a
    `DSecError` where the platform cannot do what is asked.

    Args:
        url: Address of the server; else DSEC_URL, else http://127.0.0.1:7321.
        api_key: The key; else DSEC_API_KEY, else the content of key_file.
        key_file: A file that holds the key; else DSEC_KEY_FILE, else
            /var/lib/dsec/admin.key, which `dsec up` writes.
        ca_file: Certificates that an https server is checked against; else the system's.
        retries: How often a call is sent again that the server did not accept
            (`exhausted`, `unavailable`), with growing random pauses. Commands
            are never sent again.
        call_timeout: Seconds after which a call raises `RequestTimeout`, its
            retries included; None is never. Calls that take as long as a
            command, a create or a transfer does have bounds of their own.
    """

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
        if not isinstance(retries, int) or not 0 <= retries <= 100:
            raise InvalidError(f"want a whole number from 0 to 100, got {retries!r}", field="retries")
        config = _config.resolve(url, api_key, key_file, ca_file)
        self._backend = config.backend
        self._rpc = Rpc(config, retries, call_timeout)

    def __repr__(self) -> str:
        return f"<DSecClient {self._rpc.url}>"

    async def open(self) -> Self:
        """Check that the server answers and knows the key. Other methods work without it, too.

        Raises:
            UnavailableError: The server cannot be reached.
            UnauthenticatedError: It does not know the key.
        """
        await self._rpc.unary(m.LIST, sandbox_pb2.ListRequest(page_size=1))
        return self

    async def close(self) -> None:
        """Close the connections. Commands that are being waited for are killed; sandboxes go on."""
        await self._rpc.close()

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()

    async def run_container(
        self, args: DSecContainerRunArgs, *, timeout: float | None = None, request_id: str = ""
    ) -> Sandbox:
        """Make a sandbox; return when it takes commands.

        Args:
            args: What to make.
            timeout: Seconds that this may take.
            request_id: A name for this create, at most 128 characters. The
                same one with the same args gives the same sandbox, so that a
                caller who lost the answer can ask again; with other args it
                is a conflict. Empty: a new one.

        Raises:
            RequestTimeout: The time is over. A sandbox that is made all the
                same ends by its idle timeout; asking again with the same
                request_id returns it.
            ConflictError: The request_id was used with other args.
            NotFoundError: A layer is not there.
            UnsupportedError: A network rule, or the backend, that the server cannot offer.
        """
        request = c.create_request(args, request_id or uuid.uuid4().hex, self._backend)
        try:
            response = await self._rpc.unary(m.CREATE, request, timeout)
        except DSecError as e:
            raise c.of_layers(e, args) from None
        return self._sandbox(response)

    async def run_containers(
        self,
        args: DSecContainerRunArgs,
        count: int,
        *,
        timeout: float | None = None,
        request_id: str = "",
    ) -> builtins.list[Sandbox | DSecError]:
        """Make `count` sandboxes alike in one call.

        Returns:
            For each the sandbox, or the error that kept it from being made.
            An error of the whole call is raised.
        """
        request = sandbox_pb2.BatchCreateRequest(
            template=c.create_request(args, request_id or uuid.uuid4().hex, self._backend),
            count=c.int32(count, "count"),
        )
        try:
            response = await self._rpc.unary(m.BATCH_CREATE, request, timeout)
        except DSecError as e:
            raise c.of_layers(e, args) from None
        if len(response.items) != count:
            raise InternalError(f"the server answered for {len(response.items)} sandboxes, want {count}")
        return [self._item(i, args) for i in response.items]

    async def attach(
        self,
        sandbox_id: str = "",
        *,
        job: str = "",
        name: str = "",
        args: DSecContainerRunArgs | None = None,
        timeout: float | None = None,
    ) -> Sandbox:
        """Return the handle of a sandbox that is there already, by its ID or by job and name.

        By job and name it is made where it is not there: a program that is started
        again gets the sandboxes that it had.

        Args:
            sandbox_id: Of the sandbox.
            job: In place of it: the job that the sandbox belongs to.
            name: Tells the sandboxes of a job apart.
            args: What to make where it is not there; the same at each call. None: nothing.
            timeout: Seconds that making it may take.

        Raises:
            NotFoundError: There is none of that ID; or of that name, and there are no args.
            ConflictError: It has ended, and another is made under another name only (field
                `name`); or it is there, made with other args (field `args`).
        """
        if not sandbox_id:
            return await self._attach_named(job, name, args, timeout)
        if job or name or args is not None:
            raise InvalidError("want it alone, or job, name and args in its place", field="sandbox_id")
        info = await self.get(sandbox_id)
        if info.ended:
            raise ConflictError(f"the sandbox is {info.state}: {info.reason}", field="sandbox_id")
        return Sandbox(self._rpc, info.id)

    async def _attach_named(
        self, job: str, name: str, args: DSecContainerRunArgs | None, timeout: float | None
    ) -> Sandbox:
        if not job or not name:
            missing = "job" if name else "name" if job else "sandbox_id"
            raise InvalidError("want the ID of a sandbox, or job and name in its place", field=missing)
        what = f"the sandbox {name!r} of job {job!r}"
        if args is None:
            return await self._find_named(job, name, what)
        if args.job not in ("", job):
            raise InvalidError(f"want {job!r}, as job says, or none, got {args.job!r}", field="args.job")
        digest = hashlib.sha256(f"{job}\0{name}".encode()).hexdigest()
        labels = {**args.labels, "name": name}
        args = replace(args, job=c.text(job, "job"), labels=labels)
        try:
            sandbox = await self.run_container(args, timeout=timeout, request_id=f"attach-{digest}")
        except ConflictError as e:
            if e.field != "request_id":
                raise
            raise ConflictError(f"{what} was made with other args", field="args") from None
        return self._going_on(await self.get(sandbox.id), what)

    async def _find_named(self, job: str, name: str, what: str) -> Sandbox:
        found = [i async for i in self.list(job=job, labels={"name": name}, states=_STATES)]
        # Where it was migrated the one that took its place goes on.
        found.sort(key=lambda i: (i.ended, -i.created.timestamp()))
        if not found:
            raise NotFoundError(f"{what} is not there, and there are no args to make it of", field="name")
        return self._going_on(found[0], what)

    def _going_on(self, info: SandboxInfo, what: str) -> Sandbox:
        if info.ended:
            reason = f"{what} is {info.state}: {info.reason}; another one takes another name"
            raise ConflictError(reason, field="name")
        return Sandbox(self._rpc, info.id)

    async def replay(
        self,
        sandbox_id: str,
        *,
        layers: Sequence[str] = (),
        until: int = 0,
        ignore_output: bool = False,
        mask: Sequence[str] = (),
        keep: bool = False,
    ) -> ReplayResult:
        """Replay the log of a sandbox, also of one that has ended lately: see `Sandbox.replay`."""
        sandbox = Sandbox(self._rpc, c.text(sandbox_id, "sandbox_id"))
        return await sandbox.replay(
            layers=layers, until=until, ignore_output=ignore_output, mask=mask, keep=keep
        )

    async def get(self, sandbox_id: str) -> SandboxInfo:
        """Return the state of a sandbox, also of one that has ended lately."""
        request = sandbox_pb2.GetRequest(sandbox_id=c.text(sandbox_id, "sandbox_id"))
        return c.sandbox_info((await self._rpc.unary(m.GET, request)).sandbox)

    async def list(
        self,
        *,
        job: str = "",
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] = (),
    ) -> AsyncIterator[SandboxInfo]:
        """Yield the sandboxes that match.

        Args:
            job: Of this job only.
            labels: With all of these labels.
            states: In any of these states; empty is all that have not ended.
        """
        request = sandbox_pb2.ListRequest(
            job=c.text(job, "job"),
            labels=c.texts(labels or {}, "labels"),
            states=c.names(states, "states"),
            page_size=_PAGE,
        )
        while True:
            page = await self._rpc.unary(m.LIST, request)
            for sandbox in page.sandboxes:
                yield c.sandbox_info(sandbox)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def kill(self, sandbox_id: str) -> str:
        """End a sandbox and free all it held; return the state it is in.

        Killing an ended one is a success.
        """
        request = sandbox_pb2.KillRequest(sandbox_id=c.text(sandbox_id, "sandbox_id"))
        return (await self._rpc.unary(m.KILL, request)).state

    def job(self, name: str) -> Job:
        """Return the handle of a job that is there already."""
        return Job(self._rpc, name)

    async def create_job(
        self,
        name: str,
        *,
        labels: Mapping[str, str] | None = None,
        lease: float | None = None,
        on_expiry: str = "pause",
        grace: float | None = None,
    ) -> Job:
        """Make a job, or find the one that was made so before, whose lease then begins anew.

        Sandboxes belong to it whose create names it: `DSecContainerRunArgs(job=name)`.

        Args:
            name: 1 to 256 characters.
            labels: To find it by.
            lease: Seconds that a heartbeat keeps it, 5 to 86400; None: it never expires.
            on_expiry: What its sandboxes are once the lease ran out: `pause`, and killed
                after grace; or `kill`.
            grace: Seconds from expiry to the kill of paused sandboxes; None is a day.

        Raises:
            ConflictError: It is there with other arguments, or has ended.
        """
        request = job_pb2.CreateJobRequest(
            name=c.text(name, "name"),
            labels=c.texts(labels or {}, "labels"),
            on_expiry=c.text(on_expiry, "on_expiry"),
        )
        if lease is not None:
            request.lease.CopyFrom(c.duration(lease, "lease"))
        if grace is not None:
            request.grace.CopyFrom(c.duration(grace, "grace"))
        await self._rpc.unary(m.CREATE_JOB, request)
        return self.job(name)

    async def list_jobs(
        self, *, labels: Mapping[str, str] | None = None, states: Sequence[str] = ()
    ) -> AsyncIterator[JobInfo]:
        """Yield the jobs that match, by name.

        Args:
            labels: With all of these labels.
            states: In any of these states; empty is all that have not ended.
        """
        request = job_pb2.ListJobsRequest(
            labels=c.texts(labels or {}, "labels"), states=c.names(states, "states"), page_size=_PAGE
        )
        while True:
            page = await self._rpc.unary(m.LIST_JOBS, request)
            for job in page.jobs:
                yield c.job_info(job)
            if not page.next_page_token:
                return
            request.page_token = page.next_page_token

    async def events(
        self,
        *,
        cursor: str = "",
        from_start: bool = False,
        kinds: Sequence[str] = (),
        sandbox_ids: Sequence[str] = (),
        job: str = "",
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] = (),
    ) -> AsyncGenerator[Event, None]:
        """Yield what happens to the project's sandboxes and jobs; it does not end by itself.

        Where the connection breaks it goes on behind the last event, for a
        minute; nothing is missed by that.

        Args:
            cursor: That of the last event that was seen; empty is from now on.
            from_start: Without a cursor: from the oldest event that is kept.
            kinds: sandbox or job; empty is both. Events of nodes always come.
            sandbox_ids: Only of these.
            job: Only of this job and its sandboxes.
            labels: Only with all of these labels.
            states: Only of these states.
        """
        picks = event_filter(kinds, sandbox_ids, job, labels, states)
        async for event in _events.events(self._rpc, cursor, from_start, picks):
            yield event

    async def create_key(self, project: str, *, expires: datetime | None = None) -> NewKey:
        """Make an API key for a project, which is made if new. Needs the operator's key."""
        request = admin_pb2.CreateKeyRequest(project=c.text(project, "project"))
        if expires is not None:
            request.expires.CopyFrom(c.timestamp(expires, "expires"))
        response = await self._rpc.unary(m.CREATE_KEY, request)
        return NewKey(key=c.key(response.key), secret=response.secret)

    async def list_keys(self) -> builtins.list[Key]:
        """Return all API keys. Needs the operator's key."""
        return [c.key(k) for k in (await self._rpc.unary(m.LIST_KEYS, admin_pb2.ListKeysRequest())).keys]

    async def revoke_key(self, key_id: str) -> None:
        """Make an API key useless. Needs the operator's key."""
        await self._rpc.unary(m.REVOKE_KEY, admin_pb2.RevokeKeyRequest(id=c.text(key_id, "id")))

    async def collect_layers(self, *, min_age: float = 3600, dry_run: bool = False) -> Collected:
        """Remove the layers from the store that no name and no sandbox refers to.

        The server does so by itself every few hours. Needs the operator's key.

        Args:
            min_age: Seconds; layers stored less than this ago stay: an import may not have named them yet.
            dry_run: Only tell what would be removed.
        """
        request = admin_pb2.CollectLayersRequest(min_age=c.duration(min_age, "min_age"), dry_run=dry_run)
        response = await self._rpc.unary(m.COLLECT_LAYERS, request)
        return c.collected(response)

    def _sandbox(self, response: sandbox_pb2.CreateResponse) -> Sandbox:
        return Sandbox(self._rpc, response.sandbox.id, launch=response.launch)

    def _item(self, item: sandbox_pb2.BatchCreateItem, args: DSecContainerRunArgs) -> Sandbox | DSecError:
        kind = item.WhichOneof("result")
        if kind == "created":
            return self._sandbox(item.created)
        if kind == "error":
            return c.of_layers(_connect.error_of(item.error.detail, item.error.message), args)
        return InternalError("the server did not say what became of this sandbox")
