"""What happens to sandboxes and jobs, as it happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._errors import DSecError, UnavailableError
from libdsec._proto.dsec.v1 import event_pb2
from libdsec._rpc import Rpc

# How long a watcher whose connection broke tries to go on.
_GO_ON_FOR = 60.0
_PAUSE = 0.2


@dataclass(frozen=True, kw_only=True)
class Event:
    """A change of a sandbox or of a job.

    Attributes:
        id: The same each time that it is told.
        kind: sandbox, job; or, of a node, gap (events were lost, or are kept no more),
            unreachable (nothing is heard of it; no event is lost by that) or reachable.
        time: By the node's clock.
        sandbox_id: Of a sandbox.
        job: That the sandbox belongs to, or that it is about.
        labels: The sandbox's, or the job's.
        state: Entered.
        reason: Why.
        conditions: That stand beside the state.
        node: First part of its sandboxes' IDs.
        repeated: It may have been told before.
        moved_to: The sandbox that has taken the place of this one.
        cursor: Goes on behind the event.
    """

    id: str
    kind: str
    time: datetime
    sandbox_id: str
    job: str
    labels: Mapping[str, str]
    state: str
    reason: str
    conditions: tuple[str, ...]
    node: str
    repeated: bool
    moved_to: str
    cursor: str


def event_filter(
    kinds: Sequence[str],
    sandbox_ids: Sequence[str],
    job: str,
    labels: Mapping[str, str] | None,
    states: Sequence[str],
) -> event_pb2.EventFilter:
    """Encode what picks events."""
    return event_pb2.EventFilter(
        kinds=c.names(kinds, "kinds"),
        sandbox_ids=c.names(sandbox_ids, "sandbox_ids"),
        job=c.text(job, "job"),
        labels=c.texts(labels or {}, "labels"),
        states=c.names(states, "states"),
    )


async def events(
    rpc: Rpc, cursor: str, from_start: bool, picks: event_pb2.EventFilter
) -> AsyncIterator[Event]:
    """See `DSecClient.events`."""
    request = event_pb2.WatchEventsRequest(
        cursor=c.text(cursor, "cursor"), from_start=bool(from_start), filter=picks
    )
    until = time.monotonic() + _GO_ON_FOR
    while True:
        try:
            stream = await rpc.server_stream(m.WATCH_EVENTS, request, first=False)
            try:
                while (message := await stream.receive()) is not None:
                    until = time.monotonic() + _GO_ON_FOR
                    request.cursor, request.from_start = message.cursor, False
                    if message.HasField("event"):
                        yield _event(message.event, message.cursor)
            finally:
                stream.close()
        except DSecError as e:
            if not (e.link_broke or isinstance(e, UnavailableError)) or time.monotonic() > until:
                raise
        await asyncio.sleep(_PAUSE)


def _event(e: event_pb2.Event, cursor: str) -> Event:
    return Event(
        id=e.id,
        kind=e.kind,
        time=c.when(e.time),
        sandbox_id=e.sandbox_id,
        job=e.job,
        labels=dict(e.labels),
        state=e.state,
        reason=e.reason,
        conditions=tuple(e.conditions),
        node=e.node,
        repeated=e.repeated,
        moved_to=e.moved_to,
        cursor=cursor,
    )
