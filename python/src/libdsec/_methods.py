"""Every call of the API that a client may make, and whether it may be sent twice."""

from __future__ import annotations

from google.protobuf.descriptor_pb2 import MethodOptions

from libdsec._connect import Method, Req, Resp
from libdsec._proto.dsec.v1 import (
    admin_pb2,
    event_pb2,
    file_pb2,
    job_pb2,
    layer_pb2,
    process_pb2,
    sandbox_pb2,
    session_pb2,
    snapshot_pb2,
    trajectory_pb2,
    webhook_pb2,
)

_SANDBOX = "/dsec.v1.SandboxService/"
_PROCESS = "/dsec.v1.ProcessService/"
_SESSION = "/dsec.v1.SessionService/"
_FILE = "/dsec.v1.FileService/"
_JOB = "/dsec.v1.JobService/"
_TRAJECTORY = "/dsec.v1.TrajectoryService/"
_SNAPSHOT = "/dsec.v1.SnapshotService/"
_WEBHOOK = "/dsec.v1.WebhookService/"
_LAYER = "/dsec.v1.LayerService/"
_ADMIN = "/dsec.v1.AdminService/"

# The API's own word on each call: idempotency_level in proto/dsec/v1.
_REPEATABLE = {
    f"/{service.full_name}/{method.name}"
    for module in (
        admin_pb2,
        event_pb2,
        file_pb2,
        job_pb2,
        layer_pb2,
        process_pb2,
        sandbox_pb2,
        session_pb2,
        snapshot_pb2,
        trajectory_pb2,
        webhook_pb2,
    )
    for service in module.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.GetOptions().idempotency_level != MethodOptions.IDEMPOTENCY_UNKNOWN
}


def _call(
    path: str,
    request: type[Req],
    response: type[Resp],
    *,
    retry: bool = True,
    slow: bool = False,
    repeatable: bool = False,
    action: bool = False,
) -> Method[Req, Resp]:
    return Method(path, request, response, retry, repeatable or path in _REPEATABLE, slow, action)


# A create always carries a request id, under which the server makes it once.
CREATE = _call(
    _SANDBOX + "Create", sandbox_pb2.CreateRequest, sandbox_pb2.CreateResponse, repeatable=True, slow=True
)
BATCH_CREATE = _call(
    _SANDBOX + "BatchCreate",
    sandbox_pb2.BatchCreateRequest,
    sandbox_pb2.BatchCreateResponse,
    repeatable=True,
    slow=True,
)
GET = _call(_SANDBOX + "Get", sandbox_pb2.GetRequest, sandbox_pb2.GetResponse)
LIST = _call(_SANDBOX + "List", sandbox_pb2.ListRequest, sandbox_pb2.ListResponse)
KILL = _call(_SANDBOX + "Kill", sandbox_pb2.KillRequest, sandbox_pb2.KillResponse)
EXTEND = _call(_SANDBOX + "Extend", sandbox_pb2.ExtendRequest, sandbox_pb2.ExtendResponse)
USAGE = _call(_SANDBOX + "Usage", sandbox_pb2.UsageRequest, sandbox_pb2.UsageResponse)
PAUSE = _call(_SANDBOX + "Pause", sandbox_pb2.PauseRequest, sandbox_pb2.PauseResponse, slow=True)
RESUME = _call(_SANDBOX + "Resume", sandbox_pb2.ResumeRequest, sandbox_pb2.ResumeResponse, slow=True)

WATCH_EVENTS = _call(
    "/dsec.v1.EventService/WatchEvents", event_pb2.WatchEventsRequest, event_pb2.WatchEventsResponse
)

CREATE_WEBHOOK = _call(
    _WEBHOOK + "CreateWebhook", webhook_pb2.CreateWebhookRequest, webhook_pb2.CreateWebhookResponse
)
GET_WEBHOOK = _call(_WEBHOOK + "GetWebhook", webhook_pb2.GetWebhookRequest, webhook_pb2.GetWebhookResponse)
LIST_WEBHOOKS = _call(
    _WEBHOOK + "ListWebhooks", webhook_pb2.ListWebhooksRequest, webhook_pb2.ListWebhooksResponse
)
DELETE_WEBHOOK = _call(
    _WEBHOOK + "DeleteWebhook", webhook_pb2.DeleteWebhookRequest, webhook_pb2.DeleteWebhookResponse
)

PACK = _call(_SNAPSHOT + "Pack", snapshot_pb2.PackRequest, snapshot_pb2.PackResponse, slow=True)
# As a create it always carries a request id.
FORK = _call(
    _SNAPSHOT + "Fork", snapshot_pb2.ForkRequest, snapshot_pb2.ForkResponse, repeatable=True, slow=True
)
MIGRATE = _call(_SNAPSHOT + "Migrate", snapshot_pb2.MigrateRequest, snapshot_pb2.MigrateResponse, slow=True)

LIST_TRAJECTORY = _call(
    _TRAJECTORY + "List", trajectory_pb2.ListTrajectoryRequest, trajectory_pb2.ListTrajectoryResponse
)
FOLLOW_TRAJECTORY = _call(
    _TRAJECTORY + "Follow", trajectory_pb2.FollowTrajectoryRequest, trajectory_pb2.FollowTrajectoryResponse
)
READ_OUTPUT = _call(
    _TRAJECTORY + "ReadOutput",
    trajectory_pb2.ReadTrajectoryOutputRequest,
    trajectory_pb2.ReadTrajectoryOutputResponse,
)

CREATE_JOB = _call(_JOB + "CreateJob", job_pb2.CreateJobRequest, job_pb2.CreateJobResponse)
GET_JOB = _call(_JOB + "GetJob", job_pb2.GetJobRequest, job_pb2.GetJobResponse)
LIST_JOBS = _call(_JOB + "ListJobs", job_pb2.ListJobsRequest, job_pb2.ListJobsResponse)
HEARTBEAT = _call(_JOB + "Heartbeat", job_pb2.HeartbeatRequest, job_pb2.HeartbeatResponse)
PAUSE_JOB = _call(_JOB + "PauseJob", job_pb2.PauseJobRequest, job_pb2.PauseJobResponse, slow=True)
RESUME_JOB = _call(_JOB + "ResumeJob", job_pb2.ResumeJobRequest, job_pb2.ResumeJobResponse, slow=True)
KILL_JOB = _call(_JOB + "KillJob", job_pb2.KillJobRequest, job_pb2.KillJobResponse, slow=True)
END_JOB = _call(_JOB + "EndJob", job_pb2.EndJobRequest, job_pb2.EndJobResponse, slow=True)

# A command must not run twice whatever the server says, so these are never sent again.
EXEC = _call(
    _PROCESS + "Exec", process_pb2.ExecRequest, process_pb2.ExecResponse, retry=False, slow=True, action=True
)
START = _call(
    _PROCESS + "Start", process_pb2.StartRequest, process_pb2.ProcessEvent, retry=False, action=True
)
ATTACH = _call(_PROCESS + "Attach", process_pb2.AttachRequest, process_pb2.ProcessEvent)
LIST_PROCESSES = _call(
    _PROCESS + "ListProcesses", process_pb2.ListProcessesRequest, process_pb2.ListProcessesResponse
)
SIGNAL = _call(_PROCESS + "Signal", process_pb2.SignalRequest, process_pb2.SignalResponse, action=True)
WRITE_STDIN = _call(_PROCESS + "WriteStdin", process_pb2.WriteStdinRequest, process_pb2.WriteStdinResponse)
STREAM_STDIN = _call(
    _PROCESS + "StreamStdin", process_pb2.WriteStdinRequest, process_pb2.WriteStdinResponse, retry=False
)
CLOSE_STDIN = _call(_PROCESS + "CloseStdin", process_pb2.CloseStdinRequest, process_pb2.CloseStdinResponse)
RESIZE = _call(_PROCESS + "Resize", process_pb2.ResizeRequest, process_pb2.ResizeResponse)

OPEN_SESSION = _call(
    _SESSION + "OpenSession", session_pb2.OpenSessionRequest, session_pb2.OpenSessionResponse, action=True
)
RUN_COMMAND = _call(
    _SESSION + "RunCommand", session_pb2.RunCommandRequest, process_pb2.ProcessEvent, retry=False
)
RUN_COMMANDS = _call(
    _SESSION + "RunCommands", session_pb2.RunCommandRequest, process_pb2.ProcessEvent, retry=False
)
INTERRUPT_COMMAND = _call(
    _SESSION + "InterruptCommand",
    session_pb2.InterruptCommandRequest,
    session_pb2.InterruptCommandResponse,
    action=True,
)
LIST_SESSIONS = _call(
    _SESSION + "ListSessions", session_pb2.ListSessionsRequest, session_pb2.ListSessionsResponse
)
CLOSE_SESSION = _call(
    _SESSION + "CloseSession", session_pb2.CloseSessionRequest, session_pb2.CloseSessionResponse, action=True
)

STAT = _call(_FILE + "Stat", file_pb2.StatRequest, file_pb2.StatResponse, action=True)
LIST_DIR = _call(_FILE + "ListDir", file_pb2.ListDirRequest, file_pb2.ListDirResponse, action=True)
MKDIR = _call(_FILE + "Mkdir", file_pb2.MkdirRequest, file_pb2.MkdirResponse, action=True)
RENAME = _call(_FILE + "Rename", file_pb2.RenameRequest, file_pb2.RenameResponse, action=True)
REMOVE = _call(_FILE + "Remove", file_pb2.RemoveRequest, file_pb2.RemoveResponse, action=True)
READ = _call(_FILE + "Read", file_pb2.ReadRequest, file_pb2.FileChunk, action=True)
WRITE = _call(_FILE + "Write", file_pb2.WriteRequest, file_pb2.WriteResponse, retry=False, action=True)
DOWNLOAD = _call(_FILE + "Download", file_pb2.DownloadRequest, file_pb2.FileChunk, action=True)
UPLOAD = _call(_FILE + "Upload", file_pb2.UploadRequest, file_pb2.UploadResponse, retry=False, action=True)

IMPORT_LAYER = _call(
    _LAYER + "ImportLayer", layer_pb2.ImportLayerRequest, layer_pb2.ImportLayerResponse, retry=False
)
PREFETCH_LAYER = _call(
    _LAYER + "PrefetchLayer", layer_pb2.PrefetchLayerRequest, layer_pb2.PrefetchLayerResponse, slow=True
)
PULL_LAYER = _call(_LAYER + "PullLayer", layer_pb2.PullLayerRequest, layer_pb2.PullLayerResponse, slow=True)
EXPORT_LAYER = _call(
    _LAYER + "ExportLayer", layer_pb2.ExportLayerRequest, layer_pb2.ExportLayerResponse, slow=True
)
LIST_LAYERS = _call(_LAYER + "ListLayers", layer_pb2.ListLayersRequest, layer_pb2.ListLayersResponse)
INSPECT_LAYER = _call(_LAYER + "InspectLayer", layer_pb2.InspectLayerRequest, layer_pb2.InspectLayerResponse)
TAG_LAYER = _call(_LAYER + "TagLayer", layer_pb2.TagLayerRequest, layer_pb2.TagLayerResponse)
REMOVE_LAYER = _call(_LAYER + "RemoveLayer", layer_pb2.RemoveLayerRequest, layer_pb2.RemoveLayerResponse)

CREATE_KEY = _call(_ADMIN + "CreateKey", admin_pb2.CreateKeyRequest, admin_pb2.CreateKeyResponse)
LIST_KEYS = _call(_ADMIN + "ListKeys", admin_pb2.ListKeysRequest, admin_pb2.ListKeysResponse)
REVOKE_KEY = _call(_ADMIN + "RevokeKey", admin_pb2.RevokeKeyRequest, admin_pb2.RevokeKeyResponse)
COLLECT_LAYERS = _call(
    _ADMIN + "CollectLayers", admin_pb2.CollectLayersRequest, admin_pb2.CollectLayersResponse
)
