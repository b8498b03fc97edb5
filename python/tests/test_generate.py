"""scripts/generate.sh without what it needs changes nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[1]


def test_generate_without_protoc_deletes_nothing(tmp_path: Path) -> None:
    tree = tmp_path / "python"
    (tree / "scripts").mkdir(parents=True)
    shutil.copy(PYTHON / "scripts" / "generate.sh", tree / "scripts")
    shutil.copytree(PYTHON.parent / "proto", tmp_path / "proto")
    made = tree / "src" / "libdsec" / "_proto" / "dsec" / "v1" / "types_pb2.py"
    made.parent.mkdir(parents=True)
    made.write_text("generated")
    # A python that has no grpc_tools, whatever this one has: -S leaves out all packages.
    bare = tmp_path / "bare"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    result = subprocess.run(
        [tree / "scripts" / "generate.sh"],
        env={**os.environ, "PYTHON": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1
    assert "grpc_tools" in result.stderr
    assert made.read_text() == "generated"
    assert [p.name for p in made.parents[2].iterdir()] == ["dsec"]
