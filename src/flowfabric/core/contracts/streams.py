"""Output frames, positions in the output, and the results of stream operations."""

import re
from typing import Any, Literal, Self, TypeVar, overload

import msgspec

from flowfabric.core.annotations import annotation
from flowfabric.core.errors import ValidationError

T = TypeVar("T")

FrameMode = Literal["durable", "summary", "best_effort"]
Visibility = Literal["all", "exclude_best_effort"]

_KINDS = frozenset({"stdout", "stderr", "event", "blob"})

READ_HARD_CAP = 10_000
"""How many frames one read or tail returns at most."""

MAX_TAIL_BLOCK_MS = 30_000
"""How long one tail waits at most."""

_split_id = re.compile(r"([0-9]+)(?:-([0-9]+))?", re.ASCII).fullmatch
_FORMS = "pass start, end, <ms> or <ms>-<seq>"
_MAX_PART = 2**64 - 1
_MAX_DIGITS = len(str(_MAX_PART))
_LAST_POSSIBLE = f"{_MAX_PART}-{_MAX_PART}"


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
        return self.frame_type or (self.kind if self.kind in _KINDS else "event")


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
    def text(self) -> str:
        """The payload as text; bytes that are not UTF-8 become `�`."""
        return self.payload.decode(errors="replace")

    @overload
    def json(self) -> Any: ...

    @overload
    def json(self, kind: type[T]) -> T: ...

    def json(self, kind: Any = Any) -> Any:
        """The value that was written, as this type. `ValueError` means that it is not JSON.

        Large values take several frames: join the payloads of all parts to decode them.
        """
        try:
            return annotation(kind).fit(msgspec.json.decode(self.payload), f"frame {self.id}")
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            part = self.encoding == "json" and '"part"' in self.metadata_json
            what = f"holds one part of a larger value: {self.metadata_json}" if part else str(error)
            problem = f"Frame {self.id} ({self.encoding}) is not JSON: {what}"
            raise ValueError(f"{problem.rstrip('.')}. Read `text` or `payload`.") from error

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


class StreamCursor(msgspec.Struct, frozen=True):
    """`start`, `end`, `<ms>` or `<ms>-<seq>`.

    >>> StreamCursor.parse("1713100800150-0").is_concrete
    True
    """

    text: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """The cursor, or `invalid_input`."""
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise _refuse(f"Malformed: {type(text).__name__}: {_FORMS}")
        if text == "":
            raise _refuse(f"Empty: {_FORMS}")
        if text in {"-", "+"}:
            raise _refuse(f"BareMarkerRejected: {text!r}: use start or end")
        parts = _split_id(text)
        if text in {"start", "end"} or (parts and all(map(_fits, parts.groups("0")))):
            return cls(text)
        raise _refuse(f"Malformed: {text!r}: {_FORMS}")

    @property
    def is_concrete(self) -> bool:
        """Whether it names an entry, not an end of the stream."""
        return self.text not in {"start", "end"}

    def first(self) -> str:
        """The lower bound of a range."""
        if self.text == "start":
            return "-"
        return "+" if self.text == "end" else _entry_id(self.text)

    def last(self) -> str:
        """The upper bound of a range; `<ms>` includes the whole millisecond."""
        return self.first() if "-" in self.text else self.first().removesuffix("-0")

    def after(self) -> str:
        """The position that a tail starts after."""
        if not self.is_concrete:
            raise _refuse(f"{self.text!r} is not a frame id; pass 0-0 to follow from the beginning")
        return _entry_id(self.text)

    def __str__(self) -> str:
        return self.text


START = StreamCursor("0-0")
"""Before every entry."""


def behind(entry: str) -> str:
    """The lower bound of everything after an entry. Nothing follows the last possible id."""
    return entry if entry == _LAST_POSSIBLE else f"({entry}"


def check_count(count_limit: int) -> int:
    """A page size within its limits."""
    if type(count_limit) is not int or count_limit < 1:
        raise ValidationError("invalid_input", "count_limit must be >= 1")
    if count_limit > READ_HARD_CAP:
        raise ValidationError("invalid_input", "count_limit_exceeds_hard_cap")
    return count_limit


def _fits(part: str) -> bool:
    # Check the length first: Python refuses to parse numbers of thousands of digits.
    digits = part.lstrip("0") or "0"
    return len(digits) <= _MAX_DIGITS and int(digits) <= _MAX_PART


def _entry_id(text: str) -> str:
    ms, _, seq = text.partition("-")
    return f"{ms.lstrip('0') or '0'}-{seq.lstrip('0') or '0'}"


def _refuse(problem: str) -> ValidationError:
    return ValidationError("invalid_input", f"cursor: {problem}")
