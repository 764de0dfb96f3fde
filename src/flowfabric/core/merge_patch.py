"""JSON merge patch for summary documents, exact to the last digit."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from flowfabric.core.errors import CorruptionError, ValidationError

PATCH_KIND = "json-merge-patch"
"""The only kind of patch there is."""

NULL_SENTINEL = "__ff_null__"
"""Stands for a literal null, which as such would remove the member."""

EMPTY = b"{}"
"""The document before the first patch."""

_MAX_LEVEL = 16
# Arrays are replaced whole, so a merge never descends into them; this bounds reading them.
_MAX_NESTING = 128


def parse_patch(payload: bytes) -> dict[str, Any]:
    """The patch, which must be a JSON object."""
    try:
        patch = _decode(payload)
    except RecursionError as error:
        raise ValidationError("invalid_input", "patch_depth_exceeded") from error
    except ValueError as error:
        raise ValidationError("invalid_input", f"payload: is not JSON: {error}") from error
    if not isinstance(patch, dict):
        raise ValidationError("invalid_input", "payload: a patch must be a JSON object")
    return cast("dict[str, Any]", patch)


def check_depth(patch: dict[str, Any]) -> None:
    """Refuse a patch of more than 17 levels of objects, the root included."""
    _check(patch, 0, in_array=False)


def merge(document: bytes, *patches: dict[str, Any]) -> bytes:
    """The document with the patches applied in order; sentinels become null."""
    try:
        target = _decode(document)
    except (RecursionError, ValueError) as error:
        raise CorruptionError("corruption", f"summary: document: {error}") from error
    if not isinstance(target, dict):
        raise CorruptionError("corruption", "summary: document: is not an object")
    merged = cast("dict[str, Any]", target)
    for patch in patches:
        check_depth(patch)
        merged = _merged(merged, patch)
    return msgspec.json.encode(_nulls(merged))


def _decode(source: bytes) -> Any:
    try:
        return msgspec.json.decode(source)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from error


def _check(value: Any, level: int, *, in_array: bool) -> None:
    if level > (_MAX_NESTING if in_array else _MAX_LEVEL):
        raise ValidationError("invalid_input", "patch_depth_exceeded")
    if isinstance(value, dict):
        for member in cast("dict[str, Any]", value).values():
            _check_inside(member, level, in_array=in_array)
    elif isinstance(value, list):
        for member in cast("list[Any]", value):
            _check_inside(member, level, in_array=True)


def _check_inside(member: Any, level: int, *, in_array: bool) -> None:
    if isinstance(member, dict):
        _check(member, level + 1, in_array=in_array)
    elif isinstance(member, list):
        _check(member, level + 1, in_array=True)


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
