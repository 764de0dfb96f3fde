"""Limits of frames, and the checks that need no storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args
from unicodedata import category

from flowfabric.core.contracts.streams import BestEffort, Frame, FrameMode
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.engine.api.arguments import checked_bytes, checked_text, instance, one_of, whole

MAX_FRAME_BYTES = 65_536
MAX_BATCH_FRAMES = 256
MAX_BATCH_BYTES = 1_048_576
U32 = 2**32 - 1
U64 = 2**64 - 1
_FRAME_TYPE_BYTES = 128
# Control characters, and surrogates, which UTF-8 cannot represent.
_REFUSED = frozenset({"Cc", "Cs"})
_LONGEST = {"correlation_id": 1024, "encoding": 128, "source": 128}
_MODES = get_args(FrameMode)


def knobs(given: BestEffort) -> dict[str, Any]:
    """Best-effort settings with their defaults filled in."""
    for name in ("ttl_ms", "maxlen_floor", "maxlen_ceiling"):
        if whole(getattr(given, name), name) > U32:
            raise invalid_input(name, f"must be at most {U32}")
    if not isinstance(given.ema_alpha, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise invalid_input("ema_alpha", "must be a number")
    floor = given.maxlen_floor if given.maxlen_floor > 0 else 64
    ceiling = given.maxlen_ceiling if given.maxlen_ceiling > 0 else 16_384
    alpha = given.ema_alpha if 0 < given.ema_alpha <= 1 else 0.2
    return {
        "ttl_ms": max(0, given.ttl_ms),
        "floor": floor,
        "ceiling": max(floor, ceiling),
        "alpha": alpha,
    }


def size_of(frame: Frame) -> int:
    """The bytes that count against the limits."""
    return len(frame.payload) + len(frame.metadata_json.encode())


def check_frames(frames: Sequence[Frame], mode: FrameMode, max_payload_bytes: int) -> None:
    """Refuse what is too large or badly named, before anything is sent."""
    one_of(mode, "mode", _MODES)
    if not 1 <= len(frames) <= MAX_BATCH_FRAMES:
        raise invalid_input("frames", f"must be 1 to {MAX_BATCH_FRAMES}")
    total = 0
    for frame in frames:
        checked_bytes(instance(frame, Frame, "frames").payload, "payload")
        _check_text("metadata_json", frame.metadata_json, U32)
        size = size_of(frame)
        total += size
        if size > max_payload_bytes:
            raise ValidationError(
                "retention_limit_exceeded", f"a frame carries at most {max_payload_bytes} bytes"
            )
        _check_names(frame)
    if total > MAX_BATCH_BYTES:
        raise ValidationError(
            "retention_limit_exceeded", f"one call carries at most {MAX_BATCH_BYTES} bytes"
        )


def _check_names(frame: Frame) -> None:
    checked_text(frame.kind, "kind")
    instance(frame.frame_type, str, "frame_type")
    name = frame.name
    # Most names are printable, which is quick to tell; of the others, few have control characters.
    if len(name.encode(errors="replace")) > _FRAME_TYPE_BYTES or (
        not name.isprintable() and any(category(letter) in _REFUSED for letter in name)
    ):
        raise ValidationError(
            "invalid_frame_type",
            f"must be 1 to {_FRAME_TYPE_BYTES} bytes of UTF-8 without control characters",
        )
    for field, longest in _LONGEST.items():
        _check_text(field, getattr(frame, field), longest)
    if frame.ts is not None:
        whole(frame.ts, "ts", 0, U64)


def _check_text(field: str, value: str, longest: int) -> None:
    size = len(checked_text(value, field))
    if not value.isascii():
        size = len(value.encode())
    if size > longest:
        raise invalid_input(field, f"at most {longest} bytes")
