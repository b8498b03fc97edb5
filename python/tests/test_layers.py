"""Layers of directories and checkouts, against a real server; the command line makes the same of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from server import Server, backend, rootfs

import libdsec
from libdsec import DSecClient, DSecContainerRunArgs, LayerOrigin


@pytest.fixture
async def client(server: Server) -> AsyncIterator[DSecClient]:
    async with DSecClient(server.url, server.key) as c:
        yield c


def by_cli(server: Server, *args: str) -> dict[str, Any]:
    """Import by the command line; None of the server's own binary is a skip."""
    if not server.binary:
        pytest.skip("the binary of that server is not known")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSEC_")}
    environment |= {"DSEC_URL": server.url, "DSEC_API_KEY": server.key}
    done = subprocess.run(
        [server.binary, "layer", "import", "by-cli", *args, "-o", "json"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def has_attributes(path: Path) -> bool:
    try:
        os.setxattr(path, "user.note", b"\x00\xff\n=")
    except OSError:
        return False
    return True


async def test_a_directory_is_what_the_command_line_makes_of_it(
    server: Server, client: DSecClient, tmp_path: Path
) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "a.b").write_text("sorts between a and a/b")
    (tree / "a" / "b" / "file").write_bytes(b"x" * 100_000)
    (tree / "a" / "hard").hardlink_to(tree / "a" / "b" / "file")
    (tree / "link").symlink_to("../x")
    (tree / "link2").hardlink_to(tree / "link")
    (tree / os.fsdecode(b"\xff\n")).write_text("no UTF-8")
    (tree / ("n" * 200)).write_text("")
    os.mkfifo(tree / "pipe", 0o600)
    os.utime(tree / "a.b", ns=(0, -1_500_000_000))
    (tree / "a.b").chmod(0o4751)
    attributes = has_attributes(tree / "a" / "b" / "file") and has_attributes(tree / "a")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(tree / "sock"))
        imported = await client.import_layer(tree, name="by-sdk")
        told = by_cli(server, str(tree))
    assert imported.findings == ('sockets left out: 1, the first at "/sock"',)
    assert told["findings"] == list(imported.findings)
    assert told["digest"] == imported.layer.digest
    if attributes:
        os.removexattr(tree / "a", "user.note")
        assert (await client.import_layer(tree, name="by-sdk")).layer.digest != imported.layer.digest


async def test_an_empty_base_is_none(client: DSecClient, tmp_path: Path) -> None:
    with pytest.raises(libdsec.InvalidError) as e:
        await client.import_layer(tmp_path, name="empty")
    assert e.value.field == "archive"
    assert (await client.import_layer(tmp_path, name="empty", kind="toolkit")).layer.files == 0


def git(directory: Path, *args: str) -> str:
    words = ["git", "-c", "user.name=t", "-c", "user.email=t@example.com", *args]
    environment = os.environ | {"GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(words, cwd=directory, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of two commits with a submodule, whose later history is not to be seen."""
    library, main = tmp_path / "library", tmp_path / "main"
    for path in (library, main):
        path.mkdir()
        git(path, "init", "--quiet", "-b", "trunk")
        (path / "file").write_text(path.name)
        (path / "run").write_text("#!/bin/sh\n")
        (path / "run").chmod(0o775)
        git(path, "add", "-A")
        git(path, "commit", "--quiet", "-m", "one")
    git(
        main,
        "-c",
        "protocol.file.allow=always",
        "submodule",
        "--quiet",
        "add",
        "../library",
        "vendor/library",
    )
    git(main, "commit", "--quiet", "-m", "two")
    git(main, "tag", "-a", "-m", "x", "v1")
    (main / "file").write_text("later")
    git(main, "commit", "--quiet", "-am", "three")
    return main


@pytest.mark.parametrize(
    ("options", "flags"),
    [
        ({}, []),
        ({"ref": "v1"}, ["--ref", "v1"]),
        ({"ref": "v1", "depth": 0, "at": "/work"}, ["--ref", "v1", "--depth", "0", "--at", "/work"]),
        ({"no_git": True, "kind": "toolkit"}, ["--no-git", "--kind", "toolkit"]),
        ({"submodules": True}, ["--submodules"]),
    ],
)
@pytest.mark.parametrize("scheme", ["", "file://"])
async def test_a_checkout_is_what_the_command_line_makes_of_it(
    server: Server,
    client: DSecClient,
    repository: Path,
    scheme: str,
    options: dict[str, Any],
    flags: list[str],
) -> None:
    source = f"{scheme}{repository}"
    imported = await client.import_git(source, name="by-sdk", **options)
    commit = git(repository, "rev-parse", options.get("ref", "HEAD") + "^{commit}")
    assert imported.layer.origin == LayerOrigin(type="git", location=source, revision=commit)
    assert imported.layer.kind == options.get("kind", "workspace")
    assert imported.layer.at == options.get("at", "")
    assert imported.findings == ()
    assert by_cli(server, "--git", source, *flags)["digest"] == imported.layer.digest


async def test_what_cannot_be_checked_out(client: DSecClient, repository: Path, tmp_path: Path) -> None:
    below = repository / "below"
    below.mkdir()
    cases: list[tuple[Any, dict[str, Any], type[libdsec.DSecError], str]] = [
        (tmp_path / "nosuch", {}, libdsec.NotFoundError, "repository"),
        (below, {}, libdsec.InvalidError, "repository"),
        (repository / "file", {}, libdsec.InvalidError, "repository"),
        ("-x", {}, libdsec.InvalidError, "repository"),
        (f"file://{tmp_path}/nosuch", {}, libdsec.NotFoundError, "repository"),
        ("http://127.0.0.1:1/x", {}, libdsec.UnavailableError, "repository"),
        (repository, {"ref": "nosuch"}, libdsec.NotFoundError, "ref"),
        (f"file://{repository}", {"ref": "nosuch"}, libdsec.NotFoundError, "ref"),
        (repository, {"depth": -1}, libdsec.InvalidError, "depth"),
        (repository, {"kind": "tools"}, libdsec.InvalidError, "kind"),
    ]
    for source, options, kind, field in cases:
        with pytest.raises(kind) as e:
            await client.import_git(source, name="x", **options)
        assert e.value.field == field, source
        assert "\n" not in str(e.value)


async def test_no_git(client: DSecClient, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(libdsec.UnsupportedError) as e:
        await client.import_git(repository, name="x")
    assert e.value.field == "repository"


async def test_lists_of_names_are_no_strings(client: DSecClient, tmp_path: Path) -> None:
    strings: Any = "base"
    with pytest.raises(libdsec.InvalidError) as e:
        await client.export_layers(strings, tmp_path / "x.tar")
    assert e.value.field == "layers"
    with pytest.raises(libdsec.InvalidError) as e:
        async for _ in client.list(states=strings):
            pass
    assert e.value.field == "states"
    for field in ("toolkits", "layers", "network_rules", "env", "labels"):
        for value in (strings, None):
            args: Any = {field: value}
            with pytest.raises(libdsec.InvalidError) as e:
                await client.run_container(DSecContainerRunArgs(container_image="base", **args))
            assert e.value.field == field


async def test_a_layer_is_what_it_is_taken_for(client: DSecClient, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    await client.import_layer(rootfs_of(tmp_path), name="a-base")
    await client.import_layer(tmp_path, name="a-toolkit", kind="toolkit")
    await client.import_layer(tmp_path, name="a-workspace", kind="workspace")
    cases: list[tuple[str, str, dict[str, Any]]] = [
        ("workspace", '"a-toolkit" is a toolkit, want a workspace', {"workspace": "a-toolkit"}),
        (
            "toolkits[1]",
            '"a-workspace" is a workspace, want a toolkit',
            {"toolkits": ["a-toolkit", "a-workspace"]},
        ),
        ("container_image", '"a-toolkit" is a toolkit, want a base', {"container_image": "a-toolkit"}),
        ("layers[0]", '"a-base" is there already', {"workspace": "a-workspace", "layers": ["a-base"]}),
        ("toolkits[0]", 'no layer "nosuch"', {"workspace": "a-workspace", "toolkits": ["nosuch"]}),
    ]
    for field, message, args in cases:
        all_args: Any = {"container_image": "a-base", "backend": backend(), **args}
        with pytest.raises(libdsec.DSecError) as e:
            await client.run_container(DSecContainerRunArgs(**all_args))
        assert e.value.field == field
        assert message in str(e.value)
        try:
            made = await client.run_containers(DSecContainerRunArgs(**all_args), 2)
        except libdsec.DSecError as whole:
            made = [whole, whole]
        assert [m.field if isinstance(m, libdsec.DSecError) else m for m in made] == [field, field]


def rootfs_of(tmp_path: Path) -> Path:
    path = tmp_path / "rootfs.tar"
    path.write_bytes(rootfs())
    return path
