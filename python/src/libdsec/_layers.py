"""The client's calls for layers."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, suppress
from functools import partial

from libdsec import _checkout, _tar
from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._bridge import produce
from libdsec._errors import ConflictError, UnavailableError
from libdsec._proto.dsec.v1 import layer_pb2
from libdsec._rpc import Rpc
from libdsec._source import Source, chunks
from libdsec._types import ImportedLayer, InspectedLayer, Layer


class LayerCalls:
    """What a `DSecClient` does with layers."""

    _rpc: Rpc

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
        left_out: list[str] = []
        return await self._import(target, _archive(archive, left_out, at), "archive", left_out)

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
            left_out: list[str] = []
            data = _tree(tree.dir, left_out, at, as_root=True)
            return await self._import(target, data, "repository", left_out)

    async def _import(
        self,
        target: layer_pb2.ImportLayerOpen,
        archive: AsyncGenerator[bytes, None],
        field: str,
        left_out: list[str],
    ) -> ImportedLayer:
        async with aclosing(archive) as data:
            messages = partial(_import_messages, target, data)
            response = await self._rpc.client_stream(m.IMPORT_LAYER, None, messages, {"data": field})
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
        verify: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImportedLayer:
        """Have the server import an image from an OCI registry, and name it.

        An image that the project has already is not fetched again, unless its layer is damaged.

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
            verify: Read all that the store has of an image that the project has already,
                and import it again where anything differs; else data are not read.
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
            verify=verify,
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

    async def export_layers(
        self, layers: Sequence[str], path: os.PathLike[str] | str, *, replace: bool = False
    ) -> str:
        """Write layers as an image, the tar of an OCI layout, and return its manifest's digest.

        The same layers give the same bytes.

        Args:
            layers: `name:tag` or digest, lowest first.
            path: The file to write; it is there once all has come.
            replace: Replace one that is there.

        Raises:
            ConflictError: There is a file of that name, and `replace` is not set.
        """
        request = layer_pb2.ExportLayerRequest(layers=c.names(layers, "layers"))
        out = os.fspath(path)
        if not replace and await asyncio.to_thread(os.path.lexists, out):
            raise ConflictError(f"{out} is there already; replace=True replaces it", field="path")
        part = f"{out}.{uuid.uuid4().hex}.part"
        stream = await self._rpc.server_stream(m.EXPORT_LAYER, request)
        try:
            digest, size = "", 0
            with await asyncio.to_thread(open, part, "xb") as f:
                while (message := await stream.receive()) is not None:
                    if message.HasField("open"):
                        digest, size = message.open.digest, message.open.size
                    size -= await asyncio.to_thread(f.write, message.data)
            if not digest or size != 0:
                raise UnavailableError("the server's answer broke off")
            await asyncio.to_thread(os.replace, part, out)
            return digest
        except OSError as e:
            if e.errno is not None:
                e.filename, e.filename2 = out, None  # and not the file that was to become it
            raise
        finally:
            stream.close()
            with suppress(OSError):
                os.unlink(part)

    async def list_layers(self) -> list[Layer]:
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


async def _archive(
    archive: os.PathLike[str] | Source, left_out: list[str], at: str
) -> AsyncGenerator[bytes, None]:
    if not isinstance(archive, (str, os.PathLike)):
        async for piece in chunks(archive, "archive"):
            yield piece
    elif _tar.is_dir(archive):
        async with aclosing(_tree(archive, left_out, at)) as tar:
            async for piece in tar:
                yield piece
    else:
        with await asyncio.to_thread(open, archive, "rb") as f:
            async for piece in chunks(f, "archive"):
                yield piece


async def _tree(
    root: c.StrPath, left_out: list[str], at: str, *, as_root: bool = False
) -> AsyncGenerator[bytes, None]:
    def pack(put: Callable[[bytes], None]) -> None:
        left_out.extend(_tar.pack(root, put, top=True, as_root=as_root, at=at))

    async with aclosing(produce(pack)) as tar:
        async for piece in tar:
            yield piece


async def _import_messages(
    target: layer_pb2.ImportLayerOpen, data: AsyncIterator[bytes]
) -> AsyncGenerator[layer_pb2.ImportLayerRequest, None]:
    yield layer_pb2.ImportLayerRequest(open=target)
    async for piece in data:
        yield layer_pb2.ImportLayerRequest(data=piece)
