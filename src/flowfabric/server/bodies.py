"""Request bodies: the types of their fields, and how JSON becomes a request (10 §1, §2.5)."""

import json
import re
from collections.abc import Callable, Iterable
from functools import cache
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, cast, get_args

import msgspec

from flowfabric.core.contracts.flows import DependencyKind
from flowfabric.core.errors import ValidationError
from flowfabric.core.ids import ExecutionId, canonical_uuid
from flowfabric.core.policy import ExecutionPolicy, parse_policy
from flowfabric.server.problems import Problem, invalid, not_json

MAX_DEPTH = 128
Byte = Annotated[int, msgspec.Meta(ge=0, le=255)]
U16 = Annotated[int, msgspec.Meta(ge=0, le=2**16 - 1)]
U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
I32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
I64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_U64_MAX = 2**64 - 1


def words(known: Iterable[str]) -> msgspec.Meta:
    """Documents the allowed texts in OpenAPI; a rule checks them, so others are 400 (10 §2.5)."""
    return msgspec.Meta(extra_json_schema={"enum": list(known)})


EdgeKind = Annotated[str, words(get_args(DependencyKind))]
# JSON Schema has no \Z, and a plain $ would accept a final line break.
_LANE = r"^[ -~]{1,64}$(?!\n)"
LaneName = Annotated[str, msgspec.Meta(pattern=_LANE)]
_PATTERNS = {repr(_LANE): "must be 1 to 64 printable ASCII characters"}

T = TypeVar("T")
_message = re.compile(r"(?s)(.*?)(?: - at `(?:key` in `)?\$?(.*)`)?").fullmatch
_named = re.compile(r"Object (missing required|contains unknown) field `(.*)`").fullmatch
_surrogate = re.compile(rb"\\u[dD][89a-fA-F]").search
_is_paired = re.compile(
    # Possessive, so that a text that does not match is scanned only once.
    rb"(?s)[^\\]*+(?:\\(?:[^u]|u(?![dD][89a-fA-F])"
    rb"|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})[^\\]*+)*+"
).fullmatch
_NO_BRACKETS = bytes(set(range(256)) - set(b'[]{}"'))
# As signed bytes: an opening bracket is 1, a closing one -1.
_STEPS = bytes(1 if letter in b"[{" else 255 for letter in range(256))
_syntax = msgspec.json.Decoder(msgspec.Raw)


class _Checked(type):
    """Makes types whose values are plain text or numbers that `decode_field` has checked."""

    def __instancecheck__(cls, instance: object) -> bool:
        return True


if TYPE_CHECKING:
    U64 = int
    Uuid = str
else:

    class U64(metaclass=_Checked):
        """A whole number of 64 bits: msgspec itself can only compare up to 2^63 - 1."""

    class Uuid(metaclass=_Checked):
        """A UUID; upper case and missing hyphens are accepted, and never stored."""


class PolicyObject:
    """An execution policy that was checked while it was decoded."""

    __slots__ = ("policy",)

    def __init__(self, policy: ExecutionPolicy | None) -> None:
        self.policy = policy


class OfExecution(msgspec.Struct, frozen=True, kw_only=True):
    """About the execution of the path, whose id the body may repeat."""

    execution_id: ExecutionId | None = None


class OfWaitpoint(OfExecution, frozen=True, kw_only=True):
    """About the waitpoint of the path."""

    waitpoint_id: Uuid | None = None


class OfFlow(msgspec.Struct, frozen=True, kw_only=True):
    """About the flow of the path."""

    flow_id: Uuid | None = None


class OfLane(msgspec.Struct, frozen=True, kw_only=True):
    """About the lane of the path."""

    lane_id: LaneName | None = None


class OfInstance(msgspec.Struct, frozen=True, kw_only=True):
    """About the worker process of the path."""

    worker_instance_id: str | None = None


class _PolicyRefused(ValueError):
    def __init__(self, error: ValidationError) -> None:
        super().__init__(error.detail)
        self.error = error


def _execution_id(value: Any) -> ExecutionId:
    try:
        parsed = ExecutionId.parse(value)
    except ValidationError as error:
        raise ValueError(error.detail.partition(": ")[2]) from None
    if parsed != value:
        raise ValueError(f"must have its canonical form {parsed}")
    return parsed


def _policy(value: Any) -> PolicyObject:
    if not isinstance(value, dict):
        raise _PolicyRefused(ValidationError("invalid_policy_json", "not_object", undecodable=True))
    try:
        return PolicyObject(parse_policy(cast("dict[str, Any]", value)))
    except ValidationError as error:
        raise _PolicyRefused(_typed(error, cast("dict[str, Any]", value))) from None


def _typed(error: ValidationError, policy: dict[str, Any]) -> ValidationError:
    """The error; a wrong type inside capabilities counts as a policy error (01 §7)."""
    if error.code != "invalid_capabilities" or not error.undecodable:
        return error
    tokens: Any = policy["routing_requirements"]["required_capabilities"]
    problem = ": must be an array"
    if isinstance(tokens, list):
        are_text = [isinstance(each, str) for each in cast("list[object]", tokens)]
        problem = f"[{are_text.index(False)}]: must be text"
    detail = f"routing_requirements.required_capabilities{problem}"
    return ValidationError("invalid_policy_json", detail, undecodable=True)


_JSON_TYPES: dict[type, str] = {dict: "object", list: "array", type(None): "null"}


def _expect(value: object, kind: type) -> None:
    if type(value) is not kind:
        found = _JSON_TYPES.get(type(value), type(value).__name__)
        raise ValueError(f"expected {kind.__name__}, got {found}")


def _u64(value: Any) -> int:
    _expect(value, int)
    if not 0 <= value <= _U64_MAX:
        raise ValueError(f"expected int from 0 to {_U64_MAX}")
    return value


def _uuid(value: Any) -> str:
    _expect(value, str)
    found = canonical_uuid(value)
    if found is None:
        raise ValueError("must be a UUID")
    return found


_FIELDS: dict[type, Callable[[Any], Any]] = {
    ExecutionId: _execution_id,
    PolicyObject: _policy,
    U64: _u64,
    Uuid: _uuid,
}


def decode_field(kind: type, value: Any) -> Any:
    """A value of one of the types that JSON does not have."""
    return _FIELDS[kind](value)


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind, dec_hook=decode_field)


def decode(body: bytes, kind: type[T], levels: int = MAX_DEPTH) -> T:
    """The request in a body, or the `Problem` that 10 §2.5 asks for."""
    return decode_with(_decoder(kind), body, levels)


def decode_with(decoder: msgspec.json.Decoder[T], body: bytes, levels: int = MAX_DEPTH) -> T:
    """`decode` with a decoder that the caller has."""
    _check_text(body, levels)
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        # Decoding stops at the first wrong type, so check that the rest is JSON at all.
        try:
            _syntax.decode(body)
        except (msgspec.DecodeError, RecursionError):
            raise not_json(400) from None
        raise refusal(_with_path(error, decoder, body)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise not_json(400) from None


def _with_path(
    error: msgspec.ValidationError, decoder: msgspec.json.Decoder[Any], body: bytes
) -> msgspec.ValidationError:
    """The error with the whole path of a number that is out of range, even inside a policy."""
    if not str(error).startswith("Number out of range"):
        return error
    try:
        # Python reads such a number as infinite, so it fails where its type is known.
        msgspec.convert(json.loads(body), decoder.type, dec_hook=decode_field)
    except msgspec.ValidationError as found:
        return found
    except (ValueError, RecursionError):
        pass
    return error


def _check_text(body: bytes, levels: int) -> None:
    """Reject input that decoders accept although it is not JSON or not safe to decode."""
    if body.count(b"[") + body.count(b"{") > levels and _depth(body) > levels:
        raise not_json(400, f"body: more than {levels} levels of nesting")
    if not body.isascii():
        try:
            body.decode()
        except UnicodeDecodeError:
            raise not_json(400) from None
    if _surrogate(body) is not None:
        try:
            _syntax.decode(body)
        except (msgspec.DecodeError, RecursionError):
            raise not_json(400) from None
        if _is_paired(body) is None:
            raise not_json(400)


def _depth(body: bytes) -> int:
    """The levels of nesting, without a Python loop, because unauthenticated callers reach this."""
    # A backslash escapes the next letter, so pairs of them escape nothing.
    text = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _NO_BRACKETS)
    # What is between an odd quote and the next one is a string.
    outside = b"".join(text.replace(b'""', b"").split(b'"')[::2])
    return max(accumulate(memoryview(outside.translate(_STEPS)).cast("b")), default=0)


def refusal(error: msgspec.ValidationError, *, in_query: bool = False) -> Problem:
    """The answer to a value that does not decode; in a query string it is only a broken rule."""
    matched = _message(str(error))
    text, where = (matched[1], matched[2] or "") if matched else (str(error), "")
    path = where.removeprefix(".").replace("[...]", "[*]")
    if isinstance(cause := error.__cause__, _PolicyRefused):
        return _policy_problem(path, cause.error, in_query=in_query)
    if (named := _named(text)) is not None:
        field = f"{path}.{named[2]}" if path else named[2]
        if named[1] == "missing required":
            return invalid(field, "missing") if in_query else not_json(422, f"{field}: missing")
        return invalid(field, "unknown field")
    problem = text
    if cause is None:
        problem = (text[:1].lower() + text[1:]).replace("`", "")
        problem = _PATTERNS.get(problem.removeprefix("expected str matching regex "), problem)
    return invalid(path, problem) if in_query else not_json(422, f"{path or 'body'}: {problem}")


def _policy_problem(path: str, error: ValidationError, *, in_query: bool) -> Problem:
    detail = error.detail
    if error.code != "invalid_policy_json":
        return Problem(error.code, detail)
    if detail == "not_object":
        detail = f"{path}: expected object"
    else:
        detail = f"{path}.{detail.replace(':not_object', ': expected object')}"
    if error.undecodable and not in_query:
        return not_json(422, detail, error.code)
    return Problem(error.code, detail)


Numbers = list[Byte] | msgspec.UnsetType
"""Bytes as numbers, which may be absent, but not null."""


def payload_of(numbers: Numbers | None, encoded: bytes | None, field: str) -> bytes | None:
    """The bytes of a field that was given as numbers or as base64."""
    given = None if isinstance(numbers, msgspec.UnsetType) else numbers
    if encoded is None:
        return None if given is None else bytes(given)
    if given is not None:
        raise invalid(f"{field}_b64", f"cannot be combined with {field}: send only one of them")
    return encoded


def is_json(content_type: bytes | None) -> bool:
    """Whether a content type is JSON; parameters do not matter."""
    kind = (content_type or b"").partition(b";")[0].strip().lower()
    return kind == b"application/json" or (
        kind.startswith(b"application/") and kind.endswith(b"+json")
    )
