"""A shell that remembers, without async."""

import sys

from libdsec.sync import DSecClient, DSecContainerRunArgs


def main(image: str = "base") -> None:
    """Run the example on a sandbox made of `image`."""
    args = DSecContainerRunArgs(container_image=image, ttl_running_stop=60)
    with (
        DSecClient() as client,
        client.run_container(args) as sandbox,
        sandbox.open_session(cwd="/tmp") as shell,
    ):
        shell.run("mkdir -p work; cd work; export GREETING=hello")
        result = shell.run("echo $GREETING from $PWD")
        print(result.text, end="")
        # The status is the shell's own word, and so no ground for a reward.
        print("claimed:", result.claimed)


if __name__ == "__main__":
    main(*sys.argv[1:2])
