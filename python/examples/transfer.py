"""Copy a directory into a sandbox, work on it there, and copy it back."""

import asyncio
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from libdsec import DSecClient, DSecContainerRunArgs


async def main(image: str = "base") -> None:
    """Run the example on a sandbox made of `image`."""
    args = DSecContainerRunArgs(container_image=image, ttl_running_stop=60)
    async with DSecClient() as client, await client.run_container(args) as sandbox:
        with TemporaryDirectory() as work:
            there, back = Path(work, "there"), Path(work, "back")
            await asyncio.to_thread(prepare, there)
            await sandbox.files.upload(there, "/tmp/project")
            result = await sandbox.run_shell("cat notes.txt | wc -c > size.txt", cwd="/tmp/project")
            result.check()
            await sandbox.files.download("/tmp/project", back)
            for name in sorted(p.name for p in await asyncio.to_thread(lambda: list(back.iterdir()))):
                print(name, (await sandbox.files.stat(f"/tmp/project/{name}")).size, file=sys.stdout)


def prepare(where: Path) -> None:
    """Make something to copy."""
    where.mkdir()
    (where / "notes.txt").write_text("some notes\n")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:2]))
