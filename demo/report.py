"""What runs of the environments came to, in bench/results and in bench/ENVIRONMENTS.md."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from libdsec import Sandbox

# How a node reads layers: the kernel from the store's own file, or chunks that are fetched and checked.
WAYS = {"read": "the kernel reads the store", "fetched": "chunks are fetched and checked"}


@dataclass
class Run:
    """One run of one environment's task."""

    name: str
    way: str
    project: str
    bug: str
    create_ms: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)  # of each step
    cpu: float = 0.0
    moved: int = 0
    image: int = 0
    kinds: dict[str, tuple[int, int]] = field(default_factory=dict)  # of each layer: bytes moved, all
    reward: int = 0
    features: list[str] = field(default_factory=list)

    @property
    def percent(self) -> float:
        """How much of the image came to the node."""
        return 100 * self.moved / self.image

    def rows(self) -> list[dict[str, Any]]:
        """Return the run's figures."""
        common = {
            "features": self.features, "host": host(), "load": four(os.getloadavg()[0]),
            "time": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"), "floor": None,
        }  # fmt: skip
        kinds = ", ".join(f"{k} {m / 1e6:.1f} of {n / 1e6:.1f}" for k, (m, n) in self.kinds.items())
        steps = ", ".join(f"{what} {s:.1f}" for what, s in self.seconds.items())
        took = sum(self.seconds.values())
        figures = [
            ("mb", self.moved / 1e6, "MB", "all of the image", self.image / 1e6, kinds),
            ("create_ms", self.create_ms, "ms", None, None, "nothing of the image in the page cache"),
            ("task_s", took, "s", None, None, f"{steps}; CPU {self.cpu:.1f}"),
            ("reward", self.reward, "exit code is 0", "before the fix", 0, self.bug),
        ]
        return [
            {
                "id": f"E_{self.name}_{self.way}_{what}", "value": four(value), "unit": unit,
                "rival": rival, "rival_value": None if of is None else four(of),
                **common, "what": self.project, "note": note,
            }
            for what, value, unit, rival, of, note in figures
        ]  # fmt: skip


async def observe(sandbox: Sandbox) -> list[str]:
    """Find out from inside what isolates a sandbox."""
    script = "readlink /proc/self/ns/*; echo; cat /proc/self/status; echo; cat /proc/self/mountinfo"
    out = (await sandbox.exec(["sh", "-c", script])).check().text
    links, status_text, mounts = out.split("\n\n")
    ours = {os.readlink(p) for p in Path("/proc/self/ns").iterdir()}
    namespaces = sorted({link.partition(":")[0] for link in links.split() if link not in ours})
    status = dict(line.split(":\t", 1) for line in status_text.splitlines() if ":\t" in line)
    root = next(line.partition(" - ")[2].split()[0] for line in mounts.splitlines() if line.split()[4] == "/")
    return [
        f"namespaces: {' '.join(namespaces)}",
        f"seccomp filters: {status['Seccomp_filters']}",
        *(["no_new_privs"] if status["NoNewPrivs"] == "1" else []),
        f"capabilities {status['CapBnd']}",
        f"root: {root}",
        "limits: memory pids cpu disk",
    ]


def host() -> str:
    """Name the machine in one line."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "CPU")
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return f"{os.cpu_count()} x {model}, {gib} GiB, Linux {os.uname().release}"


def four(value: float) -> float:
    """Keep four digits: more are noise."""
    return float(f"{value:.4g}")


def write(runs: Iterable[Run], results: Path, table: Path) -> None:
    """Replace the rows of these runs in results, and make the table from all that are there then."""
    rows = {row["id"]: row for row in json.loads(results.read_text())} if results.is_file() else {}
    for run in runs:
        rows |= {row["id"]: row for row in run.rows()}
    results.write_text(json.dumps(list(rows.values()), indent=2) + "\n")
    table.write_text(markdown(rows))


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """Return the table."""
    lines = []
    for row in rows.values():
        name, way = row["id"].split("_")[1:3]
        if not row["id"].endswith(f"{way}_mb"):
            continue
        of = {what: rows[f"E_{name}_{way}_{what}"] for what in ("create_ms", "task_s", "reward")}
        lines.append(
            f"| {name} | {row['what']} | {way} | {row['rival_value']:g} | {row['value']:g}"
            f" | {100 * row['value'] / row['rival_value']:.1f} | {of['create_ms']['value']:g}"
            f" | {of['task_s']['value']:g} | {of['reward']['value']:g} | {row['load']:.1f} |"
        )
    last = max(rows.values(), key=lambda row: str(row["time"]))
    notes = [f"- {row['id']}: {row['note']}" for row in rows.values()]
    return f"""# Environments

Written by `make environments`; edit nothing here. Host: {last["host"]}. {last["time"]}.

An image is a base with a toolchain from Debian, a workspace with a released project and all that it
depends on, and a toolkit, on a node that has nothing of it. The task installs and builds the project,
sees its tests fail for a bug, mends it, builds and tests again; the reward is by the last exit code.

- read: {WAYS["read"]}; counted is what it read, ahead too
- fetched: {WAYS["fetched"]} (`layers.verify = "always"`), as from a bucket; counted is the node's cache

| environment | project | way | image MB | moved MB | % | create ms | task s | reward | load |
|---|---|---|---|---|---|---|---|---|---|
{chr(10).join(sorted(lines))}

In force in every sandbox: {", ".join(last["features"])}.

{chr(10).join(notes)}
"""
