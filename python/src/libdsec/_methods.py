"""Every call of the API that a client may make, and whether it may be sent twice."""

from __future__ import annotations

from libdsec._connect import Method
from libdsec._proto.dsec.v1 import admin_pb2, file_pb2, layer_pb2, process_pb2, sandbox_pb2, session_pb2

_SANDBOX = "/dsec.v1.SandboxService/"
_PROCESS = "/dsec.v1.ProcessService/"
_SESSION = "/dsec.v1.SessionService/"
_FILE = "/dsec.v1.FileService/"
_LAYER = "/dsec.v1.LayerService/"
_ADMIN = "/dsec.v1.AdminService/"

# A create always carries a request id, under which the server makes it once.
CREATE = Method(
    _SANDBOX + "Create", sandbox_pb2.CreateRequest, sandbox_pb2.CreateResponse, repeatable=True, slow=True
)
BATCH_CREATE = Method(
    _SANDBOX + "BatchCreate",
    sandbox_pb2.BatchCreateRequest,
    sandbox_pb2.BatchCreateResponse,
    repeatable=True,
    slow=True,
)
GET = Method(_SANDBOX + "Get", sandbox_pb2.GetRequest, sandbox_pb2.GetResponse, repeatable=True)
LIST = Method(_SANDBOX + "List", sandbox_pb2.ListRequest, sandbox_pb2.ListResponse, repeatable=True)
KILL = Method(_SANDBOX + "Kill", sandbox_pb2.KillRequest, sandbox_pb2.KillResponse, repeatable=True)
EXTEND = Method(_SANDBOX + "Extend", sandbox_pb2.ExtendRequest, sandbox_pb2.ExtendResponse, repeatable=True)
USAGE = Method(_SANDBOX + "Usage", sandbox_pb2.UsageRequest, sandbox_pb2.UsageResponse, repeatable=True)

# A command must not run twice whatever the server says, so these are never sent again.
EXEC = Method(_PROCESS + "Exec", process_pb2.ExecRequest, process_pb2.ExecResponse, retry=False, slow=True)
START = Method(_PROCESS + "Start", process_pb2.StartRequest, process_pb2.ProcessEvent, retry=False)
ATTACH = Method(_PROCESS + "Attach", process_pb2.AttachRequest, process_pb2.ProcessEvent, repeatable=True)
LIST_PROCESSES = Method(
    _PROCESS + "ListProcesses",
    process_pb2.ListProcessesRequest,
    process_pb2.ListProcessesResponse,
    repeatable=True,
)
SIGNAL = Method(_PROCESS + "Signal", process_pb2.SignalRequest, process_pb2.SignalResponse)
WRITE_STDIN = Method(_PROCESS + "WriteStdin", process_pb2.WriteStdinRequest, process_pb2.WriteStdinResponse)
STREAM_STDIN = Method(
    _PROCESS + "StreamStdin", process_pb2.WriteStdinRequest, process_pb2.WriteStdinResponse, retry=False
)
CLOSE_STDIN = Method(
    _PROCESS + "CloseStdin", process_pb2.CloseStdinRequest, process_pb2.CloseStdinResponse, repeatable=True
)
RESIZE = Method(_PROCESS + "Resize", process_pb2.ResizeRequest, process_pb2.ResizeResponse, repeatable=True)

OPEN_SESSION = Method(
    _SESSION + "OpenSession", session_pb2.OpenSessionRequest, session_pb2.OpenSessionResponse
)
RUN_COMMAND = Method(
    _SESSION + "RunCommand", session_pb2.RunCommandRequest, process_pb2.ProcessEvent, retry=False
)
RUN_COMMANDS = Method(
    _SESSION + "RunCommands", session_pb2.RunCommandRequest, process_pb2.ProcessEvent, retry=False
)
LIST_SESSIONS = Method(
    _SESSION + "ListSessions",
    session_pb2.ListSessionsRequest,
    session_pb2.ListSessionsResponse,
    repeatable=True,
)
CLOSE_SESSION = Method(
    _SESSION + "CloseSession", session_pb2.CloseSessionRequest, session_pb2.CloseSessionResponse
)

STAT = Method(_FILE + "Stat", file_pb2.StatRequest, file_pb2.StatResponse, repeatable=True)
LIST_DIR = Method(_FILE + "ListDir", file_pb2.ListDirRequest, file_pb2.ListDirResponse, repeatable=True)
MKDIR = Method(_FILE + "Mkdir", file_pb2.MkdirRequest, file_pb2.MkdirResponse)
RENAME = Method(_FILE + "Rename", file_pb2.RenameRequest, file_pb2.RenameResponse)
REMOVE = Method(_FILE + "Remove", file_pb2.RemoveRequest, file_pb2.RemoveResponse)
READ = Method(_FILE + "Read", file_pb2.ReadRequest, file_pb2.FileChunk, repeatable=True)
WRITE = Method(_FILE + "Write", file_pb2.WriteRequest, file_pb2.WriteResponse, retry=False)
DOWNLOAD = Method(_FILE + "Download", file_pb2.DownloadRequest, file_pb2.FileChunk, repeatable=True)
UPLOAD = Method(_FILE + "Upload", file_pb2.UploadRequest, file_pb2.UploadResponse, retry=False)

IMPORT_LAYER = Method(
    _LAYER + "ImportLayer", layer_pb2.ImportLayerRequest, layer_pb2.ImportLayerResponse, retry=False
)
LIST_LAYERS = Method(
    _LAYER + "ListLayers", layer_pb2.ListLayersRequest, layer_pb2.ListLayersResponse, repeatable=True
)
REMOVE_LAYER = Method(_LAYER + "RemoveLayer", layer_pb2.RemoveLayerRequest, layer_pb2.RemoveLayerResponse)

CREATE_KEY = Method(_ADMIN + "CreateKey", admin_pb2.CreateKeyRequest, admin_pb2.CreateKeyResponse)
LIST_KEYS = Method(
    _ADMIN + "ListKeys", admin_pb2.ListKeysRequest, admin_pb2.ListKeysResponse, repeatable=True
)
REVOKE_KEY = Method(_ADMIN + "RevokeKey", admin_pb2.RevokeKeyRequest, admin_pb2.RevokeKeyResponse)
