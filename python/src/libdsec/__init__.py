"""Python SDK of dsec: isolated, disposable sandboxes for agents.

    from libdsec import DSecClient, DSecContainerRunArgs

    async with DSecClient() as client:
        args = DSecContainerRunArgs(container_image="base", memory_limit_mb=512)
        async with await client.run_container(args, timeout=120) as sandbox:
            result = await sandbox.run_shell("echo hello; exit 3", timeout=600)
            print(result.exit_code, result.text)

Everything here is async; `libdsec.sync` is the same without.

A command's outcome is a result (`ExecResult`), whatever it did. A fault of the
platform is a `DSecError`, one class for each code of the API. The two can not
be taken for one another: only `result.check()` raises for a failed command,
and `CommandFailed` is no `DSecError`.
"""

from libdsec._admin import Collected, Key, NewKey, StoredLayer
from libdsec._client import DSecClient
from libdsec._errors import (
    CommandFailed,
    ConflictError,
    DeniedError,
    DivergedError,
    DSecError,
    ExhaustedError,
    InternalError,
    InvalidError,
    NotFoundError,
    OutcomeUnknownError,
    PlatformError,
    RequestTimeout,
    SandboxLost,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedError,
)
from libdsec._events import Event
from libdsec._files import ByteStream, Files
from libdsec._job import Job
from libdsec._jobtypes import JobInfo, JobResult, LogEntry, Pause, ReplayDifference, ReplayResult
from libdsec._packs import Packed, PackRemoval, PackReport, Scrub
from libdsec._process import Process
from libdsec._sandbox import Sandbox
from libdsec._session import Session
from libdsec._text import TextDecoder
from libdsec._trajectory import Trajectory
from libdsec._types import (
    DSecContainerRunArgs,
    Entry,
    ExecResult,
    Gap,
    ImportedLayer,
    InspectedLayer,
    Layer,
    LayerConfig,
    LayerOrigin,
    Limits,
    Outcome,
    Output,
    ProcessInfo,
    SandboxInfo,
    SessionInfo,
    Usage,
)
from libdsec._version import __version__
from libdsec._webhooks import NewWebhook, Webhook, verify_webhook

__all__ = [
    "ByteStream",
    "Collected",
    "CommandFailed",
    "ConflictError",
    "DSecClient",
    "DSecContainerRunArgs",
    "DSecError",
    "DeniedError",
    "DivergedError",
    "Entry",
    "Event",
    "ExecResult",
    "ExhaustedError",
    "Files",
    "Gap",
    "ImportedLayer",
    "InspectedLayer",
    "InternalError",
    "InvalidError",
    "Job",
    "JobInfo",
    "JobResult",
    "Key",
    "Layer",
    "LayerConfig",
    "LayerOrigin",
    "Limits",
    "LogEntry",
    "NewKey",
    "NewWebhook",
    "NotFoundError",
    "Outcome",
    "OutcomeUnknownError",
    "Output",
    "PackRemoval",
    "PackReport",
    "Packed",
    "Pause",
    "PlatformError",
    "Process",
    "ProcessInfo",
    "ReplayDifference",
    "ReplayResult",
    "RequestTimeout",
    "Sandbox",
    "SandboxInfo",
    "SandboxLost",
    "Scrub",
    "Session",
    "SessionInfo",
    "StoredLayer",
    "TextDecoder",
    "Trajectory",
    "UnauthenticatedError",
    "UnavailableError",
    "UnsupportedError",
    "Usage",
    "Webhook",
    "__version__",
    "verify_webhook",
]
