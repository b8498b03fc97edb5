"""Run one task in many sandboxes at once, and score only what may be scored."""

import asyncio

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox


async def attempt(sandbox: Sandbox | DSecError, number: int) -> float | None:
    """Return the reward of one attempt; None where the platform failed, and there is none."""
    try:
        if isinstance(sandbox, DSecError):
            raise sandbox  # it could not be made
        async with sandbox:
            await sandbox.files.write("/tmp/answer", f"{number * number}\n")
            result = await sandbox.run_shell(
                "cat /tmp/answer | wc -l; exit $CODE", env={"CODE": str(number % 2)}
            )
    except DSecError as e:
        print(f"attempt {number}: not scored: {e}")
        return None
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
    asyncio.run(main())
