"""The errors of the platform, one class for each code of the API, and CommandFailed, which is not one."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from libdsec._types import ExecResult


class DSecError(Exception):
    """What was asked was not done. Base of every error of the API.

    A command that fails is no DSecError: its outcome comes back as an
    `ExecResult`. Where the platform is at fault the error is a
    `PlatformError`, and only then the attempt must not be scored. Any other
    is about the request or about the sandbox as its agent left it: a command
    whose program, shell, directory or user is not there, say.

    Attributes:
        code: The API's word for the kind of error.
        message: What was wrong and what was expected.
        field: Dotted name of the request's field at fault; empty if none is.
        retryable: True where the request was provably not accepted, so that
            sending it again cannot do it twice.
    """

    code: ClassVar[str] = "internal"
    # The connection broke: the server did not say this. A process may be asked again.
    link_broke = False
    # No connection was made, so nothing of the request was sent.
    unreached = False
    # The server said that it, or the node, is being restarted. Where it is unavailable it has
    # not accepted the call.
    restarting = False

    def __init__(self, message: str, *, field: str = "", retryable: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retryable = retryable

    def __str__(self) -> str:
        """Return `field: message (code)`."""
        where = f"{self.field}: " if self.field else ""
        return f"{where}{self.message} ({self.code})"

    def __reduce__(self) -> tuple[object, ...]:
        # Errors travel between worker processes; the default would lose field and retryable.
        return type(self), (self.message,), {"field": self.field, "retryable": self.retryable}


class PlatformError(DSecError):
    """The platform failed, through nothing that the caller or the sandbox's processes did.

    An attempt during which one was raised says nothing about the command and
    must not be scored.
    """


class InvalidError(DSecError):
    """The request can never work as written; `field` names what is wrong in it."""

    code = "invalid"


class UnauthenticatedError(DSecError):
    """No API key, or not a known one."""

    code = "unauthenticated"


class DeniedError(DSecError):
    """The key is known but may not do this."""

    code = "denied"


class NotFoundError(DSecError):
    """There is no such thing, or it is not yours."""

    code = "not_found"


class ConflictError(DSecError):
    """The thing exists differently, or its state forbids the call."""

    code = "conflict"


class DivergedError(DSecError):
    """The same action id came with a different request."""

    code = "diverged"


class OutcomeUnknownError(PlatformError):
    """The request may have been carried out; its result was lost on the way."""

    code = "outcome_unknown"


class RequestTimeout(OutcomeUnknownError, TimeoutError):  # noqa: N818 - as SandboxLost
    """The platform did not answer within the call's `timeout`; the request may have been carried out.

    This bounds a call to the platform. A command that ran into its own
    timeout is an `ExecResult` with `timed_out` set.
    """


class UnsupportedError(DSecError):
    """This backend, node or version cannot do it."""

    code = "unsupported"


class ExhaustedError(DSecError):
    """A limit is reached now, a sandbox's own or for creates the node's; nothing was done."""

    code = "exhausted"


class UnavailableError(PlatformError):
    """The platform cannot do it now, or cannot be reached; nothing was done."""

    code = "unavailable"


class SandboxLost(PlatformError):  # noqa: N818 - the published name
    """The sandbox is gone through no act of the caller; its results must not be scored."""

    code = "lost"


class InternalError(PlatformError):
    """A fault of the platform itself."""

    code = "internal"


class CommandFailed(Exception):  # noqa: N818 - not an error of the platform
    """Raised only by `ExecResult.check()`: the command ran, and did not succeed.

    Deliberately no DSecError, so that `except DSecError` never takes a failed
    command for a platform fault, nor the other way round.

    Attributes:
        result: The whole result, output included.
    """

    def __init__(self, result: ExecResult) -> None:
        super().__init__(result)
        self.result = result

    def __str__(self) -> str:
        """Say how the command ended and show the end of its stderr."""
        tail = self.result.stderr[-500:].decode("utf-8", "replace").strip()
        return f"command {self.result.describe()}" + (f": {tail}" if tail else "")


ERRORS: dict[str, type[DSecError]] = {
    c.code: c
    for c in (
        InvalidError,
        UnauthenticatedError,
        DeniedError,
        NotFoundError,
        ConflictError,
        DivergedError,
        OutcomeUnknownError,
        UnsupportedError,
        ExhaustedError,
        UnavailableError,
        SandboxLost,
        InternalError,
    )
}
