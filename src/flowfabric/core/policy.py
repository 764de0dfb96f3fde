"""The execution policy: validated when it is submitted, then stored without its defaults."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from types import UnionType
from typing import Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from flowfabric.core.capabilities import normalise
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import IdParseError, validate_uuid

_MAX_PRIORITY = 9000
_MAX_BUDGET_IDS = 16
_DEFAULT_MAX_RECLAIMS = 100
_MAX_RECLAIMS_WITHOUT_POLICY = 1000

_Parser = Callable[[object, str], Any]
"""Returns the value of a field, or raises `invalid_policy_json` with the path."""


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


_i32 = _integer(-(2**31), 2**31 - 1)
U32 = Annotated[int, _integer(0, 2**32 - 1)]
U64 = Annotated[int, _integer(0, 2**64 - 1)]
Timestamp = Annotated[int, _integer(-(2**63), 2**63 - 1)]


def clamp_priority(priority: int) -> int:
    """A priority from 0 to 9000; others move to the nearest of the two."""
    return min(max(priority, 0), _MAX_PRIORITY)


def _priority(value: object, path: str) -> int:
    return clamp_priority(_i32(value, path))


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


def _uuid(value: object, path: str) -> str:
    text = _text(value, path)
    try:
        return validate_uuid(text, path)
    except IdParseError:
        raise _refuse(path, "is not a UUID", undecodable=True) from None


def _budget_ids(value: object, path: str) -> tuple[str, ...]:
    found = _array(_uuid)(value, path)
    if len(found) > _MAX_BUDGET_IDS:
        raise _refuse(path, f"must hold at most {_MAX_BUDGET_IDS}, got {len(found)}")
    return tuple(dict.fromkeys(found))


def _capabilities(value: object, _path: str) -> tuple[str, ...]:
    return normalise(value, "required")


def _backoff(value: object, path: str) -> Backoff:
    if not isinstance(value, Mapping):
        raise _refuse(path, "must be an object", undecodable=True)
    members = dict(cast("Mapping[object, object]", value))
    kind = members.pop("type", None)
    if kind is None:
        raise _refuse(f"{path}.type", "missing", undecodable=True)
    backoff = _BACKOFFS.get(_text(kind, f"{path}.type"))
    if backoff is None:
        raise _refuse(f"{path}.type", f"must be one of {', '.join(_BACKOFFS)}")
    return _object(backoff)(members, path)


def _routing(value: object, path: str) -> RoutingRequirements:
    if not isinstance(value, Mapping):
        raise ValidationError("invalid_policy_json", f"{path}:not_object", undecodable=True)
    return _object(RoutingRequirements)(cast("object", value), path)


def _array(item: _Parser) -> _Parser:
    def parse(value: object, path: str) -> tuple[Any, ...]:
        if not isinstance(value, (list, tuple)):
            raise _refuse(path, "must be an array", undecodable=True)
        items = cast("list[object] | tuple[object, ...]", value)
        return tuple(item(each, f"{path}.{i}") for i, each in enumerate(items))

    return parse


def _name_of(names: type[StrEnum]) -> _Parser:
    def parse(value: object, path: str) -> StrEnum:
        text = _text(value, path)
        try:
            return names(text)
        except ValueError:
            raise _refuse(path, f"must be one of {', '.join(names)}") from None

    return parse


def _parser_of(hint: Any) -> _Parser:
    """The parser of a field, from its type."""
    if get_origin(hint) in (Union, UnionType):
        return _parser_of(get_args(hint)[0])
    if get_origin(hint) is Annotated:
        return hint.__metadata__[0]
    if get_origin(hint) is tuple:
        return _array(_parser_of(get_args(hint)[0]))
    if issubclass(hint, StrEnum):
        return _name_of(hint)
    if issubclass(hint, msgspec.Struct):
        return _object(hint)
    return {bool: _flag, str: _text}[hint]


@cache
def _parsers(struct: type[msgspec.Struct]) -> Mapping[str, _Parser]:
    hints = get_type_hints(struct, include_extras=True)
    return {name: _parser_of(hints[name]) for name in struct.__struct_fields__}


def _read(value: object, path: str, struct: type[msgspec.Struct]) -> dict[str, Any]:
    """Parse the members of an object; null is absent, an unknown name is refused."""
    if not isinstance(value, Mapping):
        raise _refuse(path, "must be an object", undecodable=True)
    parsed: dict[str, Any] = {}
    for key, member in cast("Mapping[object, object]", value).items():
        where = f"{path}.{key}" if path else str(key)
        parser = _parsers(struct).get(key) if isinstance(key, str) else None
        if parser is None:
            raise _refuse(where, "unknown field")
        if member is not None:
            parsed[cast("str", key)] = parser(member, where)
    return parsed


def _object(struct: type[msgspec.Struct]) -> _Parser:
    def parse(value: object, path: str) -> Any:
        parsed = _read(value, path, struct)
        for name, default in _defaults(struct):
            if default is msgspec.NODEFAULT and name not in parsed:
                raise _refuse(f"{path}.{name}", "missing", undecodable=True)
        return struct(**parsed)

    return parse


class TimeoutBehavior(StrEnum):
    """What a suspension's timeout does."""

    FAIL = "fail"
    CANCEL = "cancel"
    EXPIRE = "expire"
    AUTO_RESUME = "auto_resume"
    ESCALATE = "escalate"


class DurabilityMode(StrEnum):
    """How output frames are written."""

    BUFFERED = "buffered"
    DURABLE = "durable"


class FixedBackoff(msgspec.Struct, frozen=True, tag_field="type", tag="fixed"):
    """The same delay before every retry."""

    delay_ms: U64


class ExponentialBackoff(msgspec.Struct, frozen=True, tag_field="type", tag="exponential"):
    """A delay that grows with every retry; jitter picks from its upper half."""

    initial_delay_ms: U64 = 1000
    max_delay_ms: U64 = 60_000
    multiplier: Annotated[float, _multiplier] = 2.0
    jitter: bool = False


Backoff = FixedBackoff | ExponentialBackoff
_BACKOFFS: Mapping[str, type[Backoff]] = {
    "fixed": FixedBackoff,
    "exponential": ExponentialBackoff,
}


class RetryPolicy(msgspec.Struct, frozen=True):
    """Whether and when a failed attempt is retried."""

    max_retries: U32 = 3
    backoff: Annotated[Backoff, _backoff] = ExponentialBackoff()
    retryable_categories: tuple[str, ...] = ()
    retry_on_timeout: bool = False


class TimeoutPolicy(msgspec.Struct, frozen=True):
    """Time limits of an attempt and of the whole execution."""

    attempt_timeout_ms: U64 | None = None
    execution_deadline_ms: U64 | None = None
    max_reclaim_count: U32 = _DEFAULT_MAX_RECLAIMS


class SuspensionPolicy(msgspec.Struct, frozen=True):
    """Defaults for suspensions that name no timeout."""

    default_timeout_ms: U64 | None = None
    timeout_behavior: TimeoutBehavior = TimeoutBehavior.FAIL


class FallbackTier(msgspec.Struct, frozen=True):
    """A provider and model to fall back to. Handlers read it; the engine does not apply it."""

    provider: Annotated[str, _non_empty]
    model: Annotated[str, _non_empty]
    timeout_ms: U64 | None = None


class FallbackPolicy(msgspec.Struct, frozen=True):
    """Fallback tiers in order of preference."""

    tiers: tuple[FallbackTier, ...] = ()


class RoutingRequirements(msgspec.Struct, frozen=True):
    """Where the execution may run."""

    required_capabilities: Annotated[tuple[str, ...], _capabilities] = ()
    preferred_locality: str | None = None
    isolation_level: str | None = None


class StreamPolicy(msgspec.Struct, frozen=True):
    """How output is written, and how long it and the execution are kept."""

    durability_mode: DurabilityMode = DurabilityMode.BUFFERED
    retention_maxlen: U64 = 10_000
    retention_ttl_ms: U64 | None = None


class ExecutionPolicy(msgspec.Struct, frozen=True):
    """How an execution is run.

    >>> ExecutionPolicy(retry_policy=RetryPolicy(max_retries=5)).to_json()
    b'{"retry_policy":{"max_retries":5},"max_reclaim_count":100}'
    """

    priority: Annotated[int, _priority] = 0
    delay_until: Timestamp | None = None
    retry_policy: RetryPolicy | None = None
    timeout_policy: TimeoutPolicy = TimeoutPolicy()
    max_reclaim_count: U32 = _DEFAULT_MAX_RECLAIMS
    suspension_policy: SuspensionPolicy = SuspensionPolicy()
    fallback_policy: FallbackPolicy = FallbackPolicy()
    max_replay_count: U32 = 10
    budget_ids: Annotated[tuple[str, ...], _budget_ids] = ()
    quota_policy_id: Annotated[str, _uuid] | None = None
    routing_requirements: Annotated[RoutingRequirements, _routing] = RoutingRequirements()
    dedup_window_ms: U64 = 86_400_000
    stream_policy: StreamPolicy = StreamPolicy()
    max_signals_per_execution: U32 = 10_000

    def to_dict(self) -> dict[str, object]:
        """The stored form: without defaults, except `max_reclaim_count`.

        An execution without a stored `max_reclaim_count` gets another one.
        """
        fields = _without_defaults(self)
        fields["max_reclaim_count"] = self.max_reclaim_count
        return fields

    def normalised(self) -> dict[str, object]:
        """Every field that has a value, defaults included."""
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
    # Reading a struct's fields resolves its annotations, which is slow.
    return tuple((info.name, info.default) for info in msgspec.structs.fields(struct))


def _plain(value: object) -> object:
    # A backoff is written with its defaults, which Lua does not know.
    if isinstance(value, (FixedBackoff, ExponentialBackoff)):
        return msgspec.to_builtins(value)
    if isinstance(value, msgspec.Struct):
        return _without_defaults(value)
    if isinstance(value, tuple):
        return [_plain(item) for item in cast("tuple[object, ...]", value)]
    return value


NO_POLICY = ExecutionPolicy(max_reclaim_count=_MAX_RECLAIMS_WITHOUT_POLICY)
"""The policy of an execution that was submitted without one."""


def parse_policy(
    source: bytes | str | Mapping[str, object] | ExecutionPolicy | None,
) -> ExecutionPolicy | None:
    """Validate a policy. None, empty text and an empty object mean that there is none."""
    if isinstance(source, ExecutionPolicy):
        return ExecutionPolicy(**_read(source.to_dict(), "", ExecutionPolicy))
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
    members = _read(cast("object", value), "", ExecutionPolicy)
    return ExecutionPolicy(**members) if members else None
