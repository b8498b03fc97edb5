"""A rollout as an RL framework would write it: many sandboxes at once, a few steps each.

Nothing in it knows of interruptions. It is started from its beginning however
often it was killed: `attach` finds the sandboxes that are there, and what was
done in a trajectory is answered from its log.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox

# Each command leaves its name behind: what ran twice is there twice.
COUNT = "/var/tmp/ran"


async def rollout(sandbox: Sandbox, test: list[str], workdir: str, fix: dict[str, str]) -> tuple[int, int]:
    """See tests fail, write the fix, see them pass. Return the reward and how many steps were replayed."""
    with sandbox.trajectory() as steps:

        async def run(name: str, command: str) -> int:
            result = await sandbox.run_shell(f"echo {name} >> {COUNT}; {command}", timeout=120, cwd=workdir)
            return -1 if result.exit_code is None else result.exit_code

        tests = " ".join(test)
        before = await run("before", tests)
        for path in fix:
            await run("look", f"wc -l {path}")
            text = (await sandbox.files.read(f"{workdir}/{path}")).decode()
            await run("lines", f"test $(wc -l < {path}) = {text.count(chr(10))}")
            await run("compile", f"python3 -m py_compile {path}")
            await sandbox.files.write(f"{workdir}/{path}", fix[path].encode())
            await run("changed", f"wc -c {path}")
            await run("compile-again", f"python3 -m py_compile {path}")
        after = await run("after", tests)
        last = await run("again", tests)
    return int(before != 0 and after == 0 and last == 0), steps.replayed


async def main() -> None:
    """Run all rollouts of a job that a file describes."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    args = DSecContainerRunArgs(**plan["args"])
    started = time.monotonic()
    async with (
        DSecClient(plan["url"], key_file=plan["key_file"]) as client,
        await client.create_job(plan["job"], lease=60),
        asyncio.TaskGroup() as group,
    ):

        async def one(number: int) -> None:
            sandbox = await client.attach(job=plan["job"], name=f"rollout-{number}", args=args, timeout=120)
            reward, replayed = await rollout(sandbox, plan["test"], plan["workdir"], plan["fix"])
            print(json.dumps({"number": number, "reward": reward, "replayed": replayed}), flush=True)

        for number in range(plan["count"]):
            group.create_task(one(number))
    print(json.dumps({"seconds": time.monotonic() - started}), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
