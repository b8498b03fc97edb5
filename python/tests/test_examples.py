"""The examples, run as a user does: in a process of their own that finds server and key by itself."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from textwrap import indent

import pytest
from images import Images
from server import Server, backend, rootfs

import libdsec
import libdsec.sync
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


def run(server: Server, args: DSecContainerRunArgs, *argv: str | Path, cwd: Path | None = None) -> str:
    """Run Python as a user does, in cwd, without a warning, and return what it prints."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("DSEC_")}
    environment |= {"DSEC_URL": server.url, "DSEC_API_KEY": server.key, "DSEC_BACKEND": args.backend}
    done = subprocess.run(
        [sys.executable, "-W", "error", *argv],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize("name", PRINTED)
def test_example(server: Server, args: DSecContainerRunArgs, name: str) -> None:
    assert run(server, args, EXAMPLES / f"{name}.py", args.container_image) == PRINTED[name]


@pytest.mark.parametrize("readme", [EXAMPLES.parent / "README.md", EXAMPLES.parents[1] / "README.md"])
def test_readme(server: Server, args: DSecContainerRunArgs, readme: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", readme.read_text(), re.DOTALL)[0]
    assert program.count('container_image="base"') == 1
    program = program.replace('container_image="base"', f"container_image={args.container_image!r}")
    assert run(server, args, "-c", program) == "hello\n 3\n"


def test_readme_of_layers(server: Server, args: DSecContainerRunArgs, images: Images, tmp_path: Path) -> None:
    program = re.findall(r"```python\n(.*?)```", (EXAMPLES.parent / "README.md").read_text(), re.DOTALL)[1]
    images.push("python", "3.12", rootfs(), ["FROM=readme"])
    repository = tmp_path / "repository"
    repository.mkdir()
    (repository / "solve.py").write_text("print(1)\n")
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "one"], ["tag", "v1.2"]):
        subprocess.run([*git, *command], check=True)
    program = program.replace('"python:3.12"', repr(f"{images.host}/python:3.12"))
    listed = "solve.py\n" if backend() == "container" else ""
    assert run(server, args, "-c", program, cwd=tmp_path) == f"task:latest ()\n{listed}\n"
    with tarfile.open(tmp_path / "task.tar") as image:
        assert {"oci-layout", "index.json"} < set(image.getnames())


def test_docstring(server: Server, args: DSecContainerRunArgs) -> None:
    for module, wrap in ((libdsec, True), (libdsec.sync, False)):
        (example,) = re.findall(r"\n\n(    .*?)\n\n(?! )", module.__doc__ or "", re.DOTALL)
        program = re.sub("(?m)^    ", "", example).replace('"base"', repr(args.container_image))
        assert program.count("container_image=") == 1
        if wrap:
            program = (
                "async def main():\n" + indent(program, "    ") + "\nimport asyncio\nasyncio.run(main())\n"
            )
        assert "hello\n" in run(server, args, "-c", program)
