"""Where the server is and which key it is asked with."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from libdsec._errors import InvalidError, UnauthenticatedError

DEFAULT_URL = "http://127.0.0.1:7321"
DEFAULT_KEY_FILE = "/var/lib/dsec/admin.key"


@dataclass(frozen=True)
class Config:
    """A resolved server address and key."""

    url: str
    api_key: str
    ca_file: str | None = None
    backend: str = ""

    def tls(self, *protocols: str) -> ssl.SSLContext | None:
        """Return a context that checks the server and offers these protocols; None for plain http.

        Raises:
            InvalidError: The CA file cannot be used.
        """
        if not self.url.startswith("https:"):
            return None
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except OSError as e:
            raise InvalidError(f"want a file of PEM certificates: {e}", field="ca_file") from None
        context.set_alpn_protocols(list(protocols))
        return context

    def __repr__(self) -> str:
        # A key must not end up in a log.
        return f"Config(url={self.url!r})"


def resolve(
    url: str | None = None,
    api_key: str | None = None,
    key_file: str | os.PathLike[str] | None = None,
    ca_file: str | os.PathLike[str] | None = None,
) -> Config:
    """Fill what the caller left out from the environment, then from the defaults of `dsec up`.

    Raises:
        InvalidError: The address is not one.
        UnauthenticatedError: No key was given and none can be read.
    """
    return Config(
        _url(url or os.environ.get("DSEC_URL") or DEFAULT_URL),
        _key(api_key, key_file),
        os.fspath(ca_file) if ca_file is not None else None,
        os.environ.get("DSEC_BACKEND", ""),
    )


def _url(url: str) -> str:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as e:
        raise InvalidError(
            f"want http://host:port or https://host:port, got {url!r}: {e}", field="url"
        ) from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise InvalidError(f"want http://host:port or https://host:port, got {url!r}", field="url")
    return url.rstrip("/")


def _key(api_key: str | None, key_file: str | os.PathLike[str] | None) -> str:
    key = api_key
    if key is None and key_file is None:
        key = os.environ.get("DSEC_API_KEY") or None
    if key is None:
        path = Path(key_file or os.environ.get("DSEC_KEY_FILE") or DEFAULT_KEY_FILE)
        try:
            key = path.read_text(encoding="ascii", errors="strict").strip()
        except (OSError, UnicodeError) as e:
            raise UnauthenticatedError(
                f"no API key: pass api_key=, set DSEC_API_KEY, or make {path} readable",
                field="api_key",
            ) from e
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        # Anything else could not be sent as a header, or would end it early.
        raise UnauthenticatedError(
            "the API key is empty or holds characters that no key has", field="api_key"
        )
    return key
