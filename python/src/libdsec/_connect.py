"""The Connect protocol without I/O: headers, frames and errors.

See https://connectrpc.com/docs/protocol. Messages are binary protobuf and
never compressed: this side offers no compression, so a compressed frame is a
fault of the server.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from google.protobuf.message import DecodeError, Message

from libdsec._errors import ERRORS, DSecError, InternalError, OutcomeUnknownError, RequestTimeout
from libdsec._proto.dsec.v1 import types_pb2

Req = TypeVar("Req", bound=Message)
Resp = TypeVar("Resp", bound=Message)

UNARY_TYPE = "application/proto"
STREAM_TYPE = "application/connect+proto"

# No honest frame comes near: output and file chunks are far smaller.
MAX_FRAME = 64 << 20

_COMPRESSED = 0x01
_END_STREAM = 0x02
_PREFIX = struct.Struct(">BI")
PREFIX_LEN = _PREFIX.size


@dataclass(frozen=True)
class Method(Generic[Req, Resp]):
    """One call of the API.

    Attributes:
        path: Path of the call's URL.
        request: Class of the messages sent.
        response: Class of the messages received.
        retry: The call may be sent again where the server provably did not accept it.
        repeatable: Doing it twice is the same as doing it once, so it may be
            sent again even where a lost connection leaves open if it was done.
        slow: The answer takes as long as a command or a create does.
        action: It does something in a sandbox, or looks at it, and so can be done
            once by a name.
    """

    path: str
    request: type[Req]
    response: type[Resp]
    retry: bool = True
    repeatable: bool = False
    slow: bool = False
    action: bool = False


class Action:
    """What a call does, by a name under which the server does it once.

    Attributes:
        id: The name.
        replayed: Whether the answer is that of an earlier call.
        give_back: Called where the call ended without an answer.
    """

    def __init__(self, action_id: str, note: Callable[[], None], give_back: Callable[[], None]) -> None:
        self.id = action_id
        self.replayed = False
        self.give_back = give_back
        self._note = note

    def answered(self, replayed: bool) -> None:
        """Take note of whether the answer is that of an earlier call."""
        if replayed and not self.replayed:
            self.replayed = True
            self._note()


# Of the call that is being made.
current_action: ContextVar[Action | None] = ContextVar("libdsec_action", default=None)


def answered(headers: Mapping[str, str]) -> None:
    """Look at the headers of an answer."""
    action = current_action.get()
    if action is not None:
        action.answered(headers.get("Dsec-Replayed") == "1")


# What a Connect code says in the API's words, for answers without our ErrorDetail.
_CODES = {
    "canceled": "outcome_unknown",
    "unknown": "outcome_unknown",
    "invalid_argument": "invalid",
    "deadline_exceeded": "outcome_unknown",
    "not_found": "not_found",
    "already_exists": "conflict",
    "permission_denied": "denied",
    "resource_exhausted": "exhausted",
    "failed_precondition": "conflict",
    "aborted": "diverged",
    "out_of_range": "invalid",
    "unimplemented": "unsupported",
    "internal": "internal",
    "unavailable": "unavailable",
    "data_loss": "lost",
    "unauthenticated": "unauthenticated",
}

# The protocol's reading of answers that no Connect server made, as from a proxy.
_STATUS_CODES = {
    400: "internal",
    401: "unauthenticated",
    403: "permission_denied",
    404: "unimplemented",
    429: "unavailable",
    502: "unavailable",
    503: "unavailable",
    504: "unavailable",
}


def headers(content_type: str, api_key: str, user_agent: str, timeout: float | None) -> dict[str, str]:
    """Return the headers of a request that the server should give up after timeout seconds."""
    h = {
        "Content-Type": content_type,
        "Connect-Protocol-Version": "1",
        "Authorization": f"Bearer {api_key}",
        "User-Agent": user_agent,
    }
    action = current_action.get()
    if action is not None:
        h["Dsec-Action-Id"] = action.id
    if timeout is not None:
        # The protocol allows ten digits; a longer wait is as good as none.
        h["Connect-Timeout-Ms"] = str(min(max(int(timeout * 1000), 1), 9_999_999_999))
    return h


def frame(message: Message) -> bytes:
    """Return the message as one frame of a stream."""
    data = message.SerializeToString()
    return _PREFIX.pack(0, len(data)) + data


def parse_prefix(prefix: bytes) -> tuple[bool, int]:
    """Return whether a frame ends the stream, and the length of its data.

    Raises:
        InternalError: The prefix is none that an honest server sends.
    """
    flags, length = _PREFIX.unpack(prefix)
    if flags not in (0, _END_STREAM):
        raise InternalError(f"the server sent a frame with flags {flags:#x}, want 0 or {_END_STREAM:#x}")
    if length > MAX_FRAME:
        raise InternalError(f"the server sent a frame of {length} bytes, want at most {MAX_FRAME}")
    return flags == _END_STREAM, length


def parse_message(kind: type[Resp], data: bytes) -> Resp:
    """Decode one message.

    Raises:
        InternalError: The bytes are no such message.
    """
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError as e:
        raise InternalError(f"the server's answer is no {kind.DESCRIPTOR.full_name}") from e
    return message


def parse_end(data: bytes) -> DSecError | None:
    """Read the frame that ends a stream: the error it carries, or None."""
    end = _json_object(data)
    if end is None:
        return InternalError("the end of the stream is no JSON object")
    error = end.get("error")
    if error is None:
        return None
    return _error(error) if isinstance(error, dict) else InternalError("the stream's error is no JSON object")


def parse_failure(method: Method[Any, Any], status: int, content_type: str, data: bytes) -> DSecError:
    """Read an answer that is no success: Connect's JSON, or whatever a proxy wrote."""
    if content_type == "application/json":
        body = _json_object(data)
        if body is not None and isinstance(body.get("code"), str):
            return _error(body)
    code = _CODES[_STATUS_CODES.get(status, "unknown")]
    if code == "unavailable" and not method.repeatable:
        # A proxy that lost its server knows nothing of what the server did.
        code = "outcome_unknown"
    return ERRORS[code](f"the server answered with HTTP status {status} and no reason")


def _json_object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data or b"{}")
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _error(body: Mapping[str, Any]) -> DSecError:
    message = body.get("message")
    if not isinstance(message, str) or not message:
        message = "the server gave no reason"
    detail = _detail(body.get("details"))
    if detail is not None:
        return error_of(detail, message)
    if body.get("code") == "deadline_exceeded":
        return RequestTimeout(message)
    return ERRORS[_CODES.get(str(body.get("code")), "outcome_unknown")](message)


def _detail(details: object) -> types_pb2.ErrorDetail | None:
    if not isinstance(details, list):
        return None
    for d in details:
        if not isinstance(d, dict) or d.get("type") != types_pb2.ErrorDetail.DESCRIPTOR.full_name:
            continue
        value = d.get("value")
        if not isinstance(value, str):
            continue
        try:
            raw = base64.b64decode(value + "=" * (-len(value) % 4), validate=True)
            return parse_message(types_pb2.ErrorDetail, raw)
        except (binascii.Error, ValueError, InternalError):
            continue
    return None


def error_of(detail: types_pb2.ErrorDetail, message: str) -> DSecError:
    """Return the exception for an error of the API. A code of a newer server is an unknown outcome."""
    kind = ERRORS.get(detail.code, OutcomeUnknownError)
    if detail.field:
        message = message.removeprefix(f"{detail.field}: ")  # str(error) puts it in front again
    error = kind(message, field=detail.field, retryable=detail.retryable)
    error.restarting = detail.restarting
    return error


class FrameReader(Generic[Resp]):
    """Turns the bytes of a stream into messages, and insists on a proper end.

    Args:
        kind: Class of the messages.
        read: Returns that many bytes, or fewer at the end of the body.
    """

    def __init__(self, kind: type[Resp], read: Callable[[int], Any]) -> None:
        self._kind = kind
        self._read = read
        self._ended = False

    async def next(self) -> Resp | None:
        """Return the next message; None after the server said that there are no more.

        Raises:
            OutcomeUnknownError: The stream stopped without that word.
            DSecError: The error that the server ended the stream with.
        """
        if self._ended:
            return None
        ends, length = parse_prefix(await self._exactly(PREFIX_LEN))
        data = await self._exactly(length)
        if not ends:
            return parse_message(self._kind, data)
        self._ended = True
        error = parse_end(data)
        if error is not None:
            raise error
        return None

    async def _exactly(self, n: int) -> bytes:
        data: bytes = await self._read(n)
        if len(data) != n:
            error = OutcomeUnknownError("the connection ended in the middle of a stream")
            error.link_broke = True
            raise error
        return data
