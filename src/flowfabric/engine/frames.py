"""Frames on the wire: limits, arguments, replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import msgspec

from flowfabric.core.contracts.leases import Handle
from flowfabric.core.contracts.streams import (
    AppendOutcome,
    BestEffort,
    Frame,
    FrameMode,
    StreamedFrame,
)
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.engine.calls import text

__all__ = [
    "MAX_BATCH_FRAMES",
    "MAX_FRAME_BYTES",
    "Page",
    "append_args",
    "append_outcome",
    "check_frames",
    "decode_frame",
    "knobs",
]

MAX_FRAME_BYTES = 65_536
MAX_BATCH_FRAMES = 256
MAX_BATCH_BYTES = 1_048_576
_FRAME_TYPE_BYTES = 128
_CORRELATION_BYTES = 1024
_MODES: tuple[FrameMode, ...] = ("durable", "summary", "best_effort")
_pack = msgspec.msgpack.Encoder().encode


class Page:
    """One reply of the range read."""

    __slots__ = ("closed_at", "closed_reason", "count", "frames", "oldest", "retained")

    def __init__(
        self,
        frames: list[StreamedFrame],
        closed_at: int | None,
        closed_reason: str | None,
        count: int,
        retained: int,
        oldest: str | None,
    ) -> None:
        self.frames = frames
        self.closed_at = closed_at
        self.closed_reason = closed_reason
        self.count = count
        self.retained = retained
        self.oldest = oldest

    def truncated_after(self, position: str) -> bool:
        """Whether frames behind the position may have been trimmed away."""
        if self.count <= self.retained:
            return False
        if self.oldest is None or position == "-":
            return True
        return _key(self.oldest) > _key(position.removeprefix("("))


def _key(entry: str) -> tuple[int, int]:
    ms, _, seq = entry.partition("-")
    return (int(ms), int(seq or 0)) if ms.isdecimal() else (2**64, 0)


def knobs(given: BestEffort) -> dict[str, Any]:
    """Best-effort settings with their defaults filled in."""
    floor = given.maxlen_floor if given.maxlen_floor > 0 else 64
    ceiling = given.maxlen_ceiling if given.maxlen_ceiling > 0 else 16_384
    alpha = given.ema_alpha if 0 < given.ema_alpha <= 1 else 0.2
    return {
        "ttl_ms": max(0, given.ttl_ms),
        "floor": floor,
        "ceiling": max(floor, ceiling),
        "alpha": alpha,
    }


def check_frames(frames: Sequence[Frame], mode: FrameMode, max_payload_bytes: int) -> None:
    """Refuse what is too large or badly named, before anything is sent."""
    if mode not in _MODES:
        raise invalid_input("mode", f"must be one of {', '.join(_MODES)}")
    if not 1 <= len(frames) <= MAX_BATCH_FRAMES:
        raise invalid_input("frames", f"must be 1 to {MAX_BATCH_FRAMES}")
    total = 0
    for frame in frames:
        size = len(frame.payload) + len(frame.metadata_json)
        total += size
        if size > max_payload_bytes:
            raise ValidationError(
                "retention_limit_exceeded", f"a frame carries at most {max_payload_bytes} bytes"
            )
        kind = frame.frame_type
        if not kind or len(kind.encode()) > _FRAME_TYPE_BYTES or not kind.isprintable():
            raise ValidationError(
                "invalid_frame_type", f"must be 1 to {_FRAME_TYPE_BYTES} printable bytes"
            )
        if len(frame.correlation_id.encode()) > _CORRELATION_BYTES:
            raise invalid_input("correlation_id", f"at most {_CORRELATION_BYTES} bytes")
    if total > MAX_BATCH_BYTES:
        raise ValidationError(
            "retention_limit_exceeded", f"one call carries at most {MAX_BATCH_BYTES} bytes"
        )


def append_args(
    handle: Handle,
    frames: Sequence[Frame],
    mode: FrameMode,
    retention_maxlen: int | None,
    settings: bytes,
    seq: int | None,
) -> list[Any]:
    """The arguments of one append."""
    maxlen = "" if retention_maxlen is None else retention_maxlen
    number = "" if seq is None else seq
    args: list[Any] = [
        handle.execution_id,
        handle.lease,
        handle.attempt,
        mode,
        maxlen,
        settings,
        number,
    ]
    for frame in frames:
        args += (frame.frame_type, frame.payload, _extra(frame))
    return args


def _extra(frame: Frame) -> bytes:
    """Only what differs from the defaults is stored."""
    extra: list[Any] = []
    if frame.encoding != "utf8":
        extra += ("e", frame.encoding)
    if frame.source != "worker":
        extra += ("s", frame.source)
    if frame.correlation_id:
        extra += ("c", frame.correlation_id)
    if frame.metadata_json:
        extra += ("md", frame.metadata_json)
    if frame.ts is not None:
        extra += ("ts", str(frame.ts))
    return _pack(extra) if extra else b""


def append_outcome(reply: Sequence[Any]) -> AppendOutcome:
    """What an append answered."""
    version = text(reply[4])
    return AppendOutcome(
        stream_ids=tuple(text(entry) for entry in reply[2]),
        frame_count=int(reply[3]),
        summary_version=int(version) if version else None,
        duplicate=reply[5] == 1,
    )


def decode_frame(entry: str, flat: Sequence[bytes]) -> StreamedFrame:
    """A frame from a stream entry; absent fields have their defaults."""
    fields = {flat[i]: flat[i + 1] for i in range(0, len(flat), 2)}
    version, ttl, ts = fields.get(b"v"), fields.get(b"ttl"), fields.get(b"ts")
    return StreamedFrame(
        id=entry,
        frame_type=fields[b"t"].decode(),
        payload=fields[b"p"],
        encoding=fields.get(b"e", b"utf8").decode(),
        source=fields.get(b"s", b"worker").decode(),
        mode=cast("FrameMode", fields.get(b"m", b"durable").decode()),
        ts=int(ts or entry.partition("-")[0]),
        correlation_id=fields.get(b"c", b"").decode(),
        metadata_json=fields.get(b"md", b"").decode(),
        summary_version=None if version is None else int(version),
        ttl_ms=None if ttl is None else int(ttl),
    )
