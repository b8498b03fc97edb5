"""Events that are posted to a server of one's own."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from libdsec import _convert as c
from libdsec import _methods as m
from libdsec._errors import DeniedError, InvalidError
from libdsec._events import event_filter
from libdsec._proto.dsec.v1 import webhook_pb2
from libdsec._rpc import Rpc

_PREFIX = "whsec_"
# Bytes of a secret, as Standard Webhooks have it.
_MIN_SECRET, _MAX_SECRET = 24, 64


@dataclass(frozen=True, kw_only=True)
class Webhook:
    """An address that a project's events are posted to.

    Attributes:
        id: Names it.
        url: The address.
        created: When it was made.
        state: ok; failing: an attempt was not taken and is made again; disabled: the
            receiver answered 410 Gone.
        delivered: How many events were taken.
        given_up: How many were not, for too long.
        last_delivered: When the last was taken; None is never.
        failing_since: Of one that fails.
        error: Why it fails.
    """

    id: str
    url: str
    created: datetime
    state: str
    delivered: int
    given_up: int
    last_delivered: datetime | None
    failing_since: datetime | None
    error: str


@dataclass(frozen=True, kw_only=True)
class NewWebhook:
    """A webhook that was made.

    Attributes:
        webhook: It.
        secret: What deliveries are signed with; it is shown only here.
    """

    webhook: Webhook
    secret: str


def verify_webhook(secret: str, headers: Mapping[str, str], body: bytes, *, tolerance: float = 300.0) -> None:
    """Check that a delivery was signed with the secret, and lately.

    The header Webhook-Id is the same each time that an event is delivered.

    Args:
        secret: Of the webhook.
        headers: Of the request; names in any case.
        body: Of the request, as it came.
        tolerance: Seconds that the clocks may be apart.

    Raises:
        DeniedError: It was not.
        InvalidError: The secret is none.
    """
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not _MIN_SECRET <= len(key) <= _MAX_SECRET:
        # With an empty one anybody could sign.
        raise InvalidError(
            f"want {_PREFIX} and base64 of {_MIN_SECRET} to {_MAX_SECRET} bytes", field="secret"
        )
    lower = {k.lower(): v for k, v in headers.items()}
    event, stamp = lower.get("webhook-id", ""), lower.get("webhook-timestamp", "")
    if not event or not stamp.isascii() or not stamp.isdigit():
        raise DeniedError("the webhook's headers webhook-id and webhook-timestamp are missing")
    if abs(time.time() - int(stamp)) > tolerance:
        raise DeniedError("the webhook's time is too far off")
    digest = hmac.new(key, f"{event}.{stamp}.".encode() + body, hashlib.sha256).digest()
    want = b"v1," + base64.b64encode(digest)
    given = lower.get("webhook-signature", "").split()
    if not any(hmac.compare_digest(have.encode(), want) for have in given):
        raise DeniedError("the webhook's signature is another")


class WebhookCalls:
    """What a `DSecClient` does with webhooks."""

    _rpc: Rpc

    async def create_webhook(
        self,
        url: str,
        *,
        kinds: Sequence[str] = (),
        sandbox_ids: Sequence[str] = (),
        job: str = "",
        labels: Mapping[str, str] | None = None,
        states: Sequence[str] = (),
        secret: str = "",
    ) -> NewWebhook:
        """Have events that happen from now on posted to an address.

        In order, each until it is taken, signed as Standard Webhooks have it:
        `verify_webhook` checks that.

        Args:
            url: https, or http; not of the server's own networks, unless its operator allows it.
            kinds: See `events`.
            sandbox_ids: See `events`.
            job: See `events`.
            labels: See `events`.
            states: See `events`.
            secret: `whsec_` and base64 of 24 to 64 bytes; empty: one is made.
        """
        request = webhook_pb2.CreateWebhookRequest(
            url=c.text(url, "url"),
            filter=event_filter(kinds, sandbox_ids, job, labels, states),
            secret=c.text(secret, "secret"),
        )
        response = await self._rpc.unary(m.CREATE_WEBHOOK, request)
        return NewWebhook(webhook=_webhook(response.webhook), secret=response.secret)

    async def get_webhook(self, webhook_id: str) -> Webhook:
        """Return how a webhook goes."""
        request = webhook_pb2.GetWebhookRequest(id=c.text(webhook_id, "id"))
        return _webhook((await self._rpc.unary(m.GET_WEBHOOK, request)).webhook)

    async def list_webhooks(self) -> list[Webhook]:
        """Return the project's webhooks, oldest first."""
        response = await self._rpc.unary(m.LIST_WEBHOOKS, webhook_pb2.ListWebhooksRequest())
        return [_webhook(w) for w in response.webhooks]

    async def delete_webhook(self, webhook_id: str) -> None:
        """End a webhook. One that is not there is a success."""
        await self._rpc.unary(m.DELETE_WEBHOOK, webhook_pb2.DeleteWebhookRequest(id=c.text(webhook_id, "id")))


def _webhook(w: webhook_pb2.Webhook) -> Webhook:
    return Webhook(
        id=w.id,
        url=w.url,
        created=c.when(w.created),
        state=w.state,
        delivered=w.delivered,
        given_up=w.given_up,
        last_delivered=c.when(w.last_delivered) if w.HasField("last_delivered") else None,
        failing_since=c.when(w.failing_since) if w.HasField("failing_since") else None,
        error=w.error,
    )
