"""JSON merge patch for summary documents, exact to the last digit."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from flowfabric.core.errors import CorruptionError, ValidationError

__all__ = ["NULL_SENTINEL", "merge", "parse_patch"]

NULL_SENTINEL = "__ff_null__"
"""Stands for a literal null, which as such would remove the member."""

_MAX_LEVEL = 16


def parse_patch(payload: bytes) -> dict[str, Any]:
    """A patch: a JSON object, nested at most 17 levels."""
    try:
        patch: Any = msgspec.json.decode(payload)
    except msgspec.DecodeError as error:
        raise ValidationError("invalid_input", f"payload: is not JSON: {error}") from error
    if not isinstance(patch, dict):
        raise ValidationError("invalid_input", "payload: a patch must be a JSON object")
    _check_depth(patch, 0)  # pyright: ignore[reportUnknownArgumentType]
    return cast("dict[str, Any]", patch)


def _check_depth(value: Any, level: int) -> None:
    if level > _MAX_LEVEL:
        raise ValidationError("invalid_input", "patch_depth_exceeded")
    if isinstance(value, dict):
        for member in cast("dict[str, Any]", value).values():
            if isinstance(member, dict):
                _check_depth(member, level + 1)


def merge(document: bytes, patch: dict[str, Any]) -> bytes:
    """The document with the patch applied; sentinels become null."""
    try:
        target: Any = msgspec.json.decode(document)
    except msgspec.DecodeError as error:
        raise CorruptionError("corruption", f"summary: document: {error}") from error
    if not isinstance(target, dict):
        raise CorruptionError("corruption", "summary: document: is not an object")
    return msgspec.json.encode(_nulls(_merged(cast("dict[str, Any]", target), patch)))


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
