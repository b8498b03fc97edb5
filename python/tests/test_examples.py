"""The examples, run as a user does: in a process of their own that finds server and key by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from server import Server

from libdsec import DSecContainerRunArgs

EXAMPLES = Path(__file__).parents[1] / "examples"

PRINTED = {
    "quickstart": "hello from /tmp\n",
    "attempts": "rewards: 1.0 0.0 1.0 0.0 1.0 0.0 1.0 0.0\n",
    "background": "stdout 0 b'one\\n'\nstdout 4 b'two\\n'\nexited with status 0\n",
    "session": "hello from /tmp/work\nclaimed: True\n",
    "transfer": "notes.txt 11\nsize.txt 3\n",
}


def test_every_example_is_run() -> None:
    assert {p.stem for p in EXAMPLES.glob("*.py")} == set(PRINTED)


@pytest.mark.parametrize("name", PRINTED)
def test_example(server: Server, args: DSecContainerRunArgs, name: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSEC_")}
    environment |= {"DSEC_URL": server.url, "DSEC_API_KEY": server.key, "DSEC_BACKEND": args.backend}
    code = f"import sys, asyncio, inspect; sys.path.insert(0, {str(EXAMPLES)!r}); import {name} as e; " + (
        f"r = e.main({args.container_image!r}); asyncio.run(r) if inspect.iscoroutine(r) else None"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == PRINTED[name]
