from __future__ import annotations

import os
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from images import Images
from images import serve as serve_images
from server import Server, backend, rootfs
from server import serve as serve_real
from wire import Wire, serve

import libdsec
import libdsec.sync


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out, and count as deselected, what the backend under test has no part in."""
    if backend() == "fake":
        out = [i for i in items if i.get_closest_marker("holes")]
        items[:] = [i for i in items if i not in out]
        config.hook.pytest_deselected(items=out)


@pytest.fixture
async def wire() -> AsyncIterator[Wire]:
    """A server that says what the test tells it to."""
    async with serve() as w:
        yield w


@pytest.fixture
async def client(wire: Wire) -> AsyncIterator[libdsec.DSecClient]:
    """A client of `wire`."""
    c = libdsec.DSecClient(wire.url, "e2b_00")
    yield c
    await c.close()


@pytest.fixture
def unused_url() -> Iterator[str]:
    """An address where nothing listens: bound, so that nobody else takes it, and not listening."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{s.getsockname()[1]}"


@pytest.fixture(scope="session")
def images() -> Iterator[Images]:
    """A registry that the real server may speak to."""
    with serve_images() as i:
        yield i


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, images: Images) -> Iterator[Server]:
    """A real server."""
    with serve_real(tmp_path_factory.mktemp("server"), images.host) as s:
        yield s


@pytest.fixture(scope="session")
def args(server: Server) -> libdsec.DSecContainerRunArgs:
    """What to make a sandbox of on that server."""
    if backend() == "fake":
        return libdsec.DSecContainerRunArgs(container_image="", backend="fake")
    image = os.environ.get("DSEC_TEST_IMAGE")
    if not image:
        image = "libdsec-test"
        with libdsec.sync.DSecClient(server.url, server.key) as client:
            client.import_layer(rootfs(), name=image)
    return libdsec.DSecContainerRunArgs(container_image=image, backend=backend())
