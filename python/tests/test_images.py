"""Layers from a registry and back, against a real server."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from images import Images
from server import Server, rootfs

import libdsec
from libdsec import DSecClient, DSecContainerRunArgs

pytestmark = pytest.mark.skipif("DSEC_TEST_URL" in os.environ, reason="that server knows no registry here")


@pytest.fixture
async def client(server: Server) -> AsyncIterator[DSecClient]:
    async with DSecClient(server.url, server.key) as c:
        yield c


async def test_a_container_of_an_image(
    client: DSecClient, args: DSecContainerRunArgs, images: Images
) -> None:
    repository = f"team/{uuid.uuid4().hex}"
    digest = images.push(repository, "v1", rootfs(), ["FROM=registry"])
    ref = f"{images.host}/{repository}:v1"
    async with await client.run_container(replace(args, container_image=ref), timeout=120) as sandbox:
        assert (await sandbox.run_shell("echo $FROM")).text == "registry\n"
    inspected = await client.inspect_layer(ref)
    assert inspected.layer.origin == libdsec.LayerOrigin(type="registry", location=ref, revision=digest)
    images.asked.clear()
    async with await client.run_container(replace(args, container_image=ref), timeout=120):
        pass
    assert images.asked == []
    with pytest.raises(libdsec.NotFoundError):
        await client.run_container(replace(args, container_image=f"{images.host}/{repository}:v2"))


async def test_import_and_export(client: DSecClient, images: Images, tmp_path: Path) -> None:
    repository = f"team/{uuid.uuid4().hex}"
    digest = images.push(repository, "v1", rootfs(), [])
    told: list[tuple[int, int]] = []
    ref = f"{images.host}/{repository}"
    imported = await client.import_image(
        f"{ref}@{digest}", name="image", progress=lambda n, size: told.append((n, size))
    )
    assert imported.layer.source_digest == digest
    assert imported.layer.name == "image:latest"
    assert told
    assert all(n <= size for n, size in told)
    images.asked.clear()
    again = await client.import_image(f"{ref}:v1", name="again", verify=True)
    assert again.layer.digest == imported.layer.digest
    assert not [path for path in images.asked if "/blobs/" in path]
    image = tmp_path / "image.tar"
    exported = await client.export_layers(["image"], image)
    with pytest.raises(libdsec.ConflictError) as there:
        await client.export_layers([imported.layer.digest], image)
    assert there.value.field == "path"
    assert await client.export_layers([imported.layer.digest], image, replace=True) == exported
    with pytest.raises(FileNotFoundError) as missing:
        await client.export_layers(["image"], tmp_path / "none" / "x.tar")
    assert missing.value.filename == str(tmp_path / "none" / "x.tar")
    assert os.listdir(tmp_path) == ["image.tar"]
    assert (await client.import_layer(image, name="again")).layer.digest == imported.layer.digest
    with pytest.raises(libdsec.NotFoundError):
        await client.export_layers(["none-of-this-name"], tmp_path / "none.tar")
    with pytest.raises(libdsec.NotFoundError) as caught:
        await client.import_image(f"{ref}:none", name="none")
    assert caught.value.field == "ref"
    with pytest.raises(libdsec.DeniedError):
        await client.import_image("127.0.0.1:1/none", name="none", username="u", password="p")
    assert os.listdir(tmp_path) == ["image.tar"]
