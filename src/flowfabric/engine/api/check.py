"""Checks of arguments; a wrong type or form raises `invalid_input`."""

import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from flowfabric.core.contracts.leases import Fence, Handle
from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.ids import ExecutionId, new_uuid, validate_text, validate_uuid
from flowfabric.core.partition import PartitionCounts
from flowfabric.core.text import REASON_LIMIT, truncate_utf8

MAX_EXACT = 2**53 - 1
"""The largest whole number that Lua represents exactly."""
_I64_MAX = 2**63 - 1
_U32_MAX = 2**32 - 1
_U64_MAX = 2**64 - 1
_OVERRIDE = "operator_override"
_NO_LISTS = (str, bytes, bytearray, memoryview, Mapping)
_MAX_JSON_DEPTH = 100
_MAX_PROMPT_BYTES = 1024
_MAX_DETAILS_BYTES = 8192
_encode_json = msgspec.json.Encoder().encode
_decode_json = msgspec.json.Decoder().decode
_is_tag = re.compile(r"\{fp:(0|[1-9][0-9]{0,4})\}").fullmatch
_is_label = re.compile(r"[ -~]{0,256}").fullmatch
_is_pair = re.compile(r"[0-9a-f-]{36}/[0-9]{1,20}").fullmatch
T = TypeVar("T")


def _wrong_type(field: str, wanted: str, value: object) -> ValidationError:
    return invalid_input(field, f"must be {wanted}, got {type(value).__name__}", undecodable=True)


def instance(value: Any, kind: type[T], field: str) -> T:
    """A value of the given type."""
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise _wrong_type(field, f"{article} {kind.__name__}", value)
    return value


def flag(value: Any, field: str) -> bool:
    """A bool, not merely a truthy value."""
    if not isinstance(value, bool):
        raise _wrong_type(field, "True or False", value)
    return value


def listed(value: Any, field: str) -> list[Any]:
    """Any collection except text, as a list."""
    if isinstance(value, list):
        return cast("list[Any]", value)
    if isinstance(value, _NO_LISTS) or not isinstance(value, Iterable):
        raise _wrong_type(field, "a list", cast("object", value))
    return list(cast("Iterable[Any]", value))


def pairs(value: Any, field: str) -> list[tuple[Any, Any]]:
    """Any collection of two values each."""
    each = [tuple(listed(one, field)) for one in listed(value, field)]
    if any(len(one) != 2 for one in each):
        raise _wrong_type(field, "a list of pairs", value)
    return cast("list[tuple[Any, Any]]", each)


def text(value: Any, field: str) -> str:
    """Text that UTF-8 can represent."""
    if not isinstance(value, str):
        raise _wrong_type(field, "text", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid_input(field, "is not valid Unicode", undecodable=True) from None
    return value


def label(value: Any, field: str) -> str:
    """The name of an encoding, which must fit in an HTTP header."""
    if not isinstance(value, str):
        raise _wrong_type(field, "text", value)
    if _is_label(value) is None:
        raise invalid_input(field, "must be at most 256 printable ASCII characters")
    return value


def texts(values: Any, field: str) -> list[str]:
    """A list of texts."""
    return [text(value, field) for value in listed(values, field)]


def stored_names(values: Any, field: str) -> list[str]:
    """A list of stored names, malformed ones included."""
    found = listed(values, field)
    for value in found:
        if not isinstance(value, str):
            raise _wrong_type(field, "texts", value)
    return found


def one_of(value: Any, field: str, allowed: Collection[str]) -> str:
    """One of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise invalid_input(field, f"must be one of {', '.join(allowed)}")
    return value


def reason(value: Any, field: str, limit: int = REASON_LIMIT) -> str:
    """Text for people, truncated to its limit."""
    if not isinstance(value, str):
        raise _wrong_type(field, "text", value)
    return truncate_utf8(value, limit)


def uuid(value: Any, field: str) -> str:
    """The id that the caller chose, or a new one for None."""
    return new_uuid() if value is None else validate_uuid(value, field)


def binary(value: Any, field: str) -> bytes:
    """Opaque bytes."""
    if not isinstance(value, bytes):
        raise _wrong_type(field, "bytes", value)
    return value


def json_problem(data: bytes) -> str:
    """Why these bytes are not readable as JSON of at most 100 levels; empty if they are."""
    try:
        return "nests too deeply" if _is_deep(data, _decode_json(data)) else ""
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return "is not JSON"


def _is_deep(data: bytes, value: Any) -> bool:
    if data.count(b"[") + data.count(b"{") <= _MAX_JSON_DEPTH:
        return False
    layer = _nested([value])
    for _ in range(_MAX_JSON_DEPTH):
        layer = [part for each in layer for part in _nested(each)]
    return bool(layer)


def _nested(value: list[Any] | dict[str, Any]) -> list[Any]:
    parts = value.values() if isinstance(value, dict) else value
    return [part for part in parts if isinstance(part, list | dict)]


def question(prompt: Any, details: Any) -> dict[str, str]:
    """The question of a wait in stored form: text and JSON, each only if given."""
    asked: dict[str, str] = {}
    if prompt is not None and prompt != "":
        asked["prompt"] = validate_text(prompt, "prompt", limit=_MAX_PROMPT_BYTES)
    if details is None:
        return asked
    try:
        data = _encode_json(details)
    except (TypeError, ValueError, RecursionError) as error:
        raise invalid_input("details", f"cannot be written as JSON: {error}") from error
    if len(data) > _MAX_DETAILS_BYTES:
        problem = f"is {len(data)} bytes long as JSON; the limit is {_MAX_DETAILS_BYTES}"
        raise invalid_input("details", f"{problem}. Pass a link to the rest.")
    if problem := json_problem(data):
        raise invalid_input("details", problem)
    return asked | {"details": data.decode()}


def source(value: Any) -> str:
    """The source of an action on a lease. An override gets an id that identifies repeats."""
    given = text(value, "source")
    if given == _OVERRIDE:
        return f"{_OVERRIDE} {new_uuid()}"
    if " " in given:
        raise invalid_input("source", "must not contain spaces")
    return given


def whole(value: Any, field: str, low: int | None = None, high: int = MAX_EXACT) -> int:
    """A whole number; with `low`, one from there to `high`."""
    if type(value) is not int:
        raise _wrong_type(field, "a whole number", value)
    if low is not None and not low <= value <= high:
        raise invalid_input(field, f"must be a whole number from {low} to {high}")
    return value


def count(value: Any, field: str) -> int | str:
    """A whole number of 32 bits from 0; empty text for None."""
    return "" if value is None else whole(value, field, 0, _U32_MAX)


def clamped(value: int) -> int:
    """The nearest number that Lua represents exactly."""
    return max(-MAX_EXACT, min(MAX_EXACT, value))


def revision(value: Any, field: str) -> int:
    """A 64-bit revision to compare with; stored ones never get that large."""
    return clamped(whole(value, field, 0, _U64_MAX))


def timestamp(value: Any, field: str, *, low: int = -_I64_MAX) -> int:
    """A time in ms, clamped to what Lua represents exactly."""
    return clamped(whole(value, field, low, _I64_MAX))


def positive_ms(value: Any, field: str) -> int:
    """A duration: a positive whole number of milliseconds."""
    if type(value) is not int or not 0 < value <= MAX_EXACT:
        raise invalid_input(field, "must be a positive whole number of milliseconds")
    return value


def seconds(value: Any, field: str) -> float:
    """A duration in seconds; negative counts as 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise invalid_input(field, "must be a number of seconds", undecodable=True)
    return max(0.0, value)


def partition(value: Any, counts: PartitionCounts, field: str = "partition") -> int:
    """The number of one of the deployment's partitions."""
    return whole(value, field, 0, counts.flow - 1)


def tag(value: Any, counts: PartitionCounts, field: str = "tag") -> str:
    """The hash tag of one of the deployment's partitions."""
    match = _is_tag(value) if isinstance(value, str) else None
    if match is None or int(match[1]) >= counts.flow:
        raise invalid_input(field, f"must be a partition from {{fp:0}} to {{fp:{counts.flow - 1}}}")
    return value


def handle(value: Any, field: str = "handle") -> Handle:
    """A handle that a claim returned."""
    given = instance(value, Handle, field)
    if (
        type(given.execution_id) is not ExecutionId
        or _is_pair(text(given.lease, field)) is None
        or _is_pair(text(given.attempt, field)) is None
    ):
        raise invalid_input(field, "is not a handle that a claim returned")
    return given


def fence(fence: Any) -> str:
    """A fence in the form that functions compare. Its parts must not contain the separator `/`."""
    if not isinstance(fence, Fence):
        raise _wrong_type("fence", "a Handle or a Fence", fence)
    for field in ("lease_id", "attempt_id"):
        if "/" in text(getattr(fence, field), field):
            raise invalid_input(field, "must not contain '/'")
    for field in ("lease_epoch", "attempt_index"):
        value: Any = getattr(fence, field)
        if value is not None:
            whole(value, field, 0, _U64_MAX)
    return fence.wire
