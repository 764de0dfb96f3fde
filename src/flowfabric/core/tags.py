"""Tags: their keys, the reserved prefix, and limits."""

import re
from collections.abc import Mapping

from flowfabric.core.errors import ValidationError, invalid_input
from flowfabric.core.ids import validate_text

MAX_TAGS = 128
MAX_KEY_BYTES = 256
_MAX_VALUE_BYTES = 4096
# Only FlowFabric sets keys with this prefix.
_RESERVED_PREFIX = "ff."
TRACE_TAG = "ff.traceparent"
"""The trace that an execution belongs to, as in the W3C header `traceparent`."""

_is_traceparent = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}").fullmatch
_is_key = re.compile(r"[a-z][a-z0-9_]*\.[a-z0-9_][a-z0-9_.]*").fullmatch


def is_tag_key(key: str) -> bool:
    """Whether `key` may be set or updated after creation.

    >>> is_tag_key("app.task_id"), is_tag_key("app..x"), is_tag_key("ff.task_id")
    (True, False, False)
    """
    return _is_key(key) is not None and not key.startswith(_RESERVED_PREFIX)


def validate_tag_key(key: str) -> str:
    """The key, or `invalid_tag_key` if it breaks the pattern or is reserved."""
    if not isinstance(key, str) or not is_tag_key(key):
        raise ValidationError("invalid_tag_key", str(key))
    if len(key) > MAX_KEY_BYTES:
        raise invalid_input("tags: key", f"must be at most {MAX_KEY_BYTES} bytes, got {len(key)}")
    return key


def validate_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    """Check the tags of an update: at least one, and every key follows the pattern."""
    _check_pairs(tags)
    if not tags:
        raise invalid_input("tags", "must not be empty")
    for key, value in tags.items():
        validate_tag_key(key)
        validate_text(value, "tags: value", limit=_MAX_VALUE_BYTES)
    return tags


def validate_creation_tags(tags: Mapping[str, str]) -> Mapping[str, str]:
    """Check the tags of a new execution: any key that is not reserved, and the trace context."""
    for key in validate_tag_filter(tags):
        if key == TRACE_TAG:
            if not _is_traceparent(tags[key]):
                raise invalid_input("tags", f"{TRACE_TAG} must be a W3C traceparent")
        elif key.startswith(_RESERVED_PREFIX):
            raise ValidationError("invalid_tag_key", key)
    return tags


def validate_tag_filter(tags: Mapping[str, str]) -> Mapping[str, str]:
    """Check the tags of a filter: any that an execution may have."""
    _check_pairs(tags)
    for key, value in tags.items():
        validate_text(key, "tags: key", limit=MAX_KEY_BYTES, required=True)
        validate_text(value, "tags: value", limit=_MAX_VALUE_BYTES)
    return tags


def _check_pairs(tags: Mapping[str, str]) -> None:
    if not isinstance(tags, Mapping):
        problem = f"must be a mapping of text to text, got {type(tags).__name__}"
        raise invalid_input("tags", problem, undecodable=True)
    if len(tags) > MAX_TAGS:
        raise invalid_input("tags", f"must hold at most {MAX_TAGS} pairs, got {len(tags)}")
