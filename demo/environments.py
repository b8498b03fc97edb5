"""Real environments on dsec: what of an image does a real task touch?

Builds a base, a workspace and a toolkit for each language from Debian and the
language's own registry, imports them as layers, and runs a real task in a sandbox
of them: install, build, tests. Prints for each step how it ended, and for each
layer how many of its bytes the node has read.

    sudo make environments

The server is one of its own, with its state below build/environments: what is made
and imported once is there the next time.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox

import recipes
from inputs import DemoError
from recipes import Environment

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build/environments"
STORE = CACHE / "store"
ADDRESS = os.environ.get("DSEC_API_LISTEN", "127.0.0.1:7329")
KINDS = ("base", "workspace", "toolkit")
STEP_TIMEOUT = 1800.0


@dataclass
class Layer:
    """One layer, and the file in the store that has its files' contents."""

    kind: str
    digest: str

    @property
    def data(self) -> Path:
        """The file."""
        return STORE / "layers" / self.digest.removeprefix("sha256:") / "data"

    def forget(self) -> None:
        """Take the file from the page cache."""
        fd = os.open(self.data, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def touched(self) -> tuple[int, int]:
        """Bytes of the file that the node has read, in whole pages, and all of them."""
        size = self.data.stat().st_size
        fd = os.open(self.data, os.O_RDWR)
        try:
            with mmap.mmap(fd, size) as m:
                pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
                resident = (ctypes.c_ubyte * pages)()
                start = ctypes.c_char.from_buffer(m)
                address = ctypes.c_void_p(ctypes.addressof(start))
                failed = ctypes.CDLL(None, use_errno=True).mincore(address, ctypes.c_size_t(size), resident)
                del start  # else the map could not be closed
                if failed:
                    raise OSError(ctypes.get_errno(), "mincore")
                return sum(r & 1 for r in resident) * mmap.PAGESIZE, size
        finally:
            os.close(fd)


@asynccontextmanager
async def server() -> AsyncIterator[DSecClient]:
    """Run a `dsec up` of our own, and end it after the block."""
    if os.geteuid() != 0:
        raise DemoError("only root can make sandboxes: sudo make environments")
    url, data, log = f"http://{ADDRESS}", CACHE / "up", CACHE / "server.log"
    env = {
        **os.environ,
        "DSEC_DATA_DIR": str(data),
        "DSEC_API_LISTEN": ADDRESS,
        "DSEC_LAYERS_STORE": str(STORE),
        "DSEC_CONTAINER_DISK_IMAGE_BYTES": str(3 << 30),
    }
    with log.open("ab") as out:
        process = subprocess.Popen(
            [ROOT / "bin/dsec", "up"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env
        )
    try:
        await answering(url, process, log)
        async with DSecClient(url, key_file=str(data / "admin.key")) as client:
            yield client
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


async def answering(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    for _ in range(300):
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise DemoError(f"dsec up ended with status {process.returncode}:\n{tail}")
        try:
            with urllib.request.urlopen(f"{url}/healthz", timeout=2):
                return
        except (urllib.error.URLError, OSError):
            await asyncio.sleep(0.1)
    raise DemoError(f"dsec up does not answer at {url} after 30 s; see {log}")


async def layers_of(client: DSecClient, e: Environment) -> list[Layer]:
    """Make and import the layers of an environment that are not there."""
    there = {layer.name: layer for layer in await client.list_layers()}
    layers = []
    for kind in KINDS:
        name = e.layer(kind)
        if name not in there:
            started = time.monotonic()
            tar = await recipes.tar_of(e, kind, CACHE)
            made = time.monotonic()
            imported = await client.import_layer(tar, name=name, kind=kind)
            size = tar.stat().st_size / 1e6
            tar.unlink()  # the store has it
            print(
                f"{name}: {size:.0f} MB, made in {made - started:.0f} s,",
                f"imported in {time.monotonic() - made:.1f} s",
                file=sys.stderr,
            )
            digest = imported.layer.digest
        else:
            digest = there[name].digest
        layers.append(Layer(kind, digest))
    return layers


async def task(sandbox: Sandbox, e: Environment) -> bool:
    """Run the steps; say how each ended."""
    good = True
    for what, *argv in e.steps:
        started = time.monotonic()
        result = await sandbox.exec(argv, cwd=e.workdir, timeout=STEP_TIMEOUT)
        print(f"  {what:<8} {time.monotonic() - started:>7.1f} s  {result.describe()}")
        if not result.ok:
            good = False
            for line in (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()[-12:]:
                print(f"    {line}")
            break
    return good


async def environment(client: DSecClient, e: Environment) -> bool:
    """Run the task of one environment from a cold page cache and report what it touched."""
    layers = await layers_of(client, e)
    for layer in layers:
        layer.forget()
    args = DSecContainerRunArgs(
        container_image=e.layer("base"), workspace=e.layer("workspace"), toolkits=[e.layer("toolkit")],
        memory_limit_mb=e.memory_mb, cpu_cores_limit=2, pids_limit=1024,
        disk_limit_mb=2048, disk_inodes_limit=200_000,
        workdir=e.workdir, env=e.env, job="environments",
    )  # fmt: skip
    started = time.monotonic()
    sandbox = await client.run_container(args, timeout=120)
    print(f"{e.name}: created in {(time.monotonic() - started) * 1000:.1f} ms")
    async with sandbox:
        good = await task(sandbox, e)
        sums = [layer.touched() for layer in layers]
        sums.append((sum(t for t, _ in sums), sum(n for _, n in sums)))
        for what, (t, n) in zip([*KINDS, "all"], sums, strict=True):
            print(f"  {what:<9} {t / 1e6:>8.1f} of {n / 1e6:>8.1f} MB read: {100 * t / n:.1f} %")
    return good


async def environments(names: list[str]) -> int:
    """Run all environments, or those that are named, and return the exit status."""
    CACHE.mkdir(parents=True, exist_ok=True)
    STORE.mkdir(exist_ok=True)
    all_of_them = recipes.load(ROOT / "demo/environments.toml")
    if unknown := set(names) - {e.name for e in all_of_them}:
        raise DemoError(
            f"no environment {', '.join(sorted(unknown))}; there are {', '.join(e.name for e in all_of_them)}"
        )
    bad = []
    current = asyncio.current_task()
    assert current is not None  # asyncio.run made one
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, current.cancel)
    async with server() as client:
        for e in all_of_them:
            if (not names or e.name in names) and not await environment(client, e):
                bad.append(e.name)
    if bad:
        print(f"failed: {', '.join(bad)}")
    return 1 if bad else 0


def main() -> int:
    """Run what the command line names; what goes wrong is one line."""
    try:
        return asyncio.run(environments(sys.argv[1:]))
    except* asyncio.CancelledError:
        print("\nenvironments: ended by a signal", file=sys.stderr)
    except* (DemoError, DSecError, OSError) as group:
        for e in group.exceptions:
            print(f"\nenvironments: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
