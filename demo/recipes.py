"""Makers of real environments: the tars of a base, a workspace and a toolkit.

What is fetched, the machine's own apt, pip, npm, go and mvn fetch, from wherever
they are set up to fetch from. Nothing of a project is run on this machine: wheels
and npm's packages are unpacked without their scripts, modules are copied, tools in
Go are compiled from source. Debian's packages install themselves in the chroot of
mmdebstrap, and Maven runs its own plugin that downloads.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import tempfile
import tomllib
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from inputs import VENV_PYTHON, DemoError, debian_sources, owned_by_root, run

# The one that Maven takes where none is named leaves out what plugins depend on.
DEPENDENCY_PLUGIN = "org.apache.maven.plugins:maven-dependency-plugin:3.8.1"
DIST_PACKAGES = "usr/local/lib/python3.11/dist-packages"


@dataclass(frozen=True)
class Bug:
    """What the workspace has wrong, and the task is to mend; the fields are those of environments.toml."""

    what: str
    file: str  # in the workspace
    right: str  # of which the file has one
    wrong: str  # which it has in its place
    shows: str  # what failing tests say


@dataclass(frozen=True)
class Environment:
    """One environment; the fields are those of environments.toml."""

    name: str
    base: list[str]
    project: str
    workdir: str
    memory_mb: int
    bug: Bug
    install: list[str]
    build: list[str]
    tests: list[str]
    version: str = ""
    packages: list[str] = field(default_factory=list)
    dependencies: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    debian_tools: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)

    def layer(self, kind: str) -> str:
        """Name of one of its layers; another recipe gives another name."""
        parts: dict[str, list[str]] = {
            "base": self.base,
            "workspace": [
                self.project, self.version, self.workdir, *self.dependencies, *self.packages,
                self.bug.file, self.bug.right, self.bug.wrong,
            ],
            "toolkit": self.tools + self.debian_tools,
        }  # fmt: skip
        recipe = hashlib.sha256("\n".join(parts[kind]).encode()).hexdigest()
        return f"env-{self.name}-{kind}:{recipe[:12]}"


def load(path: Path) -> list[Environment]:
    """Read environments.toml."""
    with path.open("rb") as f:
        return [Environment(**{**e, "bug": Bug(**e["bug"])}) for e in tomllib.load(f)["environment"]]


async def tar_of(e: Environment, kind: str, cache: Path) -> Path:
    """Return the tar of a layer, made where an earlier run has not."""
    tar = cache / f"{e.name}-{kind}.tar"
    if not tar.is_file():
        part = tar.with_suffix(".part.tar")
        if kind == "base":
            await base(e, part)
        else:
            with scratch(cache) as root:
                await TREES[e.name, kind](e, root)
                if kind == "toolkit":
                    await debian_tools(e, root)
                else:
                    replace_one(root / e.workdir.lstrip("/") / e.bug.file, e.bug.right, e.bug.wrong)
                pack(root, part)
        part.replace(tar)
    return tar


async def base(e: Environment, tar: Path) -> None:
    """Bootstrap Debian with the packages of the base."""
    # A JDK links its manuals there, and is not installed where that fails.
    hooks = ['--essential-hook=mkdir -p "$1/usr/share/man/man1"']
    if e.name == "go":
        hooks += [f"--customize-hook=copy-in {goroot()} /usr/local"]
    await run(
        "nice", "mmdebstrap", "--variant=minbase", f"--include={','.join(e.base)}",
        "--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-exclude=/usr/share/man/*",
        *hooks, "bookworm", str(tar), debian_sources(),
    )  # fmt: skip


def replace_one(path: Path, old: str, new: str) -> None:
    """Replace the one place of a file that reads so, and have no other read like the new one."""
    text = path.read_text()
    for what, want in ((old, 1), (new, 0)):
        if text.count(what) != want:
            raise DemoError(f"{path.name} has {text.count(what)} places that read {what!r}, want {want}")
    path.write_text(text.replace(old, new))


async def debian_tools(e: Environment, root: Path) -> None:
    """Unpack Debian packages that need no more than what every base has."""
    with scratch(root.parent) as debs:
        await run("apt-get", "-qq", "download", *e.debian_tools, cwd=debs)
        for deb in debs.glob("*.deb"):
            await run("dpkg-deb", "--extract", str(deb), str(root))


async def python_workspace(e: Environment, root: Path) -> None:
    """Unpack a source distribution, and its dependencies as wheels."""
    with scratch(root.parent) as fetched:
        await pip(
            "download",
            "--no-deps",
            "--no-binary",
            e.project,
            "--dest",
            str(fetched),
            f"{e.project}=={e.version}",
        )
        (archive,) = fetched.glob("*.tar.gz")
        unpack(archive, root / e.workdir.lstrip("/"))
    await wheels(e.dependencies, root)


async def python_toolkit(e: Environment, root: Path) -> None:
    """Unpack tools that are wheels."""
    await wheels(e.tools, root)
    programs = root / DIST_PACKAGES / "bin"
    if programs.is_dir():
        (root / "usr/local/bin").mkdir(parents=True)
        for program in programs.iterdir():
            program.replace(root / "usr/local/bin" / program.name)


async def wheels(names: list[str], root: Path) -> None:
    """Unpack wheels and what they depend on where Debian's Python finds them."""
    await pip(
        "install", "--only-binary", ":all:", "--no-compile", "--python-version", "3.11",
        "--target", str(root / DIST_PACKAGES), *names,
    )  # fmt: skip


async def go_workspace(e: Environment, root: Path) -> None:
    """Copy a module, and download the modules that the packages of the task depend on."""
    source = json.loads(output("go", "mod", "download", "-json", f"{e.project}@{e.version}"))["Dir"]
    workdir = root / e.workdir.lstrip("/")
    shutil.copytree(source, workdir, copy_function=shutil.copyfile)
    for directory, _, _ in os.walk(workdir):
        os.chmod(directory, 0o755)  # the cache has them read-only
    modules = root / e.env["GOMODCACHE"].lstrip("/")
    await run(
        "go",
        "list",
        "-deps",
        "-test",
        *e.packages,
        cwd=workdir,
        env={"GOMODCACHE": str(modules), "GOFLAGS": "-modcacherw", "GOWORK": "off"},
    )


async def go_toolkit(e: Environment, root: Path) -> None:
    """Compile tools."""
    for tool in e.tools:
        bin_dir = root / "usr/local/bin"
        await run(
            "nice",
            "go",
            "install",
            tool,
            cwd=root,
            env={"GOBIN": str(bin_dir), "CGO_ENABLED": "0", "GOFLAGS": "-trimpath"},
        )


async def debian_workspace(e: Environment, root: Path) -> None:
    """Unpack the upstream source of a Debian source package, as Debian has patched it."""
    with scratch(root.parent) as apt:
        deb = Path(debian_sources()).read_text()
        sources = apt / ("src.sources" if "Types:" in deb else "src.list")
        sources.write_text(deb.replace("Types: deb\n", "Types: deb-src\n").replace("\ndeb ", "\ndeb-src "))
        (apt / "lists/partial").mkdir(parents=True)
        options = [
            f"-oDir::Etc::SourceList={sources}",
            "-oDir::Etc::SourceParts=-",
            f"-oDir::State::Lists={apt}/lists",
            "-qq",
        ]
        if "Types:" in deb:
            parts = apt / "parts"
            parts.mkdir()
            sources.rename(parts / sources.name)
            options[:2] = ["-oDir::Etc::SourceList=-", f"-oDir::Etc::SourceParts={parts}"]
        await run("apt-get", *options, "update")
        await run("apt-get", *options, "source", "--download-only", e.project, cwd=apt)
        (dsc,) = apt.glob("*.dsc")
        workdir = root / e.workdir.lstrip("/")
        workdir.parent.mkdir(parents=True)
        await run("dpkg-source", "--no-check", "--extract", str(dsc), str(workdir), cwd=apt)


async def node_workspace(e: Environment, root: Path) -> None:
    """Unpack a package; npm's cache beside it has all that its lock file names."""
    workdir = root / e.workdir.lstrip("/")
    with scratch(root.parent) as fetched:
        await run("npm", "pack", "--silent", f"{e.project}@{e.version}", cwd=fetched)
        (archive,) = fetched.glob("*.tgz")
        unpack(archive, workdir)
    cache = root / e.env["npm_config_cache"].lstrip("/")
    # Of what a lock file names without its address, npm asks the registry, also when offline.
    await npm("install", "--cache", str(cache), "--omit-lockfile-registry-resolved=false", cwd=workdir)
    shutil.rmtree(workdir / "node_modules")  # which the task installs
    shutil.rmtree(cache / "_logs", ignore_errors=True)


async def node_toolkit(e: Environment, root: Path) -> None:
    """Unpack programs and what they depend on where npm has global ones."""
    with scratch(root.parent) as cache:
        await npm("install", "--global", "--prefix", str(root / "usr/local"), "--cache", str(cache), *e.tools)


async def java_workspace(e: Environment, root: Path) -> None:
    """Unpack a project; a repository beside it has what its build needs."""
    await debian_workspace(e, root)
    repository = root / "work/repository"
    workdir = root / e.workdir.lstrip("/")
    await mvn(repository, f"{DEPENDENCY_PLUGIN}:go-offline", cwd=workdir)
    for artifact in e.dependencies:
        await mvn(repository, f"{DEPENDENCY_PLUGIN}:get", f"-Dartifact={artifact}", cwd=root)
    # Maven offline takes only what it remembers to have from the same repository.
    for record in ("_remote.repositories", "resolver-status.properties", "*.lastUpdated"):
        for path in list(repository.rglob(record)):
            path.unlink()


async def java_toolkit(e: Environment, root: Path) -> None:
    """Copy programs that are one jar each."""
    with scratch(root.parent) as repository:
        for tool in e.tools:
            await mvn(
                repository,
                f"{DEPENDENCY_PLUGIN}:copy",
                f"-Dartifact={tool}",
                f"-DoutputDirectory={root}/usr/local/share/java",
                cwd=root,
            )


async def no_more(e: Environment, root: Path) -> None:
    """Make nothing: the tools are Debian's."""


TREES: dict[tuple[str, str], Callable[[Environment, Path], Awaitable[None]]] = {
    ("python", "workspace"): python_workspace,
    ("python", "toolkit"): python_toolkit,
    ("go", "workspace"): go_workspace,
    ("go", "toolkit"): go_toolkit,
    ("node", "workspace"): node_workspace,
    ("node", "toolkit"): node_toolkit,
    ("java", "workspace"): java_workspace,
    ("java", "toolkit"): java_toolkit,
    ("cpp", "workspace"): debian_workspace,
    ("cpp", "toolkit"): no_more,
}


@contextmanager
def scratch(parent: Path) -> Iterator[Path]:
    """Give a directory that goes with the block."""
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=False) as directory:
        os.chmod(directory, 0o755)
        yield Path(directory)


def pack(root: Path, tar: Path) -> None:
    """Write a tree as the tar of a layer, owned by root."""
    with tarfile.open(tar, "w") as out:
        out.add(root, arcname=".", filter=owned_by_root)


def unpack(archive: Path, directory: Path) -> None:
    """Unpack a source distribution without its top directory; no name leads out of directory."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as tmp:
        with tarfile.open(archive) as source:
            source.extractall(tmp, filter="data")
        (top,) = Path(tmp).iterdir()
        directory.parent.mkdir(parents=True, exist_ok=True)
        top.rename(directory)


def goroot() -> str:
    """Return where this machine has Go."""
    return output("go", "env", "GOROOT").strip()


def output(*argv: str) -> str:
    """Return what a program says."""
    try:
        return subprocess.run(argv, check=True, capture_output=True, text=True, cwd="/").stdout
    except subprocess.CalledProcessError as e:
        raise DemoError(f"{argv[0]} failed with status {e.returncode}:\n{e.stderr}") from e


async def pip(*args: str) -> None:
    """Run the pip of the virtual environment."""
    await run(VENV_PYTHON, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input", *args)


async def npm(*args: str, cwd: Path | None = None) -> None:
    """Run npm, and no script of a package."""
    await run("nice", "npm", *args, "--ignore-scripts", "--no-audit", "--no-fund", cwd=cwd)


async def mvn(repository: Path, *args: str, cwd: Path) -> None:
    """Run Maven with a local repository of our own."""
    await run("nice", "mvn", "-B", "-q", f"-Dmaven.repo.local={repository}", *args, cwd=cwd)
