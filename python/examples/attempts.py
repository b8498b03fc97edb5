"""Run one task in many sandboxes at once, and score only what may be scored."""

import asyncio
import sys

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, PlatformError, Sandbox


async def attempt(sandbox: Sandbox | DSecError, number: int) -> float | None:
    """Return the reward of one attempt; None where the platform failed, and there is none."""
    if isinstance(sandbox, DSecError):
        print(f"attempt {number}: not scored, for want of a sandbox: {sandbox}")
        return None
    try:
        async with sandbox:
            await sandbox.files.write("/tmp/answer", f"{number * number}\n")
            result = await sandbox.run_shell(
                "cat /tmp/answer | wc -l; exit $CODE", env={"CODE": str(number % 2)}
            )
    except PlatformError as e:
        print(f"attempt {number}: not scored: {e}")
        return None
    except DSecError as e:
        # What the command needs is not in the sandbox any more: a shell that the
        # agent removed, say. To drop the attempt would reward just that.
        print(f"attempt {number}: failed: {e}")
        return 0.0
    if result.timed_out or result.oom:
        print(f"attempt {number}: {result.describe()}")
    return 1.0 if result.ok else 0.0


async def main(image: str = "base", count: int = 8) -> list[float | None]:
    """Run `count` attempts on sandboxes made of `image`; return their rewards."""
    args = DSecContainerRunArgs(
        container_image=image, memory_limit_mb=256, ttl_running_stop=60, job="attempts"
    )
    async with DSecClient() as client:
        sandboxes = await client.run_containers(args, count, timeout=120)
        rewards = await asyncio.gather(*(attempt(s, i) for i, s in enumerate(sandboxes)))
        print("rewards:", *rewards)
        return list(rewards)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if sys.argv[1:] else "base"))
