"""The demo's inputs: Debian packages and PyPI releases, made into layers.

Everything is fetched by the machine's own apt and pip, from wherever they are
set up to fetch from, and is kept below build/demo, so that a second run only
looks. What pip fetches is pinned by hash. A source distribution is never
unpacked on this machine: its tar is read in memory and written out again as
the tar of a layer.
"""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
import tempfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

BASE = "demo-base:bookworm"
VENV_PYTHON = str(Path(__file__).resolve().parent.parent / ".venv/bin/python")
BASE_PACKAGES = "python3,python3-pip,git,gcc,libc6-dev"


class DemoError(Exception):
    """The demo cannot go on; the text says why, for a person."""


@dataclass(frozen=True)
class Task:
    """One bug to fix; the fields are those of tasks.toml."""

    name: str
    bug: str
    licence: str
    broken: dict[str, str]
    fixed: dict[str, str]
    fix: list[str]
    test: list[str]
    toolkit: bool = False

    @property
    def layer(self) -> str:
        """Name of the layer that holds the broken release."""
        return f"demo-{self.name}:{self.broken['version']}"

    @property
    def workdir(self) -> str:
        """Where the layer has the project."""
        return f"/work/{self.name}"


@dataclass(frozen=True)
class Toolkit:
    """What tests need beside Python."""

    name: str
    wheels: list[str]


def load(path: Path) -> tuple[list[Task], Toolkit]:
    """Read tasks.toml."""
    with path.open("rb") as f:
        document = tomllib.load(f)
    return [Task(**t) for t in document["task"]], Toolkit(**document["toolkit"])


async def run(*argv: str, env: dict[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run a program, and show what it said only if it failed."""
    process = await asyncio.create_subprocess_exec(
        *argv,
        env={**os.environ, **(env or {})},
        cwd=cwd,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    except asyncio.CancelledError:
        process.terminate()  # and let it clean up after itself
        await process.wait()
        raise
    if process.returncode != 0:
        tail = "\n".join(output.decode(errors="replace").strip().splitlines()[-15:])
        raise DemoError(f"{argv[0]} failed with status {process.returncode}:\n{tail}")


def debian_sources() -> str:
    """Return the file that says where this machine gets Debian from."""
    for candidate in ("/etc/apt/sources.list.d/debian.sources", "/etc/apt/sources.list"):
        path = Path(candidate)
        if path.is_file() and "bookworm" in path.read_text():
            return candidate
    raise DemoError("no source of Debian 12 in /etc/apt/sources.list or sources.list.d/debian.sources")


async def base_tar(cache: Path) -> Path:
    """Make the base environment from Debian packages; a minute, most of the demo."""
    tar = cache / "base.tar"
    part = cache / "base.part.tar"
    await run(
        "mmdebstrap",
        "--variant=minbase",
        f"--include={BASE_PACKAGES}",
        "--dpkgopt=path-exclude=/usr/share/doc/*",
        "--dpkgopt=path-exclude=/usr/share/man/*",
        "--dpkgopt=path-exclude=/usr/share/locale/*",
        "bookworm",
        str(part),
        debian_sources(),
    )
    return part.replace(tar)


async def toolkit_tar(toolkit: Toolkit, cache: Path) -> Path:
    """Install the pinned wheels into a tree and pack it."""
    tar = cache / f"{toolkit.name.replace(':', '-')}.tar"
    with tempfile.TemporaryDirectory(dir=cache) as tmp:
        requirements = Path(tmp, "requirements.txt")
        requirements.write_text("\n".join(toolkit.wheels) + "\n")
        target = Path(tmp, "root/usr/local/lib/python3.11/dist-packages")
        await _pip(
            "install", "--no-deps", "--only-binary", ":all:", "--require-hashes", "--no-compile",
            "--python-version", "3.11", "--target", str(target), "-r", str(requirements),
        )  # fmt: skip
        with tarfile.open(tar, "w") as out:
            out.add(Path(tmp, "root"), arcname=".", filter=owned_by_root)
    return tar


async def sdist(project: str, release: dict[str, str], cache: Path) -> Path:
    """Fetch one source distribution, checked by its hash."""
    directory = cache / "sdist" / f"{project}-{release['version']}"
    if not directory.is_dir():
        part = directory.with_name(directory.name + ".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        requirements = part / "requirements.txt"
        requirements.write_text(f"{project}=={release['version']} --hash=sha256:{release['sha256']}\n")
        await _pip(
            "download", "--no-deps", "--no-binary", project, "--require-hashes",
            "--dest", str(part), "-r", str(requirements),
        )  # fmt: skip
        part.rename(directory)
    (archive,) = directory.glob("*.tar.gz")
    return archive


async def task_tar(task: Task, cache: Path) -> Path:
    """Write the broken release with the tests of the fixed one as a layer."""
    broken = await sdist(task.name, task.broken, cache)
    fixed = await sdist(task.name, task.fixed, cache)
    tar = cache / f"{task.layer.replace(':', '-')}.tar"
    with tarfile.open(tar, "w") as out:
        for directory in (PurePosixPath("work"), PurePosixPath("work", task.name)):
            _add_directory(out, directory)
        for path, member, data in _members(broken):
            if path.parts[0] != "tests":
                _add(out, PurePosixPath("work", task.name) / path, member, data)
        for path, member, data in _members(fixed):
            if path.parts[0] == "tests":
                _add(out, PurePosixPath("work", task.name) / path, member, data)
    return tar


async def fix(task: Task, cache: Path) -> dict[str, bytes]:
    """Return the files of the fixed release that make up the fix."""
    archive = await sdist(task.name, task.fixed, cache)
    wanted = {path: data for path, _, data in _members(archive) if str(path) in task.fix}
    if len(wanted) != len(task.fix):
        raise DemoError(f"{archive.name} holds only {sorted(map(str, wanted))} of {task.fix}")
    return {str(path): data for path, data in wanted.items()}


def _members(archive: Path) -> Iterator[tuple[PurePosixPath, tarfile.TarInfo, bytes]]:
    """Yield the files of a source distribution, without its top directory."""
    with tarfile.open(archive) as source:
        for member in source:
            path = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if not member.isfile() or not path.parts or ".." in path.parts:
                continue
            content = source.extractfile(member)
            assert content is not None  # it is a file
            yield path, member, content.read()


def _add(out: tarfile.TarFile, path: PurePosixPath, member: tarfile.TarInfo, data: bytes) -> None:
    for parent in reversed(path.parents[:-3]):
        _add_directory(out, parent)
    info = tarfile.TarInfo(str(path))
    info.size = len(data)
    info.mode = 0o755 if member.mode & 0o100 else 0o644
    info.mtime = int(member.mtime)
    out.addfile(info, io.BytesIO(data))


def _add_directory(out: tarfile.TarFile, path: PurePosixPath) -> None:
    if str(path) not in out.getnames():
        info = tarfile.TarInfo(str(path))
        info.type = tarfile.DIRTYPE
        info.mode = 0o755
        out.addfile(info)


def owned_by_root(info: tarfile.TarInfo) -> tarfile.TarInfo:
    """Make a member of a tar be root's."""
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    if info.isdir():
        info.mode = 0o755
    return info


async def _pip(*args: str) -> None:
    await run(VENV_PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *args)
