"""The client: where sandboxes come from."""

from __future__ import annotations

import asyncio
import builtins
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from datetime import datetime
from types import TracebackType

from typing_extensions import Self

from libdsec import _checkout, _config, _connect, _tar
from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._admin import Collected, Key, NewKey
from libdsec._bridge import produce
from libdsec._errors import ConflictError, DSecError, InternalError, InvalidError, UnavailableError
from libdsec._proto.dsec.v1 import admin_pb2, layer_pb2, sandbox_pb2
from libdsec._rpc import Rpc
from libdsec._sandbox import Sandbox
from libdsec._source import Source, chunks
from libdsec._types import (
    DSecContainerRunArgs,
    ImportedLayer,
    InspectedLayer,
    Layer,
    SandboxInfo,
)

_PAGE = 1000


class DSecClient:
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

    async def attach(self, sandbox_id: str) -> Sandbox:
        """Return the handle of a sandbox that is there already.

        Raises:
            NotFoundError: There is none of that ID.
            ConflictError: It has ended.
        """
        info = await self.get(sandbox_id)
        if info.ended:
            raise ConflictError(f"the sandbox is {info.state}: {info.reason}", field="sandbox_id")
        return Sandbox(self._rpc, info.id)

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

    async def import_layer(
        self,
        archive: os.PathLike[str] | Source,
        *,
        name: str,
        select: str = "",
        kind: str = "",
        at: str = "",
        strict: bool = False,
    ) -> ImportedLayer:
        """Make a layer of a root file system or an image, and name it.

        Args:
            archive: A tar (plain, gzip or zstd) of a root file system, an OCI
                layout or a docker-archive: a path, an open binary file or its
                bytes in pieces. A path of a directory is packed first, as
                `dsec layer import` packs it: the same directory gives the same
                layer. A str is a path.
            name: `name:tag`, or `name` for `name:latest`.
            select: Which image, by tag or digest, of an archive that holds several.
            kind: base (also where empty), workspace or toolkit. The last two may hide
                what is below them, by whiteouts in the form of OCI or of overlayfs.
            at: Directory of a sandbox that the archive's root becomes, of a workspace
                or a toolkit; empty is the root.
            strict: Raise `InvalidError` where the lint finds something.
        """
        target = layer_pb2.ImportLayerOpen(
            name=c.text(name, "name"),
            select=c.text(select, "select"),
            kind=c.text(kind, "kind"),
            at=c.text(at, "at"),
            strict=strict,
        )
        left_out: builtins.list[str] = []
        return await self._import(target, _archive(archive, left_out), "archive", left_out)

    async def import_git(
        self,
        repository: os.PathLike[str] | str,
        *,
        name: str,
        ref: str = "",
        depth: int = 1,
        submodules: bool = False,
        no_git: bool = False,
        kind: str = "workspace",
        at: str = "",
        strict: bool = False,
    ) -> ImportedLayer:
        """Check one commit out with this machine's git, and make a layer of it.

        The layer has nothing of the repository but that commit, or so many as depth
        says: no remote, no tag, no log, no other branch. The same commit gives the
        same layer, here and by `dsec layer import --git`.

        Args:
            repository: A URL as git takes it, or the path of a local repository, of
                which only what is committed counts.
            name: `name:tag`, or `name` for `name:latest`.
            ref: Branch, tag or commit; empty is what the repository has checked out.
            depth: How many commits of the history are kept; 0 is all.
            submodules: Check those out alike.
            no_git: Leave out .git.
            kind: As of `import_layer`, but empty is workspace.
            at: As of `import_layer`.
            strict: As of `import_layer`.

        Raises:
            UnsupportedError: There is no git on this machine.
            NotFoundError: There is no such repository (field `repository`) or commit (`ref`).
            UnavailableError: The repository cannot be read now.
        """
        options = _checkout.Options(c.text(os.fspath(repository), "repository"), c.text(ref, "ref"))
        options.depth, options.submodules, options.no_git = c.int32(depth, "depth"), submodules, no_git
        async with _checkout.made(options) as tree:
            target = layer_pb2.ImportLayerOpen(
                name=c.text(name, "name"),
                kind=c.text(kind, "kind") or "workspace",
                at=c.text(at, "at"),
                strict=strict,
                origin=layer_pb2.LayerOrigin(type="git", location=tree.source, revision=tree.commit),
            )
            left_out: builtins.list[str] = []
            data = _tree(tree.dir, left_out, as_root=True)
            return await self._import(target, data, "repository", left_out)

    async def _import(
        self,
        target: layer_pb2.ImportLayerOpen,
        archive: AsyncGenerator[bytes, None],
        field: str,
        left_out: builtins.list[str],
    ) -> ImportedLayer:
        async with aclosing(archive) as data, aclosing(_import_messages(target, data)) as stream:
            response = await self._rpc.client_stream(m.IMPORT_LAYER, stream, {"data": field})
        return ImportedLayer(layer=c.layer(response.layer), findings=(*response.findings, *left_out))

    async def import_image(
        self,
        ref: str,
        *,
        name: str,
        platform: str = "",
        username: str = "",
        password: str = "",
        kind: str = "",
        at: str = "",
        strict: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImportedLayer:
        """Have the server import an image from an OCI registry, and name it.

        An image that the project has already is not fetched again.

        Args:
            ref: `[host[:port]/]repository[:tag][@digest]`.
            name: `name:tag`, or `name` for `name:latest`.
            platform: os/architecture[/variant]; empty is the server's.
            username: For the image's registry, with password; else the server's own
                credentials, if it has any.
            password: Of username. The server does not keep it.
            kind: As of `import_layer`.
            at: As of `import_layer`.
            strict: As of `import_layer`.
            progress: Is called now and then with how many of the image's bytes came, of
                how many.
        """
        request = layer_pb2.PullLayerRequest(
            name=c.text(name, "name"),
            ref=c.text(ref, "ref"),
            platform=c.text(platform, "platform"),
            kind=c.text(kind, "kind"),
            at=c.text(at, "at"),
            strict=strict,
        )
        if username or password:
            request.credentials.username = c.text(username, "username")
            request.credentials.password = c.text(password, "password")
        stream = await self._rpc.server_stream(m.PULL_LAYER, request)
        try:
            while (message := await stream.receive()) is not None:
                if message.HasField("done"):
                    return ImportedLayer(
                        layer=c.layer(message.done.layer), findings=tuple(message.done.findings)
                    )
                if progress is not None and message.HasField("progress"):
                    progress(message.progress.bytes, message.progress.size)
        finally:
            stream.close()
        raise UnavailableError("the server's answer broke off")

    async def prefetch_layer(self, name: str, *, progress: Callable[[int, int], None] | None = None) -> None:
        """Bring a layer to every node that is ready, so that first reads in a sandbox wait for nothing.

        Args:
            name: `name:tag` or digest.
            progress: Is called now and then with how many bytes are there, of how many on all nodes together.
        """
        stream = await self._rpc.server_stream(
            m.PREFETCH_LAYER, layer_pb2.PrefetchLayerRequest(name=c.text(name, "name"))
        )
        try:
            while (message := await stream.receive()) is not None:
                if progress is not None:
                    progress(message.bytes, message.size)
        finally:
            stream.close()

    async def export_layers(self, layers: Sequence[str], path: os.PathLike[str] | str) -> str:
        """Write layers as an image, the tar of an OCI layout, and return its manifest's digest.

        The same layers give the same bytes.

        Args:
            layers: `name:tag` or digest, lowest first.
            path: The file to write; one that is there is replaced once all has come.
        """
        request = layer_pb2.ExportLayerRequest(layers=c.names(layers, "layers"))
        stream = await self._rpc.server_stream(m.EXPORT_LAYER, request)
        part = f"{os.fspath(path)}.{uuid.uuid4().hex}.part"
        try:
            digest, size = "", 0
            with await asyncio.to_thread(open, part, "xb") as f:
                while (message := await stream.receive()) is not None:
                    if message.HasField("open"):
                        digest, size = message.open.digest, message.open.size
                    size -= await asyncio.to_thread(f.write, message.data)
            if not digest or size != 0:
                raise UnavailableError("the server's answer broke off")
            await asyncio.to_thread(os.replace, part, path)
            return digest
        finally:
            stream.close()
            with suppress(FileNotFoundError):
                os.unlink(part)

    async def list_layers(self) -> builtins.list[Layer]:
        """Return the layers that sandboxes can be made of."""
        response = await self._rpc.unary(m.LIST_LAYERS, layer_pb2.ListLayersRequest())
        return [c.layer(layer) for layer in response.layers]

    async def inspect_layer(self, name: str) -> InspectedLayer:
        """Return all that is known of a layer, by `name:tag` or digest."""
        request = layer_pb2.InspectLayerRequest(name=c.text(name, "name"))
        response = await self._rpc.unary(m.INSPECT_LAYER, request)
        return InspectedLayer(
            layer=c.layer(response.layer),
            names=tuple(response.names),
            findings=tuple(response.layer.findings),
        )

    async def tag_layer(self, name: str, new_name: str, *, replace: bool = False) -> Layer:
        """Give a layer (`name:tag` or digest) one more name.

        Raises `ConflictError` where another layer has it, unless `replace` is set.
        """
        request = layer_pb2.TagLayerRequest(
            name=c.text(name, "name"), new_name=c.text(new_name, "new_name"), replace=replace
        )
        return c.layer((await self._rpc.unary(m.TAG_LAYER, request)).layer)

    async def remove_layer(self, name: str) -> None:
        """Remove a name (`name:tag` or digest), and the layer once no name and no sandbox uses it."""
        await self._rpc.unary(m.REMOVE_LAYER, layer_pb2.RemoveLayerRequest(name=c.text(name, "name")))

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


async def _archive(
    archive: os.PathLike[str] | Source, left_out: builtins.list[str]
) -> AsyncGenerator[bytes, None]:
    if not isinstance(archive, (str, os.PathLike)):
        async for piece in chunks(archive, "archive"):
            yield piece
    elif _tar.is_dir(archive):
        async with aclosing(_tree(archive, left_out)) as tar:
            async for piece in tar:
                yield piece
    else:
        with await asyncio.to_thread(open, archive, "rb") as f:
            async for piece in chunks(f, "archive"):
                yield piece


async def _tree(
    root: c.StrPath, left_out: builtins.list[str], *, as_root: bool = False
) -> AsyncGenerator[bytes, None]:
    def pack(put: Callable[[bytes], None]) -> None:
        left_out.extend(_tar.pack(root, put, top=True, as_root=as_root))

    async with aclosing(produce(pack)) as tar:
        async for piece in tar:
            yield piece


async def _import_messages(
    target: layer_pb2.ImportLayerOpen, data: AsyncIterator[bytes]
) -> AsyncGenerator[layer_pb2.ImportLayerRequest, None]:
    yield layer_pb2.ImportLayerRequest(open=target)
    async for piece in data:
        yield layer_pb2.ImportLayerRequest(data=piece)
