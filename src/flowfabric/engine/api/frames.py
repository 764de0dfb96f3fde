"""Frames and how they are appended: limits, defaults, and the checks that need no storage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict, get_args
from unicodedata import category

import msgspec

from flowfabric.core.contracts.streams import BestEffort, Frame, FrameMode
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.merge_patch import PATCH_KIND
from flowfabric.engine.api import check

MAX_FRAME_BYTES = 65_536
MAX_BATCH_FRAMES = 256
MAX_BATCH_BYTES = 1_048_576
SUMMARY_MAX_BYTES = 262_144
U32 = 2**32 - 1
U64 = 2**64 - 1
_FRAME_TYPE_BYTES = 128
# Control characters, and surrogates, which UTF-8 cannot represent.
_REFUSED = frozenset({"Cc", "Cs"})
_LONGEST = {"correlation_id": 1024, "encoding": 128, "source": 128}
_MODES = get_args(FrameMode)


class AppendOptions(TypedDict, total=False):
    """How frames are appended."""

    mode: FrameMode
    best_effort: BestEffort | None
    retention_maxlen: int | None
    """Keep exactly this many newest frames. 0 keeps about 10 000; None follows the policy."""
    max_payload_bytes: int
    patch_kind: str
    summary_max_bytes: int
    seq: int | None
    """Number of the last frame. An append whose number is not higher than all before it is not
    written again, so send the next one only after the reply."""


class Append(msgspec.Struct, frozen=True, kw_only=True):
    """Checked `AppendOptions` with their defaults."""

    mode: FrameMode = "durable"
    best_effort: BestEffort | None = None
    retention_maxlen: int | None = None
    max_payload_bytes: int = MAX_FRAME_BYTES
    patch_kind: str = PATCH_KIND
    summary_max_bytes: int = SUMMARY_MAX_BYTES
    seq: int | None = None

    def __post_init__(self) -> None:
        check.one_of(self.mode, "mode", _MODES)
        check.whole(self.max_payload_bytes, "max_payload_bytes", 0, U32)
        check.whole(self.summary_max_bytes, "summary_max_bytes", 0, U32)
        check.text(self.patch_kind, "patch_kind")
        if self.best_effort is not None:
            check.instance(self.best_effort, BestEffort, "best_effort")
        if self.retention_maxlen is not None:
            check.whole(self.retention_maxlen, "retention_maxlen", 0, U32)
        if self.seq is not None:
            check.whole(self.seq, "seq", 0, U64)

    def live(self) -> dict[str, Any]:
        """The settings of best-effort frames, defaults filled in."""
        given = self.best_effort or BestEffort()
        for name in ("ttl_ms", "maxlen_floor", "maxlen_ceiling"):
            if check.whole(getattr(given, name), name) > U32:
                raise invalid_input(name, f"must be at most {U32}")
        if not isinstance(given.ema_alpha, int | float):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise invalid_input("ema_alpha", "must be a number")
        floor = given.maxlen_floor if given.maxlen_floor > 0 else 64
        ceiling = given.maxlen_ceiling if given.maxlen_ceiling > 0 else 16_384
        return {
            "ttl_ms": max(0, given.ttl_ms),
            "floor": floor,
            "ceiling": max(floor, ceiling),
            "alpha": given.ema_alpha if 0 < given.ema_alpha <= 1 else 0.2,
        }

    def check(self, frames: Sequence[Frame]) -> None:
        """Refuse frames that are too large or badly named."""
        if not 1 <= len(frames) <= MAX_BATCH_FRAMES:
            raise invalid_input("frames", f"must be 1 to {MAX_BATCH_FRAMES}")
        total = 0
        for frame in frames:
            check.binary(check.instance(frame, Frame, "frames").payload, "payload")
            _check_text("metadata_json", frame.metadata_json, U32)
            size = size_of(frame)
            total += size
            if size > self.max_payload_bytes:
                raise _too_large("a frame", size, self.max_payload_bytes)
            _check_names(frame)
        if total > MAX_BATCH_BYTES:
            raise _too_large("the batch", total, MAX_BATCH_BYTES)


def _too_large(what: str, size: int, limit: int) -> ValidationError:
    problem = f"{what} is {size} bytes long; the limit is {limit}"
    return ValidationError("retention_limit_exceeded", problem)


def size_of(frame: Frame) -> int:
    """The bytes that count against the limits."""
    return len(frame.payload) + len(frame.metadata_json.encode())


def _check_names(frame: Frame) -> None:
    check.text(frame.kind, "kind")
    check.instance(frame.frame_type, str, "frame_type")
    name = frame.name
    # Printable is the common case and quick to check.
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
        check.whole(frame.ts, "ts", 0, U64)


def _check_text(field: str, value: str, longest: int) -> None:
    size = len(check.text(value, field))
    if not value.isascii():
        size = len(value.encode())
    if size > longest:
        raise invalid_input(field, f"is {size} bytes long; the limit is {longest}")
