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
    async for message in messages(rpc, sandbox_id, from_seq, kinds, follow):
        yield _entry(message)


async def messages(
    rpc: Rpc, sandbox_id: str, from_seq: int, kinds: Sequence[str], follow: bool
) -> AsyncIterator[trajectory_pb2.TrajectoryEntry]:
    """Yield entries as the API has them."""
    wanted = [_kind(k) for k in c.names(kinds, "kinds")]
    first = c.count(from_seq, "from_seq")
    if follow:
        request = trajectory_pb2.FollowTrajectoryRequest(sandbox_id=sandbox_id, from_seq=first, kinds=wanted)
        stream = await rpc.server_stream(m.FOLLOW_TRAJECTORY, request, first=False)
        try:
            while (message := await stream.receive()) is not None:
                if message.HasField("entry"):
                    yield message.entry
        finally:
            stream.close()
        return
    page = trajectory_pb2.ListTrajectoryRequest(
        sandbox_id=sandbox_id, from_seq=first, kinds=wanted, page_size=_PAGE
    )
    while True:
        response = await rpc.unary(m.LIST_TRAJECTORY, page)
        for entry in response.entries:
            yield entry
        if not response.next_seq:
            return
        page.from_seq = response.next_seq


async def content(rpc: Rpc, sandbox_id: str, seq: int, given: bool) -> bytes:
    """Return what the action of entry seq wrote, of all streams together, or was given."""
    return b"".join([p.data async for p in _pieces(rpc, sandbox_id, seq, given)])


async def streams(rpc: Rpc, sandbox_id: str, seq: int, given: bool) -> dict[int, bytes]:
    """Return content, each stream by itself."""
    out: dict[int, bytearray] = {}
    async for p in _pieces(rpc, sandbox_id, seq, given):
        out.setdefault(p.stream, bytearray()).extend(p.data)
    return {stream: bytes(data) for stream, data in out.items()}


async def _pieces(
    rpc: Rpc, sandbox_id: str, seq: int, given: bool
) -> AsyncIterator[trajectory_pb2.TrajectoryOutputPiece]:
    request = trajectory_pb2.ReadTrajectoryOutputRequest(
        sandbox_id=sandbox_id, seq=c.count(seq, "seq"), input=given
    )
    stream = await rpc.server_stream(m.READ_OUTPUT, request)
    try:
        while (message := await stream.receive()) is not None:
            yield message.piece
    finally:
        stream.close()


def _kind(name: str) -> trajectory_pb2.TrajectoryKind:
    try:
        return cast(
            "trajectory_pb2.TrajectoryKind", trajectory_pb2.TrajectoryKind.Value(_KIND + name.upper())
        )
    except ValueError:
        known = ", ".join(n.removeprefix(_KIND).lower() for n in trajectory_pb2.TrajectoryKind.keys()[1:])
        raise InvalidError(f"want one of {known}, got {name!r}", field="kinds") from None


def kind_name(kind: trajectory_pb2.TrajectoryKind) -> str:
    """Return the name of a kind of entries."""
    return trajectory_pb2.TrajectoryKind.Name(kind).removeprefix(_KIND).lower()


def _entry(e: trajectory_pb2.TrajectoryEntry) -> LogEntry:
    return LogEntry(
        seq=e.seq,
        time=c.when(e.time),
        kind=kind_name(e.kind),
        phase=trajectory_pb2.TrajectoryPhase.Name(e.phase).removeprefix(_PHASE).lower(),
        action_id=e.action_id,
        begun_seq=e.begun_seq,
        fields=MessageToDict(e, preserving_proto_field_name=True),
    )
