"""Reading the trajectory of a sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from google.protobuf.json_format import MessageToDict

from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._errors import InvalidError
from libdsec._jobtypes import LogEntry
from libdsec._proto.dsec.v1 import trajectory_pb2
from libdsec._rpc import Rpc

_PAGE = 1000
_KIND = "TRAJECTORY_KIND_"
_PHASE = "TRAJECTORY_PHASE_"


async def entries(
    rpc: Rpc, sandbox_id: str, from_seq: int, kinds: Sequence[str], follow: bool
) -> AsyncIterator[LogEntry]:
    """Yield entries; with follow, also those that come, until the sandbox has ended."""
    wanted = [_kind(k) for k in c.names(kinds, "kinds")]
    first = c.count(from_seq, "from_seq")
    if follow:
        request = trajectory_pb2.FollowTrajectoryRequest(sandbox_id=sandbox_id, from_seq=first, kinds=wanted)
        stream = await rpc.server_stream(m.FOLLOW_TRAJECTORY, request)
        try:
            while (message := await stream.receive()) is not None:
                if message.HasField("entry"):
                    yield _entry(message.entry)
        finally:
            stream.close()
        return
    page = trajectory_pb2.ListTrajectoryRequest(
        sandbox_id=sandbox_id, from_seq=first, kinds=wanted, page_size=_PAGE
    )
    while True:
        response = await rpc.unary(m.LIST_TRAJECTORY, page)
        for entry in response.entries:
            yield _entry(entry)
        if not response.next_seq:
            return
        page.from_seq = response.next_seq


async def content(rpc: Rpc, sandbox_id: str, seq: int, given: bool) -> bytes:
    """Return what the action of entry seq wrote, of all streams together, or was given."""
    request = trajectory_pb2.ReadTrajectoryOutputRequest(
        sandbox_id=sandbox_id, seq=c.count(seq, "seq"), input=given
    )
    stream = await rpc.server_stream(m.READ_OUTPUT, request)
    data = bytearray()
    try:
        while (message := await stream.receive()) is not None:
            data += message.piece.data
    finally:
        stream.close()
    return bytes(data)


def _kind(name: str) -> trajectory_pb2.TrajectoryKind:
    try:
        return cast(
            "trajectory_pb2.TrajectoryKind", trajectory_pb2.TrajectoryKind.Value(_KIND + name.upper())
        )
    except ValueError:
        known = ", ".join(n.removeprefix(_KIND).lower() for n in trajectory_pb2.TrajectoryKind.keys()[1:])
        raise InvalidError(f"want one of {known}, got {name!r}", field="kinds") from None


def _entry(e: trajectory_pb2.TrajectoryEntry) -> LogEntry:
    return LogEntry(
        seq=e.seq,
        time=c.when(e.time),
        kind=trajectory_pb2.TrajectoryKind.Name(e.kind).removeprefix(_KIND).lower(),
        phase=trajectory_pb2.TrajectoryPhase.Name(e.phase).removeprefix(_PHASE).lower(),
        action_id=e.action_id,
        begun_seq=e.begun_seq,
        fields=MessageToDict(e, preserving_proto_field_name=True),
    )
