"""The main job of dsec on real input, on one machine.

Three bugs of released Python projects, 8 attempts each, all at once: every
attempt gets a fresh sandbox in which the project's tests fail, applies the fix
as an agent would, runs the tests again and takes the exit code as its reward.

    sudo make demo

The agent here knows the answer; what is real is everything around it.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, ExecResult, PlatformError, Sandbox

import inputs
from inputs import DemoError, Task

ROOT = Path(__file__).resolve().parent.parent
CACHE = ROOT / "build/demo"
DSEC = ROOT / "bin/dsec"
# The server that this demo starts takes these from the environment, too.
URL = os.environ.get("DSEC_URL") or "http://" + os.environ.get("DSEC_API_LISTEN", "127.0.0.1:7321")
KEY_FILE = os.environ.get("DSEC_KEY_FILE") or os.environ.get("DSEC_DATA_DIR", "/var/lib/dsec") + "/admin.key"
ATTEMPTS = 8
STEPS = 4  # of one attempt: tests, read, write, tests
TEST_TIMEOUT = 120.0


@dataclass
class Attempt:
    """What one attempt came to."""

    task: Task
    number: int
    sandbox_id: str = ""
    create_ms: float = 0.0
    steps: int = 0
    before: ExecResult | None = None
    after: ExecResult | None = None
    error: str = ""
    platform_failed: bool = False

    @property
    def reward(self) -> int | None:
        """1 if the tests pass now, 0 if not; None if the platform failed, which must not be scored."""
        if self.platform_failed:
            return None
        return int(self.after is not None and self.after.ok)

    @property
    def as_expected(self) -> bool:
        """Whether the tests failed before the fix and pass after it."""
        return self.before is not None and not self.before.ok and self.reward == 1


@dataclass
class Progress:
    """One line that fills while work is done; on a terminal it is drawn in place."""

    total: int
    what: str
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def step(self, count: int = 1) -> None:
        """Count work as done."""
        self.done += count
        self.draw()

    def draw(self) -> None:
        """Show how far it is."""
        if not sys.stderr.isatty():
            return
        width = 32
        filled = width * self.done // self.total
        bar = "#" * filled + "." * (width - filled)
        seconds = time.monotonic() - self.started
        print(
            f"\r\033[K{self.what} [{bar}] {self.done}/{self.total}  {seconds:.0f} s", end="", file=sys.stderr
        )

    def end(self) -> None:
        """Leave the line as it is and say how long it took."""
        clear = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{clear}{self.what}: {time.monotonic() - self.started:.1f} s", file=sys.stderr)


def healthy() -> bool:
    """Whether a server answers at URL."""
    try:
        with urllib.request.urlopen(f"{URL}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


async def server() -> None:
    """Start `dsec up`, unless one runs, so that it stays after this program ends."""
    if healthy():
        return
    if os.geteuid() != 0:
        raise DemoError("no server runs at " + URL + ", and only root can start one: sudo make demo")
    log = CACHE / "server.log"
    with log.open("ab") as out:
        process = subprocess.Popen(
            [DSEC, "up"], stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, cwd="/"
        )
    for _ in range(300):
        if healthy():
            return
        if process.poll() is not None:
            tail = "\n".join(log.read_text(errors="replace").splitlines()[-5:])
            raise DemoError(f"dsec up ended with status {process.returncode}:\n{tail}")
        await asyncio.sleep(0.1)
    raise DemoError(f"dsec up does not answer at {URL} after 30 s; see {log}")


async def layers(client: DSecClient, tasks: list[Task], toolkit: inputs.Toolkit) -> None:
    """Make and import the layers that the server does not have."""
    kinds = {task.layer: "workspace" for task in tasks} | {toolkit.name: "toolkit", inputs.BASE: "base"}
    there = {layer.name for layer in await client.list_layers() if layer.kind == kinds.get(layer.name)}
    makers: dict[str, Callable[[], Awaitable[Path]]] = {
        inputs.BASE: partial(inputs.base_tar, CACHE),
        toolkit.name: partial(inputs.toolkit_tar, toolkit, CACHE),
    }
    for task in tasks:
        makers[task.layer] = partial(inputs.task_tar, task, CACHE)
    missing = [name for name in makers if name not in there]
    if not missing:
        print(f"layers: all {len(makers)} are there from an earlier run", file=sys.stderr)
        return
    progress = Progress(2 * len(missing), f"layers: {len(missing)} of {len(makers)} from Debian and PyPI")
    print(f"making {', '.join(missing)}: two to four minutes, most of it mmdebstrap", file=sys.stderr)
    progress.draw()

    async def make(name: str) -> None:
        tar = await makers[name]()
        progress.step()
        await client.import_layer(tar, name=name, kind=kinds[name])
        tar.unlink()
        progress.step()

    async with asyncio.TaskGroup() as group:
        for name in missing:
            group.create_task(make(name))
    progress.end()


async def attempt(
    client: DSecClient, a: Attempt, fix: dict[str, bytes], toolkit: str, step: Callable[[], None]
) -> None:
    """Run one attempt from create to reward."""
    args = DSecContainerRunArgs(
        container_image=inputs.BASE,
        workspace=a.task.layer,
        toolkits=[toolkit] if a.task.toolkit else [],
        memory_limit_mb=512,
        cpu_cores_limit=1,
        ttl_running_stop=600,
        workdir=a.task.workdir,
        job="demo",
        labels={"task": a.task.name, "attempt": str(a.number)},
    )
    try:
        started = time.monotonic()
        sandbox = await client.run_container(args, timeout=120)
        a.create_ms = (time.monotonic() - started) * 1000
        a.sandbox_id = sandbox.id
        async with sandbox:
            await solve(sandbox, a, fix, step)
    except DSecError as e:
        a.error = f"{type(e).__name__}: {e}"
        a.platform_failed = isinstance(e, PlatformError) or not a.sandbox_id


async def solve(sandbox: Sandbox, a: Attempt, fix: dict[str, bytes], step: Callable[[], None]) -> None:
    """Do what an agent does: see the failure, read, write, try again."""

    def count() -> None:
        a.steps += 1
        step()

    a.before = await sandbox.exec(a.task.test, timeout=TEST_TIMEOUT)
    count()
    for path in fix:
        await sandbox.files.read(f"{a.task.workdir}/{path}")
    count()
    for path, text in fix.items():
        await sandbox.files.write(f"{a.task.workdir}/{path}", text)
    count()
    a.after = await sandbox.exec(a.task.test, timeout=TEST_TIMEOUT)
    count()


def table(attempts: list[Attempt]) -> None:
    """Print what each attempt came to."""
    print(f"{'task':<10} {'attempt':>7} {'create ms':>9} {'steps':>5} {'reward':>6}")
    for a in attempts:
        reward = "-" if a.reward is None else str(a.reward)
        note = "" if a.as_expected else f"  {why(a)}"
        print(f"{a.task.name:<10} {a.number:>7} {a.create_ms:>9.1f} {a.steps:>5} {reward:>6}{note}")


def why(a: Attempt) -> str:
    """Say in one line what was not as expected."""
    if a.error:
        return a.error
    if a.before is not None and a.before.ok:
        return "the tests passed before the fix"
    last = a.after or a.before
    tail = last.text.strip().splitlines()[-1:] if last else []
    return " ".join([last.describe() if last else "", *tail])


async def demo() -> int:
    """Run it all and return the exit status."""
    started = time.monotonic()
    CACHE.mkdir(parents=True, exist_ok=True)
    tasks, toolkit = inputs.load(ROOT / "demo/tasks.toml")
    await server()
    async with DSecClient(URL, key_file=KEY_FILE) as client:
        await layers(client, tasks, toolkit)
        fixes = {task.name: await inputs.fix(task, CACHE) for task in tasks}
        attempts = [Attempt(task, n) for task in tasks for n in range(1, ATTEMPTS + 1)]
        progress = Progress(len(attempts) * STEPS, f"{len(attempts)} attempts at once")
        progress.draw()
        async with asyncio.TaskGroup() as group:
            for a in attempts:
                group.create_task(attempt(client, a, fixes[a.task.name], toolkit.name, progress.step))
        progress.end()
    table(attempts)
    good = sum(a.as_expected for a in attempts)
    print(f"\n{good} of {len(attempts)} attempts failed before the fix and passed after it")
    print(f"{time.monotonic() - started:.0f} s in all")
    print(f"The server runs at {URL}; SIGTERM to the process of `dsec up` ends it, and leaves its sandboxes.")
    print("Try next:\n")
    print(f"  export DSEC_URL={URL} DSEC_KEY_FILE={KEY_FILE}")
    print(f"  bin/dsec sandbox create {inputs.BASE} {tasks[0].layer}")
    print("  bin/dsec shell ID                # a terminal inside it")
    print(f"  bin/dsec exec -w {tasks[0].workdir} ID -- {' '.join(tasks[0].test)}")
    return 0 if good == len(attempts) else 1


def main() -> int:
    """Run the demo; what goes wrong is one line."""
    try:
        return asyncio.run(demo())
    except* (DemoError, DSecError, OSError) as group:
        for e in group.exceptions:
            print(f"\ndemo: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
