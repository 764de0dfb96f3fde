"""Payloads and results for people."""

from typing import Self

import msgspec

from flowfabric.cli.views.text import preview

_PREVIEW = 400


class Blob(msgspec.Struct, frozen=True):
    """A payload or result: as text if it is UTF-8, otherwise as hex."""

    size: int
    encoding: str
    form: str
    preview: str
    truncated: bool

    @classmethod
    def of(cls, data: bytes | None, encoding: str, *, full: bool) -> Self | None:
        """The bytes, shortened unless `full`."""
        if data is None:
            return None
        shown, form, truncated = preview(data, None if full else _PREVIEW)
        return cls(len(data), encoding, form, shown, truncated)
