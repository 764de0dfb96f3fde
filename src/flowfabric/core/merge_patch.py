"""JSON merge patch for summary documents."""

from typing import Any, cast

import msgspec

from flowfabric.core.errors import CorruptionError, ValidationError

PATCH_KIND = "json-merge-patch"

NULL_SENTINEL = "__ff_null__"
"""Represents a literal null, because a real null removes the member."""

EMPTY = b"{}"
"""The document before the first patch."""

_MAX_LEVEL = 16
# A merge never descends into arrays, which are replaced whole; this bounds decoding them.
_MAX_NESTING = 128


def parse_patch(payload: bytes) -> dict[str, Any]:
    """The patch, which must be a JSON object."""
    try:
        patch: object = msgspec.json.decode(payload)
    except RecursionError as error:
        raise ValidationError("invalid_input", "patch_depth_exceeded") from error
    except (ValueError, msgspec.DecodeError) as error:
        raise ValidationError("invalid_input", f"payload: is not JSON: {error}") from error
    if not isinstance(patch, dict):
        raise ValidationError("invalid_input", "payload: a patch must be a JSON object")
    return cast("dict[str, Any]", patch)


def merge(document: bytes, *patches: dict[str, Any]) -> bytes:
    """The document with the patches applied in order; sentinels become null."""
    try:
        merged = msgspec.json.decode(document, type=dict[str, Any])
    except (RecursionError, ValueError, msgspec.DecodeError) as error:
        raise CorruptionError("corruption", f"summary: document: {error}") from error
    for patch in patches:
        _check_depth(patch, 0, in_array=False)
        merged = _merged(merged, patch)
    return msgspec.json.encode(_nulls(merged))


def _check_depth(value: Any, level: int, *, in_array: bool) -> None:
    """Refuse a patch of more than 17 levels of objects, the root included."""
    if isinstance(value, list):
        in_array, members = True, cast("list[Any]", value)
    elif isinstance(value, dict):
        members = list(cast("dict[str, Any]", value).values())
    else:
        return
    if level > (_MAX_NESTING if in_array else _MAX_LEVEL):
        raise ValidationError("invalid_input", "patch_depth_exceeded")
    for member in members:
        _check_depth(member, level + 1, in_array=in_array)


def _merged(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    result = dict(target)
    for name, value in patch.items():
        if value is None:
            result.pop(name, None)
        elif isinstance(value, dict):
            inside = result.get(name)
            base = cast("dict[str, Any]", inside) if isinstance(inside, dict) else {}
            result[name] = _merged(base, cast("dict[str, Any]", value))
        else:
            result[name] = value
    return result


def _nulls(value: Any) -> Any:
    if value == NULL_SENTINEL:
        return None
    if isinstance(value, dict):
        return {name: _nulls(member) for name, member in cast("dict[str, Any]", value).items()}
    if isinstance(value, list):
        return [_nulls(member) for member in cast("list[Any]", value)]
    return value
