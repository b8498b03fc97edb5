"""What goes into the calls of the SDK and what comes out of them."""

from __future__ import annotations

import signal as _signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from typing_extensions import Self

from libdsec._errors import CommandFailed
from libdsec._jobtypes import Pause

StreamName = Literal["stdout", "stderr", "pty"]


@dataclass(kw_only=True)
class DSecContainerRunArgs:
    """What to make a container sandbox of. None leaves a field to the server's default.

    Attributes:
        container_image: Name (`name` or `name:tag`) or digest (`sha256:...`)
            of the base that is the sandbox's root file system, or the reference
            of an image with its registry's host, which is imported if no layer
            has that name. Empty for a backend that needs none.
        workspace: Name or digest of the workspace on top of it.
        toolkits: Names or digests of toolkits, each on top of the one before.
        layers: Further layers, stacked on top in this order.
        memory_limit_mb: MiB, of all processes and files in memory together.
        cpu_cores_limit: CPUs; 0.5 is half of one.
        disk_limit_mb: MiB of the writable layer.
        disk_inodes_limit: Files of the writable layer.
        pids_limit: Processes and threads.
        ttl_running_stop: Seconds without activity after which the sandbox is
            stopped, or paused where idle_action says so; 0 is never.
        idle_action: `kill` or `pause`.
        max_lifetime: Seconds after which it is stopped in any case; 0 is never.
        network_rules: Name of a mirror or package manager to whether it may be
            reached. All False is no network. True raises `UnsupportedError`
            where the server cannot enforce the rule.
        init_user: Who commands run as that name no user: `name`, `uid`, `name:group` or `uid:gid`.
            A name is looked up when a command starts, which raises `NotFoundError` where the
            sandbox's /etc/passwd does not have it (yet).
        workdir: Where commands start, absolute.
        env: Environment of every command.
        labels: For finding sandboxes again with `list`.
        job: Name of the job that the sandbox belongs to.
        backend: Kind of sandbox to make; empty is DSEC_BACKEND, else `container`.
    """

    container_image: str
    workspace: str = ""
    toolkits: Sequence[str] = ()
    layers: Sequence[str] = ()
    memory_limit_mb: int | None = None
    cpu_cores_limit: float | None = None
    disk_limit_mb: int | None = None
    disk_inodes_limit: int | None = None
    pids_limit: int | None = None
    ttl_running_stop: float | None = None
    idle_action: str = "kill"
    max_lifetime: float | None = None
    network_rules: Mapping[str, bool] = field(default_factory=dict)
    init_user: str = ""
    workdir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    job: str = ""
    backend: str = ""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one sandbox may use.

    Attributes:
        milli_cpu: Thousandths of one CPU.
        memory_bytes: Of all processes and files in memory together.
        disk_bytes: Of the writable layer.
        disk_inodes: Files of the writable layer; None where the node's disk driver does not count them.
        pids: Processes and threads.
    """

    milli_cpu: int
    memory_bytes: int
    disk_bytes: int
    disk_inodes: int
    pids: int


@dataclass(frozen=True, kw_only=True)
class SandboxInfo:
    """The state of one sandbox.

    Attributes:
        id: Names the sandbox and the node that runs it.
        backend: What kind it is.
        state: pending, starting, running, paused, stopping, stopped, failed or lost.
        reason: Why the state is stopped, failed or lost.
        layers: Digests, with those of all that they go on, lowest first.
        layer_names: The layers as the creator named them, lowest first.
        limits: What it may use.
        labels: As given at create.
        job: As given at create.
        user: Who commands run as.
        workdir: Where commands start.
        created: When it was made.
        idle_timeout: Seconds without activity after which it is stopped; 0 is never.
        deadline: When it is stopped in any case; None is never.
        active: When the last activity ended.
        conditions: degraded, quarantined, tainted.
        idle_action: What is done after idle_timeout: kill or pause.
        pause: What is known of its pause, while the state is paused.
    """

    id: str
    backend: str
    state: str
    reason: str
    layers: tuple[str, ...]
    layer_names: tuple[str, ...]
    limits: Limits
    labels: Mapping[str, str]
    job: str
    user: str
    workdir: str
    created: datetime
    idle_timeout: float
    deadline: datetime | None
    active: datetime
    conditions: tuple[str, ...]
    idle_action: str = "kill"
    pause: Pause | None = None

    @property
    def ended(self) -> bool:
        """Whether the sandbox will never run again."""
        return self.state in ("stopped", "failed", "lost")


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What a sandbox uses now and has used so far.

    Attributes:
        cpu: Seconds of CPU time used.
        cpu_throttled: Seconds that the CPU limit held it back.
        memory_bytes: In use now.
        memory_peak_bytes: Most in use so far.
        disk_bytes: Of the writable layer; where the disk driver is btrfs, what was
            written in about the last half minute may be missing.
        disk_inodes: Files of the writable layer.
        pids: Processes and threads now.
        oom_kills: Processes killed for memory so far.
        limits: What it may use.
        at: When this was read.
    """

    cpu: float
    cpu_throttled: float
    memory_bytes: int
    memory_peak_bytes: int
    disk_bytes: int
    disk_inodes: int | None
    pids: int
    oom_kills: int
    limits: Limits
    at: datetime


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a command ended. A result, whatever the command did, and never a fault of the platform.

    Attributes:
        exit_code: Exit status, 0 to 255; None where a signal ended the process.
        signal: Number of the signal that ended the process, or None.
        oom: A process of the command was killed for memory.
        timed_out: The command's timeout ended it.
        output_limit: The command's output cap ended it.
        claimed: The status was told by a shell inside and not by the kernel;
            unfit for rewards.
        started: When, by the host's clock.
        duration: Seconds from start to end.
        cpu: Seconds of user and system time of the process and the children it waited for.
        max_rss_bytes: Most memory resident at once.
    """

    exit_code: int | None
    signal: int | None
    oom: bool
    timed_out: bool
    output_limit: bool
    claimed: bool
    started: datetime
    duration: float
    cpu: float
    max_rss_bytes: int

    @property
    def ok(self) -> bool:
        """Whether the command exited by itself with status 0."""
        return self.exit_code == 0 and not (self.oom or self.timed_out or self.output_limit)

    @property
    def shell_status(self) -> int:
        """What a shell would show: the exit status, or 128 plus the signal."""
        return self.exit_code if self.exit_code is not None else 128 + (self.signal or 0)

    def describe(self) -> str:
        """Say in words how the command ended."""
        if self.exit_code is not None:
            how = f"exited with status {self.exit_code}"
        else:
            try:
                name = _signal.Signals(self.signal or 0).name
            except ValueError:
                name = f"signal {self.signal}"
            how = f"was ended by {name}"
        why = [
            word
            for flag, word in (
                (self.oom, "out of memory"),
                (self.timed_out, "timed out"),
                (self.output_limit, "output limit reached"),
            )
            if flag
        ]
        return f"{how} ({', '.join(why)})" if why else how


@dataclass(frozen=True, kw_only=True)
class ExecResult(Outcome):
    """How a command ended and what it wrote; what came before a timeout or a limit is kept.

    Attributes:
        stdout: Everything on stdout, or on the terminal of a command with one.
        stderr: Everything on stderr.
        missed_bytes: Output that is in neither, because nobody read it while
            the server's spool was full, or it came before the point attached
            from. 0 for `exec` and `run_shell`.
        process_id: The platform's number of the process.
        replayed: It was run by an earlier call of the same action: see `Sandbox.trajectory`.
    """

    stdout: bytes
    stderr: bytes
    missed_bytes: int = 0
    process_id: int = 0
    replayed: bool = False

    @property
    def text(self) -> str:
        """Stdout as text."""
        return self.stdout_text

    @property
    def stdout_text(self) -> str:
        """Stdout as UTF-8; what is none becomes U+FFFD."""
        return self.stdout.decode("utf-8", "replace")

    @property
    def stderr_text(self) -> str:
        """Stderr as UTF-8; what is none becomes U+FFFD."""
        return self.stderr.decode("utf-8", "replace")

    def check(self) -> Self:
        """Return the result itself if the command succeeded.

        Raises:
            CommandFailed: It did not: see `ok`.
        """
        if not self.ok:
            raise CommandFailed(self)
        return self


@dataclass(frozen=True)
class Output:
    """Some bytes that a command wrote.

    Attributes:
        stream: Where to; a command with a terminal has only `pty`.
        seq: Number of the first byte: how many bytes of all streams came before it.
        data: The bytes.
    """

    stream: StreamName
    seq: int
    data: bytes


@dataclass(frozen=True)
class Gap:
    """Bytes that are gone, because nobody read them while the server's spool was full.

    Attributes:
        start: Number of the first byte missing.
        end: Number of the first byte after them.
    """

    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class ProcessInfo:
    """A process that was started through the API.

    Attributes:
        process_id: The platform's number, to attach by.
        pid: Process number inside the sandbox.
        argv: What was run.
        started: When.
        outcome: How it ended; None while it runs, and where there is a fault.
        next_seq: Bytes of output so far.
        first_seq: First byte that can still be read.
        pty: It has a terminal.
        lingering: It has ended, and descendants of it have not.
        session_id: The session that it belongs to, or empty.
        fault: Why one that ended has no outcome that could be judged, or empty.
    """

    process_id: int
    pid: int
    argv: tuple[str, ...]
    started: datetime
    outcome: Outcome | None
    next_seq: int
    first_seq: int
    pty: bool
    lingering: bool
    session_id: str
    fault: str = ""

    @property
    def ended(self) -> bool:
        """Whether it has ended, with an outcome or a fault."""
        return self.outcome is not None or bool(self.fault)


@dataclass(frozen=True, kw_only=True)
class SessionInfo:
    """An open session.

    Attributes:
        session_id: To attach by.
        process_id: The shell's process.
        busy: A command is running in it.
    """

    session_id: str
    process_id: int
    busy: bool


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A file of a sandbox.

    Attributes:
        name: Last element of the path; bytes where it is not valid UTF-8.
        type: file, dir, symlink, fifo, socket, char or block.
        size: Bytes.
        mode: Permission, setuid, setgid and sticky bits.
        uid: Owner.
        gid: Group.
        modified: When the content last changed.
        link_target: Target of a symlink.
    """

    name: str | bytes
    type: str
    size: int
    mode: int
    uid: int
    gid: int
    modified: datetime
    link_target: bytes

    @property
    def is_dir(self) -> bool:
        """Whether it is a directory."""
        return self.type == "dir"

    @property
    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return self.type == "file"


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Defaults of the sandboxes made of a layer, from its image's configuration."""

    env: tuple[str, ...]
    user: str
    workdir: str
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class LayerOrigin:
    """Where an image, a checkout or a pack came from.

    Attributes:
        type: registry, git or sandbox.
        location: The image's reference in full, the repository's URL, or the sandbox's ID.
        revision: Digest of the image's manifest, the commit, or the time.
        entry: Of a sandbox: the entry of its trajectory with which the pack began.
    """

    type: str
    location: str
    revision: str
    entry: int = 0


@dataclass(frozen=True, kw_only=True)
class Layer:
    """An imported layer.

    Attributes:
        name: `name:tag`; empty where only the digest is known.
        digest: `sha256:<hex>` of the layer.
        kind: base, workspace or toolkit.
        at: Directory of a sandbox that the import's root was put at; empty is the root.
        size: Bytes, with those of the layers that it goes on.
        files: Entries, as size.
        created: When it was imported.
        source: rootfs, oci-layout, docker-archive, registry, git or pack.
        source_digest: SHA-256 of the bytes imported; of a registry's image, the digest
            of its manifest.
        origin: Of what came from a registry or a repository; else None.
        config: Defaults of sandboxes made of it.
        parents: Digests of the layers that it goes on, lowest first, where an image
            became several. They come with it wherever it is named.
    """

    name: str
    digest: str
    kind: str
    at: str
    size: int
    files: int
    created: datetime
    source: str
    source_digest: str
    origin: LayerOrigin | None
    config: LayerConfig
    parents: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class InspectedLayer:
    """All that is known of a layer.

    Attributes:
        layer: The layer; it has no name here.
        names: The project's names of it.
        findings: What the lint found in it.
    """

    layer: Layer
    names: tuple[str, ...]
    findings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ImportedLayer:
    """The result of an import.

    Attributes:
        layer: The layer made.
        findings: Remarks on what looked like a secret or an answer, and on what was left out.
    """

    layer: Layer
    findings: tuple[str, ...]
