"""Frames of an attempt's stream and what stream operations answer."""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "AppendOutcome",
    "BestEffort",
    "Frame",
    "FrameMode",
    "StreamFrames",
    "StreamedFrame",
    "SummaryDocument",
    "Visibility",
]

FrameMode = Literal["durable", "summary", "best_effort"]
Visibility = Literal["all", "exclude_best_effort"]


class Frame(msgspec.Struct, frozen=True, kw_only=True):
    """One frame to append. The payload is bytes and stays so."""

    payload: bytes
    frame_type: str = "event"
    encoding: str = "utf8"
    source: str = "worker"
    correlation_id: str = ""
    metadata_json: str = ""
    ts: int | None = None


class BestEffort(msgspec.Struct, frozen=True, kw_only=True):
    """How short-lived a best-effort frame is."""

    ttl_ms: int = 10_000
    maxlen_floor: int = 64
    maxlen_ceiling: int = 16_384
    ema_alpha: float = 0.2


class AppendOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The ids of the new entries and how many frames were ever appended."""

    stream_ids: tuple[str, ...]
    frame_count: int
    summary_version: int | None = None
    duplicate: bool = False

    @property
    def stream_id(self) -> str:
        """The id of the newest entry."""
        return self.stream_ids[-1]


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


class StreamFrames(msgspec.Struct, frozen=True, kw_only=True):
    """A page of frames; `closed_at` is set once the attempt's output is complete."""

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
