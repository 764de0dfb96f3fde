"""Output frames and the results of stream operations."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

FrameMode = Literal["durable", "summary", "best_effort"]
Visibility = Literal["all", "exclude_best_effort"]

KINDS = frozenset({"stdout", "stderr", "event", "blob"})
"""The kinds of frames; any other counts as `event`."""


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame to append. Its type is its kind unless `frame_type` is set.

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
        """The stored type."""
        return self.frame_type or (self.kind if self.kind in KINDS else "event")


class BestEffort(msgspec.Struct, frozen=True, kw_only=True):
    """How long best-effort frames are kept. A TTL of 0 keeps them until they are trimmed."""

    ttl_ms: int = 10_000
    maxlen_floor: int = 64
    maxlen_ceiling: int = 16_384
    ema_alpha: float = 0.2


class AppendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of the new entries, and how many frames were appended in all.

    A `duplicate` wrote nothing. It has the ids of the first call if that was the latest append.
    """

    stream_ids: tuple[str, ...]
    frame_count: int
    summary_version: int | None = None
    duplicate: bool = False

    @property
    def stream_id(self) -> str:
        """The id of the newest entry; empty if it is no longer known."""
        return self.stream_ids[-1] if self.stream_ids else ""


class StreamedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame as it is read."""

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
        """The fields of the frame except its id, sorted by name."""
        present = {"correlation_id", "metadata_json", "summary_version", "ttl_ms"}
        pairs = sorted((name, getattr(self, name)) for name in self.__struct_fields__)
        return {
            name: value
            for name, value in pairs
            if name != "id" and not (name in present and value in {"", None})
        }


class StreamFrames(msgspec.Struct, frozen=True, kw_only=True):
    """A page of frames; `closed_at` is set when the output is complete.

    Continue from `next_cursor`, which can be after the last frame returned. `truncated` means that
    older frames may have been trimmed before they were read.
    """

    frames: tuple[StreamedFrame, ...]
    next_cursor: str
    closed_at: int | None = None
    closed_reason: str | None = None
    truncated: bool = False

    @property
    def is_closed(self) -> bool:
        """Whether the output is complete."""
        return self.closed_at is not None


class SummaryDocument(msgspec.Struct, frozen=True, kw_only=True):
    """The rolling summary of an attempt."""

    document_json: bytes
    version: int
    patch_kind: str
    last_updated_ms: int
    first_applied_ms: int
