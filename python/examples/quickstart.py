"""Make a sandbox, run a command, read its result."""

import asyncio
import sys

from libdsec import DSecClient, DSecContainerRunArgs


async def main(image: str = "base") -> None:
    """Run the example on sandboxes made of `image`."""
    client = DSecClient()
    await client.open()
    sandbox = await client.run_container(
        DSecContainerRunArgs(
            container_image=image,
            memory_limit_mb=512,
            cpu_cores_limit=1,
            ttl_running_stop=300,
            network_rules={"npm": False, "pypi": False},
            init_user="root",
        ),
        timeout=120,
    )
    result = await sandbox.run_shell("echo hello from $(pwd)", cwd="/tmp", timeout=30)
    print(result.check().text, end="")
    await sandbox.stop()
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
