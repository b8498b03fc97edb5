"""Layers of what a sandbox has written, and sandboxes of that."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from libdsec import _connect
from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._errors import DSecError, InternalError, InvalidError
from libdsec._proto.dsec.v1 import sandbox_pb2, snapshot_pb2
from libdsec._rpc import Rpc
from libdsec._types import Layer


@dataclass(frozen=True, kw_only=True)
class Scrub:
    """What of a sandbox is not packed.

    A pattern is an absolute path whose parts may have `*`, `?` and `[...]`, and `**` for
    any directories; what is below a directory that matches goes with it.

    Attributes:
        remove: Left out beside what is by default: caches, histories, residue of the platform.
        keep: Stays, whatever else says.
        defaults: Whether caches and histories are left out.
        secrets: What is done with files in which the lint finds secrets: remove, keep,
            or refuse, which raises.
    """

    remove: Sequence[str] = ()
    keep: Sequence[str] = ()
    defaults: bool = True
    secrets: str = "remove"


@dataclass(frozen=True, kw_only=True)
class PackRemoval:
    """Something that was not packed, with all that is below it.

    Attributes:
        path: In the sandbox.
        reason: cache, history, platform, path (of `Scrub.remove`), secret or special.
        note: Of a secret: what it looks like.
        files: How many.
        bytes: Of them.
    """

    path: str
    reason: str
    note: str
    files: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class PackReport:
    """What came of a pack.

    Attributes:
        removed: What was left out, at most 1,000.
        removed_more: How many more.
        files: Names in the layer.
        bytes: Of the layer.
        frozen: Seconds for which the sandbox's processes stood still.
        collapsed: How many packed layers below became one with it.
    """

    removed: tuple[PackRemoval, ...]
    removed_more: int
    files: int
    bytes: int
    frozen: float
    collapsed: int


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A layer of what a sandbox has written.

    Attributes:
        layer: It, with its name.
        report: What came of packing.
    """

    layer: Layer
    report: PackReport


async def pack(rpc: Rpc, sandbox_id: str, name: str, scrub: Scrub | None) -> Packed:
    """See `Sandbox.pack`."""
    request = snapshot_pb2.PackRequest(
        sandbox_id=sandbox_id, name=c.text(name, "name"), scrub=_scrub(scrub or Scrub())
    )
    response = await rpc.unary(m.PACK, request)
    return Packed(layer=c.layer(response.layer), report=_report(response.report))


async def fork(
    rpc: Rpc,
    sandbox_id: str,
    count: int,
    request_id: str,
    job: str | None,
    labels: Mapping[str, str] | None,
    env: Mapping[str, str] | None,
    scrub: Scrub | None,
) -> list[sandbox_pb2.CreateResponse | DSecError]:
    """See `Sandbox.fork`."""
    request = snapshot_pb2.ForkRequest(
        sandbox_id=sandbox_id,
        count=c.int32(count, "count"),
        request_id=c.text(request_id, "request_id") or uuid.uuid4().hex,
        labels=c.texts(labels or {}, "labels"),
        env=c.texts(env or {}, "env"),
    )
    if job is not None:
        request.job = c.text(job, "job")
    if scrub is not None:
        request.scrub.CopyFrom(_scrub(scrub))
    response = await rpc.unary(m.FORK, request)
    if len(response.items) != count:
        raise InternalError(f"the server answered for {len(response.items)} sandboxes, want {count}")
    return [_item(i) for i in response.items]


async def migrate(rpc: Rpc, sandbox_id: str, lose_memory: bool, lose_actions: bool) -> str:
    """See `Sandbox.migrate`."""
    request = snapshot_pb2.MigrateRequest(
        sandbox_id=sandbox_id, lose_memory=bool(lose_memory), lose_actions=bool(lose_actions)
    )
    return (await rpc.unary(m.MIGRATE, request)).sandbox.id


def _scrub(scrub: Scrub) -> snapshot_pb2.Scrub:
    return snapshot_pb2.Scrub(
        remove=_patterns(scrub.remove, "scrub.remove"),
        keep=_patterns(scrub.keep, "scrub.keep"),
        no_defaults=not scrub.defaults,
        secrets=c.text(scrub.secrets, "scrub.secrets"),
    )


def _patterns(patterns: Sequence[str], field: str) -> list[str]:
    if isinstance(patterns, (str, bytes)):
        raise InvalidError("want a sequence of patterns, got one", field=field)
    return [c.text(p, f"{field}[{i}]") for i, p in enumerate(patterns)]


def _item(item: sandbox_pb2.BatchCreateItem) -> sandbox_pb2.CreateResponse | DSecError:
    kind = item.WhichOneof("result")
    if kind == "created":
        return item.created
    if kind == "error":
        return _connect.error_of(item.error.detail, item.error.message)
    return InternalError("the server did not say what became of this sandbox")


def _report(report: snapshot_pb2.PackReport) -> PackReport:
    return PackReport(
        removed=tuple(
            PackRemoval(path=r.path, reason=r.reason, note=r.note, files=r.files, bytes=r.bytes)
            for r in report.removed
        ),
        removed_more=report.removed_more,
        files=report.files,
        bytes=report.bytes,
        frozen=c.seconds(report.frozen),
        collapsed=report.collapsed,
    )
