"""Real environments on dsec: what of an image does a real task touch?

Builds a base, a workspace and a toolkit for each language from Debian and the
language's own registry, imports them as layers, and runs a real task in a sandbox
of them: install, build, see the tests fail, mend, build, tests. Prints for each step
how it ended, and for each layer how many of its bytes came to the node; rows go to
bench/results/environments.json and bench/ENVIRONMENTS.md.

    sudo make environments
    sudo make environments ENVIRONMENTS="--way fetched java"

The server is one of its own, with its state below build/environments: what is made
and imported once is there the next time.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, ExecResult, Sandbox

import recipes
from inputs import DemoError
from layerbytes import Layer
from recipes import Environment
from report import WAYS, Run, observe, write

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build/environments"
STORE = CACHE / "store"
FETCHED = CACHE / "fetched"
RUN = "/run/dsec-environments"
ADDRESS = os.environ.get("DSEC_API_LISTEN", "127.0.0.1:7329")
KINDS = ("base", "workspace", "toolkit")
STEP_TIMEOUT = 1800.0


@asynccontextmanager
async def server(way: str) -> AsyncIterator[DSecClient]:
    """Run a `dsec up` of our own that has fetched nothing, and end it after the block."""
    if os.geteuid() != 0:
        raise DemoError("only root can make sandboxes: sudo make environments")
    url, data, log = f"http://{ADDRESS}", CACHE / "up", CACHE / "server.log"
    shutil.rmtree(FETCHED, ignore_errors=True)
    env = {
        **os.environ,
        "DSEC_DATA_DIR": str(data),
        "DSEC_RUN_DIR": RUN,
        "DSEC_API_LISTEN": ADDRESS,
        "DSEC_LAYERS_STORE": str(STORE),
        "DSEC_LAYERS_VERIFY": "always" if way == "fetched" else "auto",
        "DSEC_LAYERS_CACHE_DIR": str(FETCHED),
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
        unmount(RUN)  # else the next server went on with these mounts, and what is cached of them


def unmount(directory: str) -> None:
    """Unmount what is below a directory, the latest first."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for point in reversed(mounts):
        if point.startswith(directory + "/"):
            subprocess.run(["umount", "--lazy", point], check=True)


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


async def layers_of(client: DSecClient, e: Environment, way: str) -> list[Layer]:
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
        layers.append(Layer(kind, digest, STORE, FETCHED if way == "fetched" else None))
    return layers


async def step(sandbox: Sandbox, e: Environment, run: Run, what: str, argv: list[str]) -> ExecResult:
    """Run a step of the task and say how it ended."""
    result = await sandbox.exec(argv, cwd=e.workdir, timeout=STEP_TIMEOUT)
    run.seconds[what] = result.duration
    run.cpu += result.cpu
    print(f"  {what:<10} {result.duration:>7.1f} s  {result.describe()}", flush=True)
    return result


def tail(result: ExecResult) -> None:
    """Show the end of what a step said."""
    for line in (result.stdout + result.stderr).decode(errors="replace").strip().splitlines()[-25:]:
        print(f"    {line}")


async def task(sandbox: Sandbox, e: Environment, run: Run) -> bool:
    """Do the task; return whether all of it went as it should."""
    for what, argv in (("install", e.install), ("build", e.build)):
        if not (result := await step(sandbox, e, run, what, argv)).ok:
            tail(result)
            return False
    before = await step(sandbox, e, run, "tests", e.tests)
    by_itself = before.exit_code is not None and not (before.oom or before.timed_out or before.output_limit)
    if before.ok or not by_itself or e.bug.shows.encode() not in before.stdout + before.stderr:
        print(f"  the tests should have failed and said {e.bug.shows!r}")
        tail(before)
        return False
    path = f"{e.workdir}/{e.bug.file}"
    text = (await sandbox.files.read(path)).decode()
    await sandbox.files.write(path, text.replace(e.bug.wrong, e.bug.right))
    for what, argv in (("build again", e.build), ("tests again", e.tests)):
        if not (result := await step(sandbox, e, run, what, argv)).ok:
            tail(result)
            return False
    run.reward = 1
    return True


async def environment(client: DSecClient, e: Environment, way: str) -> Run:
    """Run the task of one environment on a node that has nothing of it."""
    layers = await layers_of(client, e, way)
    for layer in layers:
        layer.start()
    args = DSecContainerRunArgs(
        container_image=e.layer("base"), workspace=e.layer("workspace"), toolkits=[e.layer("toolkit")],
        memory_limit_mb=e.memory_mb, cpu_cores_limit=2, pids_limit=1024,
        disk_limit_mb=2048, disk_inodes_limit=200_000,
        workdir=e.workdir, env=e.env, job="environments",
    )  # fmt: skip
    run = Run(e.name, way, f"{e.project} {e.version}".strip(), e.bug.what)
    started = time.monotonic()
    sandbox = await client.run_container(args, timeout=120)
    run.create_ms = (time.monotonic() - started) * 1000
    print(f"{e.name}: created in {run.create_ms:.1f} ms")
    async with sandbox:
        await task(sandbox, e, run)
        run.kinds = {layer.kind: layer.bytes_of() for layer in layers}
        run.features = await observe(sandbox)
    run.moved = sum(m for m, _ in run.kinds.values())
    run.image = sum(n for _, n in run.kinds.values())
    for what, (m, n) in {**run.kinds, "all": (run.moved, run.image)}.items():
        print(f"  {what:<9} {m / 1e6:>8.1f} of {n / 1e6:>8.1f} MB {way}: {100 * m / n:.1f} %")
    print(f"  reward {run.reward}", flush=True)
    return run


async def environments(way: str, names: list[str]) -> int:
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
    async with server(way) as client:
        for e in all_of_them:
            if names and e.name not in names:
                continue
            run = await environment(client, e, way)
            if run.reward:
                write([run], ROOT / "bench/results/environments.json", ROOT / "bench/ENVIRONMENTS.md")
            else:
                bad.append(e.name)
    if bad:
        print(f"failed: {', '.join(bad)}")
    return 1 if bad else 0


def main() -> int:
    """Run what the command line names; what goes wrong is one line."""
    parser = argparse.ArgumentParser(prog="environments", description="Run real tasks in real environments.")
    parser.add_argument("--way", choices=list(WAYS), default="read", help="how the node reads layers")
    parser.add_argument("names", nargs="*", metavar="environment", help="one of environments.toml; none: all")
    args = parser.parse_args()
    try:
        return asyncio.run(environments(args.way, args.names))
    except* asyncio.CancelledError:
        print("\nenvironments: ended by a signal", file=sys.stderr)
    except* (DemoError, DSecError, OSError) as group:
        for e in group.exceptions:
            print(f"\nenvironments: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
