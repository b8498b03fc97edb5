"""Calls with retries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any, TypeVar

from google.protobuf.message import Message

from libdsec._config import Config
from libdsec._connect import Action, Method, Req, Resp
from libdsec._errors import DSecError, ExhaustedError, OutcomeUnknownError, UnavailableError
from libdsec._h2 import BidiStream
from libdsec._http import ServerStream, TransportPool, within
from libdsec._trajectory import acting

T = TypeVar("T")

_FIRST_PAUSE = 0.1
_LONGEST_PAUSE = 5.0
# How long a server that answered before may be out of reach: a restart takes seconds.
_OUT_OF_REACH = 60.0
_REACH_PAUSE = 0.5


class Rpc:
    """What every object of the SDK makes its calls with.

    A call is sent again only after `exhausted` or `unavailable`, only where
    the server provably did not accept it or doing it twice changes nothing,
    and never where it runs a command. For a server that was reached before and is
    being restarted every call waits, for a minute: a connection that cannot be made
    is tried again, and what the server refuses for that is sent again.
    """

    def __init__(self, config: Config, retries: int, call_timeout: float | None) -> None:
        self.url = config.url
        self._call_timeout = call_timeout
        self._pool = TransportPool(config)
        self._retries = retries
        self._reached = False

    async def close(self) -> None:
        """Close the connections of the running event loop."""
        await self._pool.close()

    async def unary(self, method: Method[Req, Resp], request: Req, timeout: float | None = None) -> Resp:
        """Make a call with one message each way; timeout bounds it with all its retries, in seconds.

        Without one, a call that does not wait for a command or a create is
        bounded all the same: a server that hangs must not hang its callers.
        """
        if timeout is None and not method.slow:
            timeout = self._call_timeout
        loop = asyncio.get_running_loop()
        end = None if timeout is None else loop.time() + timeout

        async def once() -> Resp:
            left = None if end is None else max(end - loop.time(), 0.001)
            return await self._pool.get().unary(method, request, left)

        with acting(method, request) as action:
            async with within(timeout):
                return await self.retrying(method, action, once)

    async def once(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make a call with one message each way, and never again once it was sent."""
        return await self._reaching(None, lambda: self._pool.get().unary(method, request, None))

    async def server_stream(
        self, method: Method[Req, Resp], request: Req, *, first: bool = True
    ) -> ServerStream[Resp]:
        """Start a call that answers with a stream; it is the caller's to close.

        With first it has begun when this returns: a refusal comes as the end of a stream, too.
        """

        async def once() -> ServerStream[Resp]:
            stream = await self._pool.get().server_stream(method, request)
            if first:
                await stream.begin()
            return stream

        with acting(method, request) as action:
            return await self.retrying(method, action, once)

    async def client_stream(
        self,
        method: Method[Req, Resp],
        opening: Message | None,
        messages: Callable[[], AsyncGenerator[Req, None]],
        names: Mapping[str, str] | None = None,
        *,
        again: bool = False,
    ) -> Resp:
        """Send a stream and return the one answer.

        An error names what the caller gave: names are parameters of the fields of the first
        message, and of `data`, that have other names than those.

        Args:
            method: The call.
            opening: What says what is done, where that is an action.
            messages: Returns the stream.
            names: See above.
            again: It returns the same stream each time; else nothing is sent again.
        """

        async def once() -> Resp:
            async with aclosing(messages()) as stream:
                return await self._pool.get().client_stream(method, stream)

        try:
            with acting(method, opening) as action:
                if again:
                    return await self.retrying(method, action, once)
                return await self._reaching(action, once, again=False)
        except DSecError as e:
            field = e.field.removeprefix("open.")
            e.field = (names or {}).get(field, field)
            raise

    async def open(self, method: Method[Req, Resp]) -> BidiStream[Req, Resp]:
        """Open a stream with messages both ways; it is the caller's to close."""
        return await self._pool.get().bidi(method)

    async def _reaching(
        self, action: Action | None, attempt: Callable[[], Awaitable[T]], *, again: bool = True
    ) -> T:
        """Make one attempt at a call, once the server is there for it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _OUT_OF_REACH
        while True:
            try:
                result = await attempt()
            except DSecError as e:
                self._reached = self._reached or not e.unreached
                away = e.unreached or (again and _restarting(action, e))
                if away and self._reached and loop.time() < end:
                    await asyncio.sleep(random.uniform(0, _REACH_PAUSE))
                    continue
                raise
            self._reached = True
            return result

    async def retrying(
        self, method: Method[Any, Any], action: Action | None, attempt: Callable[[], Awaitable[T]]
    ) -> T:
        """Make attempts at a call, as often as it may be sent."""
        pause = _FIRST_PAUSE
        for left in range(self._retries, -1, -1):
            try:
                return await self._reaching(action, attempt)
            except (ExhaustedError, UnavailableError, OutcomeUnknownError) as e:
                # A server that was waited for is not to be waited for as often as
                # the call may be sent.
                waited = (e.unreached and self._reached) or _restarting(action, e)
                if left == 0 or waited or not _may_repeat(method, action, e):
                    raise
            # Spread over the whole pause: a burst that was refused together
            # must not come back together.
            await asyncio.sleep(random.uniform(0, pause))
            pause = min(pause * 2, _LONGEST_PAUSE)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _restarting(action: Action | None, error: DSecError) -> bool:
    # What may have been done is asked for again only by its action ID.
    return error.restarting and (isinstance(error, UnavailableError) or action is not None)


def _may_repeat(method: Method[Any, Any], action: Action | None, error: DSecError) -> bool:
    # What has an action ID is done once however often it is sent.
    if action is not None:
        return error.link_broke or not isinstance(error, OutcomeUnknownError)
    if isinstance(error, OutcomeUnknownError):
        return False
    return method.retry and (error.retryable or method.repeatable)
