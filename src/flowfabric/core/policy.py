"""The execution policy: validated when it is submitted, then stored without its defaults."""

import math
from collections.abc import Callable, Collection, Mapping
from enum import StrEnum
from functools import cache, partial
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgspec

from flowfabric.core.capabilities import normalise
from flowfabric.core.durations import Duration, to_ms
from flowfabric.core.errors import (
    BudgetExceeded,
    PermanentError,
    RetryableError,
    TransportError,
    ValidationError,
    invalid_input,
)
from flowfabric.core.ids import canonical_uuid

_MAX_PRIORITY = 9000
_MAX_BUDGET_IDS = 16
_DEFAULT_MAX_RECLAIMS = 100
_U32_MAX = 2**32 - 1

S = TypeVar("S", bound=msgspec.Struct)
_Parser = Callable[[Any, str], Any]
"""Returns the value of a field, or raises `invalid_policy_json` with the path."""


def _refuse(path: str, problem: str, *, undecodable: bool = True) -> ValidationError:
    return ValidationError("invalid_policy_json", f"{path}: {problem}", undecodable=undecodable)


def _check(ok: object, path: str, problem: str) -> None:
    if not ok:
        raise _refuse(path, problem)


def _integer(low: int, high: int) -> _Parser:
    bounds = f"must be from {low} to {high}"

    def parse(value: Any, path: str) -> int:
        _check(type(value) is int, path, "must be a whole number")
        _check(low <= value <= high, path, bounds)
        return value

    return parse


_i32 = _integer(-(2**31), 2**31 - 1)
# `msgspec.Meta` is for schemas, which cannot express an upper bound of 64 bits.
U32 = Annotated[int, _integer(0, _U32_MAX), msgspec.Meta(ge=0, le=_U32_MAX)]
U64 = Annotated[int, _integer(0, 2**64 - 1), msgspec.Meta(ge=0)]
Timestamp = Annotated[int, _integer(-(2**63), 2**63 - 1)]


def clamp_priority(priority: int) -> int:
    """The priority, clamped to 0 to 9000."""
    return min(max(priority, 0), _MAX_PRIORITY)


def _priority(value: Any, path: str) -> int:
    return clamp_priority(_i32(value, path))


def _flag(value: Any, path: str) -> bool:
    _check(isinstance(value, bool), path, "must be true or false")
    return value


def _text(value: Any, path: str) -> str:
    _check(isinstance(value, str), path, "must be text")
    encodable = value.isascii() or value.encode(errors="ignore").decode() == value
    _check(encodable, path, "is not valid Unicode")
    return value


def _non_empty(value: Any, path: str) -> str:
    if not _text(value, path):
        raise _refuse(path, "must not be empty", undecodable=False)
    return value


def _multiplier(value: Any, path: str) -> float:
    _check(type(value) in (int, float), path, "must be a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number <= 0:
        raise _refuse(path, "must be finite and greater than 0", undecodable=False)
    return number


def _uuid(value: Any, path: str) -> str:
    found = canonical_uuid(_text(value, path))
    if found is None:
        raise _refuse(path, "is not a UUID")
    return found


def _budget_ids(value: Any, path: str) -> tuple[str, ...]:
    found = _array(_uuid)(value, path)
    if len(found) > _MAX_BUDGET_IDS:
        problem = f"must hold at most {_MAX_BUDGET_IDS}, got {len(found)}"
        raise _refuse(path, problem, undecodable=False)
    return tuple(dict.fromkeys(found))


def _capabilities(value: Any, _path: str) -> tuple[str, ...]:
    return normalise(value, "required")


def _backoff(value: Any, path: str) -> Any:
    _check(isinstance(value, Mapping), path, "must be an object")
    members = dict(value)
    kind = members.pop("type", None)
    where = f"{path}.type"
    _check(kind is not None, where, "missing")
    if _text(kind, where) not in _BACKOFFS:
        raise _refuse(where, f"must be one of {', '.join(_BACKOFFS)}", undecodable=False)
    return _object(_BACKOFFS[kind], members, path)


def _routing(value: Any, path: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValidationError("invalid_policy_json", f"{path}:not_object", undecodable=True)
    return _object(RoutingRequirements, value, path)


def _array(item: _Parser) -> _Parser:
    def parse(value: Any, path: str) -> tuple[Any, ...]:
        _check(isinstance(value, (list, tuple)), path, "must be an array")
        return tuple(item(each, f"{path}[{i}]") for i, each in enumerate(value))

    return parse


def _name_of(names: type[StrEnum]) -> _Parser:
    def parse(value: Any, path: str) -> StrEnum:
        try:
            return names(_text(value, path))
        except ValueError:
            problem = f"must be one of {', '.join(names)}"
            raise _refuse(path, problem, undecodable=False) from None

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
        return partial(_object, hint)
    return {bool: _flag, str: _text}[hint]


@cache
def _parsers(struct: type[msgspec.Struct]) -> Mapping[str, _Parser]:
    hints = get_type_hints(struct, include_extras=True)
    return {name: _parser_of(hints[name]) for name in struct.__struct_fields__}


def _read(struct: type[msgspec.Struct], value: Any, path: str) -> dict[str, Any]:
    """Parse the members of an object. Null counts as absent; an unknown name is an error."""
    _check(isinstance(value, Mapping), path, "must be an object")
    parsers = _parsers(struct)
    parsed: dict[str, Any] = {}
    for key, member in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in parsers:
            raise _refuse(where, "unknown field", undecodable=False)
        if member is not None:
            parsed[key] = parsers[key](member, where)
    return parsed


def _object(struct: type[S], value: Any, path: str) -> S:
    parsed = _read(struct, value, path)
    for name, default in _defaults(struct):
        if default is msgspec.NODEFAULT and name not in parsed:
            raise _refuse(f"{path}.{name}", "missing")
    return struct(**parsed)


@cache
def _defaults(struct: type[msgspec.Struct]) -> tuple[tuple[str, object], ...]:
    # Reading a struct's fields resolves its annotations, which is slow.
    return tuple((info.name, info.default) for info in msgspec.structs.fields(struct))


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
_BACKOFFS: Mapping[str, type[Backoff]] = {"fixed": FixedBackoff, "exponential": ExponentialBackoff}


class RetryPolicy(msgspec.Struct, frozen=True):
    """Whether and when a failed attempt is retried."""

    max_retries: U32 = 3
    backoff: Annotated[Backoff, _backoff] = ExponentialBackoff()
    retryable_categories: tuple[str, ...] = ()
    retry_on_timeout: bool = False


Exceptions = type[Exception] | str | Collection[type[Exception] | str]
# These exceptions state themselves whether another attempt may help.
_DECIDED = (RetryableError, PermanentError, BudgetExceeded, TransportError)


def _checked_exceptions(given: object, field: str) -> tuple[Any, ...]:
    kinds: tuple[Any, ...] = (given,)
    if isinstance(given, Collection) and not isinstance(given, str):
        kinds = tuple(cast("Collection[Any]", given))
    for kind in kinds:
        named = isinstance(kind, str) and kind
        if not named and not (isinstance(kind, type) and issubclass(kind, Exception)):
            problem = f"must be exception classes or their names, got {kind!r}"
            raise invalid_input(field, problem)
    return kinds


def _matches(error: Exception, kinds: Any) -> bool:
    classes = type(error).__mro__
    names = {name for each in classes for name in (each.__name__, _full_name(each))}
    return any(kind in (names if isinstance(kind, str) else classes) for kind in kinds)


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


class Retry(msgspec.Struct, frozen=True):
    """How often a failed task is retried, and after which delay.

    `backoff` is a fixed delay (`"5s"`), a backoff object, or None for 1 s doubling up to 60 s, with
    `jitter`. `categories` limits retries to these failure categories. An attempt that times out is
    retried as well.

    `on` limits retries to these exceptions and their subclasses, and `never` excludes some of them;
    both take classes or names. `RetryableError`, and a server that cannot be reached, are retried
    unless `never` names them.

    >>> Retry(5, backoff="2s").policy().max_retries
    5
    >>> retry = Retry(5, on=OSError, never=(FileNotFoundError, "json.JSONDecodeError"))
    >>> retry.allows(ConnectionError()), retry.allows(FileNotFoundError())
    (True, False)
    """

    n: int = 3
    backoff: Backoff | Duration | None = None
    categories: tuple[str, ...] = ()
    jitter: bool = True
    on: Exceptions = ()
    never: Exceptions = ()

    def __post_init__(self) -> None:
        for name in ("on", "never"):
            given = _checked_exceptions(getattr(self, name), f"retry.{name}")
            msgspec.structs.force_setattr(self, name, given)
        if type(self.n) is not int or not 0 <= self.n <= _U32_MAX:
            raise invalid_input("retry.n", f"must be from 0 to {_U32_MAX}, got {self.n!r}")
        if isinstance(self.categories, str):
            raise invalid_input("retry.categories", "must be a list of names, not a single text")
        self._backoff()

    def allows(self, error: Exception) -> bool:
        """Whether this exception may be retried; for a group, whether all in it may."""
        if isinstance(error, ExceptionGroup):
            group = cast("ExceptionGroup[Exception]", error)
            return all(map(self.allows, group.exceptions))
        if _matches(error, self.never):
            return False
        return not self.on or _matches(error, self.on) or isinstance(error, _DECIDED)

    def policy(self) -> RetryPolicy:
        """The retry policy."""
        return RetryPolicy(self.n, self._backoff(), tuple(self.categories), retry_on_timeout=True)

    def _backoff(self) -> Backoff:
        if self.backoff is None:
            return ExponentialBackoff(jitter=self.jitter)
        if isinstance(self.backoff, Backoff):
            return self.backoff
        return FixedBackoff(to_ms(self.backoff, "retry.backoff"))


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

    def to_dict(self) -> dict[str, Any]:
        """The stored form: without defaults, except `max_reclaim_count`.

        An execution without a stored `max_reclaim_count` gets another one.
        """
        return _plain(self, full=False) | {"max_reclaim_count": self.max_reclaim_count}

    def normalised(self) -> dict[str, Any]:
        """Every field that has a value, defaults included."""
        return _plain(self, full=True)

    def to_json(self) -> bytes:
        """The stored form as JSON bytes."""
        return msgspec.json.encode(self.to_dict())


def _plain(value: Any, *, full: bool) -> Any:
    """A value for JSON: without None, and without defaults unless `full`."""
    if isinstance(value, tuple):
        return [_plain(each, full=full) for each in cast("tuple[Any, ...]", value)]
    if not isinstance(value, msgspec.Struct):
        return value
    # A backoff is written with its defaults, which Lua does not know.
    if isinstance(value, (FixedBackoff, ExponentialBackoff)):
        return msgspec.to_builtins(value)
    return {
        name: _plain(member, full=full)
        for name, default in _defaults(type(value))
        if (member := getattr(value, name)) is not None and (full or member != default)
    }


NO_POLICY = ExecutionPolicy(max_reclaim_count=1000)
"""The policy of an execution that was submitted without one."""


def parse_policy(
    source: bytes | str | Mapping[str, object] | ExecutionPolicy | None,
) -> ExecutionPolicy | None:
    """Validate a policy. None, empty text and an empty object mean that there is none."""
    if isinstance(source, ExecutionPolicy):
        return ExecutionPolicy(**_read(ExecutionPolicy, source.to_dict(), ""))
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
    members = _read(ExecutionPolicy, value, "")
    return ExecutionPolicy(**members) if members else None
