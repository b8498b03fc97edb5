"""What is known of pauses, jobs and trajectories."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from libdsec._errors import DSecError


@dataclass(frozen=True, kw_only=True)
class Pause:
    """What came of pausing a sandbox.

    Attributes:
        since: When it was paused.
        memory_before_bytes: What it held of the node's memory; None until that was moved out.
        memory_bytes: What it holds since it was moved out, as far as that goes; None until then.
        note: Why not all of it went: the node has no swap, for one.
        until: When it is killed; None is never.
    """

    since: datetime
    memory_before_bytes: int | None
    memory_bytes: int | None
    note: str
    until: datetime | None


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """The state of a job.

    Attributes:
        name: Names it within the project.
        labels: As given when it was made.
        state: active; expired: its lease ran out, and it is paused; ended.
        created: When it was made.
        lease: Seconds that a heartbeat keeps it; 0: it never expires.
        on_expiry: What its sandboxes are once it has expired: pause, and killed after grace; or kill.
        grace: Seconds from expiry to the kill of paused sandboxes.
        changed: When the state became what it is.
    """

    name: str
    labels: Mapping[str, str]
    state: str
    created: datetime
    lease: float
    on_expiry: str
    grace: float
    changed: datetime


@dataclass(frozen=True, kw_only=True)
class JobResult:
    """What became of one sandbox of a job.

    Attributes:
        sandbox_id: Names the sandbox.
        state: The state that it is in now.
        error: None where what was asked for is done.
    """

    sandbox_id: str
    state: str
    error: DSecError | None


@dataclass(frozen=True, kw_only=True)
class LogEntry:
    """One entry of a sandbox's trajectory.

    Attributes:
        seq: Counts the entries from 1.
        time: When it was written, by the host's clock.
        kind: What was done: create, exec, start, session_command, file_write, pause, state and so on.
        phase: begun, ended, event, or gap: entries that are gone.
        action_id: The name under which it is done once; empty where it has none.
        begun_seq: Of one that ended: the entry with which it began; 0 else.
        fields: All of it, as JSON has it (`dsec.v1.TrajectoryEntry`).
    """

    seq: int
    time: datetime
    kind: str
    phase: str
    action_id: str
    begun_seq: int
    fields: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class ReplayDifference:
    """The first action that came to something else when it was done again.

    Attributes:
        seq: Number of the entry with which it began.
        kind: As in `LogEntry`.
        what: What differs: outcome, error, end, stdout, stderr, output or answer.
        expected: What the trajectory has; of output the first line that differs.
        got: What came of it this time.
    """

    seq: int
    kind: str
    what: str
    expected: str
    got: str


@dataclass(kw_only=True)
class ReplayResult:
    """What came of replaying a trajectory.

    Attributes:
        sandbox_id: The fresh sandbox. It has ended, unless it was to be kept.
        steps: Actions that were done again and compared.
        unended: Actions that were begun again, and whose end the trajectory does not have.
        skipped: Entries of what is not repeated: pauses, packs, changes of state.
        original: Seconds that the steps took then, together.
        replayed: Seconds that they took now.
        difference: The first; None where there was none.
    """

    sandbox_id: str = ""
    steps: int = 0
    unended: int = 0
    skipped: int = 0
    original: float = 0.0
    replayed: float = 0.0
    difference: ReplayDifference | None = None

    @property
    def equal(self) -> bool:
        """Whether all that was replayed came to the same."""
        return self.difference is None
