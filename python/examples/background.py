"""Start a command, leave it, and come back to it from another client."""

import asyncio
import sys

from libdsec import DSecClient, DSecContainerRunArgs, Gap


async def main(image: str = "base") -> None:
    """Run the example on a sandbox made of `image`."""
    async with DSecClient() as client:
        sandbox = await client.run_container(DSecContainerRunArgs(container_image=image, ttl_running_stop=60))
        process = await sandbox.start_shell("echo one; sleep 0.2; echo two", detach=True)
        names = sandbox.id, process.process_id  # all that another program needs

    async with DSecClient() as client:
        sandbox = await client.attach(names[0])
        process = sandbox.process(names[1])
        async for event in process:
            if isinstance(event, Gap):
                print(f"bytes {event.start} to {event.end} are gone")
            else:
                print(event.stream, event.seq, event.data)
        result = await process.wait()
        print(result.describe())
        await sandbox.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
