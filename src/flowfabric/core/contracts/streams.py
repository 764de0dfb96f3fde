"""Frames of an attempt's stream and what stream operations answer."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FrameMode = Literal["durable", "summary", "best_effort"]
Visibility = Literal["all", "exclude_best_effort"]

KINDS = frozenset({"stdout", "stderr", "event", "blob"})
"""The coarse kinds of frames; anything else counts as `event`."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame to append. The payload is bytes and stays so.

    Without a `frame_type` the frame is called by its kind.

    >>> Frame(payload=b"hello", kind="stdout").name
    'stdout'
    """

    payload: bytes
    frame_type: str = ""
    kind: str = "event"
    encoding: str = "utf8"
    source: str = "worker"
    correlation_id: str = ""
    metadata_json: str = ""
    ts: int | None = None

    @property
    def name(self) -> str:
        """What is stored as the frame's type."""
        return self.frame_type or (self.kind if self.kind in KINDS else "event")


class BestEffort(msgspec.Struct, frozen=True, kw_only=True):
    """How short-lived a best-effort frame is. A ttl of 0 keeps it until it is trimmed."""

    ttl_ms: int = 10_000
    maxlen_floor: int = 64
    maxlen_ceiling: int = 16_384
    ema_alpha: float = 0.2


class AppendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of the new entries and how many frames were ever appended.

    A `duplicate` wrote nothing; it has the ids of the first time if it repeats the latest append.
    """

    stream_ids: tuple[str, ...]
    frame_count: int
    summary_version: int | None = None
    duplicate: bool = False

    @property
    def stream_id(self) -> str:
        """The id of the newest entry, empty when it is not known any more."""
        return self.stream_ids[-1] if self.stream_ids else ""


class StreamedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame as read back."""

    id: str
    frame_type: str
    payload: bytes
    encoding: str
    source: str
    mode: FrameMode
    ts: int
    correlation_id: str = ""
    metadata_json: str = ""
    summary_version: int | None = None
    ttl_ms: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        """What the frame carries apart from its id, by name in sorted order."""
        present = {"correlation_id", "metadata_json", "summary_version", "ttl_ms"}
        pairs = sorted((name, getattr(self, name)) for name in self.__struct_fields__)
        return {
            name: value
            for name, value in pairs
            if name != "id" and not (name in present and value in {"", None})
        }


class StreamFrames(msgspec.Struct, frozen=True, kw_only=True):
    """A page of frames; `closed_at` is set once the attempt's output is complete.

    Go on from `next_cursor`, which may be ahead of the last frame shown. `truncated` tells that
    older frames may have been trimmed away before they were read.
    """

    frames: tuple[StreamedFrame, ...]
    next_cursor: str
    closed_at: int | None = None
    closed_reason: str | None = None
    truncated: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be appended any more."""
        return self.closed_at is not None


class SummaryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The rolling summary of an attempt."""

    document_json: bytes
    version: int
    patch_kind: str
    last_updated_ms: int
    first_applied_ms: int
