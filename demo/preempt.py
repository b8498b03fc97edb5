"""Rollouts that are interrupted again and again, and come to the same end.

64 sandboxes work on a real bug, driven by demo/rollout.py, which is written
with libdsec alone and knows of no interruption. It is killed (SIGKILL) at 10
random moments, its job is paused in between, and the server is killed once.
Then: every command has run exactly once, and the rewards are those of a run
that nobody disturbed.

    sudo make demo-preempt
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, DSecError

import demo
import inputs
from demo import CACHE, KEY_FILE, ROOT, URL
from inputs import DemoError, Task
from rollout import COUNT

ROLLOUTS = int(os.environ.get("ROLLOUTS", "64"))
KILLS = int(os.environ.get("KILLS", "10"))
TASK = "markdown"


@dataclass
class Run:
    """One start of the rollouts."""

    what: str
    seconds: float = 0.0
    ended: int = 0
    pause_seconds: float = 0.0
    memory: int = 0
    paused_memory: int = 0


def server_pid() -> int:
    """Return the process that listens at URL."""
    port = int(URL.rsplit(":", 1)[1])
    inodes = set()
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        words = line.split()
        if words[3] == "0A" and int(words[1].split(":")[1], 16) == port:
            inodes.add(f"socket:[{words[9]}]")
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(fd.readlink()) in inodes:
                return int(fd.parts[2])
        except OSError:
            continue
    raise DemoError(f"nothing listens at {URL}")


def kill_server() -> None:
    """Kill the server, and return once it is gone."""
    fd = os.pidfd_open(server_pid())
    try:
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        select.select([fd], [], [])
    finally:
        os.close(fd)


def start(plan: Path, out: Path) -> subprocess.Popen[bytes]:
    """Start the rollouts from their beginning."""
    with out.open("wb") as f:
        return subprocess.Popen(
            [sys.executable, ROOT / "demo/rollout.py", plan], stdout=f, stdin=subprocess.DEVNULL
        )


def results(out: Path) -> dict[int, int]:
    """Return the rewards that a run told."""
    lines = [json.loads(line) for line in out.read_text().splitlines() if line.endswith("}")]
    return {line["number"]: line["reward"] for line in lines if "number" in line}


async def finish(process: subprocess.Popen[bytes], out: Path) -> dict[int, int]:
    """Wait for a run that nobody disturbs."""
    status = await asyncio.to_thread(process.wait)
    if status != 0:
        raise DemoError(f"the rollouts ended with status {status}")
    return results(out)


async def memory(client: DSecClient, job: str) -> int:
    """Return the bytes that the job's sandboxes have of the node's memory; looking does not resume them."""
    handles = [await client.attach(s.id) async for s in client.job(job).sandboxes()]
    return sum(u.memory_bytes for u in await asyncio.gather(*(h.usage() for h in handles)))


async def disturbed(
    client: DSecClient, job: str, plan: Path, out: Path, seconds: float
) -> tuple[list[Run], dict[int, int]]:
    """Run with kills and pauses until the rollouts come to their end."""
    runs = []
    for n in range(KILLS):
        run = Run(f"killed {n + 1}")
        began = time.monotonic()
        process = start(plan, out)
        await asyncio.sleep(random.uniform(0.1, 0.35) * seconds)
        process.kill()
        await asyncio.to_thread(process.wait)
        run.seconds, run.ended = time.monotonic() - began, len(results(out))
        if n == KILLS // 2:
            run.what += ", and the server"
            await asyncio.to_thread(kill_server)
            await demo.server()
        run.memory = await memory(client, job)
        began = time.monotonic()
        for item in await client.job(job).pause(wait=True):
            if item.error is not None:
                raise item.error
        run.pause_seconds = time.monotonic() - began
        run.paused_memory = await memory(client, job)
        runs.append(run)
        print(f"{run.what}: {run.ended} of {ROLLOUTS} had ended", file=sys.stderr)
    last = Run("to the end")
    began = time.monotonic()
    rewards = await finish(start(plan, out), out)
    last.seconds, last.ended = time.monotonic() - began, len(rewards)
    return [*runs, last], rewards


async def ran_once(client: DSecClient, job: str) -> list[str]:
    """Return what is wrong with the counts that the commands left in the sandboxes."""
    wrong = []
    async for info in client.job(job).sandboxes():
        sandbox = await client.attach(info.id)
        counts = Counter((await sandbox.files.read(COUNT)).decode().split())
        twice = {name: n for name, n in counts.items() if n != 1}
        if twice or len(counts) < 7:
            wrong.append(f"{info.labels['name']}: {dict(counts)}")
    return wrong


def table(runs: list[Run]) -> None:
    """Print what each run came to."""
    mib = 1 << 20
    print(f"{'run':<24} {'s':>6} {'ended':>6} {'pause s':>8} {'MiB':>7} {'MiB paused':>11}")
    for r in runs:
        print(
            f"{r.what:<24} {r.seconds:>6.1f} {r.ended:>6} {r.pause_seconds:>8.2f}"
            f" {r.memory / mib:>7.0f} {r.paused_memory / mib:>11.0f}"
        )


async def preempt() -> int:
    """Run it all and return the exit status."""
    CACHE.mkdir(parents=True, exist_ok=True)
    tasks, toolkit = inputs.load(ROOT / "demo/tasks.toml")
    task: Task = next(t for t in tasks if t.name == TASK)
    await demo.server()
    async with DSecClient(URL, key_file=KEY_FILE) as client:
        await demo.layers(client, tasks, toolkit)
        fix = await inputs.fix(task, CACHE)
        stamp = f"{int(time.time())}"
        plans, outs, jobs = {}, {}, {}
        for name in ("undisturbed", "disturbed"):
            jobs[name] = f"preempt-{name}-{stamp}"
            args = DSecContainerRunArgs(
                container_image=inputs.BASE,
                workspace=task.layer,
                memory_limit_mb=512,
                workdir=task.workdir,
                max_lifetime=3600,
            )
            plans[name], outs[name] = CACHE / f"{name}.json", CACHE / f"{name}.out"
            fields = {k: v for k, v in asdict(args).items() if v}
            plans[name].write_text(
                json.dumps(
                    {
                        "url": URL,
                        "key_file": KEY_FILE,
                        "job": jobs[name],
                        "count": ROLLOUTS,
                        "args": fields,
                        "test": task.test,
                        "workdir": task.workdir,
                        "fix": {p: t.decode() for p, t in fix.items()},
                    }
                )
            )
        began = time.monotonic()
        want = await finish(start(plans["undisturbed"], outs["undisturbed"]), outs["undisturbed"])
        seconds = time.monotonic() - began
        first = Run("undisturbed", seconds, len(want), memory=await memory(client, jobs["undisturbed"]))
        await client.job(jobs["undisturbed"]).end()
        runs, rewards = await disturbed(
            client, jobs["disturbed"], plans["disturbed"], outs["disturbed"], seconds
        )
        wrong = await ran_once(client, jobs["disturbed"])
        began = time.monotonic()
        again = await finish(start(plans["disturbed"], outs["disturbed"]), outs["disturbed"])
        forward = time.monotonic() - began
        await client.job(jobs["disturbed"]).end()
    table([first, *runs, Run("all of it from the log", forward, len(again))])
    same = want == rewards == again
    print(f"\nevery command ran once: {'yes' if not wrong else 'NO'}")
    for line in wrong:
        print(f"  {line}")
    print(
        f"rewards as undisturbed: {'yes' if same else 'NO'}; {sum(rewards.values())} of {len(rewards)} are 1"
    )
    return 0 if same and not wrong and len(rewards) == ROLLOUTS else 1


def main() -> int:
    """Run the demo; what goes wrong is one line."""
    try:
        return asyncio.run(preempt())
    except* (DemoError, DSecError, OSError) as group:
        for e in group.exceptions:
            print(f"\ndemo: {e}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
