"""Clean checkouts of one commit of a git repository, for imports as layers.

What internal/checkout is for the command line: the same commit gives the same
layer there and here, which a test compares. This machine's git does the work,
with its user's credentials and protocols.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import stat
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from libdsec._errors import (
    DeniedError,
    DSecError,
    InvalidError,
    NotFoundError,
    UnavailableError,
    UnsupportedError,
)

# How deep submodules may lie in each other.
_MAX_SUBMODULES = 8
_COMMIT = re.compile(r"(?:[0-9a-f]{40}|[0-9a-f]{64})")
# What git is told whatever its user's configuration says: no hook runs, no file is
# changed on its way, nothing is written that a checkout does not need.
_OWN = [
    word
    for setting in (
        "core.hooksPath=/dev/null",
        "core.fsmonitor=false",
        "core.autocrlf=false",
        "core.logAllRefUpdates=false",
        "gc.auto=0",
        "maintenance.auto=false",
        "advice.detachedHead=false",
        "index.version=2",
        "core.untrackedCache=false",
        "core.splitIndex=false",
        "fetch.writeCommitGraph=false",
    )
    for word in ("-c", setting)
]
# What makes git work in another repository.
_ELSEWHERE = {
    "GIT_DIR",
    "GIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_NAMESPACE",
    "GIT_TEMPLATE_DIR",
    "GIT_COMMON_DIR",
    "GIT_CEILING_DIRECTORIES",
}


@dataclass
class Options:
    """What is checked out; see `DSecClient.import_git`."""

    source: str
    ref: str
    depth: int = 1
    submodules: bool = False
    no_git: bool = False


@dataclass
class Checkout:
    """A directory with one commit's files, and where they are from, without credentials."""

    dir: str
    commit: str
    source: str


class _GitError(Exception):
    """What git complains of, in one line."""


@asynccontextmanager
async def made(options: Options) -> AsyncIterator[Checkout]:
    """Check a commit out into a directory that goes with the context."""
    if shutil.which("git") is None:
        raise UnsupportedError("there is no git on this machine, want it in PATH", field="repository")
    if not options.source or options.source.startswith("-") or options.ref.startswith("-"):
        raise InvalidError(
            "want a URL or a path, and a ref, that do not begin with a dash", field="repository"
        )
    if options.depth < 0:
        raise InvalidError(f"want 0 for all, or more, got {options.depth}", field="depth")
    root = await asyncio.to_thread(tempfile.mkdtemp, prefix="dsec-checkout-")
    try:
        git = _Git(options)
        commit, branch = await git.find()
        tree = os.path.join(root, "tree")
        await git.check_out(_Repository(tree, git.source, commit, branch), _MAX_SUBMODULES)
        yield Checkout(tree, commit, git.shown)
    except _GitError as e:
        raise InvalidError(str(e), field="repository") from None
    finally:
        await asyncio.to_thread(shutil.rmtree, root)


@dataclass
class _Repository:
    """One that is being checked out: the one asked for, or a submodule."""

    dir: str
    source: str
    commit: str
    branch: str = ""
    sub: bool = False


class _Git:
    def __init__(self, options: Options) -> None:
        self._options = options
        self.source = options.source  # as git gets it
        self.shown = bare(options.source)

    async def find(self) -> tuple[str, str]:
        """Find the commit, and the branch that was asked for, if it was one."""
        try:
            status = await asyncio.to_thread(os.stat, self.source)
        except OSError as e:
            if not _is_path(self.source):
                return await self._find_remote()
            kind = DeniedError if isinstance(e, PermissionError) else NotFoundError
            raise kind(f"{self.source}: {e.strerror}", field="repository") from None
        if stat.S_ISDIR(status.st_mode):
            return await self._find_local()
        return await self._find_remote()  # git may take the file for a bundle

    async def _find_local(self) -> tuple[str, str]:
        path = await asyncio.to_thread(os.path.abspath, self.source)
        ref = self._options.ref or "HEAD"
        try:
            commit = await self._output(
                path, "rev-parse", "--verify", "--quiet", "--end-of-options", ref + "^{commit}"
            )
        except _GitError:
            try:
                await self._output(path, "rev-parse", "--git-dir")
            except _GitError as e:
                raise InvalidError(
                    f"{self.source} is no git repository that can be read: {e}", field="repository"
                ) from None
            raise NotFoundError(f"no commit {ref!r} in {self.source}", field="ref") from None
        self.source, self.shown = Path(path).as_uri(), path
        return commit.strip(), await self._local_branch(path)

    async def _local_branch(self, path: str) -> str:
        ref = self._options.ref
        try:
            if not ref:
                ref = (await self._output(path, "symbolic-ref", "--quiet", "--short", "HEAD")).strip()
            await self._output(path, "show-ref", "--verify", "--quiet", "refs/heads/" + ref)
        except _GitError:
            return ""
        return ref

    async def _find_remote(self) -> tuple[str, str]:
        ref = self._options.ref
        if _COMMIT.fullmatch(ref):
            return ref, ""
        patterns = ["HEAD"]
        if ref:
            patterns = [f"refs/heads/{ref}", f"refs/tags/{ref}", f"refs/tags/{ref}^{{}}", ref]
        try:
            listed = await self._output("", "ls-remote", "--symref", "--", self.source, *patterns)
        except _GitError as e:
            raise self._refused(e, f"{self.shown} cannot be read") from None
        found, branch = {}, ""
        for line in listed.splitlines():
            commit, _, name = line.strip().partition("\t")
            if name == "HEAD" and commit.startswith("ref: refs/heads/"):
                branch = commit.removeprefix("ref: refs/heads/")
            elif _COMMIT.fullmatch(commit):
                found[name] = commit
        if not ref:
            if "HEAD" not in found:
                raise NotFoundError(f"{self.shown} has no commit that is checked out; name one", field="ref")
            return found["HEAD"], branch
        for name in patterns:
            if name in found:
                # Of a tag with a message, what it is of.
                return found.get(name + "^{}", found[name]), ref if name == patterns[0] else ""
        raise NotFoundError(f"{self.shown} has no branch or tag {ref!r}", field="ref")

    def _refused(self, e: _GitError, what: str) -> DSecError:
        """Make the error of a repository that gave nothing; one that is not there is not tried again."""
        text = f"{what}: {e}"
        if _is_path(self.source):  # a file
            return InvalidError(text, field="repository")
        if "does not appear to be a git repository" in str(e) or "not found" in str(e):
            return NotFoundError(text, field="repository")
        if "not our ref" in str(e):
            return NotFoundError(text, field="ref")
        return UnavailableError(text, field="repository")

    async def check_out(self, r: _Repository, deeper: int) -> None:
        """Fetch the commit and check it out."""
        object_format = "sha256" if len(r.commit) == 64 else "sha1"
        await self._output(
            "", "init", "--quiet", "--template=", f"--object-format={object_format}", "--", r.dir
        )
        try:
            await self._output(r.dir, *self._fetch(r), "--", r.source, r.commit)
        except _GitError as e:
            what = f"commit {r.commit} cannot be fetched from {bare(r.source)}"
            raise self._refused(e, what) from None
        if r.branch:
            await self._output(r.dir, "symbolic-ref", "HEAD", "refs/heads/" + r.branch)
            await self._output(r.dir, "update-ref", "refs/heads/" + r.branch, r.commit)
        else:
            await self._output(r.dir, "update-ref", "--no-deref", "HEAD", r.commit)
        try:
            await self._output(r.dir, "checkout", "--quiet", "--force", "--no-recurse-submodules")
        except _GitError as e:
            raise InvalidError(f"commit {r.commit} cannot be checked out: {e}", field="repository") from None
        if self._options.submodules:
            await self._submodules(r, deeper)
        await self._settle(r)

    def _fetch(self, r: _Repository) -> list[str]:
        words: list[str] = []
        if r.sub:  # its URL is a stranger's word: what git only takes from its user it does not take
            allowed = ["https", "ssh", "git"]
            # As the user had it for the first.
            allowed += [p for p in ("file", "http") if self.source.startswith(p + "://")]
            words += ["-c", "protocol.allow=never"]
            for protocol in allowed:
                words += ["-c", f"protocol.{protocol}.allow=always"]
        words += ["fetch", "--quiet", "--no-tags", "--no-recurse-submodules", "--no-write-fetch-head"]
        if self._options.depth > 0:
            words.append(f"--depth={self._options.depth}")
        return words

    async def _settle(self, r: _Repository) -> None:
        """Make of what git left what is the same each time."""
        when = int(await self._output(r.dir, "show", "--no-patch", "--format=%ct", r.commit))
        git = os.path.join(r.dir, ".git")
        if self._options.no_git:
            await asyncio.to_thread(shutil.rmtree, git)
        else:
            # read-tree writes an index of the tree alone, without what is of this machine's files.
            os.unlink(os.path.join(git, "index"))
            await self._output(r.dir, "read-tree", r.commit)
            for name in ("logs", "FETCH_HEAD", "ORIG_HEAD", "hooks", "info", "description", "branches"):
                await asyncio.to_thread(_remove, os.path.join(git, name))
        await asyncio.to_thread(_settle_files, r.dir, when)

    async def _submodules(self, r: _Repository, deeper: int) -> None:
        """Check out what the commit names, each as a repository of its own."""
        urls: dict[str, str] | None = None
        for entry in (await self._output(r.dir, "ls-tree", "-r", "-z", r.commit)).split("\0"):
            about, _, name = entry.partition("\t")
            fields = about.split()
            if len(fields) != 3 or fields[0] != "160000":
                continue
            if deeper == 0:
                raise InvalidError(
                    f"they lie in each other more than {_MAX_SUBMODULES} deep", field="submodules"
                )
            if urls is None:
                urls = await self._urls(r)
            if name not in urls:
                raise InvalidError(f"the commit has no URL for {name!r}", field="submodules")
            source = _relative(r.source, urls[name], name)
            path = os.path.join(r.dir, name)
            if not _inside(r.dir, name):
                raise InvalidError(f"{name!r} is not in the checkout", field="submodules")
            await self.check_out(_Repository(path, source, fields[2], sub=True), deeper - 1)

    async def _urls(self, r: _Repository) -> dict[str, str]:
        """Read the URLs of the commit's .gitmodules, by path."""
        blob = r.commit + ":.gitmodules"
        pattern = r"^submodule\..*\.(path|url)$"
        try:
            listed = await self._output(r.dir, "config", "--blob", blob, "-z", "--get-regexp", pattern)
        except _GitError:
            raise InvalidError("the commit has no .gitmodules that can be read", field="submodules") from None
        paths, urls = {}, {}
        for entry in listed.split("\0"):
            key, _, value = entry.partition("\n")
            if key.endswith(".path"):
                paths[key.removesuffix(".path")] = value
            elif key.endswith(".url"):
                urls[key.removesuffix(".url")] = value
        return {path: urls[name] for name, path in paths.items() if urls.get(name)}

    async def _output(self, directory: str, *words: str) -> str:
        """Run git. A directory is a repository itself, and none below one."""
        process = await asyncio.create_subprocess_exec(
            "git",
            *_OWN,
            *words,
            cwd=directory or None,
            env=_environment(directory),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await process.communicate()
        except BaseException:  # cancelled: git is not to go on
            process.kill()
            await process.wait()
            raise
        if process.returncode != 0:
            said = _said(err.decode("utf-8", "replace")) or f"git ended with {process.returncode}"
            # git repeats URLs as they were given.
            raise _GitError(said.replace(self._options.source, bare(self._options.source)))
        return out.decode("utf-8", "surrogateescape")


def _environment(directory: str) -> dict[str, str]:
    environment = {k: v for k, v in os.environ.items() if k not in _ELSEWHERE} | {"LC_ALL": "C"}
    if directory:
        environment["GIT_CEILING_DIRECTORIES"] = os.path.dirname(os.path.realpath(directory))
    return environment


def _inside(top: str, name: str) -> bool:
    """Whether a name is no link, nor below one, nor outside of top."""
    return os.path.realpath(os.path.join(top, name)) == os.path.join(os.path.realpath(top), name)


def bare(source: str) -> str:
    """Return a URL without what opens it; a path stays as it is."""
    url = _url(source)
    if url is None or not url.netloc:
        return source  # a path, or host:path, whose user is no secret
    user, _, host = url.netloc.rpartition("@")
    if url.scheme == "ssh" and user:
        host = f"{user.partition(':')[0]}@{host}"
    return url._replace(netloc=host, query="", fragment="").geturl()


def _url(source: str) -> SplitResult | None:
    try:
        url = urlsplit(source)
    except ValueError:
        return None
    return url if url.scheme and "://" in source else None


def _is_path(source: str) -> bool:
    """Whether git takes it for a path: it has no scheme and no host before a colon."""
    host, colon, _ = source.partition(":")
    return not colon or "/" in host


def _relative(base: str, ref: str, name: str) -> str:
    """Resolve a submodule's URL against that of the repository that has it."""
    if ref.startswith("-"):
        raise InvalidError(f"{name!r}: want a URL that does not begin with a dash", field="submodules")
    if not ref.startswith(("./", "../")):
        return ref
    url = _url(base)
    if url is not None:
        return url._replace(path=os.path.normpath(f"{url.path}/{ref}")).geturl()
    host, colon, directory = base.partition(":")
    if not colon:
        raise InvalidError(f"{name!r}: {ref!r} is relative to what is no URL", field="submodules")
    return f"{host}:{os.path.normpath(f'{directory}/{ref}')}"


def _said(stderr: str) -> str:
    """Return what git complains of, without the advice that it gives to people."""
    lines: list[str] = []
    for line in stderr.splitlines():
        line = line.strip()
        if not line and lines:
            break
        if not line or line.startswith(("hint:", "warning:")) or line.endswith(":"):
            continue
        lines.append(line.removeprefix("fatal: ").removeprefix("error: "))
    return "; ".join(lines[-3:])[:400]


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    elif os.path.lexists(path):
        os.unlink(path)


def _settle_files(top: str, when: int) -> None:
    """Give every file one time, and what its owner may to all, but for writing: no umask is of a commit."""
    for directory, names, files in os.walk(top, topdown=False):
        for name in (*names, *files):
            _settle_file(os.path.join(directory, name), when)
    _settle_file(top, when)


def _settle_file(path: str, when: int) -> None:
    status = os.lstat(path)
    if not stat.S_ISLNK(status.st_mode):
        own = status.st_mode >> 6 & 7
        os.chmod(path, own << 6 | (own & 5) << 3 | own & 5)
    os.utime(path, (when, when), follow_symlinks=False)
