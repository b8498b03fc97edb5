"""Actions that are done once, however often the program that asks for them is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import MappingProxyType, TracebackType
from typing import Any

from google.protobuf.message import Message
from typing_extensions import Self

from libdsec._connect import Action, current_action
from libdsec._errors import InvalidError

_MAX_NAME = 64


class Trajectory:
    """A numbered sequence of actions in one sandbox, as a context manager.

    Within the block every command, session command and file operation of the
    sandbox gets the next number, and the server does each number once: a program
    that is started again and asks for the same things in the same order gets what
    came of them the first time, at the speed of the log, and goes on where the
    log ends. One that asks for something else gets `DivergedError`.

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

    def _next(self) -> Action:
        self.count += 1
        return Action(f"{self.name}#{self.count}", self._note)

    def _note(self) -> None:
        self.replayed += 1


# Trajectories that are open, by sandbox.
active: ContextVar[Mapping[str, Trajectory]] = ContextVar(
    "libdsec_trajectories",
    default=MappingProxyType({}),
)


def next_action(sandbox_id: str) -> Action | None:
    """Return the next action of the trajectory that is open for a sandbox; None where none is."""
    trajectory = active.get().get(sandbox_id)
    return None if trajectory is None else trajectory._next()


@contextmanager
def acting(request: Message | str, is_action: bool) -> Iterator[Action | None]:
    """Have a call carry the ID of the next action, where its sandbox has a trajectory."""
    action = next_action(_sandbox_of(request)) if is_action else None
    token = current_action.set(action)
    try:
        yield action
    finally:
        current_action.reset(token)


def _sandbox_of(request: Any) -> str:
    return request if isinstance(request, str) else str(getattr(request, "sandbox_id", ""))
