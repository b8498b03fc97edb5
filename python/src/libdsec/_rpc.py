"""Calls with retries."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Mapping
from typing import Any, TypeVar

from libdsec._config import Config
from libdsec._connect import Method, Req, Resp, current_action
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
    and never where it runs a command. A connection that cannot be made is tried
    again for a minute, for any call, where the server was reached before.
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

        with acting(request, method.action):
            async with within(timeout):
                return await self._retrying(method, once)

    async def once(self, method: Method[Req, Resp], request: Req) -> Resp:
        """Make a call with one message each way, and never again once it was sent."""
        return await self._reaching(lambda: self._pool.get().unary(method, request, None))

    async def server_stream(self, method: Method[Req, Resp], request: Req) -> ServerStream[Resp]:
        """Start a call that answers with a stream; it is the caller's to close."""
        with acting(request, method.action):
            return await self._retrying(method, lambda: self._pool.get().server_stream(method, request))

    async def client_stream(
        self,
        method: Method[Req, Resp],
        messages: AsyncIterable[Req],
        names: Mapping[str, str] | None = None,
        *,
        sandbox_id: str = "",
    ) -> Resp:
        """Send a stream and return the one answer; never sent again, for the stream is used up then.

        An error names what the caller gave: names are parameters of the fields of the first
        message, and of `data`, that have other names than those.
        """
        try:
            with acting(sandbox_id, method.action):
                return await self._reaching(lambda: self._pool.get().client_stream(method, messages))
        except DSecError as e:
            field = e.field.removeprefix("open.")
            e.field = (names or {}).get(field, field)
            raise

    async def bidi(self, method: Method[Req, Resp]) -> BidiStream[Req, Resp]:
        """Open a stream with messages both ways; it is the caller's to close."""
        return await self._reaching(lambda: self._pool.get().bidi(method))

    async def _reaching(self, attempt: Callable[[], Awaitable[T]]) -> T:
        """Make one attempt at a call, once there is a connection for it."""
        loop = asyncio.get_running_loop()
        end = loop.time() + _OUT_OF_REACH
        while True:
            try:
                result = await attempt()
            except DSecError as e:
                if not e.unreached:
                    self._reached = True
                elif self._reached and loop.time() < end:
                    await asyncio.sleep(random.uniform(0, _REACH_PAUSE))
                    continue
                raise
            self._reached = True
            return result

    async def _retrying(self, method: Method[Any, Any], attempt: Callable[[], Awaitable[T]]) -> T:
        pause = _FIRST_PAUSE
        for left in range(self._retries, -1, -1):
            try:
                return await self._reaching(attempt)
            except (ExhaustedError, UnavailableError, OutcomeUnknownError) as e:
                if isinstance(e, OutcomeUnknownError) and not (e.link_broke and current_action.get()):
                    raise
                # A server that was waited for is not to be waited for as often as
                # the call may be sent.
                waited = e.unreached and self._reached
                if left == 0 or waited or not _may_repeat(method, e):
                    raise
            # Spread over the whole pause: a burst that was refused together
            # must not come back together.
            await asyncio.sleep(random.uniform(0, pause))
            pause = min(pause * 2, _LONGEST_PAUSE)
        raise AssertionError("unreachable: the last attempt returns or raises")


def _may_repeat(method: Method[Any, Any], error: DSecError) -> bool:
    # What has an action ID is done once however often it is sent.
    if current_action.get() is not None:
        return True
    return method.retry and (error.retryable or method.repeatable)
