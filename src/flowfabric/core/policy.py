"""The execution policy: frozen at creation, validated fail-closed, stored normalised."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import cast

import msgspec

from flowfabric.core.capabilities import normalise
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import IdParseError, validate_uuid

MAX_PRIORITY = 9000
MAX_BUDGET_IDS = 16
#: Default `max_reclaim_count` of an execution that has a policy.
DEFAULT_MAX_RECLAIMS = 100
#: Default `max_reclaim_count` of an execution without one.
MAX_RECLAIMS_WITHOUT_POLICY = 1000
DEFAULT_DEDUP_WINDOW_MS = 86_400_000

_U32 = 2**32 - 1
_U64 = 2**64 - 1


def clamp_priority(priority: int) -> int:
    """Priorities outside 0 to 9000 are moved to the nearest bound, not refused."""
    return min(max(priority, 0), MAX_PRIORITY)


class TimeoutBehavior(StrEnum):
    """What a suspension's timeout does."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    AUTO_RESUME = "auto_resume"
    ESCALATE = "escalate"


class DurabilityMode(StrEnum):
    """How the frames of an attempt stream are written."""

    BUFFERED = "buffered"
    DURABLE = "durable"


class FixedBackoff(msgspec.Struct, frozen=True, tag_field="type", tag="fixed"):
    """The same delay before every retry."""

    delay_ms: int


class ExponentialBackoff(msgspec.Struct, frozen=True, tag_field="type", tag="exponential"):
    """A delay that grows with every retry; jitter draws from its upper half."""

    initial_delay_ms: int = 1000
    max_delay_ms: int = 60_000
    multiplier: float = 2.0
    jitter: bool = False


Backoff = FixedBackoff | ExponentialBackoff


class RetryPolicy(msgspec.Struct, frozen=True):
    """Whether and when a failed attempt is followed by another."""

    max_retries: int = 3
    backoff: Backoff = ExponentialBackoff()
    retryable_categories: tuple[str, ...] = ()
    retry_on_timeout: bool = False


class TimeoutPolicy(msgspec.Struct, frozen=True):
    """Time limits of an attempt and of the whole execution."""

    attempt_timeout_ms: int | None = None
    execution_deadline_ms: int | None = None
    max_reclaim_count: int = DEFAULT_MAX_RECLAIMS


class SuspensionPolicy(msgspec.Struct, frozen=True):
    """Defaults for suspensions that name no timeout."""

    default_timeout_ms: int | None = None
    timeout_behavior: TimeoutBehavior = TimeoutBehavior.FAIL


class FallbackTier(msgspec.Struct, frozen=True):
    """One provider and model to fall back to; carried for handlers, not applied by the engine."""

    provider: str
    model: str
    timeout_ms: int | None = None


class FallbackPolicy(msgspec.Struct, frozen=True):
    """Fallback tiers in order of preference."""

    tiers: tuple[FallbackTier, ...] = ()


class RoutingRequirements(msgspec.Struct, frozen=True):
    """Where the execution may run."""

    required_capabilities: tuple[str, ...] = ()
    preferred_locality: str | None = None
    isolation_level: str | None = None


class StreamPolicy(msgspec.Struct, frozen=True):
    """How the output stream is written and how long it, and the execution, is kept."""

    durability_mode: DurabilityMode = DurabilityMode.BUFFERED
    retention_maxlen: int = 10_000
    retention_ttl_ms: int | None = None


class ExecutionPolicy(msgspec.Struct, frozen=True):
    """Everything a submitter may decide about how an execution is run.

    >>> ExecutionPolicy(retry_policy=RetryPolicy(max_retries=5)).to_json()
    b'{"retry_policy":{"max_retries":5},"max_reclaim_count":100}'
    """

    priority: int = 0
    delay_until: int | None = None
    retry_policy: RetryPolicy | None = None
    timeout_policy: TimeoutPolicy = TimeoutPolicy()
    max_reclaim_count: int = DEFAULT_MAX_RECLAIMS
    suspension_policy: SuspensionPolicy = SuspensionPolicy()
    fallback_policy: FallbackPolicy = FallbackPolicy()
    max_replay_count: int = 10
    budget_ids: tuple[str, ...] = ()
    quota_policy_id: str | None = None
    routing_requirements: RoutingRequirements = RoutingRequirements()
    dedup_window_ms: int = DEFAULT_DEDUP_WINDOW_MS
    stream_policy: StreamPolicy = StreamPolicy()
    max_signals_per_execution: int = 10_000

    def to_dict(self) -> dict[str, object]:
        """The stored form: defaults left out, except `max_reclaim_count`.

        That one is always written, because an execution without a stored value gets another cap.
        """
        fields = _without_defaults(self)
        fields["max_reclaim_count"] = self.max_reclaim_count
        return fields

    def normalised(self) -> dict[str, object]:
        """Every field with its value, the defaults too; what is not set is left out."""
        return cast("dict[str, object]", _without_unset(msgspec.to_builtins(self)))

    def to_json(self) -> bytes:
        """The stored form as JSON bytes."""
        return msgspec.json.encode(self.to_dict())


def _without_unset(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_without_unset(each) for each in cast("tuple[object, ...]", value)]
    if not isinstance(value, dict):
        return value
    members = cast("dict[str, object]", value)
    return {name: _without_unset(each) for name, each in members.items() if each is not None}


def _without_defaults(struct: msgspec.Struct) -> dict[str, object]:
    kept: dict[str, object] = {}
    for name, default in _defaults(type(struct)):
        value: object = getattr(struct, name)
        if value is not None and value != default:
            kept[name] = _plain(value)
    return kept


@cache
def _defaults(struct: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    # Reading a struct's fields resolves its annotations, which costs more than all the rest.
    return tuple((info.name, info.default) for info in msgspec.structs.fields(struct))


def _plain(value: object) -> object:
    # A backoff is written whole: half of a tagged object would be harder to read in Lua.
    if isinstance(value, (FixedBackoff, ExponentialBackoff)):
        return msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct):
        return _without_defaults(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return value


# --- parsing ---------------------------------------------------------------------------------


_Parser = Callable[[object, str], object]
_Fields = Mapping[str, _Parser]


def _refuse(path: str, problem: str, *, undecodable: bool = False) -> ValidationError:
    return ValidationError("invalid_policy_json", f"{path}: {problem}", undecodable=undecodable)


def _integer(low: int, high: int) -> _Parser:
    def parse(value: object, path: str) -> int:
        if type(value) is not int:
            raise _refuse(path, "must be a whole number", undecodable=True)
        if not low <= value <= high:
            raise _refuse(path, f"must be from {low} to {high}", undecodable=True)
        return value

    return parse


_u32 = _integer(0, _U32)
_u64 = _integer(0, _U64)
_i32 = _integer(-(2**31), 2**31 - 1)
_timestamp = _integer(-(2**63), 2**63 - 1)


def _priority(value: object, path: str) -> int:
    return clamp_priority(cast("int", _i32(value, path)))


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _refuse(path, "must be true or false", undecodable=True)
    return value


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise _refuse(path, "must be text", undecodable=True)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _refuse(path, "is not valid Unicode", undecodable=True) from None
    return value


def _non_empty(value: object, path: str) -> str:
    text = _text(value, path)
    if not text:
        raise _refuse(path, "must not be empty")
    return text


def _multiplier(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _refuse(path, "must be a number", undecodable=True)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise _refuse(path, "must be finite and greater than 0")
    return number


def _name_of(names: type[StrEnum]) -> _Parser:
    def parse(value: object, path: str) -> StrEnum:
        text = _text(value, path)
        try:
            return names(text)
        except ValueError:
            raise _refuse(path, f"must be one of {', '.join(names)}") from None

    return parse


def _uuid(value: object, path: str) -> str:
    text = _text(value, path)
    try:
        return validate_uuid(text, path)
    except IdParseError:
        raise _refuse(path, "is not a UUID", undecodable=True) from None


def _budget_ids(value: object, path: str) -> tuple[object, ...]:
    return tuple(dict.fromkeys(cast("tuple[object, ...]", _uuids(value, path))))


def _array(item: _Parser, limit: int | None = None) -> _Parser:
    def parse(value: object, path: str) -> tuple[object, ...]:
        if not isinstance(value, (list, tuple)):
            raise _refuse(path, "must be an array", undecodable=True)
        items = cast("list[object] | tuple[object, ...]", value)
        parsed = tuple(item(each, f"{path}.{i}") for i, each in enumerate(items))
        if limit is not None and len(parsed) > limit:
            raise _refuse(path, f"must hold at most {limit}, got {len(parsed)}")
        return parsed

    return parse


_uuids = _array(_uuid, MAX_BUDGET_IDS)


def _read(value: object, path: str, fields: _Fields) -> dict[str, object]:
    """Parse the members of an object; null is absent, an unknown name is refused."""
    if not isinstance(value, Mapping):
        raise _refuse(path, "must be an object", undecodable=True)
    parsed: dict[str, object] = {}
    for key, member in cast("Mapping[object, object]", value).items():
        where = f"{path}.{key}" if path else str(key)
        parser = fields.get(key) if isinstance(key, str) else None
        if parser is None:
            raise _refuse(where, "unknown field")
        if member is not None:
            parsed[cast("str", key)] = parser(member, where)
    return parsed


def _object(struct: type[msgspec.Struct], fields: _Fields) -> _Parser:
    required = [info.name for info in msgspec.structs.fields(struct) if info.required]

    def parse(value: object, path: str) -> msgspec.Struct:
        parsed = _read(value, path, fields)
        for name in required:
            if name not in parsed:
                raise _refuse(f"{path}.{name}", "missing", undecodable=True)
        return struct(**parsed)

    return parse


_BACKOFFS: Mapping[str, _Parser] = {
    "fixed": _object(FixedBackoff, {"delay_ms": _u64}),
    "exponential": _object(
        ExponentialBackoff,
        {
            "initial_delay_ms": _u64,
            "max_delay_ms": _u64,
            "multiplier": _multiplier,
            "jitter": _flag,
        },
    ),
}


def _backoff(value: object, path: str) -> object:
    if not isinstance(value, Mapping):
        raise _refuse(path, "must be an object", undecodable=True)
    members = dict(cast("Mapping[object, object]", value))
    kind = members.pop("type", None)
    if kind is None:
        raise _refuse(f"{path}.type", "missing", undecodable=True)
    parser = _BACKOFFS.get(_text(kind, f"{path}.type"))
    if parser is None:
        raise _refuse(f"{path}.type", f"must be one of {', '.join(_BACKOFFS)}")
    return parser(members, path)


def _routing(value: object, path: str) -> object:
    if not isinstance(value, Mapping):
        raise ValidationError("invalid_policy_json", f"{path}:not_object", undecodable=True)
    return _routing_members(cast("object", value), path)


def _capabilities(value: object, _path: str) -> tuple[str, ...]:
    return normalise(value, "required")


_routing_members = _object(
    RoutingRequirements,
    {
        "required_capabilities": _capabilities,
        "preferred_locality": _text,
        "isolation_level": _text,
    },
)

_POLICY: _Fields = {
    "priority": _priority,
    "delay_until": _timestamp,
    "retry_policy": _object(
        RetryPolicy,
        {
            "max_retries": _u32,
            "backoff": _backoff,
            "retryable_categories": _array(_text),
            "retry_on_timeout": _flag,
        },
    ),
    "timeout_policy": _object(
        TimeoutPolicy,
        {"attempt_timeout_ms": _u64, "execution_deadline_ms": _u64, "max_reclaim_count": _u32},
    ),
    "max_reclaim_count": _u32,
    "suspension_policy": _object(
        SuspensionPolicy,
        {"default_timeout_ms": _u64, "timeout_behavior": _name_of(TimeoutBehavior)},
    ),
    "fallback_policy": _object(
        FallbackPolicy,
        {
            "tiers": _array(
                _object(
                    FallbackTier,
                    {"provider": _non_empty, "model": _non_empty, "timeout_ms": _u64},
                )
            )
        },
    ),
    "max_replay_count": _u32,
    "budget_ids": _budget_ids,
    "quota_policy_id": _uuid,
    "routing_requirements": _routing,
    "dedup_window_ms": _u64,
    "stream_policy": _object(
        StreamPolicy,
        {
            "durability_mode": _name_of(DurabilityMode),
            "retention_maxlen": _u64,
            "retention_ttl_ms": _u64,
        },
    ),
    "max_signals_per_execution": _u32,
}


NO_POLICY = ExecutionPolicy(max_reclaim_count=MAX_RECLAIMS_WITHOUT_POLICY)
"""What holds for an execution that was submitted without a policy."""


def parse_policy(
    source: bytes | str | Mapping[str, object] | ExecutionPolicy | None,
) -> ExecutionPolicy | None:
    """Validate a policy from any source and fill in its defaults.

    None, empty text and an empty object mean "no policy"; malformed input never does.
    """
    if isinstance(source, ExecutionPolicy):
        return ExecutionPolicy(**_read(source.to_dict(), "", _POLICY))  # pyright: ignore[reportArgumentType]
    if source is None or source in (b"", ""):
        return None
    value: object = source
    if isinstance(source, (bytes, str)):
        try:
            value = msgspec.json.decode(source)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            raise ValidationError("invalid_policy_json", "malformed", undecodable=True) from None
    if not isinstance(value, Mapping):
        raise ValidationError("invalid_policy_json", "not_object", undecodable=True)
    members = _read(cast("object", value), "", _POLICY)
    return ExecutionPolicy(**members) if members else None  # pyright: ignore[reportArgumentType]
