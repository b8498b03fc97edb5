"""Actions that are done once, however often the program that asks for them is started."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Any

from google.protobuf.message import Message
from typing_extensions import Self

from libdsec._connect import Action, Method, current_action
from libdsec._errors import DSecError, ExhaustedError, InvalidError, RequestTimeout, UnavailableError

_MAX_NAME = 64


class Trajectory:
    """A numbered sequence of actions in one sandbox, as a context manager.

    Within the block every command, session command and file operation of the
    sandbox gets the next number, and the server does each number once: a program
    that is started again and asks for the same things in the same order gets what
    came of them the first time, at the speed of the log, and goes on where the
    log ends. One that asks for something else gets `DivergedError`.

    A call that ended without an answer, as `UnavailableError` and `ExhaustedError` say,
    leaves its number to the next one if that asks for the same: a loop that tries
    again asks under the same number.

    Numbers are given in the order in which calls are made, so calls that are made
    at once need trajectories of their own, with names of their own.

    Attributes:
        name: Tells trajectories of one sandbox apart.
        count: How many actions were asked for so far.
        replayed: How many of them had been done before.
    """

    def __init__(self, sandbox_id: str, name: str) -> None:
        if not isinstance(name, str) or len(name.encode()) > _MAX_NAME:
            raise InvalidError(f"want a text of at most {_MAX_NAME} bytes, got {name!r}", field="name")
        self._sandbox_id = sandbox_id
        self._token: Token[Mapping[str, Trajectory]] | None = None
        # The last number, and what it was asked for, where no answer came.
        self._unanswered: tuple[int, bytes] | None = None
        self.name = name
        self.count = 0
        self.replayed = 0

    def __repr__(self) -> str:
        done = f"{self.count} actions, {self.replayed} replayed"
        return f"<Trajectory {self.name!r} of {self._sandbox_id}: {done}>"

    def __enter__(self) -> Self:
        self._token = active.set({**active.get(), self._sandbox_id: self})
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._token is not None:
            active.reset(self._token)
            self._token = None

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, tb)

    def _next(self, asked: bytes) -> Action:
        if self._unanswered != (self.count, asked):
            self.count += 1
        self._unanswered, number = None, self.count

        def give_back() -> None:
            self._unanswered = number, asked

        return Action(f"{self.name}#{number}", self._note, give_back)

    def _note(self) -> None:
        self.replayed += 1


# Trajectories that are open, by sandbox.
active: ContextVar[Mapping[str, Trajectory]] = ContextVar(
    "libdsec_trajectories",
    default=MappingProxyType({}),
)


def next_action(path: str, request: Any) -> Action | None:
    """Return the next action of the trajectory that is open for a sandbox; None where none is.

    Args:
        path: Of the call.
        request: Its request, or the message that opens its stream.
    """
    sandbox_id = str(getattr(request, "sandbox_id", ""))
    trajectory = active.get().get(sandbox_id)
    if trajectory is None:
        return None
    asked = hashlib.sha256(path.encode() + b"\0" + request.SerializeToString(deterministic=True))
    return trajectory._next(asked.digest())


def unanswered(action: Action | None, error: BaseException) -> None:
    """Give the number of an action back where the server did not tell what became of it."""
    if action is None or not isinstance(error, DSecError):
        return
    none = isinstance(error, (ExhaustedError, UnavailableError, RequestTimeout))
    if none or error.link_broke or error.restarting:
        action.give_back()


@contextmanager
def acting(method: Method[Any, Any], request: Message | None) -> Iterator[Action | None]:
    """Have a call carry the ID of the next action, where its sandbox has a trajectory."""
    action = next_action(method.path, request) if method.action else None
    token = current_action.set(action)
    try:
        yield action
    except DSecError as e:
        unanswered(action, e)
        raise
    finally:
        current_action.reset(token)
