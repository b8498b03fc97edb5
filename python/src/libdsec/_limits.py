"""How many connections this process may hold."""

from __future__ import annotations

_PLENTY = 4096
# What is left to the rest of the program.
_RESERVED = 128
_SHORT = 128
_NO_LIMIT = 0


def connection_limits() -> tuple[int, int]:
    """Return how many connections short calls and slow ones may hold at once; 0 is no limit.

    Each call under way holds one descriptor. Where the process may open few,
    further calls wait for one that ends instead of failing; short calls have a
    share of their own, so that they never wait behind commands that run long.
    """
    try:
        import resource
    except ImportError:  # not a POSIX system
        return _NO_LIMIT, _NO_LIMIT
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= _PLENTY:
        return _NO_LIMIT, _NO_LIMIT
    return max(min(_SHORT, soft // 4), 1), max(soft - _SHORT - _RESERVED, soft // 2, 1)
