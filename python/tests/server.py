"""A real `dsec up` for tests, or the one that DSEC_TEST_URL points at."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from libdsec import _config

REPO = Path(__file__).parents[2]
_STOP = 30


@dataclass(frozen=True)
class Server:
    """Where the server is, the operator's key, and the binary that it runs; empty where that is not known."""

    url: str
    key: str
    binary: str = ""


def backend() -> str:
    """Return the kind of sandbox that the tests run on."""
    return os.environ.get("DSEC_TEST_BACKEND", "fake")


@contextmanager
def serve(work: Path, registry: str = "") -> Iterator[Server]:
    """Run `dsec up` with all its files in work, and a registry that it may speak to."""
    url = os.environ.get("DSEC_TEST_URL")
    if url:
        yield Server(url, _config.resolve(url).api_key)
        return
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSEC_")}
    environment["DSEC_CONTAINER_DISK_IMAGE_BYTES"] = str(2 << 30)
    environment["DSEC_REGISTRY_INSECURE"] = registry
    cgroup = environment["DSEC_CONTAINER_CGROUP"] = f"dsec-py-{os.getpid()}-{id(work):x}"
    binary = _binary(work)
    process = subprocess.Popen(
        [
            *(binary, "up", "--backend", backend(), "--listen", "127.0.0.1:0"),
            *("--data-dir", work / "data", "--run-dir", work / "run", "--log-level", "warn"),
        ],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    )
    try:
        assert process.stdout is not None
        ready = process.stdout.readline().split()
        if ready[:1] != ["ready"]:
            raise RuntimeError(f"dsec up did not start; it exited with {process.wait(_STOP)}")
        yield Server(ready[1], (work / "data" / "admin.key").read_text().strip(), binary)
    finally:
        process.terminate()
        process.communicate(timeout=_STOP)
        _unmount(work)
        _remove_cgroups(cgroup)
        shutil.rmtree(work / "data")  # pytest keeps its directories; the volumes' image is large
    if process.returncode != 0:
        raise RuntimeError(f"dsec up ended with {process.returncode}")


def _remove_cgroups(name: str) -> None:
    """Remove the tree that a server keeps for the next one with its data; the tests' sandboxes have ended."""
    for top in (*Path("/sys/fs/cgroup").glob(f"*/{name}"), Path("/sys/fs/cgroup") / name):
        if top.is_dir():
            for group in (*top.iterdir(), top):
                if group.is_dir():
                    group.rmdir()


def _unmount(work: Path) -> None:
    """Take down what a server leaves mounted for sandboxes that outlive it; the tests' have ended."""
    with open("/proc/self/mounts") as f:
        # The kernel writes blanks in names as octal; these names have none.
        targets = [line.split()[1] for line in f]
    for target in reversed(targets):
        if Path(target).is_relative_to(work):
            subprocess.run(["umount", target], check=True)


def _binary(work: Path) -> str:
    given = os.environ.get("DSEC_BIN")
    if given:
        return given
    out = work / "dsec"
    environment = {**os.environ, "CGO_ENABLED": "0"}
    if backend() != "fake":  # which has no PID 1 to embed
        subprocess.run(["go", "generate", "./internal/chronusbin"], cwd=REPO, check=True)
    subprocess.run(["go", "build", "-o", out, "./cmd/dsec"], cwd=REPO, check=True, env=environment)
    return str(out)


def rootfs() -> bytes:
    """Return a tar of a root file system: a static busybox under all its names."""
    busybox = shutil.which("busybox")
    if busybox is None:
        raise RuntimeError("the container backend's tests need a static busybox (Debian: busybox-static)")
    names = subprocess.run([busybox, "--list"], check=True, capture_output=True, text=True).stdout.split()
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, mode in (("bin", 0o755), ("etc", 0o755), ("root", 0o700), ("tmp", 0o1777)):
            info = tarfile.TarInfo(name)
            info.type, info.mode = tarfile.DIRTYPE, mode
            tar.addfile(info)
        for name, text in (("passwd", "root:x:0:0:root:/root:/bin/sh\n"), ("group", "root:x:0:\n")):
            info = tarfile.TarInfo(f"etc/{name}")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        tar.add(busybox, "bin/busybox")
        for name in names:
            if name != "busybox":
                info = tarfile.TarInfo(f"bin/{name}")
                info.type, info.linkname = tarfile.SYMTYPE, "busybox"
                tar.addfile(info)
    return out.getvalue()
