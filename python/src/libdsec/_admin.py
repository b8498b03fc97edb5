"""What the operator's calls answer."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, kw_only=True)
class StoredLayer:
    """A layer as the store has it.

    Attributes:
        digest: Its name by content.
        size: Bytes that it takes in the store.
        created: When it was stored.
    """

    digest: str
    size: int
    created: datetime


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a collection of layers did.

    Attributes:
        removed: Layers that nothing referred to.
        kept: How many stay.
    """

    removed: tuple[StoredLayer, ...]
    kept: int


@dataclass(frozen=True, kw_only=True)
class Key:
    """An API key, without its secret.

    Attributes:
        id: To revoke it by.
        project: Whose sandboxes it opens.
        created: When it was made.
        expires: When it ends; None is never.
        admin: It may do everything.
    """

    id: str
    project: str
    created: datetime
    expires: datetime | None
    admin: bool


@dataclass(frozen=True, kw_only=True)
class NewKey:
    """A key just made.

    Attributes:
        key: What it is.
        secret: What to give to `DSecClient(api_key=...)`; shown only now.
    """

    key: Key
    secret: str = field(repr=False)
